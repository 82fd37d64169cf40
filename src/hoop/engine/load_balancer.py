"""Load balancing in data parallel: shards follow the devices' measured speed, and stragglers are reported.

Each rank's seconds per shard are summed along with the gradients. All ranks therefore see the same times and take the
same decisions without further messages. The result of training does not depend on which rank computes a shard.

A device is a straggler if even the fastest of its last ``WINDOW`` steps took clearly longer per shard than the fastest
steps of the other devices. Noise only ever adds time, so a healthy device has a fast step among its last ones. It stops
being one when its median step is about as fast as that. A straggler is alive: it gets fewer shards, nothing else.

If devices outnumber the cores of their host, no straggler is reported: times then show which device got a core. Of four
devices on two cores one can take five times longer than another for as long as the scheduler likes. If all ranks are
on that host, the shards go to one device per core: a core computes two shards of one device in less time than one
shard each of two devices. The others only update, and get shards again when ranks are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hoop.collectives.rank_context import RankContext
from hoop.collectives.reduction import Array
from hoop.engine.stage.state import MAX_SPEEDS, SPEED
from hoop.job_events import Balanced, JobEvent, Straggler
from hoop.plan.plan import Plan
from hoop.strategies.balancing import NO_CORE_S, better_plan, plan_by_cores, shares
from hoop.strategies.base import Strategy

WINDOW = 8
"""Number of steps in the moving window: a device that becomes slow is reported after this many."""
SLOW_FACTOR = 1.5
"""Ratio to the other devices' seconds per shard above which a device becomes a straggler."""
RECOVERED_FACTOR = 1.2
"""Ratio to the other devices' seconds per shard below which a device is a straggler no more."""
FLOOR_S = 0.001
"""Smallest difference in seconds per shard that counts: smaller ones are call overhead."""


@dataclass(frozen=True)
class StragglerVerdict:
    """A rank has become a straggler (``slow``), or has stopped being one."""

    rank: int
    slow: bool
    slowdown: float
    """Ratio of the rank's seconds per shard to those of the other ranks."""

    def to_event(self, step: int) -> Straggler:
        return Straggler(step, straggler=self.rank, slow=self.slow, times=self.slowdown)


class Measurements:
    """The last ``WINDOW`` measurements of each rank: its seconds per shard, of the steps in which it computed a shard.

    ``add`` is called in every step and costs a few microseconds; most steps need no more than ``lower_bound``.
    """

    def __init__(self, size: int) -> None:
        self._windows: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(size)]
        self._added: deque[Sequence[float]] = deque(maxlen=WINDOW)
        """Steps in which every rank computed a shard, and which are not in ``_windows`` yet."""
        self._fastest: deque[float] = deque(maxlen=WINDOW)
        """Minimum measurement of each of the last steps, over all ranks."""

    def add(self, seconds: Sequence[float]) -> None:
        """Adds one step's seconds per shard, by rank; 0: the rank computed no shard."""
        self._fastest.append(min(seconds))
        self._added.append(seconds)
        if not self._fastest[-1]:
            self.windows()

    def lower_bound(self) -> float:
        """A lower bound of the minimum of every rank's window; costs less than the minimum."""
        return min(self._fastest, default=0.0)

    def windows(self) -> list[deque[float]]:
        """The measurements of each rank, oldest first."""
        for seconds in self._added:
            for recent, one in zip(self._windows, seconds, strict=True):
                if one > 0:
                    recent.append(one)
        self._added.clear()
        return self._windows

    def clear(self, rank: int) -> None:
        """Forgets the measurements of a rank."""
        self.windows()[rank].clear()


class StragglerDetector:
    """Detects stragglers from every rank's seconds per shard. Deterministic: all ranks get the same verdicts."""

    def __init__(self, size: int, oversubscription: float = 1.0) -> None:
        """``size``: ranks. ``oversubscription``: devices per core; above 1 the detector reports nothing."""
        self._enabled = oversubscription <= 1.0 and size > 1
        self._measurements = Measurements(size)
        self.slow: set[int] = set()

    def observe(self, seconds: Sequence[float]) -> list[StragglerVerdict]:
        """Adds one step's seconds per shard, by rank (0: it computed no shard); returns verdicts that changed."""
        if not self._enabled:
            return []
        self._measurements.add(seconds)
        # No rank can be a new straggler if none was slow in this step, compared with the fastest measurement of all.
        if not self.slow and max(seconds) <= SLOW_FACTOR * self._measurements.lower_bound() + FLOOR_S:
            return []
        windows = self._measurements.windows()
        if not all(len(recent) == WINDOW for recent in windows):
            return []
        verdicts = []
        minima = [min(recent) for recent in windows]
        may_be_slow = SLOW_FACTOR * min(minima) + FLOOR_S
        for rank, recent in enumerate(windows):
            if not seconds[rank] or (minima[rank] <= may_be_slow and rank not in self.slow):
                continue  # no new measurement, or about as fast as the fastest rank
            reference = self._reference(rank)
            if rank not in self.slow and minima[rank] > SLOW_FACTOR * reference + FLOOR_S:
                verdicts.append(self._verdict(rank, True))
            elif rank in self.slow and median(recent) < RECOVERED_FACTOR * reference + FLOOR_S:
                verdicts.append(self._verdict(rank, False))
        return verdicts

    def drop_rank(self, rank: int) -> list[StragglerVerdict]:
        """Called when a rank gets no more shards. There will be no more measurements, so its median decides now."""
        if not self._enabled or rank in self.slow:
            return []
        if median(self._measurements.windows()[rank]) <= SLOW_FACTOR * self._reference(rank) + FLOOR_S:
            return []
        return [self._verdict(rank, True)]

    def _reference(self, rank: int) -> float:
        """A fast step of the other ranks: the median of their minima."""
        windows = self._measurements.windows()
        return median(min(recent) for one, recent in enumerate(windows) if one != rank)

    def _verdict(self, rank: int, slow: bool) -> StragglerVerdict:
        self.slow ^= {rank}
        return StragglerVerdict(rank, slow, median(self._measurements.windows()[rank]) / self._reference(rank))


MAX_PAUSE = 512
"""Maximum number of steps between two changes. Each change doubles the pause, so that noise does not keep moving
shards."""


def load_balancer_for(strategy: Strategy, plan: Plan, enabled: bool, context: RankContext) -> LoadBalancer | None:
    """None if shards cannot move: balancing is off, there is one rank, or a rank holds no stage."""
    whole = plan.size > 1 and all(plan.held_by(rank) for rank in range(plan.size))
    if not enabled or not whole:
        return None
    return LoadBalancer(strategy, plan, plan.size, context.oversubscription, context.shared_cores)


class LoadBalancer:
    """Decides when shards move. Deterministic: all ranks take the same decision after the same step."""

    def __init__(
        self,
        strategy: Strategy,
        plan: Plan,
        size: int,
        oversubscription: float = 1.0,
        shared_cores: int | None = None,
    ) -> None:
        """``oversubscription`` and ``shared_cores``: as in ``RankContext``."""
        self._strategy = strategy
        self._plan = plan
        self._computing = size if shared_cores is None else shared_cores
        """Ranks that may get shards: the first ones, which are on different cores."""
        self._even = plan_by_cores(strategy, size, plan.num_microbatches, self._computing)
        self._leaves_cores = any(shares(plan)[self._computing :])
        """True until the shards have left the ranks that must get none."""
        self._size = size
        self._measurements = Measurements(size)
        self._stragglers = StragglerDetector(size, oversubscription)
        self._verdicts: list[StragglerVerdict] = []
        self._steps = 0
        self._next_change = self._pause = WINDOW

    def observe(self, tail: Array) -> Plan | None:
        """Called after every step with the total's tail; returns the plan for the next steps if it should change."""
        if self._size > MAX_SPEEDS:
            return None
        measured = tail[SPEED : SPEED + self._size].tolist()
        self._verdicts = self._stragglers.observe(measured)
        self._measurements.add(measured)
        self._steps += 1
        if self._steps < self._next_change:
            return None
        plan = self._even if self._leaves_cores else self._plan_by_measurements()
        self._leaves_cores = False
        if plan is None:
            return None
        self._plan = plan
        self._next_change = self._steps + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        for rank in range(self._size):
            if plan.computed_by(rank, 0):
                self._measurements.clear(rank)
            else:  # a rank without shards keeps its last measurements until it gets shards again
                self._verdicts += self._stragglers.drop_rank(rank)
        return plan

    def _plan_by_measurements(self) -> Plan | None:
        """A better plan by the last measurements of the ranks that may get shards; None: the present one stays."""
        windows = self._measurements.windows()[: self._computing]
        if not all(len(recent) == WINDOW for recent in windows):
            return None
        self._next_change = self._steps + WINDOW  # if nothing changes, the next look is at new measurements
        seconds_each = [median(recent) for recent in windows]
        seconds_each += [NO_CORE_S] * (self._size - self._computing)
        return better_plan(self._strategy, self._plan, self._even, seconds_each)

    def events(self, plan: Plan | None, step: int) -> list[JobEvent]:
        """Events of the last ``observe``, which returned ``plan``: changed verdicts, and each rank's shards."""
        events: list[JobEvent] = [verdict.to_event(step) for verdict in self._verdicts]
        if plan is not None:
            events.append(Balanced(step, shares(plan)))
        return events
