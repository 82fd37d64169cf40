"""SGD, Adam and AdamW on flat vectors in the arena, and the learning-rate schedule.

The update calls PyTorch's fused kernels on one vector that holds all weights of a stage. The kernels are elementwise,
so the stage or the server that holds a weight does not affect its bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hoop.collectives.reduction import Array
from hoop.errors import InvalidArgument

OPTIMIZERS = {"sgd": 1, "adam": 2, "adamw": 2}
"""Number of state vectors (moments) of each optimizer."""
SCHEDULES = ("constant", "step", "cosine")
_MAX_STEPS = 10**12
_MAX_STEP_FACTOR = 1000.0


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, its hyperparameters, and the learning-rate schedule."""

    name: str = "adam"
    lr: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "step", "cosine"] = "constant"
    warmup: int = 0
    """Steps of linear warm-up from 0."""
    step_every: int = 0
    """Schedule ``step``: every ``step_every`` steps the learning rate is multiplied …"""
    step_factor: float = 0.1
    """… by ``step_factor``."""
    final: float = 0.0
    """Schedule ``cosine``: the final learning rate, as a fraction of ``lr``."""
    clip: float = 0.0
    """Maximum norm of the gradient; 0: no clipping."""

    def check(self) -> OptimizerSettings:
        if self.name not in OPTIMIZERS:
            raise InvalidArgument(f"optimizer: {self.name!r} is unknown; known: {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise InvalidArgument(f"schedule: {self.schedule!r} is unknown; known: {', '.join(SCHEDULES)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InvalidArgument(f"lr: {self.lr} is not a positive number")
        for name in ("warmup", "step_every"):
            if not 0 <= getattr(self, name) <= _MAX_STEPS:
                raise InvalidArgument(f"{name}: {getattr(self, name)} is not in 0..{_MAX_STEPS}")
        if not 0 <= self.step_factor <= _MAX_STEP_FACTOR:
            raise InvalidArgument(f"step_factor: {self.step_factor} is not in 0..{_MAX_STEP_FACTOR}")
        if self.schedule == "step" and self.step_every < 1:
            raise InvalidArgument(f"step_every: {self.step_every}; the schedule 'step' needs 1 or more")
        for name in ("momentum", "beta1", "beta2", "final"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidArgument(f"{name}: {getattr(self, name)} is not in 0..1")
        for name in ("weight_decay", "eps", "clip"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise InvalidArgument(f"{name}: {getattr(self, name)} is not zero or more")
        if self.nesterov and not self.momentum:
            raise InvalidArgument("nesterov: it needs a momentum")
        return self

    @property
    def num_moments(self) -> int:
        """Number of state vectors that the optimizer keeps; 0 for SGD without momentum."""
        return OPTIMIZERS[self.name] if self.name != "sgd" or self.momentum else 0

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of ``step`` (the first is 0) in a run of ``steps``."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        match self.schedule:
            case "step":
                try:
                    return self.lr * self.step_factor ** ((step - self.warmup) // self.step_every)
                except OverflowError:  # a factor above 1: the loss will not be a number, which ends the run
                    return math.inf
            case "cosine":
                done = (step - self.warmup) / max(1, steps - self.warmup)
                half = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
                return self.lr * (self.final + (1 - self.final) * half)
            case _:
                return self.lr


Update = Callable[[Tensor, float, int], None]
"""``update(gradient, rate, step)``: updates weights in place; ``rate`` is the learning rate, the first step is 0."""


def apply_update(update: Update, weights: Array, trained: int, total: Array, rate: float, step: int) -> None:
    """Apply a step's total to a flat state: update the first ``trained`` elements, add the rest to the buffers."""
    if trained:
        update(torch.from_numpy(total[:trained]), rate, step)
    weights[trained:] += total[trained : len(weights)]


CPU = torch.device("cpu")


def make_update(
    settings: OptimizerSettings, weights: Tensor, state: list[Tensor], device: torch.device = CPU
) -> Update:
    """Make the update function of these weights, in host memory; ``state`` are the optimizer's moments.

    ``device``: where updates are computed. The kernels of a GPU round otherwise than those of the CPU, so all updates
    of a job are computed on one kind of device, wherever the weights are.
    """
    if device.type != "cpu":
        return _staged_update(settings, weights, state, device)
    tensors = make_tensor_update(settings, weights, state)
    count = torch.zeros(())

    def update(gradient: Tensor, rate: float, step: int) -> None:
        count.fill_(step + 1)
        tensors(gradient, rate, count, step == 0)

    return update


TensorUpdate = Callable[[Tensor, Tensor | float, Tensor, bool], None]
"""``update(gradient, rate, count, first)``: the number of the step, from 1 on, is in ``count``.

``first``: it is the first step. On a GPU ``rate`` is a tensor, and ``first`` may always be False: moments begin at 0.
"""


def make_tensor_update(settings: OptimizerSettings, weights: Tensor, state: list[Tensor]) -> TensorUpdate:
    """Make the update function of weights and moments that are on one device. A CUDA graph can record its calls."""
    if settings.name == "sgd":

        def sgd(gradient: Tensor, rate: Tensor | float, count: Tensor, first: bool) -> None:
            with torch.no_grad():
                torch._fused_sgd_(
                    [weights],
                    [gradient],
                    state,
                    lr=rate,
                    momentum=settings.momentum,
                    dampening=0.0,
                    weight_decay=settings.weight_decay,
                    nesterov=settings.nesterov,
                    maximize=False,
                    is_first_step=first,
                )

        return sgd
    kernel = torch._fused_adam_ if settings.name == "adam" else torch._fused_adamw_
    first_moment, second_moment = state

    def adam(gradient: Tensor, rate: Tensor | float, count: Tensor, first: bool) -> None:
        with torch.no_grad():
            kernel(
                [weights],
                [gradient],
                [first_moment],
                [second_moment],
                [],
                [count],
                lr=rate,
                beta1=settings.beta1,
                beta2=settings.beta2,
                weight_decay=settings.weight_decay,
                eps=settings.eps,
                amsgrad=False,
                maximize=False,
            )

    return adam


def _staged_update(settings: OptimizerSettings, weights: Tensor, state: list[Tensor], device: torch.device) -> Update:
    """An update of vectors in host memory on a GPU: they are copied there and back."""
    on_device, moments = (
        torch.empty_like(weights, device=device),
        [torch.empty_like(one, device=device) for one in state],
    )
    rate_and_count = torch.zeros(2, device=device)
    update = make_tensor_update(settings, on_device, moments)

    def staged(gradient: Tensor, rate: float, step: int) -> None:
        on_device.copy_(weights)
        for one, host in zip(moments, state, strict=True):
            one.copy_(host)
        rate_and_count.copy_(torch.tensor([rate, step + 1]))
        update(gradient.to(device), rate_and_count[0], rate_and_count[1], False)
        weights.copy_(on_device)
        for one, host in zip(moments, state, strict=True):
            host.copy_(one)

    return staged
