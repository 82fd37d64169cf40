"""Who keeps whose mirror: somebody on another machine, where there is one.

    machine A: ranks 0 1    machine B: ranks 2 3        0 ──▶ 2   1 ──▶ 3   2 ──▶ 0   3 ──▶ 1

Ranks in the order of their machines, each kept by the one as many places further as the largest machine has ranks:
that leaves every machine. Where one machine has more than half of all ranks some of its own must do, for everybody
keeps one mirror and no more: memory is counted before the first step, and a small machine is not to carry a large one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def keepers(hosts: Sequence[Hashable], size: int) -> list[int]:
    """By rank, who keeps its mirror; ``hosts``, by rank, may be empty: all are on one. The same at every rank."""
    machines: dict[Hashable, list[int]] = {}
    for rank in range(size):
        machines.setdefault(hosts[rank] if hosts else 0, []).append(rank)
    order = [rank for ranks in machines.values() for rank in ranks]
    further = max(map(len, machines.values())) % size or 1
    kept_by = {rank: order[(place + further) % size] for place, rank in enumerate(order)}
    return [kept_by[rank] for rank in range(size)]
