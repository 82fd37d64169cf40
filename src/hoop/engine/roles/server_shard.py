"""The part of a model that one parameter server owns: how weights are cut into slices, and a slice's state.

    | parameters … | buffers … | tail |        a gradient; the weights have no tail
    |  slice 0  |  slice 1  |  slice 2 |       cut at multiples of 64 elements; the last slice has the tail

Updates are elementwise, and no kernel has a remainder at a multiple of 64 elements. So the updates of the slices give
the same bits as one update of the whole vector. The last server has the tail, so it knows the losses and reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.reduction import Array
from hoop.engine.fault_tolerance.checkpoint import MOMENT
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.stage.accelerator import Accelerator, Staging
from hoop.engine.stage.device_state import DeviceState
from hoop.engine.stage.optimizer import apply_update, make_update
from hoop.engine.stage.state import PAD, StateLayout, StateVectors
from hoop.plan.plan import split_evenly


@dataclass(frozen=True)
class ServerSlice:
    """Elements ``[low, high)`` of the weights; its gradient is ``[low, end)``, for the last slice with the tail."""

    low: int
    high: int
    end: int
    trained: int
    """Number of its elements that the optimizer updates; the rest are buffers."""

    @property
    def weights(self) -> int:
        return self.high - self.low

    @property
    def width(self) -> int:
        """Elements of its gradient."""
        return self.end - self.low


def server_slices(layout: StateLayout, servers: int) -> list[ServerSlice]:
    """Cut the weights into one slice per server; with fewer units of 64 elements, the last slices are empty."""
    found = []
    for part in split_evenly(layout.state // PAD, servers):
        low, high = part.start * PAD, part.stop * PAD
        found.append(ServerSlice(low, high, high, max(0, min(high, layout.trained) - low)))
    last = found[-1]
    found[-1] = ServerSlice(last.low, last.high, layout.total, last.trained)
    return found


@dataclass(frozen=True)
class ParameterPiece:
    """The elements of a parameter that are in one slice: ``[low, high)`` of the whole vector."""

    parameter: int
    low: int
    high: int
    first_slice: int
    """The slice in which the parameter begins."""


def parameter_pieces(layout: StateLayout, parts: list[ServerSlice]) -> list[list[ParameterPiece]]:
    """Return the pieces of parameters in each slice, in order."""
    found: list[list[ParameterPiece]] = [[] for _ in parts]
    for index, parameter in enumerate(layout.parameters):
        start = layout.offsets[index]
        stop = start + parameter.numel()
        first_slice = next((number for number, one in enumerate(parts) if one.low <= start < one.high), 0)
        for number, one in enumerate(parts):
            low, high = max(start, one.low), min(stop, one.high)
            if low < high:
                found[number].append(ParameterPiece(index, low, high, first_slice))
    return found


class ServerShard:
    """The state of one server in the arena: its slice of the weights, optimizer state, and rows for gradients.

    On a GPU ``GpuServerShard`` takes its place.
    """

    def __init__(
        self, vectors: StateVectors, layout: StateLayout, part: ServerSlice, optimizer: OptimizerSettings, rows: int
    ) -> None:
        """``rows``: number of gradients that it holds at a time."""
        self.part = part
        self.weights: Array = vectors.new("slice.weights", part.weights)
        self.moments = [
            torch.from_numpy(vectors.new(f"slice.moment{index}", part.trained))
            for index in range(optimizer.num_moments)
        ]
        self.rows: Array = vectors.new("slice.gradients", rows * part.width).reshape(rows, part.width)
        self._update = make_update(optimizer, torch.from_numpy(self.weights[: part.trained]), self.moments)
        self.load_weights(layout)

    def load_weights(self, layout: StateLayout) -> None:
        """Copy the slice out of the model's tensors."""
        whole = torch.zeros(layout.state)
        with torch.no_grad():
            for view, tensor in zip(layout.views(whole), layout.tensors, strict=True):
                view.copy_(tensor)
        np.copyto(self.weights, whole[self.part.low : self.part.high].numpy())

    def load_moments(self, wholes: list[Tensor]) -> None:
        for moment, whole in zip(self.moments, wholes, strict=True):
            moment.copy_(whole[self.part.low : self.part.low + self.part.trained])

    def on_total(self, row: int) -> None:
        """The gradient in a row is the sum of all workers', with which the slice will be updated."""

    def gradient(self, row: int) -> Tensor:
        """Return the gradient in a row where updates are computed, after ``on_total``."""
        return torch.from_numpy(self.rows[row])

    def scale_gradient(self, row: int, scale: float) -> None:
        """Clip the gradient in a row, after ``on_total``."""
        if scale != 1.0:
            torch.from_numpy(self.rows[row, : self.part.trained]).mul_(scale)

    def apply_update(self, row: int, rate: float, step: int) -> None:
        """Update the slice with the gradient in a row."""
        apply_update(self._update, self.weights, self.part.trained, self.rows[row], rate, step)

    def current_weights(self) -> Array:
        """Return the weights in the arena, up to date."""
        return self.weights

    def download(self) -> None:
        """Bring weights and moments in the arena up to date."""

    def on_arena_change(self) -> None:
        """Weights and moments in the arena were overwritten, and are the current ones."""

    def tail(self, row: int) -> Array:
        """Return the tail of the gradient in a row; only the last slice has one."""
        return self.rows[row, self.part.weights :]

    def flat_state(self) -> FlatState:
        return FlatState(self.weights, self.part.trained, self.moments)

    def live_slices(self, layout: StateLayout, names: Mapping[int, str]) -> list[LiveSlice]:
        """Return weights and optimizer state in the arena as slices of the model's tensors."""
        found = []
        part, vectors = self.part, [torch.from_numpy(self.weights), *self.moments]
        for index, (offset, tensor) in enumerate(zip(layout.offsets, layout.tensors, strict=True)):
            low, high = max(offset, part.low), min(offset + tensor.numel(), part.high)
            trained = index < len(layout.parameters)
            for number, vector in enumerate(vectors if trained else vectors[:1]):
                prefix = f"{MOMENT}{number - 1}." if number else ""
                if low < high:
                    elements = vector[low - part.low : high - part.low]
                    found.append(LiveSlice(prefix + names[id(tensor)], low - offset, elements))
        return found


class GpuServerShard(ServerShard):
    """Weights and optimizer state of one server on a GPU, with a copy in the arena; gradients are summed in the arena.

    An update uploads the sum. The weights are downloaded when they are given to workers.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        vectors: StateVectors,
        layout: StateLayout,
        part: ServerSlice,
        optimizer: OptimizerSettings,
        rows: int,
    ) -> None:
        super().__init__(vectors, layout, part, optimizer, rows)
        self._staging = Staging(accelerator, part.weights)
        self._device_state = DeviceState(
            accelerator, "slice.", self.weights, part.trained, self.moments, optimizer, self._staging
        )
        self._total = accelerator.vector("slice.total", part.weights)

    def on_total(self, row: int) -> None:
        self._staging.upload(self._total, self.rows[row, : self.part.weights])

    def gradient(self, row: int) -> Tensor:
        return self._total

    def scale_gradient(self, row: int, scale: float) -> None:
        super().scale_gradient(row, scale)
        if scale != 1.0:
            self._total[: self.part.trained].mul_(scale)

    def apply_update(self, row: int, rate: float, step: int) -> None:
        self._device_state.apply_update(self._total, rate, step)

    def current_weights(self) -> Array:
        self._device_state.download_weights()
        return self.weights

    def download(self) -> None:
        self._device_state.download()

    def on_arena_change(self) -> None:
        self._device_state.on_arena_change()
