"""A replica receives the state once and then gradients, and holds the same bits as its source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hoop.engine.fault_tolerance.replication import Replica, ReplicaLayout, replica_layout
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.stage.optimizer import apply_update, make_update
from hoop.engine.stage.state import StateVectors
from hoop.memory import Arena

TRAINED, BUFFERS, STEPS = 192, 64, 5


@pytest.mark.parametrize("optimizer", [("adam", 0.0), ("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)])
def test_a_replica_that_repeats_the_updates_has_the_same_bits(tmp_path: Path, optimizer: tuple[str, float]) -> None:
    name, momentum = optimizer
    settings = OptimizerSettings(name, momentum=momentum, weight_decay=0.01)
    rng = np.random.default_rng(1)

    def random_vector() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return rng.standard_normal(TRAINED + BUFFERS).astype(np.float32)

    weights, total = random_vector(), random_vector()
    moments = [torch.zeros(TRAINED) for _ in range(settings.num_moments)]
    counter, frozen = torch.tensor([7]), torch.randn(3)
    flat = FlatState(weights, TRAINED, moments)
    state = [
        LiveSlice("weight", 0, torch.from_numpy(weights)[10:100]),
        LiveSlice("counter", 0, counter),
        LiveSlice("frozen", 0, frozen),
    ]
    state += [LiveSlice(f"moment{index}", 0, one[10:100]) for index, one in enumerate(moments)]
    layout, arrays = replica_layout([flat], ["counter"], state)
    update = make_update(settings, torch.from_numpy(weights[:TRAINED]), moments)
    with Arena.create(tmp_path / "arena", 1 << 20) as arena:
        replica = Replica(
            ReplicaLayout.from_json(vars(layout)), StateVectors(arena, "test."), "replicate", settings, True, None
        )
        incoming = iter([one for one in arrays if one.nbytes])

        def receive(into: memoryview) -> None:
            into[:] = next(incoming).data

        replica.receive_state(receive, lambda: None, 0)
        for step in range(STEPS):
            total[:] = random_vector()
            replica.totals[0][:] = total
            replica.counters[:] = (counter + 1).numpy().view(np.uint8)
            replica.schedule_update(step + 1, 0.01)
            before = [version.step for version in replica.versions()]
            apply_update(update, weights, TRAINED, total, 0.01, step)
            counter += 1
            assert before == [step, step + 1]
            assert replica.shard.step == step + 1
            for one, (spec, _) in zip(state, layout.slices, strict=True):
                assert replica.shard[spec].tobytes() == one.elements.numpy().tobytes(), (step, one.name)
        assert not replica.apply_update()
        del replica
