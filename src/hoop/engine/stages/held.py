"""A stage as a rank holds it: weights, gradients, totals and optimizer state in the arena, and what computes it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.collectives.shards import Holding, Landing
from hoop.engine.settings import Settings
from hoop.engine.stages.chain import ChainStage, layers_of
from hoop.engine.stages.evidence import Evidence, claim
from hoop.engine.stages.optimizer import Update, go_on, updating
from hoop.engine.stages.stage import CPU, AutogradStage, Segments, Stage
from hoop.engine.stages.weights import (
    HITS,
    LOSS,
    MOST_SPEEDS,
    MOVE,
    SAMPLES,
    SPEED,
    STOP,
    TAIL,
    Layout,
    Vectors,
    adopt,
    shared_parameters,
)
from hoop.errors import InternalError

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


class Held:
    """A stage's state on one rank."""

    def __init__(
        self,
        vectors: Vectors,
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
        self.layout = layout = Layout(blocks, settings.micros)
        self._shards = settings.micros
        self.device = 0
        """Who computes here, in what a shard says of itself."""
        self.evidence: Evidence | None = None
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
        self._landings: dict[int, Landing] = {}
        self._before = np.empty(0, np.float32)
        self._counters = [one.clone() for one in layout.counters]
        self._counted: list[tuple[Tensor, Tensor]] = []
        self._moved: dict[int, Array] = {}

    # ---- gradients

    def arrange(self, holding: Holding, room: int = 0) -> None:
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
            claim(part.tail[TAIL:], micro % self._shards, self.device, fed)
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
    layout: Layout,
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


def segmented(blocks: Sequence[nn.Module], layout: Layout, size: int) -> tuple[Segments, list[int]]:
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
