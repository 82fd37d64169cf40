"""Commit records: a record counts only if it is intact, and of this run and this boot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hoop.memory.commit_record as commit_record_module
from hoop.memory import Arena
from hoop.memory.commit_record import NO_STEP, CommitRecord, boot_id, commit_records

RUN = "a run"


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", 1 << 20) as created:
        yield created


def found_steps(arena: Arena, run: str = RUN) -> list[tuple[str, int]]:
    return [(name, step) for name, step, _ in commit_records(arena, "job1.", run)]


def test_a_record_counts_while_it_has_a_step(arena: Arena) -> None:
    record = CommitRecord(arena, "job1.state", RUN, {"rows": [1, 2]})
    assert found_steps(arena) == [], "a new record has no step"
    record.step = 7
    assert [metadata["rows"] for _, _, metadata in commit_records(arena, "job1.", RUN)] == [[1, 2]]
    assert found_steps(arena) == [("job1.state.commit", 7)]
    record.step = NO_STEP
    assert found_steps(arena) == [], "the state is being written"


def test_a_record_survives_a_restart(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", 1 << 20) as arena:
        CommitRecord(arena, "job1.state", RUN, {}).step = 3
    with Arena.open(tmp_path / "arena") as arena:
        assert found_steps(arena) == [("job1.state.commit", 3)]


def test_records_of_another_run_job_or_boot_are_ignored(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    CommitRecord(arena, "job1.state", RUN, {}).step = 3
    assert boot_id(), "this machine has a boot id"
    assert found_steps(arena, "another run") == found_steps(arena, "") == []
    assert not list(commit_records(arena, "job2.", RUN))
    monkeypatch.setattr(commit_record_module, "boot_id", lambda: "after a reboot")
    assert found_steps(arena) == []
    monkeypatch.setattr(commit_record_module, "boot_id", lambda: "")
    assert found_steps(arena) == []


def test_a_record_with_a_damaged_byte_after_the_step_is_ignored(arena: Arena) -> None:
    CommitRecord(arena, "job1.state", RUN, {"rows": [1]}).step = 3
    buffer = arena.buffer("job1.state.commit")
    intact = arena.read(buffer.address, buffer.size)
    for offset in range(8, buffer.size):
        damaged = bytearray(intact)
        damaged[offset] ^= 0x10
        arena.write(buffer.address, damaged)
        assert found_steps(arena) == [], f"byte {offset} of {buffer.size}"
