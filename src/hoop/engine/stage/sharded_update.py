"""Data parallel with a sharded update (ZeRO stage 1): the state of a rank that updates one slice of the weights.

    slots                    | parameters | buffers | tail |       gradients of this rank's shards, whole
    state_array              | parameters | buffers |              weights, whole; the modules' tensors are views of it
    slice_total, slice_moments   | slice |                         summed gradient and optimizer state of the slice
    total                                 | buffers | tail |       summed by every rank

    REDUCE   the slice and the rest are summed along the fixed tree (``collectives/sharded_reduction.py``)
    UPDATE   the optimizer updates the slice; every rank adds the changes of all buffers
    gather   the role gets the other ranks' slices before weights are read again (``roles/sharded_data.py``)

Gradients are clipped by the norm over all parameters. The norm of a parameter is computed by the rank in whose slice it
begins. With clipping that rank sums such a parameter to its end, so the norm has the bits of unsharded training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from hoop.collectives.communicator import Communicator
from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import MergePlan
from hoop.collectives.sharded_reduction import ShardedReduction, ShardSpans
from hoop.engine.settings import Settings
from hoop.engine.stage.optimizer import apply_update, make_update
from hoop.engine.stage.state import TAIL, StageSpec, StageState, StateLayout, StateVectors, squared_norms
from hoop.engine.stage.weight_slices import WeightSlice, weight_slices
from hoop.transport.base import WaitingWork


def shard_spans(layout: StateLayout, parts: Sequence[WeightSlice], whole_parameters: bool) -> ShardSpans:
    """Return the elements that each rank sums and provides, if it has the slice of its number.

    ``whole_parameters``: a rank sums the parameters that begin in its slice to their end.
    """
    sums = []
    for part in parts:
        end = part.high
        for offset, parameter in zip(layout.offsets, layout.parameters, strict=False):
            if whole_parameters and part.low <= offset < part.high:
                end = max(end, offset + parameter.numel())
        sums.append((part.low, end))
    weights = tuple((part.low, part.low + part.trained) for part in parts)
    return ShardSpans(tuple(sums), (layout.trained, layout.total), weights)


class ShardedStageState(StageState):
    """The state of the whole model on one of several ranks, of which each updates a slice."""

    def __init__(
        self,
        number: int,
        count: int,
        vectors: StateVectors,
        spec: StageSpec,
        settings: Settings,
    ) -> None:
        """``number``: of the slice that this rank updates, of ``count``. The others: see ``StageState``."""
        assert spec.updates, "parameter servers have no sharded update"
        super().__init__(vectors, dataclasses.replace(spec, updates=False), settings)
        layout, optimizer = self.layout, settings.optimizer
        self.parts = weight_slices(layout, count)
        self.part = part = self.parts[number]
        self.spans = shard_spans(layout, self.parts, whole_parameters=bool(optimizer.clip))
        self.slice_moments = [
            torch.from_numpy(vectors.new(f"{spec.name}slice.moment{index}", part.trained))
            for index in range(optimizer.num_moments)
        ]
        self.sums: Array = vectors.new(f"{spec.name}slice.total", self.spans.output_size(number))
        """Memory into which this rank sums: ``slice_total``, then ``total``."""
        low, high = self.spans.sums[number]
        self.slice_total: Array = self.sums[: high - low]
        """Summed gradient of the slice; with clipping, of the parameters that begin in it."""
        self.total, self.total_start = self.sums[high - low :], layout.trained
        self.update = make_update(optimizer, self.state[part.low : part.low + part.trained], self.slice_moments)
        self.stale = False
        """True after an update, until the slices are gathered: outside of this rank's slice the weights are those
        before it."""

    def on_total(self, step: int, scale: float) -> None:
        if scale != 1.0:
            torch.from_numpy(self.slice_total[: self.part.trained]).mul_(scale)
        if self.provenance is not None:
            self.provenance.record(step, self.tail[TAIL:])

    def apply_update(self, rate: float, step: int) -> None:
        """Update the slice, and add the changes of the buffers that are not in it."""
        part, trained = self.part, self.layout.trained
        apply_update(self.update, self.state_array[part.low : part.high], part.trained, self.slice_total, rate, step)
        for low, high in ((trained, max(part.low, trained)), (max(part.high, trained), self.layout.state)):
            self.state_array[low:high] += self.total[low - trained : high - trained]
        self.stale = True
        self.advance_counters()

    def squared_norms(self) -> list[float]:
        """Return the squared norm of each parameter that begins in the slice, in order, and 0 for the others."""
        low, layout = self.part.low, self.layout
        found = [0.0] * len(layout.parameters)
        mine = [index for index, offset in enumerate(layout.offsets[: len(found)]) if low <= offset < self.part.high]
        gradient = torch.from_numpy(self.slice_total)
        starts = [layout.offsets[index] - low for index in mine]
        views = [
            gradient[start : start + layout.parameters[index].numel()]
            for start, index in zip(starts, mine, strict=True)
        ]
        for index, norm in zip(mine, squared_norms(views).tolist(), strict=True):
            found[index] = norm
        return found


class ShardedGradientReducer:
    """Reduces the gradients of a ``ShardedStageState``, and gathers its weights. ``PlanExecutor`` makes it."""

    num_buckets = 0
    """0: no part of the gradient is reduced during the backward."""

    def __init__(
        self,
        group: Communicator,
        holdings: Sequence[MergePlan],
        shards: int,
        stage_state: ShardedStageState,
        deadline: float,
    ) -> None:
        """Collective over ``group``, the ranks that hold the model. The parameters: see ``GradientReducer``."""
        self._stage_state = stage_state
        buffers = stage_state.slots, stage_state.sums, stage_state.state_array
        self._reduction = ShardedReduction(group, holdings, shards, buffers, stage_state.spans, deadline)

    @property
    def bytes_moved(self) -> int:
        """Bytes transferred from other ranks through shared memory."""
        return self._reduction.bytes_moved

    def start(self, bucket: int, micro: int, deadline: float) -> None:
        raise AssertionError("there are no buckets")

    def __call__(self, deadline: float, work: WaitingWork | None = None) -> float:
        """Reduce; returns the seconds that it waited for other ranks. ``work``: done while it waits."""
        return self._reduction.reduce(deadline, work)

    def gather(self, deadline: float) -> float:
        """Collective. Get the other ranks' slices of the weights; returns the seconds that it waited for them."""
        waited = self._reduction.gather(deadline)
        self._stage_state.stale = False
        return waited

    def close(self) -> None:
        """There are no threads to stop."""
