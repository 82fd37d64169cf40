"""Which algorithm, when nobody says: by what the ranks share, how many they are, and what a link costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hoop.collectives.catalog import CATALOG, Operation
from hoop.collectives.sharing import FLAT_BYTES
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
