"""Traces are valid JSON at any time, and a full disk does not fail the run."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoop.errors import InvalidArgument
from hoop.report.spans import Span
from hoop.report.trace import Trace


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    data = path.read_bytes()
    whole = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [event for event in whole["traceEvents"] if event["ph"] == phase]


def names(path: Path, kind: str) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == kind}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_device_has_a_track(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with Trace(tmp_path) as trace:
        trace.track("coordinator")
        for device in (2, 1):
            for step in range(3):
                trace.span(Span(f"device {device}", f"F{step}", "forward", step * 10.5, 4, {"shard": step}))
                trace.span(Span(f"device {device}", "send", "send", step * 10.5, 4, lane="links"))
        trace.write(path, {"command": "hoop train"})
    assert names(path, "process_name") == {0: "the run", 1: "coordinator", 2: "device 2", 3: "device 1"}
    spans = events(path, "X")
    assert len(spans) == 12
    first = {"ph": "X", "name": "F0", "cat": "forward", "ts": 0, "dur": 4, "pid": 2, "tid": 1}
    assert spans[0] == {**first, "args": {"shard": 0}}
    for pid in (2, 3):
        assert [e["name"] for e in spans if e["pid"] == pid and e["cat"] == "forward"] == ["F0", "F1", "F2"]
    assert len({e["tid"] for e in spans}) == 4
    lanes = {e["tid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["links", "links", "main", "main"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]


def test_counters_marks_and_flows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sent, received = Span("device 1", "send", "send", 5, 2), Span("device 2", "recv", "recv", 6, 3)
    with Trace() as trace:
        trace.spans([sent, received])
        trace.flow("activation", sent, received)
        trace.counter("device 1", "memory", 7, {"bytes": np.int64(4096)})  # type: ignore[dict-item]  # NumPy is accepted
        trace.mark("device 2 died", 8.25, args={"loss": math.nan})
        trace.mark("restarted", 9, track="device 2")
        trace.write(path)
    (begin,), (end,) = events(path, "s"), events(path, "f")
    assert (begin["id"], begin["pid"], begin["ts"]) == (end["id"], 1, 5)
    assert (end["pid"], end["ts"], end["bp"]) == (2, 9, "e")
    assert events(path, "C")[0]["args"] == {"bytes": 4096}
    assert [(e["s"], e["name"]) for e in events(path, "i")] == [("g", "device 2 died"), ("p", "restarted")]
    assert events(path, "i")[0]["args"] == {"loss": "NaN"}


def test_a_trace_can_be_written_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(tmp_path / "spool") as trace:
        trace.write(path)
        assert events(path, "X") == []
        for count in (1, 2, 5000):
            for index in range(count):
                trace.span(Span("d", str(index), "forward", index, 1))
            trace.write(path)
        assert [e["name"] for e in events(path, "X")] == ["0", "0", "1", *map(str, range(5000))]
    assert list((tmp_path / "spool").iterdir()) == []


def test_events_above_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(max_events=3) as trace:
        trace.spans(Span("d", str(index), "forward", index, 1) for index in range(10))
        trace.write(path)
    assert [e["name"] for e in events(path, "X")] == ["0", "1", "2"]
    assert trace.dropped == 7
    assert json.loads(path.read_text())["otherData"] == {"dropped_events": 7}
    with pytest.raises(InvalidArgument, match="max_events: 0"):
        Trace(max_events=0)


def test_a_full_disk_drops_events_but_does_not_raise(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace() as trace:
        trace.span(Span("d", "before", "forward", 0, 1))
        trace.write(path)
        real = trace._file

        class Full:
            """Writes only the first bytes of its input."""

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def write(self, data: bytes) -> int:
                return real.write(data[:7])

        trace._file = Full()  # type: ignore[assignment]
        trace.spans(Span("d", "lost", "forward", index, 1) for index in range(5))
        trace.write(path)
        trace._file = real
        trace.span(Span("d", "after", "forward", 9, 1))
        trace.write(path)
    assert [e["name"] for e in events(path, "X")] == ["before", "after"]
    assert trace.dropped == 5
