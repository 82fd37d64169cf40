"""Weights and optimizer state on a GPU, with their update there: of a stage, of a server's slice, or of a replica.

    GPU    weights | moments      the current state, during steps; an update is launched, and nothing waits for it
    arena  weights | moments      a copy, for recovery, checkpoints, persistence and other ranks

``download`` brings the arena up to date, ``upload`` the GPU; each does nothing if its copy is current. The vectors on a
GPU are buffers of a ``CudaArena``; emulated, they are in host memory beside the arena, and are copied all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hoop.collectives.reduction import Array
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.stage.accelerator import Accelerator, Staging
from hoop.engine.stage.optimizer import make_update
from hoop.errors import InternalError


class DeviceState:
    """Weights (with float buffers) and moments on a GPU, and the vectors in the arena that have a copy of them."""

    def __init__(
        self,
        accelerator: Accelerator,
        name: str,
        weights: Array,
        trained: int,
        moments: Sequence[Tensor],
        optimizer: OptimizerSettings | None,
        staging: Staging | None = None,
    ) -> None:
        """``weights``, ``moments``: vectors in the arena, whose contents are the current state until ``apply_update``.

        ``name``: begins the names of the buffers on the GPU. ``trained``: number of weights that the optimizer updates;
        the rest are buffers. ``optimizer``: None if this rank does not update the state. ``staging``: pinned memory for
        the weights, of an owner that copies them often.
        """
        self._accelerator, self._staging, self._trained = accelerator, staging, trained
        self._host_weights, self._host_moments = weights, list(moments)
        self.weights = accelerator.vector(f"{name}weights", len(weights))
        self.moments = [
            accelerator.vector(f"{name}moment{index}", len(one)) for index, one in enumerate(self._host_moments)
        ]
        self._update = make_update(optimizer, self.weights[:trained], self.moments) if optimizer is not None else None
        self._device_stale, self._weights_stale, self._moments_stale = True, False, False

    def apply_update(self, total: Tensor, rate: float, step: int) -> None:
        """Launch the update with a step's total, which is on the GPU; ``rate`` is the learning rate."""
        if self._update is None:
            raise InternalError("a copy of weights that another rank owns was to be updated")
        self.upload()
        if self._trained:
            self._update(total[: self._trained], rate, step)
        self.weights[self._trained :].add_(total[self._trained : len(self.weights)])
        self.on_device_change()

    def on_device_change(self) -> None:
        """The state on the GPU was changed: the arena is out of date."""
        self._device_stale, self._weights_stale, self._moments_stale = False, True, True

    def on_arena_change(self) -> None:
        """All vectors in the arena were overwritten: the GPU is out of date."""
        self._device_stale, self._weights_stale, self._moments_stale = True, False, False

    def upload(self) -> bool:
        """Copy the state from the arena to the GPU, if it was changed there; returns whether it was."""
        if not self._device_stale:
            return False
        if self._staging is not None:
            self._staging.upload(self.weights, self._host_weights)
        else:
            self._accelerator.copy_in(self.weights, torch.from_numpy(self._host_weights))
        for device, host in zip(self.moments, self._host_moments, strict=True):
            self._accelerator.copy_in(device, host)
        self._device_stale = False
        return True

    def download(self) -> None:
        """Bring the arena up to date. Waits for the GPU, if it has a newer state."""
        self.download_weights()
        if self._moments_stale:
            for device, host in zip(self.moments, self._host_moments, strict=True):
                self._accelerator.copy_out(host, device)
            self._moments_stale = False

    def download_weights(self) -> None:
        """Bring the weights in the arena up to date, and leave the moments."""
        if not self._weights_stale:
            return
        if self._staging is not None:
            self._staging.download(self._host_weights, self.weights)
        else:
            self._accelerator.copy_out(torch.from_numpy(self._host_weights), self.weights)
        self._weights_stale = False
