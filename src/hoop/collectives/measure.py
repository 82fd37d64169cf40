"""What a link between these ranks costs, measured on the links themselves."""

from __future__ import annotations

import time

import numpy as np

from hoop.collectives.choose import LinkCost
from hoop.transport.base import Endpoint

SMALL, LARGE = 8, 1 << 20
TURNS = 5


def measure(endpoint: Endpoint, deadline: float) -> LinkCost:
    """Every rank exchanges a few messages with its neighbours in the ring; all ranks get the slowest one's figures.

    All ranks must call it together. Costs about ten messages of 1 MiB a rank.
    """
    if endpoint.size == 1:
        return LinkCost()
    small = min(_turn(endpoint, SMALL, deadline) for _ in range(TURNS))
    large = min(_turn(endpoint, LARGE, deadline) for _ in range(TURNS))
    mine = np.array([small, max(0.0, large - small) / (LARGE - SMALL)], np.float64)
    message_s, byte_s = _slowest(endpoint, mine, deadline)
    return LinkCost(message_s, max(byte_s, 1e-13))


def _turn(endpoint: Endpoint, size: int, deadline: float) -> float:
    """Seconds of one round of a ring: this rank's message to the next while the previous one's arrives."""
    following, previous = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    out, into = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    started = time.perf_counter()
    endpoint.send(following, out.data, deadline)
    endpoint.recv_into(previous, into.data, deadline)
    endpoint.flush(deadline)
    return time.perf_counter() - started


def _slowest(endpoint: Endpoint, mine: np.ndarray, deadline: float) -> tuple[float, float]:
    """The largest of everybody's figures, passed round the ring until all have seen all."""
    following, previous = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    passing, seen = mine.copy(), mine.copy()
    for _ in range(endpoint.size - 1):
        into = np.empty_like(passing)
        endpoint.send(following, passing.view(np.uint8).data, deadline)
        endpoint.recv_into(previous, into.view(np.uint8).data, deadline)
        endpoint.flush(deadline)
        np.maximum(seen, into, out=seen)
        passing = into
    return float(seen[0]), float(seen[1])
