"""Weights from a seed: whoever builds a model gets the same one, and nobody else's random numbers move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hoop.errors import InvalidArgument

_GENERATOR = threading.Lock()
"""torch has one CPU generator a process: two threads that build at once would share its numbers."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within it torch's random numbers follow the seed; afterwards they go on as if nothing had happened.

    Modules are made on the CPU, so its generator is the only one that counts: the weights are equal on
    machines of one kind and torch version, whatever accelerators they have.
    """
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"seed: {seed} is not in 0..2^63-1")
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
