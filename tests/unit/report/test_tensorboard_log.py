"""TensorBoardLog files, read by TensorBoard itself."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest

from hoop.report.tensorboard import TensorBoardLog

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorBoard's own warnings


def read_curves(directory: Path) -> dict[str, list[Any]]:
    """The curves TensorBoard reads from a directory: (step, value, wall time) of each point."""
    from tensorboard.backend.event_processing import event_accumulator as reading

    accumulator = reading.EventAccumulator(str(directory), {reading.SCALARS: 0, reading.TENSORS: 0})
    accumulator.Reload()
    return {
        tag: [(e.step, e.value, e.wall_time) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_tensorboard_reads_every_point(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path / "runs") as log:
        for step in range(300):
            log.scalar("loss/train", step / 7, step, 1000.5 + step)
        log.scalar("größe", -0.0, 2**40, 5.0)
        assert len(read_curves(tmp_path / "runs")["loss/train"]) == 300  # while the log is open
    curves = read_curves(tmp_path / "runs")
    single = [struct.unpack("<f", struct.pack("<f", step / 7))[0] for step in range(300)]
    assert curves["loss/train"] == [(s, v, 1000.5 + s) for s, v in enumerate(single)]
    assert curves["größe"] == [(2**40, 0.0, 5.0)]


def test_values_outside_float32_are_infinite(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path) as log:
        for step, value in enumerate((1e300, -1e300, math.inf, math.nan)):
            log.scalar("loss", value, step)
    values = [value for _, value, _ in read_curves(tmp_path)["loss"]]
    assert values[:3] == [math.inf, -math.inf, math.inf]
    assert math.isnan(values[3])


def test_resuming_hides_later_points(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path) as log:
        for step in range(10):
            log.scalar("loss", float(step), step)
    with TensorBoardLog(tmp_path, resumes_after=4) as log:
        for step in range(5, 8):
            log.scalar("loss", 100.0 + step, step)
    assert len(list(tmp_path.iterdir())) == 2
    points = [(step, value) for step, value, _ in read_curves(tmp_path)["loss"]]
    assert points == [*((s, float(s)) for s in range(5)), *((s, 100.0 + s) for s in range(5, 8))]


def test_a_damaged_record_is_skipped(tmp_path: Path) -> None:
    with TensorBoardLog(tmp_path) as log:
        log.scalar("loss", 1.0, 1)
        log.scalar("loss", 2.0, 2)
    data = bytearray(log.path.read_bytes())
    data[-6] ^= 1  # in the last event
    log.path.write_bytes(data)
    assert [step for step, _, _ in read_curves(tmp_path)["loss"]] == [1]
