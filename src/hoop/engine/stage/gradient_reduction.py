"""All-reduce of a stage's gradients over shards and replicas, bucket by bucket; and gradient clipping by norm.

The sum over ranks itself is ``collectives/ordered_all_reduce.py``; a rank's own shards are merged before it by
``StageState.merge``. On GPUs: ``device_reduction.py``, ``peer_rows.py``.

A bucket is a range of the gradient vector that one segment of the backward produces. If there are several, a thread
reduces each bucket as soon as this rank's last shard has written it, while the backward of the previous segments
continues. All ranks reduce the buckets in the same order, from the last to the first; then the buffers and the tail.

The norm is a sum over the parameters in the order of the model, so the clipping factor has the same bits wherever the
model is cut into stages.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.rank_context import RankContext
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import MergePlan
from hoop.engine.settings import Settings
from hoop.engine.stage.state import StageState
from hoop.memory.dtypes import dtype
from hoop.plan.plan import Plan
from hoop.transport.base import WaitingWork


class GradientNorm:
    """Computes the clipping factor from the norm over all stages, of which each rank knows a part."""

    def __init__(
        self,
        context: RankContext,
        settings: Settings,
        blocks: Sequence[nn.Module],
        bounds: Sequence[int],
        device: torch.device,
    ) -> None:
        """``device``: where updates are computed."""
        self._context, self._settings, self._device = context, settings, device
        # Only trained parameters: numpy adds by position, so the place of a frozen one must not shift the others.
        counts = [sum(one.requires_grad for one in nn.ModuleList(blocks[:bound]).parameters()) for bound in bounds]
        *self._first_parameters, self._num_parameters = counts

    def set_context(self, context: RankContext) -> None:
        """Use the communicators of the next generation."""
        self._context = context

    def scale(self, stage_states: Mapping[int, StageState], plan: Plan) -> float:
        """Return the factor for the gradient. Collective over the ranks that hold a stage."""
        normalisation = next(iter(stage_states.values())).normalisation() if stage_states else 1.0
        if not self._settings.optimizer.clip:
            return normalisation
        squared = np.zeros(self._num_parameters, np.float64)
        for stage, one in stage_states.items():
            if plan.sharded_update or plan.holders[stage][0] == self._context.rank:
                found = one.squared_norms()
                squared[self._first_parameters[stage] : self._first_parameters[stage] + len(found)] = found
        # Flush first: a rank that has not reached the all-reduce may wait for a message from this rank, and a
        # collective in shared memory does not send pending messages.
        self._context.communicator.endpoint.flush(time.monotonic() + self._settings.timeout_s)
        holders = sorted({rank for ranks in plan.holders for rank in ranks})
        self._context.group(holders).run(
            Operation("all_reduce", len(squared), dtype("float64")), squared, squared, self._settings.timeout_s
        )
        if normalisation != 1.0:
            squared *= normalisation**2
        clipping = clip_scale(torch.from_numpy(squared).to(self._device), self._settings.optimizer.clip)
        return normalisation * float(clipping)


def clip_scale(squared: Tensor, clip: float) -> Tensor:
    """Return the factor that reduces the norm of the gradient to at most ``clip``, from all parameters' squared norms.

    A scalar on the device of ``squared``, without waiting for it.
    """
    if not squared.is_cuda:
        return torch.tensor(min(1.0, clip / (float(np.sqrt(squared.numpy().sum())) + 1e-6)), dtype=torch.float64)
    return (clip / (squared.sum().sqrt() + 1e-6)).clamp(max=1.0)


class GradientReducer:
    """Reduces the gradients of one stage to ``StageState.total``."""

    def __init__(
        self, group: Communicator, holdings: Sequence[MergePlan], shards: int, stage_state: StageState, deadline: float
    ) -> None:
        """Collective over ``group``, the ranks that hold the stage.

        ``holdings``: the tree nodes that each rank holds. ``shards``: micro-batches of the global batch.
        """
        self._stage_state = stage_state
        spans = list(itertools.pairwise(stage_state.buckets))[::-1]
        if group.size == 1 or len(spans) == 1:
            spans = []
        rest = (stage_state.buckets[-1] if spans else 0, stage_state.layout.total)
        self._all_reduces = [
            OrderedAllReduce(group, holdings, shards, stage_state.slots, stage_state.total_buffer, deadline, span)
            for span in (*spans, rest)
        ]
        stage_state.select_total(self._all_reduces[-1].result_slot)
        self._bucket_spans = spans
        self._thread = ThreadPoolExecutor(1, "hoop-totals") if spans else None
        self._started: list[Future[float]] = []

    @property
    def bytes_moved(self) -> int:
        """Bytes transferred to other ranks through shared memory."""
        return sum(one.bytes_moved for one in self._all_reduces)

    @property
    def num_buckets(self) -> int:
        """Number of buckets that can be reduced during the backward; 0 if all is reduced after it."""
        return len(self._bucket_spans)

    def start(self, bucket: int, micro: int, deadline: float) -> None:
        """Start the reduction of a bucket: this rank's last shard, ``micro``, has written its gradient of it."""
        assert self._thread is not None, "there are buckets"
        index = len(self._started)
        low, high = self._bucket_spans[index]
        assert index == len(self._bucket_spans) - 1 - bucket, "the last bucket comes first"
        self._stage_state.merge(micro, low, high)
        self._started.append(self._thread.submit(self._all_reduces[index], deadline))

    def __call__(self, deadline: float, work: WaitingWork | None = None) -> float:
        """Reduce the rest, and wait for all buckets; returns the seconds that it waited for other ranks.

        ``work``: done while it waits for other ranks in the last all-reduce.
        """
        waited = 0.0
        if self._thread is not None:
            for one in self._all_reduces[len(self._started) : -1]:
                self._started.append(self._thread.submit(one, deadline))
            started, self._started = self._started, []
            waited = sum(one.result() for one in started)
        return waited + self._all_reduces[-1](deadline, work)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
