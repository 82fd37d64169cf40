"""Which device is merely slow: it is named, and gets fewer shards, and is not taken for dead.

A device is a straggler when even the fastest of its last steps took clearly longer a shard than the fastest of the
others'. Noise only ever adds time, so a healthy device has a fast step among its last ones, whatever else runs on its
machine. It is one no more when its usual step is about as fast as that.

Where devices outnumber the cores of their machine nobody is named. Times then show who got a core and not who is slow:
of four devices on two cores one can take five times longer than another for as long as the scheduler likes.

Shards follow the devices' measured speed.

Every rank's seconds a shard come with the sum of the gradients, so all ranks see the same figures and come to the same
decision without a word; the result of the training does not depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hoop.collectives.reduction import Array
from hoop.engine.stage.state import MOST_SPEEDS, SPEED
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy

WINDOW = 8
"""Steps that are looked at: a device that becomes slow is named after so many."""
SLOW = 1.5
"""Times slower than the others: named."""
WELL = 1.2
"""Times slower than the others: no more."""
FLOOR_S = 0.001
"""Less a shard is no matter: what a call costs, not what a device does."""


@dataclass(frozen=True)
class StragglerVerdict:
    """A rank that has become a straggler, or is one no more."""

    rank: int
    slow: bool
    times: float
    """How many times longer a shard takes there than elsewhere."""

    def told(self, step: int) -> dict[str, object]:
        """As an event."""
        what = {"straggler": self.rank, "slow": self.slow, "times": self.times}
        return {"kind": "straggler", "step": step, **what}


class StragglerDetector:
    """Watches every rank's seconds a shard. All ranks see the same figures, and judge alike."""

    def __init__(self, size: int, crowding: float = 1.0) -> None:
        """``crowding``: devices a core."""
        self._judges = crowding <= 1.0
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(size)]
        self.slow: set[int] = set()

    def after(self, seconds: Sequence[float]) -> list[StragglerVerdict]:
        """A step's figures, by rank; 0 for one that computed nothing. What has changed with it."""
        if not self._judges:
            return []
        for seen, one in zip(self._seen, seconds, strict=True):
            if one > 0:
                seen.append(one)
        if len(self._seen) < 2 or not all(len(seen) == WINDOW for seen in self._seen):
            return []
        verdicts = []
        for rank, seen in enumerate(self._seen):
            if not seconds[rank]:
                continue  # nothing new is known of it
            others = self._others(rank)
            if rank not in self.slow and min(seen) > SLOW * others + FLOOR_S:
                verdicts.append(self._verdict(rank, True))
            elif rank in self.slow and median(seen) < WELL * others + FLOOR_S:
                verdicts.append(self._verdict(rank, False))
        return verdicts

    def left_out(self, rank: int) -> list[StragglerVerdict]:
        """A rank gets no more shards, by its usual speed: nothing more will be known of it."""
        if not self._judges or rank in self.slow:
            return []
        if median(self._seen[rank]) <= SLOW * self._others(rank) + FLOOR_S:
            return []
        return [self._verdict(rank, True)]

    def _others(self, rank: int) -> float:
        """What is fast elsewhere."""
        return median(min(seen) for one, seen in enumerate(self._seen) if one != rank)

    def _verdict(self, rank: int, slow: bool) -> StragglerVerdict:
        self.slow ^= {rank}
        return StragglerVerdict(rank, slow, median(self._seen[rank]) / self._others(rank))


LONGEST = 512
"""Steps between two moves, in the long run: each move doubles the pause, so that noise does not drive shards about."""
GAIN = 0.85
"""A new share must be predicted to take at most this part of the step."""


def load_balancer_for(strategy: Strategy, plan: Plan, wanted: bool, crowding: float) -> LoadBalancer | None:
    """None where nothing can move: one rank, or one that holds nothing."""
    whole = plan.size > 1 and all(plan.held_by(rank) for rank in range(plan.size))
    return LoadBalancer(strategy, plan, plan.size, crowding) if wanted and whole else None


class LoadBalancer:
    """Decides when shards move."""

    def __init__(self, strategy: Strategy, plan: Plan, size: int, crowding: float = 1.0) -> None:
        self._strategy = strategy
        self._plan = plan
        self._size = size
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(size)]
        self._stragglers = StragglerDetector(size, crowding)
        self._verdicts: list[StragglerVerdict] = []
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
