"""The optimizer's settings: its name, hyperparameters and learning-rate schedule.

Without PyTorch, so that a program that only reads settings starts quickly; ``stage/optimizer.py`` makes the updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hoop.errors import InvalidArgument

OPTIMIZERS = {"sgd": 1, "adam": 2, "adamw": 2}
"""Names of the optimizers, each with its maximum number of state vectors (moments)."""
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
    """Number of steps of linear warm-up from 0."""
    step_every: int = 0
    """Schedule ``step``: number of steps after which the learning rate is multiplied by ``step_factor``."""
    step_factor: float = 0.1
    """Schedule ``step``: factor by which the learning rate is multiplied every ``step_every`` steps."""
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
