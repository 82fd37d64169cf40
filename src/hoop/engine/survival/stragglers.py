"""Which device is merely slow: it is named, and gets fewer shards, and is not taken for dead.

A device is a straggler when even the fastest of its last steps took clearly longer a shard than the fastest of the
others'. Noise only ever adds time, so a healthy device has a fast step among its last ones, whatever else runs on its
machine. It is one no more when its usual step is about as fast as that.

Where devices outnumber the cores of their machine nobody is named. Times then show who got a core and not who is slow:
of four devices on two cores one can take five times longer than another for as long as the scheduler likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 8
"""Steps that are looked at: a device that becomes slow is named after so many."""
SLOW = 1.5
"""Times slower than the others: named."""
WELL = 1.2
"""Times slower than the others: no more."""
FLOOR_S = 0.001
"""Less a shard is no matter: what a call costs, not what a device does."""


@dataclass(frozen=True)
class Verdict:
    """A rank that has become a straggler, or is one no more."""

    rank: int
    slow: bool
    times: float
    """How many times longer a shard takes there than elsewhere."""

    def told(self, step: int) -> dict[str, object]:
        """As an event."""
        what = {"straggler": self.rank, "slow": self.slow, "times": self.times}
        return {"kind": "straggler", "step": step, **what}


class Stragglers:
    """Watches every rank's seconds a shard. All ranks see the same figures, and judge alike."""

    def __init__(self, size: int, crowding: float = 1.0) -> None:
        """``crowding``: devices a core."""
        self._judges = crowding <= 1.0
        self._seen: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(size)]
        self.slow: set[int] = set()

    def after(self, seconds: Sequence[float]) -> list[Verdict]:
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

    def left_out(self, rank: int) -> list[Verdict]:
        """A rank gets no more shards, by its usual speed: nothing more will be known of it."""
        if not self._judges or rank in self.slow:
            return []
        if median(self._seen[rank]) <= SLOW * self._others(rank) + FLOOR_S:
            return []
        return [self._verdict(rank, True)]

    def _others(self, rank: int) -> float:
        """What is fast elsewhere."""
        return median(min(seen) for one, seen in enumerate(self._seen) if one != rank)

    def _verdict(self, rank: int, slow: bool) -> Verdict:
        self.slow ^= {rank}
        return Verdict(rank, slow, median(self._seen[rank]) / self._others(rank))
