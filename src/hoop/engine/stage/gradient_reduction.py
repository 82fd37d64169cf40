"""How much a gradient is shortened when its norm is cut; the same bits wherever the model is cut.

A stage's gradients added up over all shards and replicas, bucket by bucket.

A bucket is a range of the vector whose gradients come out of the backward together. With several of them, each is added
up on a thread of its own as soon as this rank's last shard has it, while the backward of the blocks before goes on. All
ranks do it in the same order, from the last bucket to the first; what comes last is the buffers and the tail.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import MergePlan
from hoop.engine.rank_context import RankContext
from hoop.engine.settings import Settings
from hoop.engine.stage.state import StageState, StateLayout
from hoop.memory.dtypes import dtype
from hoop.plan.plan import Plan

Squares = npt.NDArray[np.float64]
"""The squared norm of each of a model's parameters, in order."""


class GradientNorm:
    """The norm over all stages, which each rank knows a part of."""

    def __init__(
        self, world: RankContext, settings: Settings, blocks: Sequence[nn.Module], bounds: Sequence[int]
    ):
        self._world, self._settings = world, settings
        counts = [len(list(nn.ModuleList(blocks[:bound]).parameters())) for bound in bounds]
        *self._places, self._parameters = counts

    def move(self, world: RankContext) -> None:
        """The members have changed."""
        self._world = world

    def scale(self, held: Mapping[int, StageState], plan: Plan) -> float:
        """What the gradient is multiplied by; every rank that holds a stage must ask."""
        if not self._settings.optimizer.clip:
            return 1.0
        squared = np.zeros(self._parameters, np.float64)
        for stage, one in held.items():
            if plan.holders[stage][0] == self._world.rank:
                found = one.squares()
                squared[self._places[stage] : self._places[stage] + len(found)] = found
        # Who has yet to come may wait for what was sent to it, and a meeting does not hand it over.
        self._world.communicator.endpoint.flush(time.monotonic() + self._settings.timeout_s)
        holders = sorted({rank for ranks in plan.holders for rank in ranks})
        self._world.group(holders).run(
            Operation("all_reduce", len(squared), dtype("float64")),
            squared,
            squared,
            self._settings.timeout_s,
        )
        return clip_scale(squared, self._settings.optimizer.clip)


def squares(layout: StateLayout, gradient: Array) -> Squares:
    """Of a gradient of the whole model; zero for parameters that are not trained."""
    found = np.zeros(len(layout.parameters) + len(layout.frozen), np.float64)
    views = layout.views(torch.from_numpy(gradient))[: len(layout.parameters)]
    for index, view in enumerate(views):
        found[index] = float(torch.dot(view.reshape(-1), view.reshape(-1)))
    return found


def clip_scale(squared: Squares, clip: float) -> float:
    """What the gradient is multiplied by, so that its norm is at most ``clip``."""
    return min(1.0, clip / (float(np.sqrt(squared.sum())) + 1e-6))


class GradientReducer:
    """The sums of one stage."""

    def __init__(
        self,
        group: Communicator,
        holdings: Sequence[MergePlan],
        shards: int,
        held: StageState,
        deadline: float,
    ) -> None:
        """All ranks of the group must prepare together."""
        self._held = held
        spans = list(itertools.pairwise(held.buckets))[::-1]
        if group.size == 1 or len(spans) == 1:
            spans = []
        rest = (held.buckets[-1] if spans else 0, held.layout.total)
        self._sums = [
            OrderedAllReduce(group, holdings, shards, held.slots, held.room, deadline, span)
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
