"""The output of ``hoop train``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hoop import job_events as ev
from hoop.cli.training_view import View

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


def rendered(terminal: bool, events: Sequence[ev.JobEvent]) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=150, color_system=None, highlight=False)
    with View(console) as view:
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
    View().summary({**RESULT, "split": "train"}, None)
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
    with View(Console(file=file, force_terminal=terminal, width=150, color_system=None)) as view:
        view.say(text)
    assert shown in file.getvalue()
    View().summary({**RESULT, "strategy": text}, Path(text))
    assert capsys.readouterr().out.count(shown) == 2


@pytest.mark.parametrize("terminal", [False, True])
def test_stages_are_shown_if_there_are_several(terminal: bool) -> None:
    text = rendered(terminal, [replace(STARTED, stages=["blocks 0..1 on ranks 0", "blocks 2..2 on ranks 1"])])
    assert "stage 1: blocks 2..2 on ranks 1" in text


def test_the_summary_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    View().summary(RESULT, None)
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
    View().summary(RESULT | times, None)
    assert f"the simulator predicted 2.00 ms: {shown}" in capsys.readouterr().out


def test_the_summary_of_a_stopped_run_says_how_to_resume(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    View().summary({**RESULT, "stopped": True, "accuracy": None}, tmp_path)
    output = capsys.readouterr().out
    assert output.startswith("stopped after 20 steps")
    assert f"hoop train --resume --out {tmp_path}" in output


def test_a_device_that_is_left_out_is_named_with_the_reason() -> None:
    reason = "device 2 (pid 7, 10.0.0.2:1) is left out: devices 1 and 2 cannot reach each other over new links"
    text = rendered(False, [STARTED, ev.Reassigned(3, [1], {"2": reason})])
    assert reason in text


def test_the_summary_says_that_devices_were_lost(capsys: pytest.CaptureFixture[str]) -> None:
    View(Console(file=io.StringIO())).summary({**RESULT, "devices": 2}, None)
    assert "2 devices at first, 1 at the end, data" in capsys.readouterr().out
