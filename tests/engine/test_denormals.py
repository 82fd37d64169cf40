"""Ranks count denormal numbers as zero, on every rank and with every strategy alike, unless the settings say no."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from forked_ranks import checkpoint, tensors_in, train
from short_jobs import JOBS
from small_jobs import settings
from torch import Tensor, nn

from hoop.engine.denormals import denormals_flushed, flushes_denormals

DENORMAL = 1e-39
pytestmark = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this processor cannot flush denormal numbers"
)


class Lifted(nn.Module):
    """Adds 0.17 to its input where denormal numbers count, and nothing where they are flushed."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.full((1,), DENORMAL) * 2.0**127


class Fading(nn.Module):
    """Adds weights as long as they are positive: then their gradients are zero, and their moments decay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((12,), 1e-4))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.weight.relu()


def lifted(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), Lifted(), nn.Sigmoid(), nn.Linear(12, 10))


def fading(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), Fading(), nn.Sigmoid(), nn.Linear(12, 10))


def trained(strategy: str, ranks: int, **changes: object) -> list[float]:
    """The losses, by the reporting rank."""
    outcomes = train("shm", ranks, settings(strategy, epochs=1, **changes), replace(JOBS["mlp"], model=lifted))
    return next(one.losses for one in outcomes if one.losses)


@pytest.mark.parametrize(("strategy", "ranks"), [("data", 2), ("pipeline:1f1b", 3), ("ps:bsp", 2), ("ring", 2)])
def test_all_strategies_flush(strategy: str, ranks: int) -> None:
    alone = trained("data", 1)
    assert trained(strategy, ranks) == alone
    assert trained("data", 1, flush_denormals=False) != alone


def state(ranks: int, flush: bool) -> dict[str, Tensor]:
    """Weights and moments after 160 steps."""
    job = replace(JOBS["mlp"], model=fading)
    return tensors_in(
        checkpoint(train("shm", ranks, settings("data", epochs=40, beta1=0.6, flush_denormals=flush), job))
    )


def denormals(tensors: dict[str, Tensor]) -> int:
    floats = [one for one in tensors.values() if one.is_floating_point()]
    return sum(int(((one.abs() < torch.finfo(torch.float32).tiny) & (one != 0)).sum()) for one in floats)


def test_the_state_is_the_same_whatever_the_number_of_ranks() -> None:
    one, three = state(1, True), state(3, True)
    assert one.keys() == three.keys()
    assert all(torch.equal(tensor, three[name]) for name, tensor in one.items())
    assert denormals(one) == 0
    assert denormals(state(1, False)) > 0


def test_only_with_one_thread_and_only_in_the_context() -> None:
    with denormals_flushed(True, 2):
        assert not flushes_denormals()
    with denormals_flushed(False, 1):
        assert not flushes_denormals()
    with denormals_flushed(True, 1):
        assert flushes_denormals()
        assert float(torch.full((1,), DENORMAL) * 1.0) == 0.0
        with denormals_flushed(True, 1):
            assert flushes_denormals()
        assert flushes_denormals(), "the outer context still lasts"
    assert not flushes_denormals()
