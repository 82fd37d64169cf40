"""The number of gradient slots that a rank needs at the same time.

Pure, and without PyTorch: ``hoop plan`` checks memory with it, and the executor allocates by it.
"""

from __future__ import annotations

from functools import lru_cache, partial

from hoop.collectives.shard_tree import merge_plan
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy
from hoop.strategies.memory_fit import GradientBuffers, Gradients


def max_gradient_slots(plan: Plan, balance: bool) -> int:
    """Return how many gradient slots a rank needs at most.

    If the load balancer may move shards between ranks, any share of them must fit, so that slots are never
    reallocated. With parameter servers shards do not move.
    """
    shares = {plan.computed_by(rank, stage) for stage, ranks in enumerate(plan.holders) for rank in ranks}
    slots = max(merge_plan(share, plan.num_microbatches).slots for share in shares)
    if plan.stages == 1 and balance and plan.size > 1 and not plan.servers:
        slots = max(slots, _slots_of_any_share(plan.num_microbatches))
    return slots


@lru_cache(maxsize=8)
def _slots_of_any_share(shards: int) -> int:
    """Return the most slots that a run of consecutive shards needs.

    Cached: setting up asks three times, and it takes time that grows with the square of the shards.
    """
    shares = {tuple(range(low, shards)) for low in range(shards)} | {tuple(range(1, high)) for high in range(2, shards)}
    return max(merge_plan(share, shards).slots for share in shares)


def _gradient_memory(balance: bool, clipped: bool, strategy: Strategy, plan: Plan) -> Gradients:
    slots = max_gradient_slots(plan, balance)
    if plan.sharded_update:
        # With clipping a rank sums whole parameters, of which one may be as large as the model.
        return Gradients(1 + slots, 0) if clipped else Gradients(slots, 0, 1)
    if plan.servers:
        nodes = sum(len(merge_plan(plan.computed_by(rank, 0), plan.num_microbatches).nodes) for rank in plan.holders[0])
        return Gradients(slots, nodes if strategy.synchronous else 1)
    # A rank with several stages reduces one of them while another stage writes gradients of the next step.
    several = any(len(plan.held_by(rank)) > 1 for rank in range(plan.size))
    return Gradients(1 + slots * (strategy.versions if several else 1), 0)


def gradient_memory_for(balance: bool, clipped: bool = False) -> GradientBuffers:
    """Return a function of (strategy, plan): the gradient memory of a rank, for the memory check.

    ``balance``: the load balancer may move shards between ranks. ``clipped``: gradients are clipped by their norm.
    """
    return partial(_gradient_memory, balance, clipped)
