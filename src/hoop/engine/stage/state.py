"""The training state of a stage on one rank: weights, gradients, totals and optimizer state, as vectors in the arena.

    | parameters, each at a multiple of 16 elements | float buffers | tail | provenance |     layout of a gradient slot

``StateLayout`` gives the offset of each tensor; the modules' tensors are views of the weight vector. A gradient slot
holds the contribution of one shard:

    parameters   the gradient
    buffers      the change of the buffers by the shard's forward (batch norm's running statistics)
    tail         metrics (loss, correct answers, samples), stop and move requests, each rank's seconds per shard
    provenance   the device that computed the shard, and a fingerprint of its samples (``provenance.py``)

One all-reduce sums all of it over the shards, in a fixed order. So buffers and metrics, like the gradient, do not
depend on which rank computed which shard.

Vectors are padded to a multiple of 64 elements. Then no elementwise kernel has a remainder, which a scalar loop would
round differently, and the update of a stage gives the same bits as the update of the whole model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import MergePlan, SlotMerge
from hoop.data.dataset import Batch, Dataset, Indices
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import CPU, AutogradStage, Segments, Stage
from hoop.engine.stage.linear_chain import ChainStage, layers_of
from hoop.engine.stage.optimizer import Update, apply_update, make_staged_update, make_update
from hoop.engine.stage.provenance import ELEMENTS_PER_SHARD, Provenance, mark
from hoop.errors import InternalError, InvalidArgument, OutOfMemory
from hoop.memory import Arena
from hoop.memory.commit_record import CommitRecord
from hoop.memory.dtypes import DType, dtype

ALIGN = 16
"""Tensors begin at a multiple of this many elements."""
PAD = 64
"""Vectors are padded to a multiple of this many elements."""
TAIL = 64
"""Number of elements of the tail."""
LOSS, CORRECT, SAMPLES, STOP, MOVE = range(5)
"""Indices of elements of the tail. ``STOP`` and ``MOVE`` are more than 0 if a rank asks to stop, or to change the
membership."""
SPEED = 5
"""Index of the element of the tail with the seconds per shard of rank 0; those of the other ranks follow."""
MAX_SPEEDS = TAIL - SPEED
FLOAT32, FLOAT64 = dtype("float32"), dtype("float64")
StateRow = tuple[str, int, int, int, str, int]
"""A slice of a tensor and its place in the arena: tensor name, first element, elements, bytes; vector, byte offset."""


def padded(count: int, to: int = PAD) -> int:
    """``count``, rounded up to a multiple of ``to``."""
    return -(-count // to) * to


class StateLayout:
    """The offsets of the tensors of consecutive blocks in a vector; raises if the model is not float32."""

    def __init__(self, blocks: Iterable[nn.Module], shards: int = 0, any_type: bool = False) -> None:
        """``shards``: micro-batches of a global batch, each of which has elements for its provenance.

        ``any_type``: tensors may have any type, and all buffers have elements (``engine/custom``).
        """
        module = nn.ModuleList(blocks)
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.frozen = [one for one in module.parameters() if not one.requires_grad]
        buffers = list(module.buffers())
        self.buffers = [one for one in buffers if any_type or one.is_floating_point()]
        self.counters = [one for one in buffers if not any_type and not one.is_floating_point()]
        types = {tensor.dtype for tensor in [*self.parameters, *self.buffers]}
        if not any_type and types - {torch.float32}:
            raise InvalidArgument(
                f"model: a tensor of {(types - {torch.float32}).pop()}; this strategy trains float32 (call "
                "model.float()), the strategy data trains other types as well"
            )
        if any(kind.is_complex for kind in types):
            raise InvalidArgument("model: a complex parameter or buffer; train its real and imaginary parts")
        self.element = FLOAT64 if torch.float64 in types else FLOAT32
        """Type of the elements of a gradient slot."""
        self.offsets: list[int] = []
        end = 0
        for one in self.parameters:
            self.offsets.append(end)
            end += padded(one.numel(), ALIGN)
        self.trained = padded(end, PAD)
        """Number of elements that the optimizer updates: the parameters, with padding."""
        end = self.trained
        for buffer in self.buffers:
            self.offsets.append(end)
            end += padded(buffer.numel(), ALIGN)
        self.state = padded(end, PAD)
        """Number of elements of a weight vector: parameters and float buffers."""
        self.total = self.state + TAIL + padded(ELEMENTS_PER_SHARD * shards, PAD)
        """Number of elements of a gradient slot."""

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parameters, *self.buffers]

    @property
    def buffer_spans(self) -> list[tuple[int, int]]:
        """The elements of each buffer."""
        offsets = self.offsets[len(self.parameters) :]
        return [(low, low + one.numel()) for low, one in zip(offsets, self.buffers, strict=True)]

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector in the shapes of the parameters and buffers."""
        return [
            vector[offset : offset + one.numel()].view(one.shape)
            for offset, one in zip(self.offsets, self.tensors, strict=True)
        ]

    def views_trained(self, vector: Tensor) -> list[Tensor]:
        """Return views of a vector of ``trained`` elements in the shapes of the parameters."""
        return [
            vector[offset : offset + one.numel()].view(one.shape)
            for offset, one in zip(self.offsets, self.parameters, strict=False)
        ]


class StateVectors:
    """Allocates named vectors in an arena, and frees them together."""

    def __init__(self, arena: Arena, prefix: str, run: str = "") -> None:
        """``prefix``: begins the name of each buffer. ``run``: run id, stored in commit records."""
        self._arena, self._prefix, self._run = arena, prefix, run
        self._names: list[str] = []

    def new(self, name: str, count: int, element: DType = FLOAT32) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Allocate a vector of zeros, of float32 if no type is given; an earlier vector of the same name is freed."""
        size = max(count, 1) * element.itemsize
        full = f"{self._prefix}{name}"
        if full in self._names and self._arena.buffer(full).size != size:
            self._arena.free(full)  # its size changes
            self._names.remove(full)
        if full in self._names:
            self._names.remove(full)
            self._arena.free(full)
        buffer = self._arena.allocate(full, size, reuse=True)
        self._names.append(full)
        array = self._arena.array(buffer.address, element, count)
        array[:] = 0
        return array

    def child(self, prefix: str) -> StateVectors:
        """Return an allocator in the same arena whose prefix is this one's, followed by ``prefix``."""
        return StateVectors(self._arena, self._prefix + prefix, self._run)

    def commit_record(
        self, name: str, rows: Iterable[StateRow], further: Mapping[str, object] | None = None
    ) -> CommitRecord:
        """Make a commit record: for a restarted device, the step of the run that these slices hold.

        ``rows`` name vectors of this allocator. ``further``: JSON for a reader that knows its keys.
        """
        full_rows = [(*row[:-2], self._prefix + row[-2], row[-1]) for row in rows]
        record = CommitRecord(self._arena, self._prefix + name, self._run, {"rows": full_rows, **(further or {})})
        self._names.append(record.name)
        return record

    @property
    def memory(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """All of the arena's memory."""
        return self._arena.array(self._arena.min_address, dtype("uint8"), self._arena.capacity)

    @property
    def largest_free(self) -> int:
        """Bytes of the arena that are free in one piece."""
        return self._arena.largest_free

    def bytes_with(self, places: Sequence[int]) -> int:
        """Bytes of the vectors that contain one of these places in this process's memory."""
        return sum(self._arena.buffer(name).size for name in self._names if self._contains(name, places))

    def _contains(self, name: str, places: Sequence[int]) -> bool:
        buffer = self._arena.buffer(name)
        start = int(self.memory.__array_interface__["data"][0]) + buffer.address - self._arena.min_address
        return any(start <= one < start + buffer.size for one in places)

    def free(self, keep_suffix: str = "", keep_places: Sequence[int] = ()) -> None:
        """Free all vectors and records, except those whose name ends with ``keep_suffix``.

        ``keep_places``: vectors that contain one of these places in this process's memory stay, too.
        """
        kept = [
            name
            for name in self._names
            if (keep_suffix and name.endswith(keep_suffix)) or (keep_places and self._contains(name, keep_places))
        ]
        for name in self._names:
            if name not in kept:
                self._arena.free(name)
        self._names = kept


def bind_tensors(layout: StateLayout, state: Tensor) -> None:
    """Copy parameters and buffers into a vector, and make the modules' tensors views of it."""
    with torch.no_grad():
        for tensor, view in zip(layout.tensors, layout.views(state), strict=True):
            view.copy_(tensor)
            tensor.data = view


def release_tensors(blocks: Iterable[nn.Module]) -> None:
    """Give back the memory of the parameters and buffers that ``bind_tensors`` binds; their shapes and types stay.

    Their values are lost: for blocks that another rank computes, or whose state is loaded again.
    """
    for tensor in StateLayout(blocks).tensors:
        tensor.data = torch.zeros(1, dtype=tensor.dtype).expand(tensor.shape)


def shared_parameters(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return the pairs of blocks that share a parameter, and must therefore be in the same stage."""
    seen: dict[int, int] = {}
    pairs = []
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            first = seen.setdefault(id(parameter), index)
            if first != index:
                pairs.append((first, index))
    return pairs


ShardMetrics = tuple[float | Tensor, float, float]
"""Loss, number of correct answers and number of samples of a shard."""
NO_METRICS: ShardMetrics = (0.0, 0.0, 0.0)
NUM_TOTAL_BUFFERS = 16
"""Maximum number of total buffers. Each generation uses the next one, so a rank that was declared dead and still writes
cannot damage the buffer in use."""


@dataclass
class _Slot:
    """Views of one gradient slot."""

    gradients: list[Tensor]
    """Gradients of the parameters, one view each."""
    buffer_deltas: Array
    """Change of the buffers."""
    tail: Array
    """Tail and provenance of the slot."""


@dataclass(frozen=True)
class StageSpec:
    """Which blocks of the model a stage is, and how a rank that holds it trains them."""

    blocks: Sequence[nn.Module]
    first_block: int
    """Number of the first block in the model."""
    name: str
    """Prefix of the names of the stage's vectors in the arena."""
    updates: bool = True
    """True if the rank updates the weights; False if parameter servers do, and the rank has a copy."""
    chain: bool = True
    """True if the whole model is a chain of Linear and ReLU. It decides for all stages alike whether they are computed
    without autograd; otherwise the cut would change the bits."""


class StageState:
    """The state of one stage on one rank, and the ``Stage`` that computes it. ``PlanExecutor`` drives it.

        begin                       a step begins
        forward                     each micro-batch; the change of the buffers is saved and undone
        stage.backward, on_gradient each micro-batch: its gradient is written to a slot, complete tree nodes are merged
        on_total                    the all-reduce is done: ``total`` holds the sum over all shards and replicas
        apply_update                the optimizer updates the weights

    On a GPU ``ResidentStageState`` (``gpu_resident_state.py``) or ``GpuStageState`` (``gpu_stage.py``) takes its place,
    with a sharded update ``ShardedStageState`` (``sharded_update.py``).
    """

    resident = False
    """True if the state stays on a GPU, and ``ResidentRole`` runs the steps there."""

    total_start = 0
    """Index of the element of a gradient with which ``total`` begins: not the first with a sharded update."""

    def __init__(
        self,
        vectors: StateVectors,
        spec: StageSpec,
        settings: Settings,
        update_device: torch.device = CPU,
    ) -> None:
        """``update_device``: where updates are computed; on a GPU the vectors here are a copy of those there."""
        self.blocks = list(spec.blocks)
        self.first_block = spec.first_block
        self.layout = layout = StateLayout(spec.blocks, settings.num_microbatches)
        self._shards = settings.num_microbatches
        self.device_id = 0
        """Number of this rank's device, for the provenance of its shards."""
        self.provenance: Provenance | None = None
        """Records the provenance of each update, if set (``RankRole.attach_provenance``)."""
        name, updates = spec.name, spec.updates
        self._vectors, self._name = vectors, name
        self.state_array = vectors.new(f"{name}weights", layout.state)
        self.state = torch.from_numpy(self.state_array)
        bind_tensors(layout, self.state)
        self.trained = self.state[: layout.trained]
        self.moments = [
            torch.from_numpy(vectors.new(f"{name}moment{index}", layout.trained))
            for index in range(settings.optimizer.num_moments if updates else 0)
        ]
        self.total_buffer: Array = vectors.new(f"{name}total", layout.total if updates else 0)
        """Buffer into which the all-reduce writes the total."""
        self._rotations = 0
        self._older_totals: list[Array] = []
        """Total buffers of earlier generations, oldest first."""
        self.total: Array = self.total_buffer
        """Total of the step: ``total_buffer``, or a slot, if that already holds the sum over all shards."""
        self.update_device = update_device
        self.update: Update = reject_update
        """Function that updates the weights in the arena."""
        if updates and update_device.type == "cpu":
            self.update = make_update(settings.optimizer, self.trained, self.moments)
        elif updates:
            self.update = make_staged_update(settings.optimizer, self.trained, self.moments, update_device)
        self.stage, self.buckets = make_stage(spec.blocks, spec.first_block, layout, settings, spec.chain)
        self.slots: Array = np.empty((0, layout.total), np.float32)
        """Gradient slots, one a row."""
        self._slot_views: list[_Slot] = []
        self._slot_merges: dict[int, SlotMerge] = {}
        """Slot of the gradient of each micro-batch, with the slots to merge once it is written."""
        self._buffers_at_start = np.empty(0, np.float32)
        self._counters_at_start = [one.clone() for one in layout.counters]
        self._counter_increments: list[tuple[Tensor, Tensor]] = []
        """Number by which a step advances each counter; see ``set_counter_increments``."""
        self._buffer_deltas: dict[int, Array] = {}

    # ---- a step begins

    def allocate_slots(self, holding: MergePlan, min_slots: int = 0) -> None:
        """Allocate the gradient slots for the shards that this rank will compute; at least ``min_slots``.

        Slots keep their contents: after a loss, a rank computes more shards and keeps those that it has computed.
        """
        layout = self.layout
        slots = max(holding.slots, min_slots)
        if slots > len(self.slots):
            contents = self.slots.copy()
            flat = self._vectors.new(f"{self._name}slots", slots * layout.total, layout.element)
            self.slots = flat.reshape(slots, layout.total)
            self.slots[: len(contents)] = contents
            trained = len(layout.parameters)
            self._slot_views = []
            for row in self.slots:
                views = layout.views(torch.from_numpy(row))
                self._slot_views.append(_Slot(views[:trained], row[layout.trained : layout.state], row[layout.state :]))
        self._slot_merges = dict(zip(holding.order, holding.slot_merges, strict=True))

    def begin(self) -> None:
        """Begin a step: save the buffers and counters, from which the forward of each shard starts."""
        if self.layout.buffers:
            self._buffers_at_start = self.state_array[self.layout.trained :].copy()
        self._counters_at_start = [one.clone() for one in self.layout.counters]

    # ---- forward

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device that computes the stage."""
        return tensor

    def sync_device_weights(self) -> None:
        """Make the device that computes the stage compute with the current weights; on the CPU it always does."""

    def download(self) -> None:
        """Bring the state in the arena up to date, if a GPU has a newer one. Called before the arena is read."""

    def on_arena_change(self) -> None:
        """Called after a recovery or a checkpoint has overwritten the arena's state: a copy on a GPU is out of date."""

    def read_inputs(self, data: Dataset, samples: Indices, out: Batch) -> Tensor:
        """Return the inputs of these samples for ``evaluate``; ``out`` is memory for a batch in host memory."""
        return data.batch(samples, epoch=0, seed=0, out=out)[0]

    def read_targets(self, data: Dataset, samples: Indices, out: Batch) -> Tensor:
        """Return the targets of these samples, on the device of the outputs of ``evaluate``."""
        return data.batch(samples, epoch=0, seed=0, out=out)[1]

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Run a forward without a backward, after ``sync_device_weights``."""
        return self.stage.evaluate(inputs)

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        outputs = self.stage.forward(micro, inputs, seed)
        if self.layout.buffers or self.layout.counters:
            self._save_buffer_deltas(micro)
        return outputs

    def _save_buffer_deltas(self, micro: int) -> None:
        """Save the change of the buffers by this shard for its slot, and undo it for the next shard."""
        buffers = self.state_array[self.layout.trained :]
        self._buffer_deltas[micro] = buffers - self._buffers_at_start
        buffers[:] = self._buffers_at_start
        pairs = list(zip(self.layout.counters, self._counters_at_start, strict=True))
        self._counter_increments = [(one, one - start) for one, start in pairs if one.dtype != torch.bool]
        for one, start in pairs:
            one.copy_(start)

    # ---- gradients

    def gradient_views(self, micro: int) -> list[Tensor]:
        """Return the views in a slot to which the backward writes the gradient of a shard."""
        return self._slot_views[self._slot_merges[micro].slot].gradients

    def on_gradient(
        self, micro: int, metrics: ShardMetrics, shards: int, fingerprint: int = 0, merged: bool = False
    ) -> None:
        """The backward has written a shard's gradient: fill the rest of its slot, and merge complete tree nodes.

        ``shards``: micro-batches of the step that have samples. ``fingerprint``: of the shard's samples, 0 if another
        rank read them. ``merged``: the gradient was merged already, bucket by bucket (``GradientReducer.start``).
        """
        slot = self._slot_views[self._slot_merges[micro].slot]
        if self.layout.buffers:
            deltas = self._buffer_deltas.pop(micro, None)
            slot.buffer_deltas[:] = 0 if deltas is None else deltas / np.float32(shards)
        slot.tail[:] = 0
        slot.tail[LOSS], slot.tail[CORRECT], slot.tail[SAMPLES] = metrics
        if fingerprint:
            self._mark_provenance(slot, micro, fingerprint)
        self.merge(micro, self.buckets[-1] if merged else 0, self.layout.total)

    def _mark_provenance(self, slot: _Slot, micro: int, fingerprint: int) -> None:
        mark(slot.tail[TAIL:], micro % self._shards, self.device_id, fingerprint)

    def on_empty_shard(self, micro: int) -> None:
        """A shard has no samples: its slot is 0."""
        self.slots[self._slot_merges[micro].slot] = 0
        self.merge(micro, 0, self.layout.total)

    def merge(self, micro: int, low: int, high: int) -> None:
        """Merge the nodes of the reduction tree that this shard completes, for the elements ``[low, high)``."""
        for into, other in self._slot_merges[micro].merges:
            target = self.slots[into, low:high]
            np.add(target, self.slots[other, low:high], out=target)

    def report_speed(self, micro: int, rank: int, seconds: float, stop: bool, move: bool) -> None:
        """Write this rank's seconds per shard and its requests to stop or move into the tail of its last shard.

        The all-reduce of the gradients brings them to all ranks.
        """
        slot_merge = self._slot_merges[micro]
        slot = slot_merge.merges[-1][0] if slot_merge.merges else slot_merge.slot
        tail = self._slot_views[slot].tail
        tail[STOP], tail[MOVE] = float(stop), float(move)
        if rank < MAX_SPEEDS:
            tail[SPEED + rank] = seconds

    def rotate_total_buffer(self) -> None:
        """Switch to another total buffer: a rank declared dead may still write to the current one.

        Allocates a new buffer while there are fewer than ``NUM_TOTAL_BUFFERS`` and the arena has room, else reuses the
        oldest. The memory check counts two buffers.
        """
        self._older_totals.append(self.total_buffer)
        self._rotations += 1
        if self._rotations < NUM_TOTAL_BUFFERS:
            try:
                name = f"{self._name}total{self._rotations}"
                self.total_buffer = self._vectors.new(name, self.layout.total, self.layout.element)
            except OutOfMemory:
                self._rotations = NUM_TOTAL_BUFFERS
                if len(self._older_totals) == 1:
                    raise
        if self._rotations >= NUM_TOTAL_BUFFERS:
            self.total_buffer = self._older_totals.pop(0)
        self.total = self.total_buffer

    # ---- the total, and the update

    def select_total(self, slot: int | None) -> None:
        """Set where the total will be: in this slot, if the rank computes all shards; None: in ``total_buffer``."""
        self.total = self.total_buffer if slot is None else self.slots[slot]

    def host_total(self) -> Array:
        """Return the total's gradient and changes of the buffers, in the arena: for a replica at another rank."""
        return self.total[: self.layout.state]

    @property
    def tail(self) -> Array:
        """The tail of the total: metrics, requests and speeds, summed over all shards."""
        return self.total[self.layout.state - self.total_start :]

    def normalisation(self) -> float:
        """Return the factor for the total of the gradients: 1, because shards' gradients are scaled before the sum."""
        return 1.0

    def mean_loss(self, tail: Array) -> float:
        """Return the loss of a step from the tail of its total."""
        return float(tail[LOSS]) / float(tail[SAMPLES])

    def metrics(self) -> list[float]:
        """Return the values of the step's further metrics (``engine/custom``)."""
        return []

    def on_total(self, step: int, scale: float) -> None:
        """The total of ``step`` is complete: clip the gradient by ``scale``, and record the provenance."""
        if scale != 1.0:
            torch.from_numpy(self.total[: self.layout.trained]).mul_(scale)
        if self.provenance is not None:
            self.provenance.record(step, self.tail[TAIL:])

    def apply_update(self, rate: float, step: int) -> None:
        """Update the weights with the total; ``rate`` is the learning rate."""
        apply_update(self.update, self.state_array, self.layout.trained, self.total, rate, step)
        self.advance_counters()

    def advance_counters(self) -> None:
        """Add a shard's increment to the counters; every shard of a step has the same increment."""
        for one, added in self.counter_increments():
            one.add_(added)

    def set_counter_increments(self, increments: Sequence[Tensor]) -> None:
        """Set by how much a step advances each of the layout's counters.

        For a rank that computes no shard until its first update: a forward tells it otherwise.
        """
        pairs = zip(self.layout.counters, increments, strict=True)
        self._counter_increments = [(one, added) for one, added in pairs if one.dtype != torch.bool]

    def counter_increments(self) -> list[tuple[Tensor, Tensor]]:
        """Return the counters (batch norm's number of batches, for example) and their increments in this step."""
        return self._counter_increments

    def squared_norms(self) -> list[float]:
        """Return the squared norm of each parameter's gradient, in order. Their sum does not depend on the cut."""
        views = self.layout.views_trained(torch.from_numpy(self.total).to(self.update_device))
        return squared_norms(views).tolist()

    def close(self) -> None:
        """Release what is not in the arena."""


def squared_norms(views: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of each tensor, as float64. The bits depend on the kind of device."""
    if not views:
        return torch.zeros(0, dtype=torch.float64)
    if views[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(views))).double().square()
    return torch.tensor([float(torch.dot(one.reshape(-1), one.reshape(-1))) for one in views], dtype=torch.float64)


def reject_update(gradient: Tensor, rate: float, step: int) -> None:
    raise InternalError("a worker of parameter servers was asked for an update, which only servers make")


def make_stage(
    blocks: Sequence[nn.Module],
    first_block: int,
    layout: StateLayout,
    settings: Settings,
    chain: bool,
    device: torch.device = CPU,
) -> tuple[Stage, list[int]]:
    """Make the ``Stage`` that computes these blocks; also return the bounds of its buckets in a gradient."""
    layers = layers_of(blocks) if chain else None
    if layers is not None and settings.precision == "float32":
        return ChainStage(layers, settings.recompute), [0, layout.trained]
    segments, bounds = split_segments(blocks, layout, settings.bucket_bytes)
    precision = torch.bfloat16 if settings.precision == "bfloat16" else None
    stage = AutogradStage(
        segments, first_block, layout.parameters, recompute=settings.recompute, precision=precision, device=device
    )
    return stage, bounds


def split_segments(blocks: Sequence[nn.Module], layout: StateLayout, size: int) -> tuple[Segments, list[int]]:
    """Group consecutive blocks into segments with at least ``size`` bytes of gradients; also return their bounds.

    There is one segment if ``size`` is 0 or blocks share a parameter.
    """
    indices = {id(one): index for index, one in enumerate(layout.parameters)}
    ends = [0]
    groups: list[list[nn.Module]] = [[]]
    one_segment = bool(shared_parameters(blocks)) or not size
    for block in blocks:
        groups[-1].append(block)
        last = max((indices[id(one)] + 1 for one in block.parameters() if one.requires_grad), default=ends[-1])
        end = layout.offsets[last] if last < len(layout.parameters) else layout.trained
        begin = layout.offsets[ends[-1]] if ends[-1] < len(layout.parameters) else layout.trained
        if not one_segment and 4 * (end - begin) >= size and block is not blocks[-1]:
            ends.append(last)
            groups.append([])
    ends.append(len(layout.parameters))
    bounds = [layout.offsets[end] if end < len(layout.parameters) else layout.trained for end in ends]
    counts = [high - low for low, high in itertools.pairwise(ends)]
    return list(zip(groups, counts, strict=True)), bounds
