"""A disk that is full because a test asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoop import files
from hoop.errors import ResourceExhausted
from hoop.plan.faults import parse_faults
from hoop.runs.run_recorder import DiskFullInjector


def test_one_checkpoint_finds_no_room_and_the_next_does(tmp_path: Path) -> None:
    told: list[str] = []
    done = 0
    full = DiskFullInjector(parse_faults("disk-full@step=5; kill@rank=1"), lambda: done, told.append)
    old, path = b"old", tmp_path / "step-5.safetensors"
    try:
        files.write_bytes(path, old)
        done = 5
        files.write_bytes(tmp_path / "metrics.txt", b"not a checkpoint")
        with pytest.raises(ResourceExhausted, match=r"step-5\.safetensors"):
            files.write_bytes(path, b"new")
        assert path.read_bytes() == old
        files.write_bytes(path, b"newer")
    finally:
        full.close()
    assert told == ["disk-full@step=5"]
    assert path.read_bytes() == b"newer"
    assert files.BEFORE_WRITE_HOOKS == []
