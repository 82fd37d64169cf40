"""MetricsLog: one JSON line per row, read back unchanged, without duplicates after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.report import strict_json
from hoop.report.metrics import MetricsLog, read_metrics


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_rows_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "out" / "metrics.jsonl"
    assert read_metrics(path) == []
    with MetricsLog(path) as log:
        log.log(0, loss=np.float32(0.5), kind="step", correct=np.int64(7), shape=(1, 2))
        assert read_metrics(path) == [{"step": 0, "loss": 0.5, "kind": "step", "correct": 7, "shape": [1, 2]}]
        log.log(np.int64(1), loss=0.25)  # type: ignore[arg-type]  # NumPy integers are accepted
        log.sync()
    assert steps(path) == [0, 1]
    assert path.read_bytes().count(b"\n") == 2


def test_non_finite_values_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(3, loss=math.nan, worst=[math.inf, np.float64(-math.inf)], name="NaN is a word here")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"])
    assert row["worst"] == [math.inf, -math.inf]
    assert row["name"] == "NaN is a word here"


def test_resuming_removes_later_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step in (1, 2, 3, 2, 4):  # the evaluation of step 2 was late
            log.log(step, loss=1 / step)
    with MetricsLog.resume(path, 2) as log:
        assert steps(path) == [1, 2, 2]
        log.log(3, loss=9.0)
    assert steps(path) == [1, 2, 2, 3]
    with MetricsLog(path) as log:
        log.log(4)
    assert steps(path) == [1, 2, 2, 3, 4]
    MetricsLog.create(path).close()
    assert steps(path) == []
    MetricsLog.resume(tmp_path / "none.jsonl", 5).close()


def test_a_truncated_last_line_is_ignored_and_then_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step":1,"loss":0.5}\n'
    for length in range(1, len(whole)):
        path.write_bytes(whole + whole[:length])
        assert steps(path) == [1]
    with MetricsLog(path) as log:
        log.log(2)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("line", [b'{"step":1', b"[1]", b'{"loss":1}', b'{"step":"1"}', b"", b"\xff"])
def test_a_damaged_line_is_reported(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + line + b'\n{"step":2}\n')
    with pytest.raises(FailedPrecondition, match=f"{path}, line 2.*move the file away"):
        read_metrics(path)


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log, pytest.raises(InvalidArgument, match="step: -1"):
        log.log(-1)


def test_strict_json_rejects_unknown_types() -> None:
    assert strict_json.dumps({"path": Path("a/b"), "array": np.arange(2)}) == '{"path":"a/b","array":[0,1]}'
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        strict_json.dumps({"x": object()})
    with pytest.raises(TypeError, match="object cannot be written as JSON"):
        strict_json.dumps({"x": [math.nan, object()]})
