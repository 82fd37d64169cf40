"""What an arena says of itself is believed when it is whole, of this run and of this boot, and never else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import hoop.memory.commit_record as claims_module
from hoop.memory import Arena
from hoop.memory.commit_record import NO_STEP, CommitRecord, boot_id, commit_records

RUN = "a run"


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", 1 << 20) as made:
        yield made


def found(arena: Arena, run: str = RUN) -> list[tuple[str, int]]:
    return [(name, step) for name, step, _ in commit_records(arena, "job1.", run)]


def test_a_step_is_claimed_when_it_is_whole(arena: Arena) -> None:
    claim = CommitRecord(arena, "job1.state", RUN, {"rows": [1, 2]})
    assert found(arena) == [], "it claims nothing at first"
    claim.step = 7
    assert [about["rows"] for _, _, about in commit_records(arena, "job1.", RUN)] == [[1, 2]]
    assert found(arena) == [("job1.state.claim", 7)]
    claim.step = NO_STEP
    assert found(arena) == [], "it is being written"


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", 1 << 20) as arena:
        CommitRecord(arena, "job1.state", RUN, {}).step = 3
    with Arena.open(tmp_path / "arena") as arena:
        assert found(arena) == [("job1.state.claim", 3)]


def test_another_run_job_or_boot_is_not_believed(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    CommitRecord(arena, "job1.state", RUN, {}).step = 3
    assert boot_id(), "this machine says which of its lives this is"
    assert found(arena, "another run") == found(arena, "") == []
    assert not list(commit_records(arena, "job2.", RUN))
    monkeypatch.setattr(claims_module, "boot_id", lambda: "after a reboot")
    assert found(arena) == []
    monkeypatch.setattr(claims_module, "boot_id", lambda: "")
    assert found(arena) == []


def test_no_byte_of_it_can_be_wrong(arena: Arena) -> None:
    CommitRecord(arena, "job1.state", RUN, {"rows": [1]}).step = 3
    buffer = arena.buffer("job1.state.claim")
    whole = arena.read(buffer.address, buffer.size)
    for place in range(8, buffer.size):
        wrong = bytearray(whole)
        wrong[place] ^= 0x10
        arena.write(buffer.address, wrong)
        assert found(arena) == [], f"byte {place} of {buffer.size}"
