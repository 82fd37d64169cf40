"""Two versions of a stage's weights, for the asynchronous ring, whose steps overlap: the newest and the previous one.

    states[0]   version 0      version 2      …        an update writes the next version over the older one,
    states[1]      version 1      version 3   …        which no micro-batch in flight uses any more

On the CPU the modules' tensors point to the selected version. The weights that autograd saved in a forward are
unchanged at the backward of the same micro-batch, because the next update writes to the other version.

On a GPU the modules compute at fixed addresses, which CUDA graphs have recorded: the selected version is copied there,
on the GPU. Autograd saved the addresses, which have the values of the forward again at the backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.stage.gpu_stage import GpuStageState
from hoop.engine.stage.optimizer import make_update
from hoop.engine.stage.state import StageState, StateVectors
from hoop.errors import InternalError

NUM_VERSIONS = 2
"""Number of versions that are kept, which is also the number of steps in flight."""


class WeightVersions(ABC):
    """The versions of one stage's weights. ``AsynchronousRingRole`` drives it; ``versions_of`` makes it."""

    def __init__(self, stage_state: StageState) -> None:
        self._stage_state = stage_state
        self._newest = 0

    def use(self, version: int) -> None:
        """Select the version for the next forward or backward; versions count the updates since the last ``reset``."""
        if not max(0, self._newest + 1 - NUM_VERSIONS) <= version <= self._newest:
            raise InternalError(f"weights of version {version} were requested, and {self._newest} is the newest")
        self._select(version)
        self._stage_state.begin()

    def update(self, rate: float, step: int) -> None:
        """Make the next version, and select it: a copy of the newest, updated with the stage's total."""
        self._prepare_next()
        self._newest += 1
        self._stage_state.begin()
        self._stage_state.on_total(step, 1.0)
        self._stage_state.apply_update(rate, step)
        self._on_updated()

    @abstractmethod
    def reset(self) -> None:
        """Make the newest version number 0 again, and select it. Called when no micro-batch is in flight."""

    @abstractmethod
    def _select(self, version: int) -> None:
        """Make the stage compute with this version."""

    @abstractmethod
    def _prepare_next(self) -> None:
        """Make the stage's state, which the next update changes, a copy of the newest version."""

    @abstractmethod
    def _on_updated(self) -> None:
        """The stage's state is the newest version now."""


class ArenaWeightVersions(WeightVersions):
    """Versions in the arena. Redirects the vectors of a ``StageState`` to the selected one."""

    def __init__(self, stage_state: StageState, vectors: StateVectors, optimizer: OptimizerSettings, name: str) -> None:
        super().__init__(stage_state)
        layout = stage_state.layout
        arrays = [stage_state.state_array]
        arrays += [vectors.new(f"{name}version{number}", layout.state) for number in range(1, NUM_VERSIONS)]
        self._arrays = arrays
        self._states: list[Tensor] = [torch.from_numpy(one) for one in arrays]
        self._views = [layout.views(one) for one in self._states]
        self._updates = [
            make_update(optimizer, one[: layout.trained], stage_state.moments) if index else stage_state.update
            for index, one in enumerate(self._states)
        ]
        self._selected = 0

    def reset(self) -> None:
        if self._newest % NUM_VERSIONS:
            self._states[0].copy_(self._states[self._newest % NUM_VERSIONS])
        self._newest = 0
        self._select(0)
        self._stage_state.begin()

    def _prepare_next(self) -> None:
        newest = self._states[self._newest % NUM_VERSIONS]
        self._states[(self._newest + 1) % NUM_VERSIONS].copy_(newest)
        self._select(self._newest + 1)

    def _on_updated(self) -> None:
        """The update was made in its vector."""

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


class GpuWeightVersions(WeightVersions):
    """Versions on a GPU. The weights of a ``GpuStageState`` are those of the selected one."""

    def __init__(self, stage_state: GpuStageState) -> None:
        super().__init__(stage_state)
        self._weights = stage_state.weights
        self._versions = [stage_state.new_vector(f"version{number}") for number in range(NUM_VERSIONS)]
        self._selected = 0
        """Number of the version that ``_weights`` has."""
        self._changed = stage_state.on_device_change

    def reset(self) -> None:
        self._select(self._newest)
        self._newest = self._selected = 0
        self._stage_state.begin()

    def _prepare_next(self) -> None:
        self._select(self._newest)
        if not self._newest:  # later versions are copied when they are made
            self._versions[0].copy_(self._weights)

    def _on_updated(self) -> None:
        self._selected = self._newest
        self._versions[self._newest % NUM_VERSIONS].copy_(self._weights)

    def _select(self, version: int) -> None:
        if version != self._selected:
            self._selected = version
            self._weights.copy_(self._versions[version % NUM_VERSIONS])
            self._changed()


def versions_of(
    stage_state: StageState, vectors: StateVectors, optimizer: OptimizerSettings, name: str
) -> WeightVersions:
    """Make the versions of a stage's weights, where its state is. ``name``: begins the names of vectors."""
    if isinstance(stage_state, GpuStageState):
        return GpuWeightVersions(stage_state)
    return ArenaWeightVersions(stage_state, vectors, optimizer, name)
