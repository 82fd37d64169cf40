"""A stage that is computed on a GPU: its state stays in the arena, and a twin of its blocks has a copy up there.

    arena   weights ──(1)──▶ GPU   weights of the twin           (1) a step begins: one copy, from pinned memory
                                   forward, backward             (2) a row a gradient slot, as in the arena; rows that
                                   rows ◀─(2)                        are complete halves of a node are added up there
    arena   slots ◀──(3)──── GPU   a node's row                  (3) once the rank's shards of a node are in: one copy

So collectives, updates, recovery and checkpoints find in the arena what they find without a GPU. A step moves the
weights up once and a gradient down once for each node that the rank holds (one, where its shards lie in a row),
however many shards it computes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.shards import Holding, Landing
from hoop.engine.settings import Settings
from hoop.engine.stages.accelerator import Accelerator
from hoop.engine.stages.captured import CapturedStage, Row, capturable
from hoop.engine.stages.evidence import claim
from hoop.engine.stages.held import NOTHING, Figures, Held, computing
from hoop.engine.stages.stage import AutogradStage
from hoop.engine.stages.weights import HITS, LOSS, SAMPLES, TAIL, Layout, Vectors, adopt
from hoop.plan.instructions import Kind
from hoop.plan.plan import Plan


class Mirrored(Held):
    """A stage's state on one rank, with a copy on its GPU."""

    def __init__(
        self,
        accelerator: Accelerator,
        captures: bool,
        vectors: Vectors,
        blocks: Sequence[nn.Module],
        first_block: int,
        settings: Settings,
        name: str,
        updates: bool,
        chain: bool,
    ) -> None:
        """``captures``: forward and backward may be recorded once and played back."""
        twins = copy.deepcopy(nn.ModuleList(blocks)).to(accelerator.device)
        settings = dataclasses.replace(settings, bucket_bytes=0)  # what comes down comes in one piece
        super().__init__(vectors, blocks, first_block, settings, name, updates, chain)
        self._accelerator, device = accelerator, accelerator.device
        self._channels_last = settings.channels_last
        self._modules = list(zip(nn.ModuleList(blocks).modules(), twins.modules(), strict=True))
        twin = Layout(twins)
        self._copy = torch.zeros(twin.state, device=device)
        adopt(twin, self._copy)
        self._shifting = self._copy[twin.trained :]
        """The buffers' part."""
        self._start = self._shifting.clone()
        self._shifts: dict[int, Tensor] = {}
        self._counts, self._counts_start, self._counts_added = _counted(twin, device)
        self.stage, _ = computing(list(twins), first_block, twin, settings, chain, device)
        if captures and isinstance(self.stage, AutogradStage) and accelerator.cuda and capturable(twins):
            rows = -(-settings.batch_size // settings.micros)
            self.stage = CapturedStage(self.stage, twins, rows, first_block > 0, self._new_row)
        self._frozen = list(zip(self.layout.frozen, twin.frozen, strict=True))
        """What changes when a checkpoint is read, before the first step, and never again."""
        self._up, self._down = accelerator.staging(twin.state), accelerator.staging(twin.state)
        self._rows: list[Tensor] = []
        self._into: list[Row] = []
        self._pending: list[tuple[int, int, Figures]] = []
        """Shards that came up, the prints of their samples, and what they measured."""
        self._above: set[int] = set()
        """Slots whose rows have not come down."""
        self._complete: set[int] = set()
        """Shards after which a node is as complete as this rank makes it."""

    def _new_row(self) -> Row:
        """Room for a gradient, and for what happens to the buffers."""
        whole = torch.zeros(self.layout.state, device=self._accelerator.device)
        return Row(whole, self.layout.views(whole)[: len(self.layout.parameters)], self.layout.trained)

    # ---- up

    def near(self, tensor: Tensor) -> Tensor:
        return self._accelerator.up(tensor)

    def refresh(self) -> None:
        """(1)"""
        self._accelerator.wait()  # the last copy may be under way
        np.copyto(self._up.numpy(), self.state_array)
        self._copy.copy_(self._up, non_blocking=True)
        if len(self._counts):
            counts = torch.cat([one.reshape(-1) for one in _counters(self.layout)])
            self._counts.copy_(counts, non_blocking=True)
        while self._frozen:
            own, twin = self._frozen.pop()
            twin.data.copy_(own.data)
        for module, other in self._modules:
            other.training = module.training

    def begin(self) -> None:
        super().begin()
        self.refresh()
        self._start.copy_(self._shifting)
        self._counts_start.copy_(self._counts)

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self.stage.evaluate(self._laid_out(inputs)).cpu()

    # ---- gradients

    def arrange(self, holding: Holding, room: int = 0) -> None:
        for slot in sorted(self._above):
            self._bring_down(slot)
        super().arrange(holding, room)
        if len(self.slots) > len(self._rows):
            self._into = [self._new_row() for _ in self.slots]
            self._rows = [row.whole for row in self._into]
        self._complete = _complete(holding)

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        return super().forward(micro, self._laid_out(inputs), seed)

    def _laid_out(self, inputs: Tensor) -> Tensor:
        inputs = self.near(inputs)
        turned = self._channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if turned else inputs

    def _set_aside(self, micro: int) -> None:
        self._shifts[micro] = self._shifting - self._start
        self._shifting.copy_(self._start)
        torch.sub(self._counts, self._counts_start, out=self._counts_added)
        self._counts.copy_(self._counts_start)

    def into(self, micro: int) -> Row:
        return self._into[self._landings[micro].slot]

    def landed(self, micro: int, figures: Figures, shards: int, fed: int = 0, merged: bool = False) -> None:
        shift = self._shifts.pop(micro, None)
        if shift is not None:
            row = self._rows[self._landings[micro].slot]
            torch.div(shift, shards, out=row[self.layout.trained :])
        self._land(micro, figures, fed)

    def skipped(self, micro: int) -> None:
        self._rows[self._landings[micro].slot].zero_()
        self._land(micro, NOTHING)

    def _land(self, micro: int, figures: Figures, fed: int = 0) -> None:
        """(2)"""
        landing = self._landings[micro]
        for into, other in landing.merges:
            self._rows[into].add_(self._rows[other])
            self._above.discard(other)
        self._pending.append((micro, fed, figures))
        slot = _outcome(landing)
        self._above = (self._above - {landing.slot}) | {slot}
        if micro in self._complete:
            self._bring_down(slot)

    def _bring_down(self, slot: int) -> None:
        """(3); with it, what the shards have measured, which lies in the arena alone."""
        self._down.copy_(self._rows[slot], non_blocking=True)
        measured = _numbers([figures[0] for _, _, figures in self._pending])
        self._accelerator.wait()
        np.copyto(self.slots[slot, : self.layout.state], self._down.numpy())
        self._above.discard(slot)
        tails = self.slots[:, self.layout.state :]
        for (micro, fed, (_, hits, samples)), loss in zip(self._pending, measured, strict=True):
            landing = self._landings[micro]
            tail = tails[landing.slot]
            tail[:] = 0
            tail[LOSS], tail[HITS], tail[SAMPLES] = loss, hits, samples
            if fed:
                claim(tail[TAIL:], micro % self._shards, self.device, fed)
            for into, other in landing.merges:
                tails[into] += tails[other]
        self._pending.clear()

    def counted(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(_counters(self.layout), self._counts_added.cpu(), strict=True))


def _counters(layout: Layout) -> list[Tensor]:
    """Batch norm's counters of batches; other buffers of whole numbers (masks) do not change."""
    return [one for one in layout.counters if one.dtype == torch.int64 and one.numel() == 1]


def _counted(twin: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The twin's counters as one vector, what they were when the step began, and what a shard added."""
    places = _counters(twin)
    counts, start, added = torch.zeros(3, len(places), dtype=torch.int64, device=device)
    for index, one in enumerate(places):
        one.data = counts[index : index + 1].view(one.shape)
    return counts, start, added


def _numbers(losses: Sequence[float | Tensor]) -> list[float]:
    """All of them by one copy."""
    there = [one.reshape(()) for one in losses if isinstance(one, Tensor)]
    here = iter(torch.stack(there).tolist() if there else [])
    return [next(here) if isinstance(one, Tensor) else one for one in losses]


def _outcome(landing: Landing) -> int:
    """The slot that a landing leaves its node in."""
    return landing.merges[-1][0] if landing.merges else landing.slot


def _complete(holding: Holding) -> set[int]:
    """Shards whose node nothing that lands later is added to, or adds itself to."""
    found = set()
    for index, (micro, landing) in enumerate(zip(holding.order, holding.landings, strict=True)):
        slot = _outcome(landing)
        for later in holding.landings[index + 1 :]:
            if any(slot in pair for pair in later.merges):
                break
            if later.slot == slot:
                found.add(micro)
                break
        else:
            found.add(micro)
    return found


def holder(accelerator: Accelerator | None, plan: Plan, settings: Settings) -> Callable[..., Held]:
    """What makes a stage, where it is computed: called as ``Held`` is."""
    if accelerator is None:
        return Held
    halves = any(one.kind is Kind.BACKWARD_INPUT for rank in plan.ranks for one in rank)
    return partial(Mirrored, accelerator, settings.graphs and not halves)
