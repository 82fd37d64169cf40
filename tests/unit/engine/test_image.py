"""A mirror is sent a state once and gradients from then on, and holds the same bits as who it is of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hoop.engine.fault_tolerance.replication import Replica, ReplicaLayout, replica_layout
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.stage.optimizer import OptimizerSettings, apply_update, make_update
from hoop.engine.stage.state import StateVectors
from hoop.memory import Arena

TRAINED, BUFFERS, STEPS = 192, 64, 5


@pytest.mark.parametrize("optimizer", [("adam", 0.0), ("adamw", 0.0), ("sgd", 0.9), ("sgd", 0.0)])
def test_updates_that_are_made_again_give_the_same_bits(tmp_path: Path, optimizer: tuple[str, float]) -> None:
    name, momentum = optimizer
    settings = OptimizerSettings(name, momentum=momentum, weight_decay=0.01)
    random = np.random.default_rng(1)

    def drawn() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return random.standard_normal(TRAINED + BUFFERS).astype(np.float32)

    weights, total = drawn(), drawn()
    moments = [torch.zeros(TRAINED) for _ in range(settings.num_moments)]
    counter, frozen = torch.tensor([7]), torch.randn(3)
    flat = FlatState(weights, TRAINED, moments, total)
    state = [
        LiveSlice("weight", 0, torch.from_numpy(weights)[10:100]),
        LiveSlice("counter", 0, counter),
        LiveSlice("frozen", 0, frozen),
    ]
    state += [LiveSlice(f"moment{index}", 0, one[10:100]) for index, one in enumerate(moments)]
    image, arrays = replica_layout([flat], ["counter"], state)
    update = make_update(settings, torch.from_numpy(weights[:TRAINED]), moments)
    with Arena.create(tmp_path / "arena", 1 << 20) as arena:
        mirror = Replica(
            ReplicaLayout.from_json(vars(image)), StateVectors(arena, "test."), "replicate", settings, True
        )
        coming = iter([one for one in arrays if one.nbytes])

        def receive(into: memoryview) -> None:
            into[:] = next(coming).data

        mirror.receive_state(receive, 0)
        for step in range(STEPS):
            total[:] = drawn()
            mirror.totals[0][:] = total
            mirror.counters[:] = (counter + 1).numpy().view(np.uint8)
            mirror.schedule_update(step + 1, 0.01)
            before = [part.step for part in mirror.clone_versions()]
            apply_update(update, weights, TRAINED, total, 0.01, step)
            counter += 1
            assert before == [step, step + 1]
            assert mirror.shard.step == step + 1
            for one, (piece, _) in zip(state, image.slices, strict=True):
                assert mirror.shard[piece].tobytes() == one.elements.numpy().tobytes(), (step, one.name)
        assert not mirror.apply_update()
        del mirror
