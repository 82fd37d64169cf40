"""Fault injection of a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoop import files
from hoop.errors import ResourceExhausted
from hoop.plan.faults import parse_faults
from hoop.runs.run_recorder import DiskFullInjector


def test_one_checkpoint_write_fails_and_the_next_succeeds(tmp_path: Path) -> None:
    injected: list[str] = []
    done = 0
    injector = DiskFullInjector(parse_faults("disk-full@step=5; kill@rank=1"), lambda: done, injected.append)
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
        injector.close()
    assert injected == ["disk-full@step=5"]
    assert path.read_bytes() == b"newer"
    assert files.BEFORE_WRITE_HOOKS == []
