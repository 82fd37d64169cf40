"""The memory check counts the snapshots that a run will make, beside the state that is in the arena."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hoop.engine.fault_tolerance import snapshots
from hoop.engine.fault_tolerance.checkpoint_format import deserialize
from hoop.engine.fault_tolerance.checkpoint_header import CHECKSUM_KEY
from hoop.engine.fault_tolerance.snapshots import SnapshotPublisher
from hoop.engine.gradient_slots import gradient_memory_for
from hoop.engine.partitioning import check_snapshots
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition
from hoop.job_events import JobEvent, SnapshotTaken
from hoop.memory import Arena
from hoop.plan.partition import Block
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.memory_fit import fit

MIB = 1 << 20
BLOCKS = [
    Block("linear", 1.0, weight_bytes=4 * MIB, optimizer_bytes=8 * MIB, activation_bytes=100 * MIB, output_bytes=8)
]
SNAPSHOT = 12 * MIB


@pytest.mark.parametrize(("epochs", "checkpoint_every", "buffers"), [(1, 1, 1), (3, 0, 1), (3, 1, 2), (3, 5, 1)])
def test_snapshots_must_fit_beside_the_state(epochs: int, checkpoint_every: int, buffers: int) -> None:
    settings = Settings(epochs=epochs, checkpoint_every=checkpoint_every)
    strategy = DataParallel()
    plan = strategy.plan(1, 1)
    gradients = gradient_memory_for(settings.balance)
    found = fit(strategy, plan, BLOCKS, [None], gradient_buffers=gradients)
    state = found.bytes[0] - 100 * MIB  # activations are not in the arena

    def check(memory: int) -> None:
        check_snapshots(settings, plan, found, BLOCKS, [memory], [0], needed=64 * MIB)

    check(state + buffers * SNAPSHOT)
    with pytest.raises(FailedPrecondition) as refused:
        check(state + buffers * SNAPSHOT - 1)
    text = str(refused.value)
    assert text.startswith("memory: rank 0 needs ")
    assert f"for {'two snapshots' if buffers == 2 else 'a snapshot'} of it, and has " in text
    assert "--memory 65MiB" in text


def test_snapshots_have_one_size_whatever_numbers_are_in_them(tmp_path: Path) -> None:
    events: list[JobEvent] = []
    with Arena.create(tmp_path / "arena", MIB) as arena:
        publisher = SnapshotPublisher(arena, "job1.", events.append, "run")
        for done, loss in ((9, 0.5), (100_000, 1 / 3)):
            publisher.publish({"w": torch.zeros(8)}, done, 10, False, 1, 0, [done, 1, loss, loss])
        (size,) = {event.bytes for event in events if isinstance(event, SnapshotTaken)}
        _, metadata = deserialize(arena.read(arena.buffer("job1.snapshot1").address, size))
    assert metadata["evaluation"] == [100_000, 1, 1 / 3, 1 / 3]
    assert "padding" not in metadata


def test_the_checksum_of_a_large_snapshot_is_made_while_its_tensors_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LATER_BYTES", 0)
    events: list[JobEvent] = []
    weights = torch.arange(8.0)
    with Arena.create(tmp_path / "arena", MIB) as arena:
        publisher = SnapshotPublisher(arena, "job1.", events.append, "run")
        publisher.publish({"w": weights}, 9, 10, False, 1, 2)
        weights.zero_()
        publisher.wait()
        (event,) = events
        assert isinstance(event, SnapshotTaken)
        assert (event.steps, event.final, event.parts, event.turn, event.buffer) == (9, False, 1, 2, "job1.snapshot0")
        tensors, metadata = deserialize(arena.read(arena.buffer(event.buffer).address, event.bytes))
        publisher.close()
    assert metadata[CHECKSUM_KEY] == event.sha256
    assert tensors["w"].tolist() == list(range(8))
