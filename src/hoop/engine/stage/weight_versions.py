"""Versions of a stage's weights, where steps overlap: the newest, and the one before it.

    states[0]   version 0      version 2      …        an update writes the next version over the oldest,
    states[1]      version 1      version 3   …        which nobody computes with any more

The modules' tensors point to the version that is computed with. A graph that autograd keeps from a forward to its
backward finds its weights unchanged, because the next update is written elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hoop.engine.stage.optimizer import OptimizerSettings, updating
from hoop.engine.stage.state import StageState, StateVectors
from hoop.errors import InternalError

KEPT = 2
"""Versions that are kept, and steps that are under way at a time."""


class WeightVersions:
    """The last versions of one stage's weights."""

    def __init__(
        self, held: StageState, vectors: StateVectors, optimizer: OptimizerSettings, name: str
    ) -> None:
        layout = held.layout
        self._held = held
        arrays = [held.state_array]
        arrays += [vectors.new(f"{name}version{number}", layout.state) for number in range(1, KEPT)]
        self._arrays = arrays
        self._states: list[Tensor] = [torch.from_numpy(one) for one in arrays]
        self._views = [layout.views(one) for one in self._states]
        self._updates = [
            updating(optimizer, one[: layout.trained], held.moments) if index else held.update
            for index, one in enumerate(self._states)
        ]
        self._newest = 0
        self._used = 0

    def use(self, version: int) -> None:
        """What is computed from now on uses this version, counted in updates since the last ``settle``."""
        if not max(0, self._newest + 1 - KEPT) <= version <= self._newest:
            raise InternalError(
                f"weights of version {version} are asked for and {self._newest} is the newest"
            )
        self._point(version)

    def update(self, rate: float, step: int) -> None:
        """Makes the next version of the newest, from the stage's total."""
        newest = self._states[self._newest % KEPT]
        self._newest += 1
        self._states[self._newest % KEPT].copy_(newest)
        self._point(self._newest)
        self._held.summed(step, 1.0)
        self._held.finish(rate, step)

    def settle(self) -> None:
        """Nothing is under way: the newest version is where it was at the beginning, and counts as the first."""
        if self._newest % KEPT:
            self._states[0].copy_(self._states[self._newest % KEPT])
        self._newest = 0
        self._point(0)

    def _point(self, version: int) -> None:
        place = version % KEPT
        held = self._held
        if place != self._used:
            self._used = place
            held.state_array, held.state = self._arrays[place], self._states[place]
            held.trained = held.state[: held.layout.trained]
            held.update = self._updates[place]
            for tensor, view in zip(held.layout.tensors, self._views[place], strict=True):
                tensor.data = view
        held.begin()
