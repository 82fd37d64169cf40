"""Denormal numbers (below 1.2e-38 as float32) count as zero in the thread of a rank.

On x86 an operation on a denormal number takes over a hundred cycles, and training makes them: the moments of weights
whose gradients stay zero decay until they are denormal, and rounding keeps them there; a softmax that is sure of its
classes gives denormal probabilities, from which backward computes denormal gradients.
"""

from __future__ import annotations

import math

import torch

_DENORMAL = math.ulp(0.0)


def flush_denormals(threads: int) -> bool:
    """Make the calling thread, and threads that it starts later, count denormal numbers as zero; whether they do.

    PyTorch's other threads would not follow: with more than one, the length of a vector would decide which of its
    elements are flushed. So with ``threads`` above 1 nothing changes.
    """
    return threads == 1 and torch.set_flush_denormal(True)


def flushes_denormals() -> bool:
    """Whether the calling thread counts denormal numbers as zero."""
    return _DENORMAL * 1.0 == 0.0
