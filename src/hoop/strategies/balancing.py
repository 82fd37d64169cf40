"""Which plan of data parallel training is worth a change, by the devices' measured speed.

``engine/load_balancer.py`` decides by it in a run, and ``runs/prediction.py`` predicts by it how a run will share its
shards: pure functions, so that both decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy

MAX_RATIO = 0.85
"""A new plan must be predicted to take at most this share of the present plan's step time."""
EVEN_RATIO = 1.1
"""The same for the plan for equal devices, which is chosen even if it looks a little slower. A rank with few shards
looks slow, because its seconds per shard contain what a step costs with any number of shards: it would never get them
back. A device that is slow enough to lose shards by ``MAX_RATIO`` does not get them back by this, so that they do not
go to and fro."""
NO_CORE_S = 1e9
"""Assumed seconds per shard of a device that shares its core with another one, so that it gets no shards."""


def plan_by_cores(strategy: Strategy, devices: int, num_microbatches: int, cores: int) -> Plan:
    """The plan for equal devices of one host: with more devices than cores, only the first ones get shards.

    They are on different cores, and a core computes two shards of one device in less time than one shard each of two.
    """
    if devices <= cores:
        return strategy.plan(devices, num_microbatches)
    speeds = [1.0 if rank < cores else 1 / NO_CORE_S for rank in range(devices)]
    return strategy.plan(devices, num_microbatches, speeds)


def better_plan(strategy: Strategy, present: Plan, even: Plan, seconds: Sequence[float]) -> Plan | None:
    """A plan that is worth a change, by each rank's seconds per shard; None: there is none.

    ``even``: the plan for equal devices.
    """
    present_shares, even_shares = shares(present), shares(even)
    now = _step_seconds(present_shares, seconds)
    if present_shares != even_shares and _step_seconds(even_shares, seconds) <= EVEN_RATIO * now:
        return even
    if not _can_take_at_most(MAX_RATIO * now, present, seconds):
        return None
    plan = strategy.plan(present.size, present.num_microbatches, [1 / one for one in seconds])
    return plan if _step_seconds(shares(plan), seconds) <= MAX_RATIO * now else None


def shares(plan: Plan) -> list[int]:
    """Shards of each rank."""
    return [len(plan.computed_by(rank, 0)) for rank in range(plan.size)]


def _can_take_at_most(limit: float, present: Plan, seconds: Sequence[float]) -> bool:
    """Whether the ranks can compute all shards in ``limit`` seconds: mostly not, and a plan costs more than this."""
    most = sum(int(limit / seconds[rank] + 1e-9) for rank in present.holders[0])
    return most >= present.num_microbatches


def _step_seconds(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """The seconds of a step in which each rank computes this many shards."""
    return max(count * one for count, one in zip(counts, seconds, strict=True))
