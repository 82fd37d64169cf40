"""Shards follow the devices' measured speed.

Every rank's seconds a shard come with the sum of the gradients, so all ranks see the same figures and come to the same
decision without a word; the result of the training does not depend on it.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from hoop.collectives.reduction import Array
from hoop.engine.stages.weights import MOST_SPEEDS, SPEED
from hoop.engine.survival.stragglers import Stragglers, Verdict
from hoop.plan.plan import Plan
from hoop.strategies.strategy import Strategy

WINDOW = 8
"""Steps that are looked at."""
LONGEST = 512
"""Steps between two moves, in the long run: each move doubles the pause, so that noise does not drive shards about."""
GAIN = 0.85
"""A new share must be predicted to take at most this part of the step."""


def balance_for(strategy: Strategy, plan: Plan, wanted: bool, crowding: float) -> Balance | None:
    """None where nothing can move: one rank, or one that holds nothing."""
    whole = plan.size > 1 and all(plan.held_by(rank) for rank in range(plan.size))
    return Balance(strategy, plan, plan.size, crowding) if wanted and whole else None


class Balance:
    """Decides when shards move."""

    def __init__(self, strategy: Strategy, plan: Plan, size: int, crowding: float = 1.0) -> None:
        self._strategy = strategy
        self._plan = plan
        self._size = size
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(size)]
        self._stragglers = Stragglers(size, crowding)
        self._verdicts: list[Verdict] = []
        self._steps = 0
        self._next = self._pause = WINDOW

    def after(self, tail: Array) -> Plan | None:
        """The plan for the next steps, if another one is clearly better."""
        if self._size > MOST_SPEEDS:
            return None
        told = [float(tail[SPEED + rank]) for rank in range(self._size)]
        self._verdicts = self._stragglers.after(told)
        for seen, seconds in zip(self._seen, told, strict=True):
            if seconds > 0:
                seen.append(seconds)
        self._steps += 1
        if self._steps < self._next or not all(len(seen) == WINDOW for seen in self._seen):
            return None
        seconds_each = [median(seen) for seen in self._seen]
        if not self._may_gain(seconds_each):
            return None
        plan = self._strategy.plan(self._size, self._plan.micros, [1 / one for one in seconds_each])
        if self._takes(plan, seconds_each) > GAIN * self._takes(self._plan, seconds_each):
            return None
        # Whoever got nothing keeps its last measurements until it gets something again.
        self._plan = plan
        self._next = self._steps + self._pause
        self._pause = min(2 * self._pause, LONGEST)
        for rank, seen in enumerate(self._seen):
            if plan.computed_by(rank, 0):
                seen.clear()
            else:
                self._verdicts += self._stragglers.left_out(rank)
        return plan

    def news(self, plan: Plan | None, step: int) -> list[dict[str, object]]:
        """What the last step has changed, as events: who has become a straggler, who gets how many shards."""
        told = [verdict.told(step) for verdict in self._verdicts]
        if plan is not None:
            shares = [len(plan.computed_by(rank, 0)) for rank in range(plan.size)]
            told.append({"kind": "balanced", "step": step, "shards": shares})
        return told

    def _may_gain(self, seconds: list[float]) -> bool:
        """Whether shards of any size could: a plan costs more than this, and most steps need none."""
        least = self._plan.micros / sum(1 / seconds[rank] for rank in self._plan.holders[0])
        return least <= GAIN * self._takes(self._plan, seconds)

    @staticmethod
    def _takes(plan: Plan, seconds: list[float]) -> float:
        return max(len(plan.computed_by(rank, 0)) * one for rank, one in enumerate(seconds))
