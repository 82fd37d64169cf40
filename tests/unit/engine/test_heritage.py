"""What a device that is restarted finds in its arena: parts that were whole, and nothing of what was being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hoop.engine.fault_tolerance.checkpoint import SnapshotPublisher
from hoop.engine.fault_tolerance.local_persistence import (
    LOG_STEPS,
    StepLog,
    load_from_arena,
    newest_state,
    read_step_log,
)
from hoop.engine.fault_tolerance.replication import allocate_shard
from hoop.engine.fault_tolerance.state_slices import LiveSlice, specs_of
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import StateVectors
from hoop.memory import Arena

RUN = "a run"
STATE = [LiveSlice("weight", 0, torch.arange(6.0)), LiveSlice("count", 0, torch.tensor([4]))]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", 1 << 20) as made:
        yield made


def kept(arena: Arena, *steps: int) -> None:
    """Copies of these steps, as mirrors keep them."""
    vectors = StateVectors(arena, "job1.", RUN)
    for turn, step in enumerate(steps):
        part = allocate_shard(vectors, f"own{turn}", specs_of(STATE))
        part.copy_from([LiveSlice(one.name, 0, one.elements + step) for one in STATE], step)


def test_the_newest_that_is_whole_is_found(arena: Arena) -> None:
    kept(arena, 5, 6)
    left = load_from_arena(arena, "job1.", RUN)
    assert [one.step for one in left] == [6, 5]
    assert not arena.buffers(), "what is trained next has the room"
    wanted = {"weight": torch.zeros(2, 3), "count": torch.tensor(0)}
    found = newest_state(wanted, left)
    assert found is not None
    assert found[0] == 6
    assert torch.equal(found[1]["weight"], torch.arange(6.0).view(2, 3) + 6)
    assert found[1]["count"].item() == 10
    more = {**wanted, "other": torch.ones(1)}
    assert newest_state(more, left) is None
    made = newest_state(more, left, ["other"])
    assert made is not None
    assert made[1]["other"] is more["other"], "what is not trained is as the model is made"


def test_one_that_is_being_written_is_not(arena: Arena) -> None:
    kept(arena, 5, 6)
    arena.view(arena.buffer("job1.own1.claim").address, 8).cast("q")[0] = -1
    assert [one.step for one in load_from_arena(arena, "job1.", RUN)] == [5]


def test_another_runs_state_is_only_freed(arena: Arena) -> None:
    kept(arena, 5, 6)
    assert load_from_arena(arena, "job1.", "another run") == []
    assert not arena.buffers()


def test_a_snapshot_is_believed_by_its_own_checksum(arena: Arena) -> None:
    for run, steps in (("another run", 9), (RUN, 4)):
        keepsakes = SnapshotPublisher(arena, "job1.", lambda told: None, run)
        keepsakes.publish({"weight": torch.ones(3)}, steps, 4, False, 1, 0)
    assert [one.step for one in load_from_arena(arena, "job1.", RUN)] == [4]
    keepsakes.publish({"weight": torch.ones(3)}, 8, 4, False, 1, 0)
    buffer = arena.buffer("job1.snapshot1")
    arena.view(buffer.address + buffer.size - 1, 1)[0] ^= 1
    assert load_from_arena(arena, "job1.", RUN) == []


def test_what_was_not_told_is_written_down(arena: Arena) -> None:
    evidence = Provenance(2)
    for step in range(LOG_STEPS + 10):
        evidence.record(step, torch.tensor([step, 1, 2, 3], dtype=torch.float32).numpy())
    diary = StepLog(StateVectors(arena, "job1.", RUN), evidence)
    for done in range(1, LOG_STEPS + 10):
        diary.append(done, [done / 3])
    rows = read_step_log(arena, "job1.", RUN)
    assert sorted(rows) == list(range(10, LOG_STEPS + 10))
    assert rows[40] == [40 / 3, 39.0, 1.0, 2.0, 3.0], "to the bit"
