"""Seeded model construction: the same seed gives the same weights, and torch's global random state is restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hoop.errors import InvalidArgument

_GENERATOR = threading.Lock()
"""Lock of torch's CPU generator, one per process: two threads that build models at the same time would disturb each
other's draws."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which torch's CPU generator is seeded; on exit its previous state is restored.

    Modules are created on the CPU, so only that generator matters: weights are equal on machines with the same CPU
    architecture and torch version, independent of accelerators.
    """
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"seed: {seed} is not in 0..2^63-1")
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
