"""Who mirrors whom, and how many bytes of it: kept, and sent a step.

    machine A: ranks 0 1    machine B: ranks 2 3        0 ──▶ 2   1 ──▶ 3   2 ──▶ 0   3 ──▶ 1

Ranks in the order of their machines, each held by the one as many places further as the largest machine has ranks: that
leaves every machine. Where one machine has more than half of all ranks some of its own must do, for everybody holds one
mirror and no more: memory is counted before the first step, and a small machine is not to carry a large one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hoop.plan.partition import Block, StageCut
from hoop.plan.plan import Plan, split_evenly


def replica_holders(size: int, hosts: Sequence[Hashable] = ()) -> list[int]:
    """By rank, who holds its mirror; ``hosts``, by rank, may be empty: all are on one. The same at every rank."""
    machines: dict[Hashable, list[int]] = {}
    for rank in range(size):
        machines.setdefault(hosts[rank] if hosts else 0, []).append(rank)
    order = [rank for ranks in machines.values() for rank in ranks]
    further = max(map(len, machines.values())) % size or 1
    held_by = {rank: order[(place + further) % size] for place, rank in enumerate(order)}
    return [held_by[rank] for rank in range(size)]


class ReplicaShare(NamedTuple):
    """What of a rank its holder has."""

    state: int
    """Bytes of weights and optimizer state: sent once, before the first step."""
    change: int
    """Bytes of the summed gradient that brings them a step further: sent every step."""


def replica_shares(plan: Plan, stages: Sequence[StageCut], blocks: Sequence[Block]) -> list[ReplicaShare]:
    """For each rank what is mirrored of it; nothing where others have it anyway, as a hybrid's replicas do."""
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
