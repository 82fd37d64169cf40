"""The state that a restarted device loads from its arena: complete parts, and none that was being written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hoop.engine.fault_tolerance.checkpoint_format import deserialize
from hoop.engine.fault_tolerance.local_persistence import (
    LOG_STEPS,
    StepLog,
    load_from_arena,
    newest_state,
    read_step_log,
)
from hoop.engine.fault_tolerance.replication import allocate_shard
from hoop.engine.fault_tolerance.snapshots import SnapshotPublisher
from hoop.engine.fault_tolerance.state_slices import LiveSlice, specs_of
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import StateVectors
from hoop.memory import Arena

RUN = "a run"
STATE = [LiveSlice("weight", 0, torch.arange(6.0)), LiveSlice("count", 0, torch.tensor([4]))]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", 1 << 20) as created:
        yield created


def store_states(arena: Arena, *steps: int) -> None:
    """Store a copy of the state of each step, as replicas do."""
    vectors = StateVectors(arena, "job1.", RUN)
    for index, step in enumerate(steps):
        state_shard = allocate_shard(vectors, f"own{index}", specs_of(STATE))
        state_shard.copy_from([LiveSlice(one.name, 0, one.elements + step) for one in STATE], step)


def test_the_newest_complete_state_is_found(arena: Arena) -> None:
    store_states(arena, 5, 6)
    loaded = load_from_arena(arena, "job1.", RUN)
    assert [one.step for one in loaded] == [6, 5]
    assert not arena.buffers(), "the arena is free for the next training"
    wanted = {"weight": torch.zeros(2, 3), "count": torch.tensor(0)}
    found = newest_state(wanted, loaded)
    assert found is not None
    assert found[0] == 6
    assert torch.equal(found[1]["weight"], torch.arange(6.0).view(2, 3) + 6)
    assert found[1]["count"].item() == 10
    with_frozen = {**wanted, "other": torch.ones(1)}
    assert newest_state(with_frozen, loaded) is None
    completed = newest_state(with_frozen, loaded, ["other"])
    assert completed is not None
    assert completed[1]["other"] is with_frozen["other"], "a tensor that is not trained keeps the model's value"


def test_a_state_that_was_being_written_is_not_loaded(arena: Arena) -> None:
    store_states(arena, 5, 6)
    arena.view(arena.buffer("job1.own1.commit").address, 8).cast("q")[0] = -1
    assert [one.step for one in load_from_arena(arena, "job1.", RUN)] == [5]


def test_the_state_of_another_run_is_freed_and_not_loaded(arena: Arena) -> None:
    store_states(arena, 5, 6)
    assert load_from_arena(arena, "job1.", "another run") == []
    assert not arena.buffers()


def test_a_snapshot_is_loaded_only_if_its_checksum_matches(arena: Arena) -> None:
    for run, steps in (("another run", 9), (RUN, 4)):
        publisher = SnapshotPublisher(arena, "job1.", lambda event: None, run)
        publisher.publish({"weight": torch.ones(3)}, steps, 4, False, 1, 0)
    assert [one.step for one in load_from_arena(arena, "job1.", RUN)] == [4]
    publisher.publish({"weight": torch.ones(3)}, 8, 4, False, 1, 0)
    buffer = arena.buffer("job1.snapshot1")
    arena.view(buffer.address + buffer.size - 1, 1)[0] ^= 1
    assert load_from_arena(arena, "job1.", RUN) == []


def test_a_copy_between_checkpoints_is_loaded_if_it_is_complete_and_replaced_by_the_next_checkpoint(
    arena: Arena,
) -> None:
    events: list[object] = []
    publisher = SnapshotPublisher(arena, "job1.", events.append, RUN)

    def replicate(step: int, every_s: float = 1e-9) -> None:
        publisher.replicate_later(lambda: lambda: {"weight": torch.full((3,), float(step))}, step, every_s)
        publisher.wait()

    def steps() -> list[int]:
        found = [deserialize(arena.read(one.address, one.size))[1]["steps"] for one in arena.buffers()]
        return sorted(found)

    publisher.publish({"weight": torch.zeros(3)}, 4, 4, False, 1, 0)
    replicate(5)
    assert steps() == [4, 5]
    while steps() == [4, 5]:  # the next copy is due after 50 times the seconds that this one took
        replicate(6, every_s=3600)
    assert steps() == [4, 6]
    replicate(7)
    assert steps() == [4, 6], "not due for an hour"
    assert len(events) == 1, "copies are not published"
    publisher.publish({"weight": torch.zeros(3)}, 8, 4, False, 1, 0)
    assert steps() == [4, 8], "two buffers suffice"
    publisher.close()
    assert [one.step for one in load_from_arena(arena, "job1.", RUN)] == [8, 4]


def test_a_copy_that_the_arena_has_no_room_for_is_left_out(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    publisher = SnapshotPublisher(arena, "job1.", lambda event: None, RUN)
    for step in (1, 2):
        publisher.replicate_later(lambda: lambda: {"weight": torch.zeros(arena.capacity)}, step, 1e-9)
        publisher.wait()
    publisher.close()
    (message,) = [one.getMessage() for one in caplog.records]
    assert message.startswith("no copy of the GPU's state is kept in the arena between checkpoints: ")


def test_the_step_log_keeps_the_last_steps(arena: Arena) -> None:
    provenance = Provenance(2)
    for step in range(LOG_STEPS + 10):
        provenance.record(step, torch.tensor([step, 1, 2, 3], dtype=torch.float32).numpy())
    log = StepLog(StateVectors(arena, "job1.", RUN), provenance)
    for done in range(1, LOG_STEPS + 10):
        log.append(done, [done / 3])
    rows = read_step_log(arena, "job1.", RUN)
    assert sorted(rows) == list(range(10, LOG_STEPS + 10))
    assert rows[40] == [40 / 3, 39.0, 1.0, 2.0, 3.0], "exact to the bit"
