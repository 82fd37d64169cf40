"""A stage's state as flat vectors in the device's arena, with the modules' tensors as views of them.

    | parameters, each at a multiple of 16 elements | float buffers | tail | evidence |     (a gradient slot's shape)

A gradient slot holds one shard's gradient, in the buffers' part what the shard did to them (a batch norm's running mean
moved by so much), in the tail what it measured (loss, hits, seconds), then what it was made of (``evidence``). All of
it is summed by the same operation, so the buffers and the figures do not depend on who computed which shard either.

Vectors are padded to a multiple of 64 elements: then no elementwise kernel has a remainder that a scalar loop would
round differently, and a stage's update gives the same bits as the whole model's.

A stage as a rank holds it: weights, gradients, totals and optimizer state in the arena, and what computes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import MergePlan, SlotMerge
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import CPU, AutogradStage, Segments, Stage
from hoop.engine.stage.linear_chain import ChainStage, layers_of
from hoop.engine.stage.optimizer import Update, go_on, updating
from hoop.engine.stage.provenance import PLACES, Provenance, mark
from hoop.errors import InternalError, InvalidArgument
from hoop.memory import Arena
from hoop.memory.commit_record import CommitRecord
from hoop.memory.dtypes import dtype

ALIGN = 16
PAD = 64
TAIL = 64
LOSS, HITS, SAMPLES, STOP, MOVE = range(5)
"""Places in the tail; from ``SPEED`` on, each rank's seconds a shard."""
SPEED = 5
MOST_SPEEDS = TAIL - SPEED
FLOAT32 = dtype("float32")
StateRow = tuple[str, int, int, int, str, int]
"""A piece of a state and where it lies: its name, first element, elements and bytes; the vector, and the byte in it."""


def _padded(count: int, to: int) -> int:
    return -(-count // to) * to


class StateLayout:
    """Where each tensor of some blocks lies in a vector."""

    def __init__(self, blocks: Iterable[nn.Module], shards: int = 0) -> None:
        """``shards``: so many may be in a gradient, and have places for evidence."""
        module = nn.ModuleList(blocks)
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.frozen = [one for one in module.parameters() if not one.requires_grad]
        buffers = list(module.buffers())
        self.buffers = [one for one in buffers if one.is_floating_point()]
        self.counters = [one for one in buffers if not one.is_floating_point()]
        for one in [*self.parameters, *self.buffers]:
            if one.dtype != torch.float32:
                raise InvalidArgument(
                    f"model: a tensor of {one.dtype}; Hoop trains float32 (call model.float())"
                )
        self.places: list[int] = []
        end = 0
        for one in self.parameters:
            self.places.append(end)
            end += _padded(one.numel(), ALIGN)
        self.trained = _padded(end, PAD)
        """Elements of the part that the optimizer updates."""
        end = self.trained
        for one in self.buffers:
            self.places.append(end)
            end += _padded(one.numel(), ALIGN)
        self.state = _padded(end, PAD)
        """Elements of parameters and buffers."""
        self.total = self.state + TAIL + _padded(PLACES * shards, PAD)
        """Elements of a gradient slot."""

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parameters, *self.buffers]

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector's parts, in the shapes of the tensors."""
        return [
            vector[place : place + one.numel()].view(one.shape)
            for place, one in zip(self.places, self.tensors, strict=True)
        ]

    def views_trained(self, vector: Tensor) -> list[Tensor]:
        """A vector of the trained part alone, in the shapes of the parameters."""
        return [
            vector[place : place + one.numel()].view(one.shape)
            for place, one in zip(self.places, self.parameters, strict=False)
        ]


class StateVectors:
    """Named float32 vectors in an arena, freed together."""

    def __init__(self, arena: Arena, prefix: str, run: str = "") -> None:
        """``run``: whose they are, for who is restarted on the arena."""
        self._arena, self._prefix, self._run = arena, prefix, run
        self._names: list[str] = []

    def new(self, name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """A vector of zeros; one of that name that was made here before is gone."""
        full = f"{self._prefix}{name}"
        if full in self._names and self._arena.buffer(full).size != max(count, 1) * 4:
            self._arena.free(full)  # it is to have another size
            self._names.remove(full)
        if full in self._names:
            self._names.remove(full)
            self._arena.free(full)
        buffer = self._arena.allocate(full, max(count, 1) * 4, reuse=True)
        self._names.append(full)
        array = self._arena.array(buffer.address, FLOAT32, count)
        array[:] = 0
        return array

    def beside(self, prefix: str) -> StateVectors:
        """Others in the same arena, whose names go on like this."""
        return StateVectors(self._arena, self._prefix + prefix, self._run)

    def claim(self, name: str, rows: Iterable[StateRow]) -> CommitRecord:
        """Says of bytes of vectors here, should the device be restarted, which step of the run they hold."""
        told = [(*row[:-2], self._prefix + row[-2], row[-1]) for row in rows]
        mark = CommitRecord(self._arena, self._prefix + name, self._run, {"rows": told})
        self._names.append(mark.name)
        return mark

    def free(self, but: str = "") -> None:
        """All of them, but for those whose name ends so."""
        left = [name for name in self._names if but and name.endswith(but)]
        for name in self._names:
            if name not in left:
                self._arena.free(name)
        self._names = left


def adopt(layout: StateLayout, state: Tensor) -> None:
    """Moves parameters and buffers into the vector; the modules' tensors are views of it from then on."""
    with torch.no_grad():
        for tensor, view in zip(layout.tensors, layout.views(state), strict=True):
            view.copy_(tensor)
            tensor.data = view


def shared_parameters(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Pairs of blocks that share a parameter: no cut may come between them."""
    seen: dict[int, int] = {}
    pairs = []
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            first = seen.setdefault(id(parameter), index)
            if first != index:
                pairs.append((first, index))
    return pairs


Figures = tuple[float | Tensor, float, float]
"""A shard's loss, hits and samples."""
NOTHING: Figures = (0.0, 0.0, 0.0)
ROOMS = 16
"""Places for totals, taken in turn: one who was thought dead writes to an old one until it hears that it is out."""


@dataclass
class _Slot:
    """One gradient slot, in parts."""

    gradients: list[Tensor]
    moved: Array
    """What the shard did to the buffers."""
    tail: Array


class StageState:
    """A stage's state on one rank."""

    def __init__(
        self,
        vectors: StateVectors,
        blocks: Sequence[nn.Module],
        first_block: int,
        settings: Settings,
        name: str,
        updates: bool = True,
        chain: bool = True,
    ) -> None:
        """``updates``: weights are updated here, and not by servers that keep the optimizer's state.

        ``chain``: the whole model is one of Linear and ReLU. All stages are computed in the same way as the whole would
        be, or a cut would change the result.
        """
        self.blocks = list(blocks)
        self.first_block = first_block
        self.layout = layout = StateLayout(blocks, settings.micros)
        self._shards = settings.micros
        self.device = 0
        """Who computes here, in what a shard says of itself."""
        self.evidence: Provenance | None = None
        """Who wants to know what each update was made of."""
        self._vectors, self._name = vectors, name
        self.state_array = vectors.new(f"{name}weights", layout.state)
        self.state = torch.from_numpy(self.state_array)
        adopt(layout, self.state)
        self.trained = self.state[: layout.trained]
        self.moments = [
            torch.from_numpy(vectors.new(f"{name}moment{index}", layout.trained))
            for index in range(settings.optimizer.slots if updates else 0)
        ]
        self.room: Array = vectors.new(f"{name}total", layout.total if updates else 0)
        """Where a total is put."""
        self._rooms = 0
        self.total: Array = self.room
        """Where it is: here, or in the one slot that is the total already."""
        self.update: Update = (
            updating(settings.optimizer, self.trained, self.moments) if updates else not_here
        )
        self.stage, self.buckets = computing(blocks, first_block, layout, settings, chain)
        self.slots: Array = np.empty((0, layout.total), np.float32)
        self._parts: list[_Slot] = []
        self._landings: dict[int, SlotMerge] = {}
        self._before = np.empty(0, np.float32)
        self._counters = [one.clone() for one in layout.counters]
        self._counted: list[tuple[Tensor, Tensor]] = []
        self._moved: dict[int, Array] = {}

    # ---- gradients

    def arrange(self, holding: MergePlan, room: int = 0) -> None:
        """Makes room for the gradients of the shards that this rank will compute, or for ``room`` if that is more.

        What is in slots already stays: after a loss a rank has more to compute, and keeps what it has.
        """
        layout = self.layout
        slots = max(holding.slots, room)
        if slots > len(self.slots):
            held = self.slots.copy()
            flat = self._vectors.new(f"{self._name}slots", slots * layout.total)
            self.slots = flat.reshape(slots, layout.total)
            self.slots[: len(held)] = held
            trained = len(layout.parameters)
            self._parts = []
            for row in self.slots:
                views = layout.views(torch.from_numpy(row))
                self._parts.append(
                    _Slot(
                        views[:trained],
                        row[layout.trained : layout.state],
                        row[layout.state :],
                    )
                )
        self._landings = dict(zip(holding.order, holding.landings, strict=True))

    def begin(self) -> None:
        """A step begins: what the buffers are now is what every shard starts from."""
        if self.layout.buffers:
            self._before = self.state_array[self.layout.trained :].copy()
        self._counters = [one.clone() for one in self.layout.counters]

    def near(self, tensor: Tensor) -> Tensor:
        """Where the stage is computed."""
        return tensor

    def refresh(self) -> None:
        """What computes the stage has the weights as they are in the arena; here it has no others."""

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Forward without a backward to come; after ``refresh``."""
        return self.stage.evaluate(inputs)

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        outputs = self.stage.forward(micro, inputs, seed)
        if self.layout.buffers or self.layout.counters:
            self._set_aside(micro)
        return outputs

    def _set_aside(self, micro: int) -> None:
        """What this shard did to the buffers is kept for its slot, and undone for the next one."""
        now = self.state_array[self.layout.trained :]
        self._moved[micro] = now - self._before
        now[:] = self._before
        pairs = list(zip(self.layout.counters, self._counters, strict=True))
        self._counted = [(one, one - before) for one, before in pairs if one.dtype != torch.bool]
        for one, before in pairs:
            one.copy_(before)

    def into(self, micro: int) -> list[Tensor]:
        """Where the gradient of a shard's parameters is written."""
        return self._parts[self._landings[micro].slot].gradients

    def landed(self, micro: int, figures: Figures, shards: int, fed: int = 0, merged: bool = False) -> None:
        """A shard's gradient is in its slot: the rest of the slot is filled, and whole nodes merge.

        ``fed``: the print of the samples, where they were read here. ``merged``: those of the gradient have merged
        already, bucket by bucket.
        """
        landing = self._landings[micro]
        part = self._parts[landing.slot]
        if self.layout.buffers:
            moved = self._moved.pop(micro, None)
            part.moved[:] = 0 if moved is None else moved / np.float32(shards)
        part.tail[:] = 0
        part.tail[LOSS], part.tail[HITS], part.tail[SAMPLES] = figures
        if fed:
            mark(part.tail[TAIL:], micro % self._shards, self.device, fed)
        self.merge(micro, self.buckets[-1] if merged else 0, self.layout.total)

    def skipped(self, micro: int) -> None:
        """A shard without samples: zeros."""
        landing = self._landings[micro]
        self.slots[landing.slot] = 0
        self.merge(micro, 0, self.layout.total)

    def merge(self, micro: int, low: int, high: int) -> None:
        """Adds up the nodes of the tree that this shard completes, in a range of the vector."""
        for into, other in self._landings[micro].merges:
            target = self.slots[into, low:high]
            np.add(target, self.slots[other, low:high], out=target)

    def tell(self, micro: int, rank: int, seconds: float, stop: bool, move: bool) -> None:
        """This rank's seconds a shard, and whether it asks to stop, or to move; the sum tells everybody.

        Written where its last shard landed.
        """
        landing = self._landings[micro]
        slot = landing.merges[-1][0] if landing.merges else landing.slot
        tail = self._parts[slot].tail
        tail[STOP], tail[MOVE] = float(stop), float(move)
        if rank < MOST_SPEEDS:
            tail[SPEED + rank] = seconds

    def another_room(self) -> None:
        """Totals go elsewhere from now on: one who was thought dead may still write to where they went before."""
        self._rooms += 1
        self.room = self._vectors.new(f"{self._name}total{self._rooms % ROOMS}", self.layout.total)
        self.total = self.room

    # ---- the end of a step

    @property
    def tail(self) -> Array:
        """What the shards measured, summed."""
        return self.total[self.layout.state :]

    def summed(self, step: int, scale: float) -> None:
        """The total is there; ``scale`` cuts the gradient's norm."""
        if scale != 1.0:
            torch.from_numpy(self.total[: self.layout.trained]).mul_(scale)
        if self.evidence is not None:
            self.evidence.note(step, self.tail[TAIL:])

    def finish(self, rate: float, step: int) -> None:
        """The update, from the total."""
        go_on(self.update, self.state_array, self.layout.trained, self.total, rate, step)
        self.count()

    def count(self) -> None:
        """Counters go on by what a shard added to them; every shard of a step adds the same."""
        for one, added in self.counted():
            one.add_(added)

    def counted(self) -> list[tuple[Tensor, Tensor]]:
        """Counters, and by how much they go on."""
        return self._counted

    def squares(self) -> list[float]:
        """The squared norm of each parameter's gradient, in order: sums of these do not depend on the cut."""
        views = self.layout.views(torch.from_numpy(self.total))[: len(self.layout.parameters)]
        return [float(torch.dot(view.reshape(-1), view.reshape(-1))) for view in views]


def not_here(gradient: Tensor, rate: float, step: int) -> None:
    raise InternalError("an update where the weights are a copy: the servers make it")


def computing(
    blocks: Sequence[nn.Module],
    first_block: int,
    layout: StateLayout,
    settings: Settings,
    chain: bool,
    device: torch.device = CPU,
) -> tuple[Stage, list[int]]:
    """What computes the blocks, and where its buckets begin and end in the vector."""
    layers = layers_of(blocks) if chain else None
    if layers is not None and settings.precision == "float32":
        return ChainStage(layers, settings.recompute), [0, layout.trained]
    segments, bounds = segmented(blocks, layout, settings.bucket_bytes)
    precision = torch.bfloat16 if settings.precision == "bfloat16" else None
    stage = AutogradStage(
        segments,
        first_block,
        layout.parameters,
        recompute=settings.recompute,
        precision=precision,
        device=device,
    )
    return stage, bounds


def segmented(blocks: Sequence[nn.Module], layout: StateLayout, size: int) -> tuple[Segments, list[int]]:
    """Consecutive blocks in segments of at least ``size`` bytes of gradients, and where those begin and end.

    Blocks that share a parameter stay together; 0: everything does.
    """
    known = {id(one): index for index, one in enumerate(layout.parameters)}
    ends = [0]
    groups: list[list[nn.Module]] = [[]]
    together = bool(shared_parameters(blocks)) or not size
    for block in blocks:
        groups[-1].append(block)
        last = max((known[id(one)] + 1 for one in block.parameters() if one.requires_grad), default=ends[-1])
        end = layout.places[last] if last < len(layout.parameters) else layout.trained
        begin = layout.places[ends[-1]] if ends[-1] < len(layout.parameters) else layout.trained
        if not together and 4 * (end - begin) >= size and block is not blocks[-1]:
            ends.append(last)
            groups.append([])
    ends.append(len(layout.parameters))
    bounds = [layout.places[end] if end < len(layout.parameters) else layout.trained for end in ends]
    counts = [high - low for low, high in itertools.pairwise(ends)]
    return list(zip(groups, counts, strict=True)), bounds
