"""How many gradients a rank must have room for at once."""

from __future__ import annotations

from functools import partial

from hoop.collectives.shards import holding
from hoop.plan.plan import Plan
from hoop.strategies.fitting import Gradients, Room
from hoop.strategies.strategy import Strategy


def most_slots(plan: Plan, balance: bool) -> int:
    """Where shards move, any share of them must fit, so that slots never do.

    With a parameter server shards stay where they are.
    """
    shares = {plan.computed_by(rank, stage) for stage, ranks in enumerate(plan.holders) for rank in ranks}
    if plan.stages == 1 and balance and plan.size > 1 and not plan.servers:
        shares |= {tuple(range(low, plan.micros)) for low in range(plan.micros)}
        shares |= {tuple(range(1, high)) for high in range(2, plan.micros)}
    return max(holding(share, plan.micros).slots for share in shares)


def _gradients(balance: bool, strategy: Strategy, plan: Plan) -> Gradients:
    slots = most_slots(plan, balance)
    if plan.servers:
        nodes = sum(len(holding(plan.computed_by(rank, 0), plan.micros).nodes) for rank in plan.holders[0])
        return Gradients(slots, nodes if strategy.synchronous else 1)
    # A device with several stages adds up one of them while the next step's gradients of another come in.
    several = any(len(plan.held_by(rank)) > 1 for rank in range(plan.size))
    return Gradients(1 + slots * (strategy.versions if several else 1), 0)


def room_for(balance: bool) -> Room:
    """For the memory check: what ranks of any strategy have room for, where shards may move or not."""
    return partial(_gradients, balance)
