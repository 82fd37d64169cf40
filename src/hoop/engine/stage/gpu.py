"""Stages on a GPU whose state stays in host memory: CUDA graphs, and a stage state with a device copy.

**CudaGraphStage.** A model of some hundred small kernels takes the CPU longer to launch than the GPU to compute. A CUDA
graph launches them as one. A graph computes at fixed addresses, so each micro-batch in flight has a lane:

    inputs ─copy─▶ lane.inputs ─ forward graph ─▶ lane.outputs       (activations stay in the lane's memory)
    gradient ─copy─▶ lane.gradient ─ backward graph ─▶ lane.row ─copy─▶ the slot's row; the input's gradient

A shard with fewer samples (of an epoch's last batch) is computed without a graph, on every rank alike. So are stages
that cannot be captured: blocks that draw random numbers, and modules whose code may launch other kernels each time.

**GpuStageState.** The state of the stage stays in the arena. A copy of its blocks on the GPU computes it:

    arena   weights ──(1)──▶ GPU   weights of the copy           (1) a step begins: one copy, from pinned memory
                                   forward, backward             (2) one row per gradient slot, as in the arena; the GPU
                                   rows ◀─(2)                        merges the rows of complete tree nodes
    arena   slots ◀──(3)──── GPU   a node's row                  (3) the rank's shards of a node are complete: one copy

Collectives, updates, recovery and checkpoints use the arena, as without a GPU. A step uploads the weights once, and
downloads one gradient for each tree node that the rank holds (one node if its shards are consecutive), however many
shards it computes.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.shard_tree import MergePlan, SlotMerge
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.autograd import AutogradStage, OnSegment, Stage, Views
from hoop.engine.stage.provenance import mark
from hoop.engine.stage.state import (
    HITS,
    LOSS,
    NO_METRICS,
    SAMPLES,
    TAIL,
    ShardMetrics,
    StageState,
    StateLayout,
    StateVectors,
    bind_tensors,
    make_stage,
)
from hoop.plan.instructions import InstructionKind
from hoop.plan.plan import Plan

_KNOWN_MODULES = ("torch.nn.", "hoop.models.")
_TRIAL = -1
"""Micro-batch number for warm-up and capture."""


class OutputRow(list[Tensor]):
    """Views of the gradients of a stage's parameters, with the vector that they are views of."""

    def __init__(self, whole: Tensor, views: Sequence[Tensor], trained: int) -> None:
        super().__init__(views)
        self.whole, self.flat = whole, whole[:trained]


def capturable(blocks: nn.Module) -> bool:
    """True if all modules are PyTorch's or Hoop's, without hooks: the kernels they launch depend on shapes only."""
    return all(
        type(one).__module__.startswith(_KNOWN_MODULES)
        and not (one._forward_hooks or one._forward_pre_hooks or one._backward_hooks)
        for one in blocks.modules()
        if type(one) is not nn.ModuleList
    )


@dataclass
class _GraphLane:
    """The graphs, and their memory, for one micro-batch in flight."""

    inputs: Tensor
    outputs: Tensor
    gradient: Tensor
    row: OutputRow
    input_gradient: Tensor | None
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class CudaGraphStage(Stage):
    """Captures forward and backward of an ``AutogradStage`` as CUDA graphs, and replays them."""

    def __init__(
        self,
        accelerator: Accelerator,
        inner: AutogradStage,
        blocks: nn.Module,
        rows: int,
        wants_input: bool,
        new_row: Callable[[], OutputRow],
    ) -> None:
        """``rows``: samples of a full shard. ``new_row``: allocates a row for a gradient."""
        self._accelerator, self._rows = accelerator, rows
        self._inner, self._blocks, self._wants_input, self._new_row = inner, blocks, wants_input, new_row
        self._free_lanes: list[_GraphLane] = []
        self._lanes_in_flight: dict[int, _GraphLane] = {}
        self._can_capture: bool | None = None
        """None until the warm-up."""

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        lane = self._acquire_lane(inputs)
        if lane is None:
            return self._inner.forward(micro, inputs, seed)
        lane.inputs.copy_(inputs)
        lane.forward.replay()
        self._lanes_in_flight[micro] = lane
        return lane.outputs

    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, on_segment: OnSegment | None = None
    ) -> Tensor | None:
        lane = self._lanes_in_flight.pop(micro, None)
        if lane is None:
            return self._inner.backward(micro, gradient, into, wants_input, on_segment)
        assert isinstance(into, OutputRow), "gradients go to a row"
        lane.gradient.copy_(gradient)
        lane.backward.replay()
        into.flat.copy_(lane.row.flat)
        self._free_lanes.append(lane)
        # Clone it: the next forward may use the lane's memory.
        return None if lane.input_gradient is None else lane.input_gradient.clone()

    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        raise AssertionError("a backward in two halves is not captured")

    def backward_weight(self, micro: int, into: Views) -> None:
        raise AssertionError("a backward in two halves is not captured")

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self._inner.evaluate(inputs)

    # ---- capture

    def _acquire_lane(self, inputs: Tensor) -> _GraphLane | None:
        """Return a free lane or capture a new one; None if this micro-batch is computed without a graph.

        Nothing is captured while micro-batches are in flight that are computed without a graph, such as shorter ones:
        their autograd graphs bind the parameters to the default stream, and PyTorch would wait for it in the capture.
        """
        if len(inputs) != self._rows or not self._accelerator.usual_kernels:
            return None
        if self._inner.in_flight and not self._free_lanes:
            return None
        if self._can_capture is None:
            self._can_capture = self._warm_up(inputs)
        if not self._can_capture:
            return None
        if self._free_lanes:
            return self._free_lanes.pop()
        try:
            return self._capture(inputs)
        except RuntimeError as error:
            self._can_capture = False
            warnings.warn(f"this stage runs without a CUDA graph: {error}", stacklevel=2)
            return None

    def _warm_up(self, inputs: Tensor) -> bool:
        """Compute twice, as PyTorch requires before a capture; returns True if no random number was drawn."""
        inner, device = self._inner, inputs.device
        seed_blocks = inner.seed_blocks
        inner.seed_blocks = False
        rng_state = torch.cuda.get_rng_state(device)
        buffers = [one.clone() for one in self._blocks.buffers()]
        compute_stream, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(compute_stream)
        with torch.cuda.stream(side):
            for _ in range(2):
                outputs = inner.forward(_TRIAL, inputs, 0)
                inner.backward(_TRIAL, torch.ones_like(outputs), self._new_row(), self._wants_input)
        compute_stream.wait_stream(side)
        for one, value in zip(self._blocks.buffers(), buffers, strict=True):
            # Through .data, which does not bump the version: autograd graphs of other micro-batches may have saved it.
            one.data.copy_(value)
        drawn = not torch.equal(rng_state, torch.cuda.get_rng_state(device))
        inner.seed_blocks = seed_blocks and drawn
        return not drawn

    def _capture(self, inputs: Tensor) -> _GraphLane:
        inner, inputs, row = self._inner, inputs.clone(), self._new_row()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, capture_error_mode="thread_local"):
            outputs = inner.forward(_TRIAL, inputs, 0)
        gradient = torch.empty_like(outputs)
        with torch.cuda.graph(backward, pool=forward.pool(), capture_error_mode="thread_local"):
            input_gradient = inner.backward(_TRIAL, gradient, row, self._wants_input)
        return _GraphLane(inputs, outputs, gradient, row, input_gradient, forward, backward)


class GpuStageState(StageState):
    """The state of one stage on one rank, with a copy of the blocks on the rank's GPU that computes it."""

    def __init__(
        self,
        accelerator: Accelerator,
        use_graphs: bool,
        vectors: StateVectors,
        blocks: Sequence[nn.Module],
        first_block: int,
        settings: Settings,
        name: str,
        updates: bool,
        chain: bool,
    ) -> None:
        """``use_graphs``: forward and backward may be captured as CUDA graphs. The rest is as for ``StageState``."""
        twins = copy.deepcopy(nn.ModuleList(blocks)).to(accelerator.device)
        settings = dataclasses.replace(settings, bucket_bytes=0)  # a gradient is downloaded in one copy
        super().__init__(vectors, blocks, first_block, settings, name, updates, chain, accelerator.device)
        self._accelerator, device = accelerator, accelerator.device
        self._channels_last = settings.channels_last
        self._modules = list(zip(nn.ModuleList(blocks).modules(), twins.modules(), strict=True))
        twin = StateLayout(twins)
        self._device_state = torch.zeros(twin.state, device=device)
        bind_tensors(twin, self._device_state)
        self._device_buffers = self._device_state[twin.trained :]
        self._device_buffers_at_start = self._device_buffers.clone()
        self._device_buffer_deltas: dict[int, Tensor] = {}
        self._counts, self._counts_at_start, self._counts_added = flatten_counters(twin, device)
        self.stage, _ = make_stage(list(twins), first_block, twin, settings, chain, device)
        if use_graphs and isinstance(self.stage, AutogradStage) and accelerator.cuda and capturable(twins):
            rows = -(-settings.batch_size // settings.num_microbatches)
            self.stage = CudaGraphStage(accelerator, self.stage, twins, rows, first_block > 0, self._new_row)
        self._frozen = list(zip(self.layout.frozen, twin.frozen, strict=True))
        """Frozen parameters, still to be copied: they change only when a checkpoint is read, before the first step."""
        self._upload_buffer = accelerator.pinned_buffer(twin.state)
        self._download_buffer = accelerator.pinned_buffer(twin.state)
        self._rows: list[Tensor] = []
        """One row per gradient slot, on the GPU."""
        self._row_views: list[OutputRow] = []
        self._pending: list[tuple[int, int, ShardMetrics]] = []
        """(micro-batch, fingerprint, metrics) of the shards whose tails are not in the arena yet."""
        self._rows_on_gpu: set[int] = set()
        """Slots whose rows have not been downloaded."""
        self._last_shards: set[int] = set()
        """Micro-batches that complete a tree node, as far as this rank's shards go."""

    def _new_row(self) -> OutputRow:
        """Allocate a row for a gradient and the changes of the buffers."""
        whole = torch.zeros(self.layout.state, device=self._accelerator.device)
        return OutputRow(whole, self.layout.views(whole)[: len(self.layout.parameters)], self.layout.trained)

    # ---- upload

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._accelerator.upload(tensor)

    def sync_device_weights(self) -> None:
        """Upload weights, buffers and counters: (1) of the module docstring."""
        self._accelerator.synchronize()  # the last copy may still read the upload buffer
        np.copyto(self._upload_buffer.numpy(), self.state_array)
        self._device_state.copy_(self._upload_buffer, non_blocking=True)
        if len(self._counts):
            counts = torch.cat([one.reshape(-1) for one in batch_counters(self.layout)])
            self._counts.copy_(counts, non_blocking=True)
        while self._frozen:
            own, twin = self._frozen.pop()
            twin.data.copy_(own.data)
        for module, other in self._modules:
            other.training = module.training

    def begin(self) -> None:
        super().begin()
        self.sync_device_weights()
        self._device_buffers_at_start.copy_(self._device_buffers)
        self._counts_at_start.copy_(self._counts)

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self.stage.evaluate(self._to_memory_format(inputs)).cpu()

    # ---- gradients

    def allocate_slots(self, holding: MergePlan, min_slots: int = 0) -> None:
        for slot in sorted(self._rows_on_gpu):
            self._download(slot)
        super().allocate_slots(holding, min_slots)
        if len(self.slots) > len(self._rows):
            self._row_views = [self._new_row() for _ in self.slots]
            self._rows = [row.whole for row in self._row_views]
        self._last_shards = _node_last_shards(holding)

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        return super().forward(micro, self._to_memory_format(inputs), seed)

    def _to_memory_format(self, inputs: Tensor) -> Tensor:
        inputs = self.to_device(inputs)
        channels_last = self._channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if channels_last else inputs

    def _save_buffer_deltas(self, micro: int) -> None:
        self._device_buffer_deltas[micro] = self._device_buffers - self._device_buffers_at_start
        self._device_buffers.copy_(self._device_buffers_at_start)
        torch.sub(self._counts, self._counts_at_start, out=self._counts_added)
        self._counts.copy_(self._counts_at_start)

    def gradient_views(self, micro: int) -> OutputRow:
        return self._row_views[self._slot_merges[micro].slot]

    def on_gradient(
        self, micro: int, metrics: ShardMetrics, shards: int, fingerprint: int = 0, merged: bool = False
    ) -> None:
        deltas = self._device_buffer_deltas.pop(micro, None)
        if deltas is not None:
            row = self._rows[self._slot_merges[micro].slot]
            torch.div(deltas, shards, out=row[self.layout.trained :])
        self._merge_rows(micro, metrics, fingerprint)

    def on_empty_shard(self, micro: int) -> None:
        self._rows[self._slot_merges[micro].slot].zero_()
        self._merge_rows(micro, NO_METRICS)

    def _merge_rows(self, micro: int, metrics: ShardMetrics, fingerprint: int = 0) -> None:
        """Merge the rows of the tree nodes that this shard completes: (2)."""
        slot_merge = self._slot_merges[micro]
        for into, other in slot_merge.merges:
            self._rows[into].add_(self._rows[other])
            self._rows_on_gpu.discard(other)
        self._pending.append((micro, fingerprint, metrics))
        slot = _merged_slot(slot_merge)
        self._rows_on_gpu = (self._rows_on_gpu - {slot_merge.slot}) | {slot}
        if micro in self._last_shards:
            self._download(slot)

    def _download(self, slot: int) -> None:
        """Copy a row to its slot in the arena: (3). Also write and merge the tails, which exist in the arena only."""
        self._download_buffer.copy_(self._rows[slot], non_blocking=True)
        losses = _numbers([metrics[0] for _, _, metrics in self._pending])
        self._accelerator.synchronize()
        np.copyto(self.slots[slot, : self.layout.state], self._download_buffer.numpy())
        self._rows_on_gpu.discard(slot)
        tails = self.slots[:, self.layout.state :]
        for (micro, fingerprint, (_, hits, samples)), loss in zip(self._pending, losses, strict=True):
            slot_merge = self._slot_merges[micro]
            tail = tails[slot_merge.slot]
            tail[:] = 0
            tail[LOSS], tail[HITS], tail[SAMPLES] = loss, hits, samples
            if fingerprint:
                mark(tail[TAIL:], micro % self._shards, self.device_id, fingerprint)
            for into, other in slot_merge.merges:
                tails[into] += tails[other]
        self._pending.clear()

    def counter_increments(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(batch_counters(self.layout), self._counts_added.cpu(), strict=True))


def batch_counters(layout: StateLayout) -> list[Tensor]:
    """Return batch norm's counters of batches; other integer buffers (masks) do not change."""
    return [one for one in layout.counters if one.dtype == torch.int64 and one.numel() == 1]


def flatten_counters(twin: StateLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Make the counters of the device copy views of one vector.

    Returns that vector, and vectors for their values at the start of a step and for the increments of a shard.
    """
    counters = batch_counters(twin)
    counts, start, added = torch.zeros(3, len(counters), dtype=torch.int64, device=device)
    for index, one in enumerate(counters):
        one.data = counts[index : index + 1].view(one.shape)
    return counts, start, added


def _numbers(losses: Sequence[float | Tensor]) -> list[float]:
    """Return losses as numbers; those on the GPU are downloaded in one copy."""
    on_gpu = [one.reshape(()) for one in losses if isinstance(one, Tensor)]
    downloaded = iter(torch.stack(on_gpu).tolist() if on_gpu else [])
    return [next(downloaded) if isinstance(one, Tensor) else one for one in losses]


def _merged_slot(slot_merge: SlotMerge) -> int:
    """Return the slot that holds the node after the merges of a shard."""
    return slot_merge.merges[-1][0] if slot_merge.merges else slot_merge.slot


def _node_last_shards(holding: MergePlan) -> set[int]:
    """Return the shards after which a node is final on this rank: no later shard merges with it."""
    found = set()
    for index, (micro, slot_merge) in enumerate(zip(holding.order, holding.slot_merges, strict=True)):
        slot = _merged_slot(slot_merge)
        for later in holding.slot_merges[index + 1 :]:
            if any(slot in pair for pair in later.merges):
                break
            if later.slot == slot:
                found.add(micro)
                break
        else:
            found.add(micro)
    return found


def stage_state_factory(accelerator: Accelerator | None, plan: Plan, settings: Settings) -> Callable[..., StageState]:
    """Return a function with the parameters of ``StageState`` that makes the state of a stage on CPU or GPU."""
    if accelerator is None:
        return StageState
    two_halves = any(one.kind is InstructionKind.BACKWARD_INPUT for rank in plan.ranks for one in rank)
    return partial(GpuStageState, accelerator, settings.graphs and not two_halves)
