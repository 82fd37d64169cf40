"""Stages on a GPU: CUDA graphs and state, for every strategy but data parallel (``gpu_resident_step.py``).

**CudaGraphStage.** A model of some hundred small kernels takes the CPU longer to launch than the GPU to compute. A CUDA
graph launches them as one. A graph computes at fixed addresses, so each micro-batch in flight has a lane:

    inputs ─copy─▶ lane.inputs ─ forward graph ─▶ lane.outputs       (activations stay in the lane's memory)
    gradient ─copy─▶ lane.gradient ─ backward graph ─▶ lane.row ─copy─▶ the slot's row; the input's gradient

A shard with fewer samples (of an epoch's last batch) is computed without a graph, on every rank alike. So are stages
that cannot be captured: blocks that draw random numbers, and modules whose code may launch other kernels each time.

**GpuStageState.** The state of the stage stays on the GPU (``DeviceState``); the arena has a copy, which is made when
something needs it. A copy of the stage's blocks has its weights there:

    GPU     weights, moments ── forward, backward ──▶ rows       (1) one row per gradient slot, as in the arena; the GPU
                     ▲                                  │            merges the rows of complete tree nodes
                     └── update ◀── total ◀─────────────┤        (2) this rank holds the stage alone: a row is the total
                                      ▲                 │        (3) several ranks of one host do: the GPU adds the rows
                                      │                 ▼            of all of them (``device_reduction.py``)
    arena                             └── total ◀── slots        (4) ranks of several hosts: one copy each way, round
                                                                     the sum in host memory

The tail of a slot (metrics, votes, provenance) is in the arena only. In cases (2) and (3) the gradient comes to the
host only if another rank holds a replica of the stage (``host_total``). The workers of parameter servers have a copy of
the weights. Servers of their host write it to the GPU, and read one gradient for each tree node there (``keep_rows``).
With other servers, workers upload the weights and download the gradients.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import MergePlan, SlotMerge
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator, Staging
from hoop.engine.stage.autograd import AutogradStage, OnSegment, Stage, Views
from hoop.engine.stage.device_state import DeviceState
from hoop.engine.stage.provenance import mark
from hoop.engine.stage.state import (
    CORRECT,
    LOSS,
    NO_METRICS,
    SAMPLES,
    TAIL,
    ShardMetrics,
    StageSpec,
    StageState,
    StateLayout,
    StateVectors,
    bind_tensors,
    make_stage,
    squared_norms,
)
from hoop.engine.stage.weight_slices import WeightSlice
from hoop.plan.instructions import InstructionKind
from hoop.plan.plan import Plan

_KNOWN_MODULES = ("torch.nn.", "hoop.models.")
_TRIAL = -1
"""Number of the micro-batch that is used for warm-up and capture."""


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
        """Whether the stage can be captured as CUDA graphs; None until the warm-up."""

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
    """The state of one stage on one rank, on the rank's GPU (or emulated, in host memory)."""

    def __init__(
        self,
        accelerator: Accelerator,
        use_graphs: bool,
        vectors: StateVectors,
        spec: StageSpec,
        settings: Settings,
    ) -> None:
        """``use_graphs``: forward and backward may be captured as CUDA graphs. The rest is as for ``StageState``."""
        twins = copy.deepcopy(nn.ModuleList(spec.blocks)).to(accelerator.device)
        settings = dataclasses.replace(settings, bucket_bytes=0)  # a gradient is downloaded in one copy
        super().__init__(vectors, spec, settings, accelerator.device)
        self._accelerator, device = accelerator, accelerator.device
        self._channels_last = settings.channels_last
        self._modules = list(zip(nn.ModuleList(spec.blocks).modules(), twins.modules(), strict=True))
        twin = StateLayout(twins)
        self._staging = Staging(accelerator, twin.state)
        optimizer = settings.optimizer if spec.updates else None
        self._device_state = DeviceState(
            accelerator, spec.name, self.state_array, twin.trained, self.moments, optimizer, self._staging
        )
        bind_tensors(twin, self._device_state.weights)
        self._device_buffers = self._device_state.weights[twin.trained :]
        self._device_buffers_at_start = self._device_buffers.clone()
        self._device_buffer_deltas: dict[int, Tensor] = {}
        self._counts, self._counts_at_start, self._counts_added = flatten_counters(twin, device)
        self.stage, _ = make_stage(list(twins), spec.first_block, twin, settings, spec.chain, device)
        if use_graphs and isinstance(self.stage, AutogradStage) and accelerator.cuda and capturable(twins):
            rows = -(-settings.batch_size // settings.num_microbatches)
            self.stage = CudaGraphStage(accelerator, self.stage, twins, rows, spec.first_block > 0, self._new_row)
        self._frozen = list(zip(self.layout.frozen, twin.frozen, strict=True))
        """Pairs of frozen parameters that are still to be copied: they change only when a checkpoint is read, before
        the first step."""
        self._row_matrix = torch.zeros(0, self.layout.state, device=device)
        self._rows: list[OutputRow] = []
        """Rows on the GPU, one for each gradient slot."""
        self._total_slot: int | None = None
        """Number of the slot whose row is the total of a step; None: the total is the sum of several ranks."""
        self._summed_on_device = False
        """Whether the sum over ranks is computed on the GPU; False: in the arena."""
        self._device_total = torch.zeros(0, device=device)
        """The sum over ranks, on the GPU."""
        self._total_copied = False
        """Whether the total of this step is both in the arena and on the GPU."""
        self._increments: list[tuple[Tensor, Tensor]] | None = None
        """Counters with their increments in this step; None: not downloaded yet."""
        self._pending: list[tuple[int, int, ShardMetrics]] = []
        """Micro-batch, fingerprint and metrics of the shards whose tails are not in the arena yet."""
        self._last_shards: set[int] = set()
        """Micro-batches that complete a tree node, as far as this rank's shards go."""

    def _new_row(self) -> OutputRow:
        """Allocate a row for a gradient and the changes of the buffers."""
        return self._as_row(torch.zeros(self.layout.state, device=self._accelerator.device))

    def _as_row(self, whole: Tensor) -> OutputRow:
        return OutputRow(whole, self.layout.views(whole)[: len(self.layout.parameters)], self.layout.trained)

    # ---- the two copies

    @property
    def weights(self) -> Tensor:
        """Parameters and float buffers on the GPU."""
        return self._device_state.weights

    def new_vector(self, name: str) -> Tensor:
        """Allocate a vector on the GPU for another version of the weights."""
        return self._accelerator.vector(self._name + name, self.layout.state)

    def on_device_change(self) -> None:
        """The weights on the GPU were overwritten: the arena is out of date."""
        self._device_state.on_device_change()

    def on_arena_change(self) -> None:
        self._device_state.on_arena_change()

    def download(self) -> None:
        self._device_state.download()

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._accelerator.upload(tensor)

    def sync_device_weights(self) -> None:
        """Upload weights, moments and counters if the arena was changed, and set the modes of the blocks' copies."""
        if self._device_state.upload() and len(self._counts):
            counts = torch.cat([one.reshape(-1) for one in batch_counters(self.layout)])
            self._accelerator.copy_in(self._counts, counts)
        while self._frozen:
            own, twin = self._frozen.pop()
            self._accelerator.copy_in(twin.data, own.data)
        for module, other in self._modules:
            other.training = module.training

    def begin(self) -> None:
        self.sync_device_weights()
        self._device_buffers_at_start.copy_(self._device_buffers)
        self._counts_at_start.copy_(self._counts)
        self._total_copied, self._increments = False, None

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self._accelerator.download(self.stage.evaluate(self._to_memory_format(inputs)))

    # ---- gradients

    def allocate_slots(self, holding: MergePlan, min_slots: int = 0) -> None:
        super().allocate_slots(holding, min_slots)
        if len(self.slots) > len(self._rows):
            count = len(self.slots) * self.layout.state
            rows = self._accelerator.shared_vector(self._vectors, f"{self._name}rows", count)
            self._row_matrix = rows.view(len(self.slots), -1)
            self._rows = [self._as_row(one) for one in self._row_matrix]
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
        return self._rows[self._slot_merges[micro].slot]

    def on_gradient(
        self, micro: int, metrics: ShardMetrics, shards: int, fingerprint: int = 0, merged: bool = False
    ) -> None:
        deltas = self._device_buffer_deltas.pop(micro, None)
        if deltas is not None:
            row = self._rows[self._slot_merges[micro].slot].whole
            torch.div(deltas, shards, out=row[self.layout.trained :])
        self._merge_rows(micro, metrics, fingerprint)

    def on_empty_shard(self, micro: int) -> None:
        self._rows[self._slot_merges[micro].slot].whole.zero_()
        self._merge_rows(micro, NO_METRICS)

    def _merge_rows(self, micro: int, metrics: ShardMetrics, fingerprint: int = 0) -> None:
        """Merge the rows of the tree nodes that this shard completes: (1)."""
        slot_merge = self._slot_merges[micro]
        for into, other in slot_merge.merges:
            self._rows[into].whole.add_(self._rows[other].whole)
        self._pending.append((micro, fingerprint, metrics))
        if micro in self._last_shards:
            self._write_tails()
            if self._total_slot is None and not self._summed_on_device:
                self._download_row(_merged_slot(slot_merge))

    def _download_row(self, slot: int) -> None:
        """Copy a row to its slot in the arena: (4)."""
        self._staging.download(self.slots[slot, : self.layout.state], self._rows[slot].whole)

    def _write_tails(self) -> None:
        """Write and merge the tails of the shards computed so far, which exist in the arena only."""
        losses = self._numbers([metrics[0] for _, _, metrics in self._pending])
        tails = self.slots[:, self.layout.state :]
        for (micro, fingerprint, (_, correct, samples)), loss in zip(self._pending, losses, strict=True):
            slot_merge = self._slot_merges[micro]
            tail = tails[slot_merge.slot]
            tail[:] = 0
            tail[LOSS], tail[CORRECT], tail[SAMPLES] = loss, correct, samples
            if fingerprint:
                mark(tail[TAIL:], micro % self._shards, self.device_id, fingerprint)
            for into, other in slot_merge.merges:
                tails[into] += tails[other]
        self._pending.clear()

    def _numbers(self, losses: Sequence[float | Tensor]) -> list[float]:
        """Return losses as numbers; those on the GPU are downloaded in one copy."""
        on_gpu = [one.reshape(()) for one in losses if isinstance(one, Tensor)]
        downloaded = iter(self._accelerator.download(torch.stack(on_gpu)).tolist() if on_gpu else [])
        return [next(downloaded) if isinstance(one, Tensor) else one for one in losses]

    # ---- the total, and the update

    def select_total(self, slot: int | None) -> None:
        super().select_total(slot)
        self._total_slot, self._summed_on_device = slot, False
        if slot is None and not len(self._device_total):
            self._device_total = self._accelerator.vector(f"{self._name}total", self.layout.state)

    def select_device_total(self) -> Tensor:
        """Keep the total on the GPU. Returns its vector; the caller writes the sum of all rows there in every step."""
        self.select_total(None)
        self._summed_on_device = True
        return self._device_total

    def keep_rows(self) -> None:
        """Complete tree nodes stay on the GPU: the caller sends them to parameter servers from there."""
        self._summed_on_device = True

    def pushed(self, slots: Sequence[int], part: WeightSlice) -> Tensor:
        """Return the gradients of a slice in these slots, (slot, element), on the GPU; of the last slice with tails."""
        found = torch.stack([self._rows[slot].whole[part.low : part.high] for slot in slots])
        if part.end > part.high:
            tails = torch.from_numpy(self.slots[list(slots), part.high : part.end])
            found = torch.cat([found, self._accelerator.upload(tails)], 1)
        return found

    def add_slots(self, into: int, other: int) -> None:
        """Add the gradient in one slot to that in another: the row on the GPU, and the tail."""
        self._rows[into].whole.add_(self._rows[other].whole)
        self.slots[into, self.layout.state :] += self.slots[other, self.layout.state :]

    def received_weights(self) -> Tensor:
        """Return the weights on the GPU for the caller to overwrite. The arena is out of date from now on."""
        self.sync_device_weights()
        self.on_device_change()
        return self.weights

    @property
    def accelerator(self) -> Accelerator:
        """The GPU of the stage."""
        return self._accelerator

    @property
    def rows(self) -> Tensor:
        """The rows on the GPU, (slot, element), in memory that other ranks of the host can map."""
        return self._row_matrix

    def total_on_device(self) -> Tensor:
        """Return the total on the GPU: (2), (3), or uploaded once a step: (4)."""
        if self._total_slot is not None:
            return self._rows[self._total_slot].whole
        if not self._summed_on_device and not self._total_copied:
            self._staging.upload(self._device_total, self.total[: self.layout.state])
            self._total_copied = True
        return self._device_total

    def host_total(self) -> Array:
        """Return the total in the arena; it is downloaded when this is first called in a step, if it is not there."""
        if (self._total_slot is not None or self._summed_on_device) and not self._total_copied:
            self._staging.download(self.total[: self.layout.state], self.total_on_device())
            self._total_copied = True
        return super().host_total()

    def squared_norms(self) -> list[float]:
        return squared_norms(self.layout.views_trained(self.total_on_device())).tolist()

    def on_total(self, step: int, scale: float) -> None:
        total = self.total_on_device()
        if scale != 1.0:
            total[: self.layout.trained].mul_(scale)
        summed_on_host = self._total_slot is None and not self._summed_on_device
        super().on_total(step, scale if summed_on_host else 1.0)

    def apply_update(self, rate: float, step: int) -> None:
        self.advance_counters()  # first: it waits for the shards, and not for the update
        self._device_state.apply_update(self.total_on_device(), rate, step)

    def advance_counters(self) -> None:
        if len(self._counts):
            super().advance_counters()
            self._counts.add_(self._counts_added)

    def counter_increments(self) -> list[tuple[Tensor, Tensor]]:
        if self._increments is None:
            added = self._accelerator.download(self._counts_added)
            self._increments = list(zip(batch_counters(self.layout), added, strict=True))
        return self._increments


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
