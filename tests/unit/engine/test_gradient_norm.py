"""Gradient clipping: the norm over all stages does not depend on where the model is cut."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn

from hoop.collectives.communicator import Communicator
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import CPU
from hoop.engine.stage.gradient_reduction import GradientNorm
from hoop.topology import Address
from hoop.transport.inproc import InprocTransport


def scale(blocks: list[nn.Module], bounds: list[int], norms: list[float]) -> float:
    """The clipping factor of one rank that holds all stages; ``norms``: squared, of the trained parameters."""
    transport = InprocTransport(Address("alone", 0))
    communicator = Communicator(transport.endpoint(0, 1, 0, [transport.address]))
    context: Any = SimpleNamespace(rank=0, communicator=communicator, group=lambda ranks: communicator)
    settings = Settings().replaced({"clip": 1e-3})
    stages: dict[int, Any] = {}
    rest = list(norms)
    for stage, (first, last) in enumerate(itertools.pairwise(bounds)):
        trained = sum(one.requires_grad for block in blocks[first:last] for one in block.parameters())
        own, rest = rest[:trained], rest[trained:]
        stages[stage] = SimpleNamespace(squared_norms=lambda own=own: own, normalisation=lambda: 1.0)
    plan: Any = SimpleNamespace(holders=[(0,)] * len(stages), sharded_update=False)
    return GradientNorm(context, settings, blocks, bounds, CPU).scale(stages, plan)


def test_frozen_parameters_do_not_change_the_order_of_the_sum() -> None:
    """numpy.sum adds 8 or more numbers in an order that depends on their positions."""
    blocks: list[nn.Module] = [nn.Linear(2, 2) for _ in range(9)]
    for parameter in blocks[1].parameters():
        parameter.requires_grad_(False)
    for seed in range(50):
        norms = np.random.default_rng(seed).random(16).tolist()
        found = {scale(blocks, bounds, norms) for bounds in ([0, 9], [0, 2, 9], [0, 4, 9], [0, 2, 5, 9])}
        assert len(found) == 1, f"seed {seed}: the factor depends on the partition: {found}"
