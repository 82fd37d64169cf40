"""Who mirrors whom, and how many bytes of it: kept, and sent a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hoop.plan.partition import Block, Stage
from hoop.plan.plan import Plan, split_evenly


def holder_of(rank: int, size: int) -> int:
    """The rank that mirrors this one."""
    return (rank + 1) % size


class Share(NamedTuple):
    """What of a rank its holder has."""

    state: int
    """Bytes of weights and optimizer state: sent once, before the first step."""
    change: int
    """Bytes of the summed gradient that brings them a step further: sent every step."""


def shares(plan: Plan, stages: Sequence[Stage], blocks: Sequence[Block]) -> list[Share]:
    """For each rank what is mirrored of it; nothing where others have it anyway, as a hybrid's replicas do."""
    each = []
    for stage in stages:
        own = blocks[stage.blocks.start : stage.blocks.stop]
        weights = sum(one.weight_bytes for one in own)
        each.append(Share(weights + sum(one.optimizer_bytes for one in own), weights))
    found = [Share(0, 0)] * plan.size
    if plan.servers:
        whole = Share(sum(one.state for one in each), sum(one.change for one in each))
        slices = zip(*(split_evenly(count, len(plan.servers)) for count in whole), strict=True)
        for rank, (state, change) in zip(plan.servers, slices, strict=True):
            found[rank] = Share(len(state), len(change))
    elif any(len(ranks) == 1 for ranks in plan.holders):
        for rank in range(plan.size):
            held = [each[stage] for stage in plan.held_by(rank)]
            found[rank] = Share(sum(one.state for one in held), sum(one.change for one in held))
    return found
