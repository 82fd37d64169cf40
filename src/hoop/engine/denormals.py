"""Denormal numbers (below 1.2e-38 as float32) count as zero in the thread of a rank.

On x86 an operation on a denormal number takes over a hundred cycles, and training makes them: the moments of weights
whose gradients stay zero decay until they are denormal, and rounding keeps them there; a softmax that is sure of its
classes gives denormal probabilities, from which backward computes denormal gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DENORMAL = math.ulp(0.0)


@contextmanager
def denormals_flushed(wanted: bool, threads: int) -> Iterator[None]:
    """In the context the calling thread, and threads that it starts, count denormal numbers as zero, if ``wanted``.

    PyTorch's other threads would not follow: with more than one, the length of a vector would decide which of its
    elements are flushed. So with ``threads`` above 1 nothing changes. A thread that flushed them before goes on to.
    """
    changes = wanted and threads == 1 and not flushes_denormals() and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if changes:
            torch.set_flush_denormal(False)


def flushes_denormals() -> bool:
    """Whether the calling thread counts denormal numbers as zero."""
    return _DENORMAL * 1.0 == 0.0
