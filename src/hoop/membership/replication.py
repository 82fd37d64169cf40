"""Replica placement: which rank holds the replica of which, and how many bytes it stores and receives per step.

    host A: ranks 0 1    host B: ranks 2 3        0 ──▶ 2   1 ──▶ 3   2 ──▶ 0   3 ──▶ 1

With ranks in the order of their hosts, a rank's holder is as many places further as the largest host has ranks, which
is always on another host. If one host has more than half of all ranks, some of its replicas stay on it: every rank
holds exactly one replica, because memory is checked before the first step, and a small host must not have to hold the
replicas of a large one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hoop.plan.partition import Block, StageCut
from hoop.plan.plan import Plan, split_evenly


def replica_holders(size: int, hosts: Sequence[Hashable] = ()) -> list[int]:
    """By rank, the rank that holds its replica; the same at every rank. ``hosts``: by rank; empty: one host."""
    by_host: dict[Hashable, list[int]] = {}
    for rank in range(size):
        by_host.setdefault(hosts[rank] if hosts else 0, []).append(rank)
    order = [rank for ranks in by_host.values() for rank in ranks]
    offset = max(map(len, by_host.values())) % size or 1
    held_by = {rank: order[(place + offset) % size] for place, rank in enumerate(order)}
    return [held_by[rank] for rank in range(size)]


class ReplicaShare(NamedTuple):
    """Bytes of one rank's replica."""

    state: int
    """Weights and optimizer state: sent once, before the first step."""
    change: int
    """The summed gradient, with which the holder repeats the update: sent every step."""


def replica_shares(plan: Plan, stages: Sequence[StageCut], blocks: Sequence[Block]) -> list[ReplicaShare]:
    """The replica of each rank; empty if other ranks have its state anyway, as the replicas of a hybrid do."""
    each = []
    for stage in stages:
        own = blocks[stage.blocks.start : stage.blocks.stop]
        weights = sum(one.weight_bytes for one in own)
        each.append(ReplicaShare(weights + sum(one.optimizer_bytes for one in own), weights))
    found = [ReplicaShare(0, 0)] * plan.size
    if plan.servers:
        whole = ReplicaShare(sum(one.state for one in each), sum(one.change for one in each))
        slices = zip(*(split_evenly(count, len(plan.servers)) for count in whole), strict=True)
        for rank, (state, change) in zip(plan.servers, slices, strict=True):
            found[rank] = ReplicaShare(len(state), len(change))
    elif any(len(ranks) == 1 for ranks in plan.holders):
        for rank in range(plan.size):
            held = [each[stage] for stage in plan.held_by(rank)]
            found[rank] = ReplicaShare(sum(one.state for one in held), sum(one.change for one in held))
    return found
