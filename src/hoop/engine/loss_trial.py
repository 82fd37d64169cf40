"""Trial calls of a user's loss before the first step: the loss of a batch beside the losses of its parts.

Random generators and buffers are restored afterwards.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hoop.engine.stage.autograd import MEAN, SUM, buffers_restored

SAMPLES = 32
"""Number of samples of a trial call."""
CUTS = ((11,), (2, 5, 16))
"""Indices at which the samples are cut into parts, for two trials."""
TOLERANCE = 1e-4
"""Relative difference allowed between a loss and the mean or sum of its parts: more than float32 rounding."""


@dataclass(frozen=True)
class Decomposition:
    """The loss of some samples, and the losses of parts of them."""

    whole: float
    parts: Sequence[tuple[int, float]]
    """Number of samples and loss of each part."""

    @property
    def samples(self) -> int:
        return sum(count for count, _ in self.parts)

    @property
    def sum(self) -> float:
        return sum(value for _, value in self.parts)

    @property
    def mean(self) -> float:
        return sum(count * value for count, value in self.parts) / self.samples

    @property
    def is_conclusive(self) -> bool:
        """True if it can distinguish a mean from a sum."""
        return math.isfinite(self.whole) and any(value for _, value in self.parts)

    def fits(self, reduction: str) -> bool:
        """True if the losses of the parts, reduced, give the loss of all; False if one of them is NaN."""
        expected = self.sum if reduction == SUM else self.mean
        sizes = [(count if reduction == MEAN else 1) * abs(value) for count, value in self.parts]
        size = sum(sizes) / (self.samples if reduction == MEAN else 1)
        return abs(self.whole - expected) <= TOLERANCE * max(size, abs(self.whole))


def compilation_disabled() -> AbstractContextManager[Any]:
    """A context in which compiled models run as they were before ``torch.compile``."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def no_side_effects(*objects: Any, on: torch.device | None = None) -> Iterator[None]:
    """Restore the random generators, and the buffers of those objects that are modules, afterwards.

    ``on``: also restore the generator of this CUDA device.
    """
    modules = [one for one in objects if isinstance(one, nn.Module)]
    gpus = [on] if on is not None and on.type == "cuda" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus), buffers_restored(modules):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
