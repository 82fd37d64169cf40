"""A stage's gradients added up over all shards and replicas, bucket by bucket.

A bucket is a range of the vector whose gradients come out of the backward together. With several of them, each is added
up on a thread of its own as soon as this rank's last shard has it, while the backward of the blocks before goes on. All
ranks do it in the same order, from the last bucket to the first; what comes last is the buffers and the tail.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered import OrderedSum
from hoop.collectives.shards import Holding
from hoop.engine.stages.held import Held


class Totals:
    """The sums of one stage."""

    def __init__(
        self, group: Communicator, holdings: Sequence[Holding], shards: int, held: Held, deadline: float
    ) -> None:
        """All ranks of the group must prepare together."""
        self._held = held
        spans = list(itertools.pairwise(held.buckets))[::-1]
        if group.size == 1 or len(spans) == 1:
            spans = []
        rest = (held.buckets[-1] if spans else 0, held.layout.total)
        self._sums = [
            OrderedSum(group, holdings, shards, held.slots, held.room, deadline, span)
            for span in (*spans, rest)
        ]
        held.total = self._sums[-1].result
        self._spans = spans
        self._thread = ThreadPoolExecutor(1, "hoop-totals") if spans else None
        self._started: list[Future[float]] = []

    @property
    def moved(self) -> int:
        """Bytes that went to others through their memory."""
        return sum(one.moved for one in self._sums)

    @property
    def buckets(self) -> int:
        """How many parts may be added up while the backward goes on."""
        return len(self._spans)

    def start(self, bucket: int, micro: int, deadline: float) -> None:
        """This rank's last shard has its gradient of this bucket, counted from the first."""
        assert self._thread is not None, "there are buckets"
        index = len(self._started)
        low, high = self._spans[index]
        assert index == len(self._spans) - 1 - bucket, "the last bucket comes first"
        self._held.merge(micro, low, high)
        self._started.append(self._thread.submit(self._sums[index], deadline))

    def __call__(self, deadline: float) -> float:
        """Everything that has not been added up yet, and what has been started; returns the seconds it waited."""
        waited = 0.0
        if self._thread is not None:
            for one in self._sums[len(self._started) : -1]:
                self._started.append(self._thread.submit(one, deadline))
            started, self._started = self._started, []
            waited = sum(one.result() for one in started)
        return waited + self._sums[-1](deadline)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
