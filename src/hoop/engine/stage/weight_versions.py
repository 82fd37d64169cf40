"""Two versions of a stage's weights, for the asynchronous ring, whose steps overlap: the newest and the previous one.

    states[0]   version 0      version 2      …        an update writes the next version over the older one,
    states[1]      version 1      version 3   …        which no micro-batch in flight uses any more

The modules' tensors point to the selected version. The weights that autograd saved in a forward are unchanged at the
backward of the same micro-batch, because the next update writes to the other version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.stage.optimizer import make_update
from hoop.engine.stage.state import StageState, StateVectors
from hoop.errors import InternalError

NUM_VERSIONS = 2
"""Versions that are kept, which is also the number of steps in flight."""


class WeightVersions:
    """The versions of one stage's weights. Redirects the vectors of its ``StageState`` to the selected version."""

    def __init__(self, stage_state: StageState, vectors: StateVectors, optimizer: OptimizerSettings, name: str) -> None:
        layout = stage_state.layout
        self._stage_state = stage_state
        arrays = [stage_state.state_array]
        arrays += [vectors.new(f"{name}version{number}", layout.state) for number in range(1, NUM_VERSIONS)]
        self._arrays = arrays
        self._states: list[Tensor] = [torch.from_numpy(one) for one in arrays]
        self._views = [layout.views(one) for one in self._states]
        self._updates = [
            make_update(optimizer, one[: layout.trained], stage_state.moments, stage_state.update_device)
            if index
            else stage_state.update
            for index, one in enumerate(self._states)
        ]
        self._newest = 0
        self._selected = 0

    def use(self, version: int) -> None:
        """Select the version for the next forward or backward; versions count the updates since the last ``reset``."""
        if not max(0, self._newest + 1 - NUM_VERSIONS) <= version <= self._newest:
            raise InternalError(f"weights of version {version} were requested, and {self._newest} is the newest")
        self._select(version)

    def update(self, rate: float, step: int) -> None:
        """Make the next version: a copy of the newest, updated with the stage's total."""
        newest = self._states[self._newest % NUM_VERSIONS]
        self._newest += 1
        self._states[self._newest % NUM_VERSIONS].copy_(newest)
        self._select(self._newest)
        self._stage_state.on_total(step, 1.0)
        self._stage_state.apply_update(rate, step)

    def reset(self) -> None:
        """Make the newest version number 0 again, in ``states[0]``. Called when no micro-batch is in flight."""
        if self._newest % NUM_VERSIONS:
            self._states[0].copy_(self._states[self._newest % NUM_VERSIONS])
        self._newest = 0
        self._select(0)

    def _select(self, version: int) -> None:
        index = version % NUM_VERSIONS
        stage_state = self._stage_state
        if index != self._selected:
            self._selected = index
            stage_state.state_array, stage_state.state = self._arrays[index], self._states[index]
            stage_state.trained = stage_state.state[: stage_state.layout.trained]
            stage_state.update = self._updates[index]
            for tensor, view in zip(stage_state.layout.tensors, self._views[index], strict=True):
                tensor.data = view
        stage_state.begin()
