"""How much a gradient is shortened when its norm is cut; the same bits wherever the model is cut."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hoop.collectives.catalog import Operation
from hoop.collectives.reduction import Array
from hoop.engine.settings import Settings
from hoop.engine.stages.held import Held
from hoop.engine.stages.weights import Layout
from hoop.engine.world import World
from hoop.memory.dtypes import dtype
from hoop.plan.plan import Plan

Squares = npt.NDArray[np.float64]
"""The squared norm of each of a model's parameters, in order."""


class Norm:
    """The norm over all stages, which each rank knows a part of."""

    def __init__(self, world: World, settings: Settings, blocks: Sequence[nn.Module], bounds: Sequence[int]):
        self._world, self._settings = world, settings
        counts = [len(list(nn.ModuleList(blocks[:bound]).parameters())) for bound in bounds]
        *self._places, self._parameters = counts

    def move(self, world: World) -> None:
        """The members have changed."""
        self._world = world

    def scale(self, held: Mapping[int, Held], plan: Plan) -> float:
        """What the gradient is multiplied by; every rank that holds a stage must ask."""
        if not self._settings.optimizer.clip:
            return 1.0
        squared = np.zeros(self._parameters, np.float64)
        for stage, one in held.items():
            if plan.holders[stage][0] == self._world.rank:
                found = one.squares()
                squared[self._places[stage] : self._places[stage] + len(found)] = found
        # Who has yet to come may wait for what was sent to it, and a meeting does not hand it over.
        self._world.communicator.endpoint.flush(time.monotonic() + self._settings.timeout_s)
        holders = sorted({rank for ranks in plan.holders for rank in ranks})
        self._world.group(holders).run(
            Operation("all_reduce", len(squared), dtype("float64")),
            squared,
            squared,
            self._settings.timeout_s,
        )
        return clip_scale(squared, self._settings.optimizer.clip)


def squares(layout: Layout, gradient: Array) -> Squares:
    """Of a gradient of the whole model; zero for parameters that are not trained."""
    found = np.zeros(len(layout.parameters) + len(layout.frozen), np.float64)
    views = layout.views(torch.from_numpy(gradient))[: len(layout.parameters)]
    for index, view in enumerate(views):
        found[index] = float(torch.dot(view.reshape(-1), view.reshape(-1)))
    return found


def clip_scale(squared: Squares, clip: float) -> float:
    """What the gradient is multiplied by, so that its norm is at most ``clip``."""
    return min(1.0, clip / (float(np.sqrt(squared.sum())) + 1e-6))
