"""Replica placement: which ranks hold the replicas of which, and how many bytes they store and receive per step.

    host A: ranks 0 1    host B: ranks 2 3        0 ──▶ 2   1 ──▶ 3   2 ──▶ 0   3 ──▶ 1

With ranks in the order of their hosts, a rank's holder is as many places further as the largest host has ranks, which
is always on another host. If one host has more than half of all ranks, some of its replicas stay on it: every rank
holds equally many replicas, because memory is checked before the first step, and a small host must not have to hold the
replicas of a large one.

With several replicas (``--replicas 2``) each further holder is again the same number of places further for all ranks:
the number that puts the most replicas on a host that has no other copy. Every replica gets such a host exactly if no
host has more than 1 / (replicas + 1) of the ranks.

    hosts A, B, C: ranks 0, 1, 2        0 ──▶ 1 2   1 ──▶ 2 0   2 ──▶ 0 1

The ranks of a hybrid that hold the same stage are replicas of each other. If that is fewer copies than are wanted, the
first of them has holders among the other ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hoop.errors import InvalidArgument
from hoop.plan.partition import Block, StageCut
from hoop.plan.plan import Plan, split_evenly


def check_replicas(replicas: int, devices: int | None = None, replicate: bool = True) -> None:
    """Raises ``InvalidArgument`` if ``devices`` devices cannot hold that many replicas; None: any number of devices.

    ``replicate``: whether there are replicas at all.
    """
    if not isinstance(replicas, int) or replicas < 1:
        raise InvalidArgument(
            f"replicas: {replicas!r} is not a whole number of at least 1; --no-replicate (replicate=False) switches "
            "replicas off"
        )
    if replicas > 1 and not replicate:
        raise InvalidArgument(
            f"replicas: {replicas}, and --no-replicate (replicate=False) switches replicas off; leave one of them out"
        )
    if devices is not None and replicas > max(1, devices - 1):
        fewer = f"take 1 to {devices - 1}" if devices > 2 else "take 1"
        raise InvalidArgument(
            f"replicas: {replicas} of each device's part need {replicas} other devices, and with {devices} there "
            f"{'is 1' if devices == 2 else f'are {devices - 1}'}; {fewer}, or at least {replicas + 1} devices"
        )


def replica_holders(
    size: int, hosts: Sequence[Hashable] = (), replicas: int = 1, groups: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Ranks that hold the replicas of each rank; the same at every rank. As many of them as there are other ranks.

    ``hosts``: by rank; empty: one host. ``groups``: see ``same_state``.
    """
    places = list(hosts) or [0] * size
    if groups:
        return _holders_beside(groups, places, replicas)
    by_host: dict[Hashable, list[int]] = {}
    for rank in range(size):
        by_host.setdefault(places[rank], []).append(rank)
    order = [rank for ranks in by_host.values() for rank in ranks]
    in_order = [places[rank] for rank in order]
    offsets: list[int] = []
    for _ in range(min(replicas, size - 1)):
        first = max(map(len, by_host.values())) % size or 1
        offsets.append(_next_offset(in_order, offsets) if offsets else first)
    found: list[tuple[int, ...]] = [()] * size
    for place, rank in enumerate(order):
        found[rank] = tuple(order[(place + offset) % size] for offset in offsets)
    return found


def _next_offset(hosts: Sequence[Hashable], offsets: Sequence[int]) -> int:
    """The offset, beside these, that puts the most replicas on new hosts, then the most on hosts but the owner's."""
    size = len(hosts)

    def score(offset: int) -> tuple[int, int, int]:
        new = other = 0
        for place, host in enumerate(hosts):
            holder = hosts[(place + offset) % size]
            new += all(holder != hosts[(place + earlier) % size] for earlier in (0, *offsets))
            other += holder != host
        return new, other, -offset

    return max((offset for offset in range(1, size) if offset not in offsets), key=score)


def _holders_beside(groups: Sequence[Sequence[int]], hosts: Sequence[Hashable], replicas: int) -> list[tuple[int, ...]]:
    """The holders of each group's first rank: on a new host if there is one, and the rank with the fewest replicas."""
    size = len(hosts)
    found: list[tuple[int, ...]] = [()] * size
    held = [0] * size
    for first, *others in groups:
        copies = [first, *others]
        while len(copies) < min(replicas + 1, size):
            used = {hosts[rank] for rank in copies}
            free = (rank for rank in range(size) if rank not in copies)
            best = min(free, key=lambda rank: (hosts[rank] in used, held[rank], (rank - first) % size))
            held[best] += 1
            copies.append(best)
        found[first] = tuple(copies[1 + len(others) :])
    return found


def same_state(plan: Plan) -> list[tuple[int, ...]]:
    """Groups of ranks that hold the same state, as the pipelines of a hybrid do; empty if each rank has its own."""
    if plan.servers or plan.sharded_update or any(len(ranks) == 1 for ranks in plan.holders):
        return []
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.size):
        groups.setdefault(plan.held_by(rank), []).append(rank)
    return [tuple(ranks) for stages, ranks in groups.items() if stages]


class ReplicaShare(NamedTuple):
    """Bytes of one rank's replica."""

    state: int
    """Bytes of weights and optimizer state: sent once, before the first step."""
    change: int
    """Bytes of the summed gradient, with which the holder repeats the update: sent every step."""


def replica_shares(plan: Plan, stages: Sequence[StageCut], blocks: Sequence[Block]) -> list[ReplicaShare]:
    """Bytes of a replica of each rank's state; ``replica_holders`` says whether there is one."""
    each = []
    for stage in stages:
        own = blocks[stage.blocks.start : stage.blocks.stop]
        weights = sum(one.weight_bytes for one in own)
        each.append(ReplicaShare(weights + sum(one.optimizer_bytes for one in own), weights))
    found = [ReplicaShare(0, 0)] * plan.size
    updating = plan.holders[0] if plan.sharded_update else plan.servers
    if updating:
        whole = ReplicaShare(sum(one.state for one in each), sum(one.change for one in each))
        slices = zip(*(split_evenly(count, len(updating)) for count in whole), strict=True)
        for rank, (state, change) in zip(updating, slices, strict=True):
            found[rank] = ReplicaShare(len(state), len(change))
    else:
        for rank in range(plan.size):
            held = [each[stage] for stage in plan.held_by(rank)]
            found[rank] = ReplicaShare(sum(one.state for one in held), sum(one.change for one in held))
    return found
