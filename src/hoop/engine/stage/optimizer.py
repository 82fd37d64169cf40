"""SGD, Adam and AdamW on flat vectors in the arena, and how the learning rate moves.

Each has PyTorch's formulas and PyTorch's own fused kernels, on one vector for the whole stage. Every element is updated
by itself, so it makes no difference to a weight which stage or server holds it.
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
"""Each with how many vectors of state it has."""
SCHEDULES = ("constant", "step", "cosine")


@dataclass(frozen=True)
class OptimizerSettings:
    """Which optimizer, and its constants."""

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
    """Steps in which the rate rises from nothing."""
    step_every: int = 0
    """Schedule ``step``: so many steps until the rate is multiplied …"""
    step_factor: float = 0.1
    """… by this."""
    final: float = 0.0
    """Schedule ``cosine``: what share of the rate is left at the end."""
    clip: float = 0.0
    """The gradient's norm is cut to this; 0: it is not."""

    def check(self) -> OptimizerSettings:
        if self.name not in OPTIMIZERS:
            raise InvalidArgument(f"optimizer: {self.name!r} is unknown; known: {', '.join(OPTIMIZERS)}")
        if self.schedule not in SCHEDULES:
            raise InvalidArgument(f"schedule: {self.schedule!r} is unknown; known: {', '.join(SCHEDULES)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise InvalidArgument(f"lr: {self.lr} is not a positive number")
        if self.schedule == "step" and self.step_every < 1:
            raise InvalidArgument(f"step_every: {self.step_every}; the schedule 'step' needs 1 or more")
        for name in ("momentum", "beta1", "beta2", "final"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidArgument(f"{name}: {getattr(self, name)} is not in 0..1")
        for name in ("weight_decay", "eps", "warmup", "clip"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise InvalidArgument(f"{name}: {getattr(self, name)} is not zero or more")
        if self.nesterov and not self.momentum:
            raise InvalidArgument("nesterov: it needs a momentum")
        return self

    @property
    def slots(self) -> int:
        """Vectors of state it keeps."""
        return OPTIMIZERS[self.name] if self.name != "sgd" or self.momentum else 0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step (the first is 0) of so many."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        match self.schedule:
            case "step":
                return self.lr * self.step_factor ** ((step - self.warmup) // self.step_every)
            case "cosine":
                done = (step - self.warmup) / max(1, steps - self.warmup)
                half = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
                return self.lr * (self.final + (1 - self.final) * half)
            case _:
                return self.lr


Update = Callable[[Tensor, float, int], None]


def go_on(update: Update, weights: Array, trained: int, total: Array, rate: float, step: int) -> None:
    """A step further: the trained elements are updated, and what shards did to the buffers behind them is added."""
    if trained:
        update(torch.from_numpy(total[:trained]), rate, step)
    weights[trained:] += total[trained : len(weights)]


def updating(settings: OptimizerSettings, weights: Tensor, state: list[Tensor]) -> Update:
    """``update(gradient, rate, step)`` on these weights; ``step`` counts from 0."""
    one = settings
    if one.name == "sgd":

        def sgd(gradient: Tensor, rate: float, step: int) -> None:
            with torch.no_grad():
                torch._fused_sgd_(
                    [weights],
                    [gradient],
                    state,
                    lr=rate,
                    momentum=one.momentum,
                    dampening=0.0,
                    weight_decay=one.weight_decay,
                    nesterov=one.nesterov,
                    maximize=False,
                    is_first_step=step == 0,
                )

        return sgd
    kernel = torch._fused_adam_ if one.name == "adam" else torch._fused_adamw_
    first, second = state
    count = torch.zeros(())

    def adam(gradient: Tensor, rate: float, step: int) -> None:
        count.fill_(step + 1)
        with torch.no_grad():
            kernel(
                [weights],
                [gradient],
                [first],
                [second],
                [],
                [count],
                lr=rate,
                beta1=one.beta1,
                beta2=one.beta2,
                weight_decay=one.weight_decay,
                eps=one.eps,
                amsgrad=False,
                maximize=False,
            )

    return adam
