"""The output of ``hoop train``."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from hoop import job_events as ev
from hoop.cli import run_dashboard
from hoop.cli.training_view import check_kept, show_result
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition
from hoop.report.progress_view import SAME_KIND, ProgressView, WarningsView, fit_parts
from hoop.report.run_summary import STRAGGLERS
from hoop.runs import prediction
from hoop.runs.result import Result

STARTED = ev.Started(
    steps=20,
    done=0,
    steps_an_epoch=10,
    samples=2560,
    parameters=109386,
    stages=["blocks 0..2 on ranks 0, 1"],
    seconds=3.2,
    data="",
    same="",
    devices=2,
    batch_size=256,
)


def steps(first: int, *losses: float) -> ev.Steps:
    return ev.Steps(first, list(losses), [0.1] * len(losses), rate=0.1, fed=[None] * len(losses))


STEPS = [steps(first, 2.0, 1.0) for first in range(0, 10, 2)]
EVALUATED = ev.Evaluated(steps=10, epoch=1, loss=0.25, accuracy=0.935, split="test")
RESULT: dict[str, Any] = {
    "checkpoint": "step-00000020.safetensors",
    "lost_files": [],
    "accuracy": 0.935,
    "split": "test",
    "steps": 20,
    "seconds": 2.0,
    "samples_per_second": 2560.0,
    "devices": 1,
    "device_ids": [3],
    "strategy": "data",
    "shares": [{"compute": 0.75, "communicate": 0.05, "idle": 0.2}],
    "memory": [4096],
    "bytes_sent": 0,
    "weights_sha256": "ab" * 32,
    "stopped": False,
}


def rendered(terminal: bool, events: Sequence[ev.JobEvent], width: int = 150) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None, highlight=False)
    with ProgressView(console) as view:
        for event in events:
            view.note(event)
    return file.getvalue()


def test_without_a_terminal_the_output_is_plain_lines() -> None:
    text = rendered(False, [STARTED, *STEPS, EVALUATED])
    lines = text.splitlines()
    assert lines[0] == "109,386 parameters on 2 devices · 20 steps · first step after 3.2 s"
    assert lines[1].startswith("epoch   1  loss 1.5000  test loss 0.2500  accuracy 93.50%")
    assert len(lines) == 2
    assert "\x1b" not in text


def test_results_on_training_data_are_never_labelled_as_test_results(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(False, [STARTED, *STEPS, replace(EVALUATED, split="train")])
    assert "training loss 0.2500  training accuracy 93.50%" in text
    assert "test" not in text
    show_result({**RESULT, "split": "train"}, None, json=False)
    assert capsys.readouterr().out.startswith("training accuracy 93.50%  20 steps")


def test_a_terminal_shows_live_progress() -> None:
    text = rendered(True, [STARTED, *STEPS, EVALUATED, steps(10, 0.5)])
    for figure in ("epoch 2/2", "step 11/20", "loss 0.5000", "accuracy 93.50%", "samples/s", "2 devices"):
        assert figure in text


def test_a_lost_device_and_the_recovery_are_shown() -> None:
    lost = ev.DeviceLost(device=2, text="closed")
    recovered = ev.Recovered(step=3, pause_s=0.42, text="…", missing=[], ranks=1, generation=2)
    text = rendered(False, [STARTED, lost, recovered])
    assert "device 2 was lost: closed" in text
    assert "step 3: goes on with 1 device, 0.4 s later" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_texts_are_shown_without_markup_and_escapes(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder or an error with square brackets ended the training with an error of Rich."""
    text = "o[/a] [fd00::7]:4021 \x07"
    shown = "o[/a] [fd00::7]:4021 \\x07"
    events = [ev.Warned(text), ev.DeviceLost(device=2, text=text), ev.StateLoaded(step=1, device=2, source=text)]
    assert rendered(terminal, [STARTED, *events]).count(shown) == len(events)
    file = io.StringIO()
    with ProgressView(Console(file=file, force_terminal=terminal, width=150, color_system=None)) as view:
        view.say(text)
    assert shown in file.getvalue()
    show_result({**RESULT, "strategy": text}, Path(text), json=False)
    assert capsys.readouterr().out.count(shown) == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_stages_are_shown_if_there_are_several(terminal: bool) -> None:
    text = rendered(terminal, [replace(STARTED, stages=["blocks 0..1 on ranks 0", "blocks 2..2 on ranks 1"])])
    assert "stage 1: blocks 2..2 on ranks 1" in text


def test_the_summary_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show_result(RESULT, None, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "accuracy 93.50%  20 steps in 2.0 s  2,560 samples/s  1 device, data"
    assert lines[1] == "  device 3 (rank 0): compute 75%  communication 5%  idle 20%  memory 4 KiB"


@pytest.mark.parametrize(
    ("error", "shown"), [(0.25, "25% more"), (-0.5, "50% less"), (9.63, "10.6 times that; other work")]
)
def test_the_summary_compares_the_step_with_its_prediction(
    error: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"step_seconds": 0.002 * (1 + error), "predicted_step_seconds": 0.002, "prediction_error": error}
    show_result(RESULT | times, None, json=False)
    assert f"the simulator predicted 2.00 ms: {shown}" in capsys.readouterr().out


def test_the_summary_of_a_stopped_run_says_how_to_resume(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    show_result({**RESULT, "stopped": True, "accuracy": None}, tmp_path, json=False)
    output = capsys.readouterr().out
    assert output.startswith("stopped after 20 steps")
    assert f"hoop train --resume --out {tmp_path}" in output


def test_a_device_that_is_left_out_is_named_with_the_reason() -> None:
    reason = "device 2 (pid 7, 10.0.0.2:1) is left out: devices 1 and 2 cannot reach each other over new links"
    text = rendered(False, [STARTED, ev.Reassigned(3, [1], {"2": reason})])
    assert reason in text


def test_the_summary_says_that_devices_were_lost(capsys: pytest.CaptureFixture[str]) -> None:
    show_result({**RESULT, "devices": 2}, None, json=False)
    assert "2 devices at first, 1 at the end, data" in capsys.readouterr().out


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_terminal_keeps_the_epoch(width: int) -> None:
    """The epoch was cut to ``e…`` at 80 columns, and the speed stayed."""
    text = rendered(True, [STARTED, *STEPS, EVALUATED, steps(10, 0.5)], width)
    (line,) = {line for line in re.split(r"[\r\n]", text) if "epoch 2/2" in line}
    assert len(re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line)) <= width
    assert ("step 11/20" in line) == (width > 20)
    assert ("loss 0.5000" in line) == (width > 30)


def test_parts_are_left_out_by_importance() -> None:
    parts = [(1, "aaaa"), (0, "b"), (2, "cc")]
    assert [fit_parts(parts, width) for width in (None, 13, 12, 8, 7, 1, 0)] == [
        *("aaaa · b · cc", "aaaa · b · cc", "aaaa · b", "aaaa · b", "b", "b", "b")
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_events_that_come_in_thousands_have_a_few_lines(terminal: bool) -> None:
    slow = [ev.Straggler(step, straggler=step % 3, slow=step % 2 == 0, times=2.0) for step in range(1000)]
    damaged = [ev.Damaged(f"message {number}") for number in range(1000)]
    text = rendered(terminal, [STARTED, *slow, *damaged])
    assert text.count("straggler") == SAME_KIND
    assert text.count("damaged on the way") == SAME_KIND
    assert text.count("no more lines of this kind") == 2


def test_a_thousand_short_epochs_are_not_a_thousand_lines_of_a_log() -> None:
    epochs = [replace(EVALUATED, steps=number, epoch=number) for number in range(1, 1001)]
    lines = rendered(False, [replace(STARTED, steps=1000), *epochs]).splitlines()
    assert len(lines) < 20
    assert lines[-1].startswith("epoch 1000")


def test_the_summary_names_a_straggler_once(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [{"rank": 1 if step % 4 else step, "step": step, "times": 1.0 + step} for step in range(2, 42)]
    show_result({**RESULT, "stragglers": verdicts}, None, json=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "stragglers" in line]
    assert "rank 1 30 times, first at step 2, up to 42.0 times slower" in line
    assert "rank 4 from step 4 on, 5.0 times slower" in line
    assert line.endswith(f"; {11 - STRAGGLERS} more ranks")


def test_the_representation_of_a_result_has_its_figures() -> None:
    summary = {**RESULT, "loss": 0.25, "metrics": {"f1": 0.5}}
    model = nn.Linear(1, 1)
    shown = "loss 0.2500, accuracy 0.9350, f1 0.5000, 20 steps in 2.0 s, weights abababababab>"
    assert repr(Result(summary, model)) == f"<Result: {shown}"
    assert "training loss 0.2500, training accuracy" in repr(Result({**summary, "split": "train"}, model))
    assert repr(Result({**summary, "loss": None, "accuracy": None, "metrics": {}}, model)).startswith("<Result: 20 st")


@pytest.mark.parametrize("file", ["closed", None])
def test_a_view_without_standard_error_shows_nothing(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = None
    if file == "closed":
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr("sys.stderr", stderr)
    with ProgressView() as view:
        for event in (STARTED, *STEPS, EVALUATED):
            view.note(event)
    WarningsView().note(ev.Warned("x"))


def test_the_summary_says_where_the_weights_are_only_if_they_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a full disk it said "kept in …", and the error after it "not kept"."""
    lost = {**RESULT, "checkpoint": None}
    show_result(lost, tmp_path, json=False)
    assert "kept in" not in capsys.readouterr().out
    with pytest.raises(FailedPrecondition, match=rf"the trained weights are not kept in {tmp_path}"):
        check_kept(lost, tmp_path)
    show_result(RESULT, tmp_path, json=False)
    assert f"kept in {tmp_path}" in capsys.readouterr().out
    check_kept(RESULT, tmp_path)
    check_kept(lost, None)


def test_an_error_of_the_view_is_said_once_and_ends_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a strange terminal")

    monkeypatch.setattr(ProgressView, "_print", fail)
    with ProgressView(Console(file=io.StringIO())) as view:
        for _ in range(2):
            view.show(ev.Warned("text"))
    said = capsys.readouterr().err
    assert said == "hoop: nothing more is shown, training goes on: ValueError: a strange terminal\n"


def test_an_error_of_the_prediction_is_a_warning_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr(prediction, "predicted_step_seconds", fail)
    expected = prediction.Prediction(Settings())
    expected.note(replace(STARTED, costs={"rows": 1}))
    assert expected.problem == "no prediction of a step: ZeroDivisionError: float division by zero"
    assert expected.result()["predicted_step_seconds"] is None


def test_a_dashboard_that_cannot_be_started_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("bokeh")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(run_dashboard, "start_process", fail)
    (tmp_path / "address").write_text("127.0.0.1:1\n")
    page = run_dashboard.RunDashboard(0, tmp_path / "address", ())
    said: list[str] = []
    for _ in range(2):
        page.start(said.append)
    page.close()
    assert said == ["the dashboard could not be started: [Errno 24] Too many open files"]
