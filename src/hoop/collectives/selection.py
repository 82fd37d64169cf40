"""Chooses the algorithm of an operation: by the memory that ranks share, their number, and the cost of a link.

``measure_links`` measures that cost on the links themselves.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from hoop.collectives.reduction import Array
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.shm_executor import flat_bytes
from hoop.errors import InvalidArgument
from hoop.transport.base import Endpoint, SharedEndpoint, SpanningEndpoint


@dataclass(frozen=True)
class LinkCost:
    """The time of one message: a fixed part, and a part for each byte, in seconds."""

    message_s: float = 60e-6
    byte_s: float = 1 / 1.5e9


def choose_algorithm(operation: Operation, endpoint: Endpoint, cost: LinkCost | None = None) -> str:
    """The algorithm that will run; every rank comes to the same result."""
    entry = CATALOG[operation.collective]
    if operation.algorithm:
        if operation.algorithm in entry.shared and not isinstance(endpoint, SharedEndpoint):
            raise InvalidArgument(
                f"algorithm: {operation.algorithm} needs ranks that share memory; over these links there is "
                f"{', '.join(entry.algorithms)}"
            )
        if operation.algorithm in entry.spanning and not spans_hosts(endpoint):
            raise InvalidArgument(
                f"algorithm: {operation.algorithm} needs several hosts, and one with several ranks that share memory; "
                f"here there is {', '.join(entry.shared if isinstance(endpoint, SharedEndpoint) else entry.algorithms)}"
            )
        return operation.algorithm
    if isinstance(endpoint, SpanningEndpoint) and entry.spanning and spans_hosts(endpoint):
        return _choose_multi_host(operation, len(set(endpoint.hosts)), cost or LinkCost())
    if isinstance(endpoint, SharedEndpoint) and entry.shared:
        return _choose_shared(operation, endpoint)
    if operation.collective == "all_reduce":
        return _choose_by_messages(operation, endpoint.size, cost or LinkCost())
    return operation.default_algorithm


def _choose_shared(operation: Operation, endpoint: SharedEndpoint) -> str:
    size = operation.count * operation.dtype.itemsize
    if "flat" in CATALOG[operation.collective].shared and size <= flat_bytes(endpoint):
        return "flat"
    has_arenas = all(arena is not None for arena in endpoint.arenas)
    return "direct" if has_arenas and "direct" in CATALOG[operation.collective].shared else "staged"


def spans_hosts(endpoint: Endpoint) -> bool:
    """Whether there are several hosts, and one of them has several ranks."""
    return isinstance(endpoint, SpanningEndpoint) and 1 < len(set(endpoint.hosts)) < endpoint.size


def _choose_multi_host(operation: Operation, hosts: int, cost: LinkCost) -> str:
    """A tree between hosts for small vectors and many hosts, else a ring; all rails of a host share its network."""
    if "hierarchical_tree" not in CATALOG[operation.collective].spanning:
        return "hierarchical"
    size = operation.count * operation.dtype.itemsize * cost.byte_s
    tree = 2 * math.ceil(math.log2(hosts)) * (cost.message_s + size)
    ring = 2 * (hosts - 1) * (cost.message_s + size / hosts)
    return "hierarchical_tree" if tree < ring else "hierarchical"


def _choose_by_messages(operation: Operation, n: int, cost: LinkCost) -> str:
    """The algorithm with the least predicted time."""
    size = operation.count * operation.dtype.itemsize * cost.byte_s
    rounds = math.ceil(math.log2(n)) if n > 1 else 0
    ring_bytes_s = 2 * (n - 1) / n * size
    is_power_of_two = not n & (n - 1)
    times = {
        "tree": 2 * rounds * (cost.message_s + size),
        "halving_doubling": 2 * rounds * cost.message_s
        + ring_bytes_s
        + (0 if is_power_of_two else 2 * (cost.message_s + size)),
        "ring": 2 * (n - 1) * cost.message_s + ring_bytes_s,
    }
    return min(times, key=lambda name: times[name])


SMALL, LARGE = 8, 1 << 20
"""Bytes of the measured messages."""
REPEATS = 5


def measure_links(endpoint: Endpoint, deadline: float) -> LinkCost:
    """Collective. Measures messages between neighbours in a ring; returns the slowest rank's cost on every rank.

    Each rank sends five messages of 8 bytes and five of 1 MiB.
    """
    if endpoint.size == 1:
        return LinkCost()
    small = min(_time_round(endpoint, SMALL, deadline) for _ in range(REPEATS))
    large = min(_time_round(endpoint, LARGE, deadline) for _ in range(REPEATS))
    own = np.array([small, max(0.0, large - small) / (LARGE - SMALL)], np.float64)
    message_s, byte_s = max_over_ranks(endpoint, own, deadline).tolist()
    return LinkCost(message_s, max(byte_s, 1e-13))


def _time_round(endpoint: Endpoint, size: int, deadline: float) -> float:
    """Seconds of one round of a ring: send a message to the next rank and receive one from the previous rank."""
    following, previous = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    sent, received = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    started = time.perf_counter()
    endpoint.send(following, sent.data, deadline)
    endpoint.recv_into(previous, received.data, deadline)
    endpoint.flush(deadline)
    return time.perf_counter() - started


def max_over_ranks(endpoint: Endpoint, own: Array, deadline: float) -> Array:
    """Collective. The elementwise maximum over all ranks: each rank's values travel once around the ring."""
    following, previous = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    passing, largest = own.copy(), own.copy()
    for _ in range(endpoint.size - 1):
        received = np.empty_like(passing)
        endpoint.send(following, passing.view(np.uint8).data, deadline)
        endpoint.recv_into(previous, received.view(np.uint8).data, deadline)
        endpoint.flush(deadline)
        np.maximum(largest, received, out=largest)
        passing = received
    return largest
