"""Which algorithm, when nobody says: by what the ranks share, how many they are, and what a link costs.

What a link between these ranks costs, measured on the links themselves.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.shm_executor import FLAT_BYTES
from hoop.errors import InvalidArgument
from hoop.transport.base import Endpoint, SharedEndpoint, SpanningEndpoint


@dataclass(frozen=True)
class LinkCost:
    """What one message costs: a fixed time, and a time for each byte."""

    message_s: float = 60e-6
    byte_s: float = 1 / 1.5e9


def choose(operation: Operation, endpoint: Endpoint, cost: LinkCost | None = None) -> str:
    """The algorithm that will run; every rank comes to the same."""
    entry = CATALOG[operation.collective]
    if operation.algorithm:
        if operation.algorithm in entry.shared and not isinstance(endpoint, SharedEndpoint):
            raise InvalidArgument(
                f"algorithm: {operation.algorithm} needs ranks that share memory; over these links there is "
                f"{', '.join(entry.algorithms)}"
            )
        if operation.algorithm in entry.spanning and not _spans(endpoint):
            raise InvalidArgument(
                f"algorithm: {operation.algorithm} needs several hosts, and one with several ranks that share memory; "
                f"here there is {', '.join(entry.shared if isinstance(endpoint, SharedEndpoint) else entry.algorithms)}"
            )
        return operation.algorithm
    if isinstance(endpoint, SpanningEndpoint) and entry.spanning and _spans(endpoint):
        return _spanning(operation, len(set(endpoint.hosts)), cost or LinkCost())
    if isinstance(endpoint, SharedEndpoint) and entry.shared:
        return _shared(operation, endpoint)
    if operation.collective == "all_reduce":
        return _by_messages(operation, endpoint.size, cost or LinkCost())
    return operation.default


def _shared(operation: Operation, endpoint: SharedEndpoint) -> str:
    size = operation.count * operation.dtype.itemsize
    if "flat" in CATALOG[operation.collective].shared and size <= FLAT_BYTES:
        return "flat"
    has_arenas = all(arena is not None for arena in endpoint.arenas)
    return "direct" if has_arenas and "direct" in CATALOG[operation.collective].shared else "staged"


def _spans(endpoint: Endpoint) -> bool:
    """Whether there are several hosts, and several ranks on one of them."""
    return isinstance(endpoint, SpanningEndpoint) and 1 < len(set(endpoint.hosts)) < endpoint.size


def _spanning(operation: Operation, hosts: int, cost: LinkCost) -> str:
    """A tree between many hosts for small vectors, else a ring; what crosses a host's border shares its cable."""
    if "hierarchical_tree" not in CATALOG[operation.collective].spanning:
        return "hierarchical"
    size = operation.count * operation.dtype.itemsize * cost.byte_s
    tree = 2 * math.ceil(math.log2(hosts)) * (cost.message_s + size)
    ring = 2 * (hosts - 1) * (cost.message_s + size / hosts)
    return "hierarchical_tree" if tree < ring else "hierarchical"


def _by_messages(operation: Operation, n: int, cost: LinkCost) -> str:
    """The least of the three formulas."""
    size = operation.count * operation.dtype.itemsize * cost.byte_s
    rounds = math.ceil(math.log2(n)) if n > 1 else 0
    moved = 2 * (n - 1) / n * size
    whole = not n & (n - 1)
    times = {
        "tree": 2 * rounds * (cost.message_s + size),
        "halving_doubling": 2 * rounds * cost.message_s
        + moved
        + (0 if whole else 2 * (cost.message_s + size)),
        "ring": 2 * (n - 1) * cost.message_s + moved,
    }
    return min(times, key=lambda name: times[name])


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
