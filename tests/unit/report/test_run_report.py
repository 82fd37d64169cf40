"""The report of a run folder: whole, partial, damaged, resumed and hostile ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")

from page_charts import assert_offline, charts_in, texts_of

from hoop import job_events as ev
from hoop.errors import NotFound
from hoop.job_events import Observed
from hoop.report.components import MarkKind
from hoop.report.metrics import MetricsLog
from hoop.report.run_events import RunEventLog, read_run_events
from hoop.report.run_report import RunFiles, curves, marks_of, run_page, run_report, traced_split, write_run_report
from hoop.report.spans import Span
from hoop.report.trace import Trace, read_spans

HASH = "9cd206d8e9b27f38" * 4
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>$$x$$"
STARTED = ev.Started(
    steps=4,
    done=0,
    steps_an_epoch=2,
    samples=512,
    parameters=1000,
    stages=["blocks 0..2 on ranks 0, 1"],
    seconds=0.5,
    data="d00d",
    same="5a5a",
    environment={"torch": "2.13.0", "processor": HOSTILE},
    costs={"step": 1.0},
)


def write_run(out: Path, devices: int = 2, job: str = "mnist") -> None:
    """All files that the report reads, of a run in which a device was lost."""
    config = {"devices": devices, "job": job, "strategy": "data", "optimizer": {"lr": 0.005}}
    (out / "config.json").write_text(json.dumps(config))
    with MetricsLog.create(out / "metrics.jsonl") as metrics:
        for step in range(1, 5):
            metrics.log(step, loss=2.0 / step, seconds=0.01, perplexity=7.0)
        metrics.log(4, test_loss=0.4, test_accuracy=0.9, epoch=2)
    with RunEventLog(out / "events.jsonl") as log:
        log.log(Observed(STARTED, device=1, time=100.0), 0)
        log.log(Observed(ev.FaultInjected("kill@rank=1,step=3", 3, "0F1"), rank=1, device=2, time=101.0), 2)
        log.log(Observed(ev.DeviceLost(2, HOSTILE), time=101.1), 2)
        log.log(Observed(ev.Recovered(3, 0.08, "rank 1 is gone", [1], 1, 2), device=1, time=101.2), 2)
        log.log(Observed(ev.StateLoaded(3, 3, "from device 1"), device=3, time=101.5), 3)
        log.log(Observed(ev.Resized(3, 0.01, "device 3 joined", [], 2, 3), device=1, time=101.6), 3)
        log.log(Observed(ev.Left("drained"), device=3, time=101.8), 3)
        log.log(Observed(ev.CheckpointWritten(4, "x/step-00000004.safetensors", 4096, 0.1), time=102.0), 4)
        log.log(Observed(ev.Steps(3, [0.5], [0.01], 0.1, [None]), time=102.0), 4)  # not logged
    spans = [
        Span(f"device {device}", name, category, 1000.0 * index, 900.0)
        for device in range(1, devices + 1)
        for index, (name, category) in enumerate((("0F0", "forward"), ("0A", "reduce"), ("0U", "update")))
    ]
    with Trace() as trace:
        trace.spans(spans)
        trace.write(out / "trace.json")
    result: dict[str, Any] = {"job": job, "strategy": "data", "devices": devices, "steps": 4, "epochs": 2}
    result |= {"accuracy": 0.9, "loss": 0.4, "split": "test", "seconds": 1.5, "weights_sha256": HASH}
    result |= {"device_ids": list(range(1, devices + 1)), "stopped": False, "idle_fraction": 0.2}
    result |= {"shares": [{"compute": 0.5, "communicate": 0.3, "idle": 0.2}] * devices}
    (out / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize("devices", [1, 64])
def test_a_whole_run(tmp_path: Path, devices: int) -> None:
    write_run(tmp_path, devices)
    path = write_run_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = path.read_text()
    assert_offline(page)
    shown = texts_of(page)
    for text in (HASH, "90.00 %", "longest pause 80 ms", "rank 1 is gone", "2.13.0", "optimizer.lr", "finished"):
        assert text in shown, text
    assert page.count('data-root-id="') == len(re.findall(r'class="chart"', page)) == 8
    charts = {(chart.labels, tuple(chart.legend)): chart for chart in charts_in(page)}
    assert len(charts) == 8
    loss = charts[("step", "loss"), ("training", "test", "device lost", "recovered")]
    assert loss.columns("training") == {"x": [1.0, 2.0, 3.0, 4.0], "y": [2.0, 1.0, pytest.approx(2 / 3), 0.5]}
    assert loss.columns("test") == {"x": [4.0], "y": [0.4]}
    names = [f"device {device}" for device in range(1, devices + 1)]
    whole = charts[("share of its time (%)", None), ("compute", "communicate", "idle")]
    assert whole.columns("idle")["device"] == names
    assert whole.columns("idle")["idle"] == [20.0] * devices
    line = charts[("time (ms)", None), ("forward", "update", "communicate")]
    assert sorted({*line.columns("forward")["device"]}, key=names.index) == names
    assert line.columns("forward")["name"].count("0U") == devices


def test_marks_are_read_from_the_events(tmp_path: Path) -> None:
    write_run(tmp_path)
    marks = marks_of(RunFiles.read(tmp_path))
    assert [(mark.kind, mark.step) for mark in marks] == [
        (MarkKind.FAULT, 3),
        (MarkKind.LOST, 2),
        (MarkKind.RECOVERED, 3),
        (MarkKind.JOINED, 3),
        (MarkKind.RESIZED, 3),
        (MarkKind.LEFT, 3),
        (MarkKind.CHECKPOINT, 4),
    ]
    assert marks[0].seconds == pytest.approx(1.0)
    assert (marks[2].pause_s, marks[2].repeated) == (0.08, "shard 1")
    assert marks[4].repeated == "nothing"


def test_texts_of_a_hostile_run_are_text(tmp_path: Path) -> None:
    write_run(tmp_path, job=HOSTILE)
    page = run_report(tmp_path)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert HOSTILE in texts_of(page)
    assert_offline(page)


@pytest.mark.slow_if(when=lambda params: params["content"] in (b"[[[", b'{"a":\xff}\n', b'{"step":"x"}\n'))
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "events.jsonl", "result.json", "trace.json"])
@pytest.mark.parametrize("content", [None, b"", b"[[[", b'{"a":\xff}\n', b"[1]\n", b'{"step":"x"}\n'])
def test_a_missing_or_damaged_file_costs_only_its_section(tmp_path: Path, name: str, content: bytes | None) -> None:
    write_run(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    page = run_page(tmp_path)
    facts = [str(value) for value in page.facts.values()]
    assert (HASH in facts) == (name != "result.json")
    assert any("did not finish" in fact for fact in facts) == (name == "result.json")
    if content == b"[1]\n":
        assert any(name in note for note in page.notes), "the damage is named"


def test_a_folder_with_one_file_only_has_a_page_without_charts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"job": "mnist", "devices": 2}')
    shown = texts_of(run_report(tmp_path))
    assert "did not finish: there is no whole result.json" in shown
    assert "No step was reported" in shown


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no files of a run"):
        run_report(tmp_path)
    with pytest.raises(NotFound, match="no files of a run"):
        run_report(tmp_path / "absent")


def test_a_resumed_run_keeps_its_earlier_marks_and_shows_where_it_went_on(tmp_path: Path) -> None:
    write_run(tmp_path)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"torn":')
    fields = {name: value for name, value in STARTED.to_fields().items() if name != "kind"}
    resumed = ev.Started(**{**fields, "done": 4, "steps": 8})
    with RunEventLog(tmp_path / "events.jsonl", resume=True) as log:
        log.log(Observed(resumed, device=1, time=200.0), 4)
    events, problems = read_run_events(tmp_path / "events.jsonl")
    assert len(events) == 9
    assert len(problems) == 1
    marks = marks_of(RunFiles.read(tmp_path))
    assert marks[0].kind is MarkKind.FAULT
    assert (marks[-1].kind, marks[-1].step) == (MarkKind.RESUMED, 4)
    assert "resumed after step 4" in texts_of(run_report(tmp_path))


def test_an_event_with_values_of_other_types_becomes_a_warning(tmp_path: Path) -> None:
    with RunEventLog(tmp_path / "events.jsonl") as log:
        log.log(Observed(ev.Recovered("x", {}, [], 5, "y", None), time=1.0), 2)  # type: ignore[arg-type]
        log.log(Observed(ev.CheckpointWritten(3, "a", 4, 0.1), time=2.0), 3)
    marks = marks_of(RunFiles.read(tmp_path))
    assert [mark.kind for mark in marks] == [MarkKind.WARNING, MarkKind.CHECKPOINT]
    assert "'recovered' has values of other types" in texts_of(run_report(tmp_path))


def test_a_run_without_an_events_file_has_marks_from_its_ledger(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "events.jsonl").unlink()
    lines = ['{"begin":0,"seed":0}', '{"step":1,"by":[1],"fed":""}', '{"lost":2}', '{"recovered":2,"missing":[0,3]}']
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    marks = marks_of(RunFiles.read(tmp_path))
    assert [(mark.kind, mark.step, mark.repeated) for mark in marks] == [
        (MarkKind.LOST, 1, ""),
        (MarkKind.RECOVERED, 2, "shards 0, 3"),
    ]


def test_curves_by_metric_and_split() -> None:
    rows = [{"step": 1, "loss": 2.0, "seconds": 0.01, "f1": 0.5}, {"step": 1, "test_accuracy": 0.5, "epoch": 1}]
    found = curves(rows)
    assert {name: [one.name for one in series] for name, series in found.items()} == {
        "loss": ["training"],
        "accuracy": ["test"],
        "f1": ["training"],
        "step time": ["step time"],
    }
    assert found["accuracy"][0].source.data["y"].tolist() == [50.0]


def test_the_traced_time_adds_up_and_a_trace_is_read_back(tmp_path: Path) -> None:
    write_run(tmp_path)
    (first, second) = traced_split(read_spans(tmp_path / "trace.json"))
    assert first["device"] == "device 1"
    for row in (first, second):
        assert sum(value for name, value in row.items() if name != "device") == pytest.approx(100)
    assert first["forward"] == pytest.approx(900 / 29)
