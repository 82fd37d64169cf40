"""The state of one parameter server: a slice of the weights (``stage/weight_slices.py``), in the arena or on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.reduction import Array
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice, slices_of_part
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.stage.accelerator import Accelerator, Staging
from hoop.engine.stage.device_state import DeviceState
from hoop.engine.stage.optimizer import apply_update, make_update
from hoop.engine.stage.state import StateLayout, StateVectors
from hoop.engine.stage.weight_slices import WeightSlice


@dataclass(frozen=True)
class ServerShardSpec:
    """Which slice of the weights a server has, and what it needs to update it."""

    part: WeightSlice
    layout: StateLayout
    """Layout of the whole model, whose tensors have the first weights."""
    optimizer: OptimizerSettings
    rows: int
    """Number of gradients that the server holds at a time."""


class ServerShard:
    """The state of one server in the arena: its slice of the weights, optimizer state, and rows for gradients.

    On a GPU ``GpuServerShard`` takes its place.
    """

    def __init__(self, vectors: StateVectors, spec: ServerShardSpec) -> None:
        self.part = part = spec.part
        self.weights: Array = vectors.new("slice.weights", part.weights)
        self.moments = [
            torch.from_numpy(vectors.new(f"slice.moment{index}", part.trained))
            for index in range(spec.optimizer.num_moments)
        ]
        self.rows: Array = vectors.new("slice.gradients", spec.rows * part.width).reshape(spec.rows, part.width)
        self._update = make_update(spec.optimizer, torch.from_numpy(self.weights[: part.trained]), self.moments)
        self.load_weights(spec.layout)

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

    def received(self, first: int, last: int) -> Tensor:
        """Return the rows ``first`` to ``last``, into which the gradients of a worker are received."""
        return torch.from_numpy(self.rows[first : last + 1])

    def add_rows(self, into: int, other: int) -> None:
        """Add the gradient in one row to that in another."""
        np.add(self.rows[into], self.rows[other], out=self.rows[into])

    def on_total(self, row: int) -> None:
        """The gradient in a row is the sum of all workers', with which the slice will be updated."""

    def host_total(self, row: int) -> Array:
        """Return the gradient in a row without its tail, in the arena: for a replica at another rank."""
        return self.rows[row, : self.part.weights]

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

    def device_weights(self) -> Tensor | None:
        """Return the weights on the GPU; None without one."""
        return None

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
        weights = torch.from_numpy(self.weights)
        return slices_of_part(layout, (self.part.low, self.part.high), weights, self.moments, names)


class GpuServerShard(ServerShard):
    """Weights and optimizer state of one server on a GPU, with a copy in the arena; gradients are summed in the arena.

    An update uploads the sum. The weights are downloaded when they are given to workers of other hosts. Where all
    workers are on the server's host, ``PeerServerShard`` takes its place.
    """

    def __init__(self, accelerator: Accelerator, vectors: StateVectors, spec: ServerShardSpec) -> None:
        super().__init__(vectors, spec)
        self._accelerator, part = accelerator, spec.part
        self._staging = Staging(accelerator, part.weights)
        self._device_state = DeviceState(
            accelerator, "slice.", self.weights, part.trained, self.moments, spec.optimizer, self._staging
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

    def device_weights(self) -> Tensor:
        self._device_state.upload()
        return self._device_state.weights

    def download(self) -> None:
        self._device_state.download()

    def on_arena_change(self) -> None:
        self._device_state.on_arena_change()


class PeerServerShard(GpuServerShard):
    """The state of one server on a GPU whose workers are on the same host: gradients are received and summed there.

    Of the sum, the tail goes to the arena, and the rest only if another rank holds a replica of the slice.
    """

    def __init__(self, accelerator: Accelerator, vectors: StateVectors, spec: ServerShardSpec) -> None:
        super().__init__(accelerator, vectors, spec)
        rows, width = spec.rows, spec.part.width
        self._device_rows = accelerator.vector("slice.gradients", rows * width).view(rows, width)
        self._total_copied = False

    def received(self, first: int, last: int) -> Tensor:
        return self._device_rows[first : last + 1]

    def add_rows(self, into: int, other: int) -> None:
        self._device_rows[into].add_(self._device_rows[other])

    def on_total(self, row: int) -> None:
        weights = self.part.weights
        self._total.copy_(self._device_rows[row, :weights])
        self._total_copied = False
        if self.part.width > weights:
            self._accelerator.copy_out(torch.from_numpy(self.rows[row, weights:]), self._device_rows[row, weights:])

    def scale_gradient(self, row: int, scale: float) -> None:
        if scale != 1.0:
            self._total[: self.part.trained].mul_(scale)

    def host_total(self, row: int) -> Array:
        if not self._total_copied:
            self._staging.download(self.rows[row, : self.part.weights], self._total)
            self._total_copied = True
        return super().host_total(row)
