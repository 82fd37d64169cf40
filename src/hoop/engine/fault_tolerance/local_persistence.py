"""What the last steps came to, in the arena: should all devices die at once, what none had told yet is not lost.

| step | loss (a float64 in two elements) | what the update was made of (``evidence``) |      a row a step, in turn;
                                                                                           the step is written last

What a device that is restarted on its arena finds there of the run it took part in, and what of it can be believed.

    claims      the mirrors of the last two steps, or a replica's state as it lies: of the step that the claim names
    snapshots   checkpoints' parts, by their own checksums; the only ones that are believed after a reboot too

All of it is copied out, and the arena's buffers are freed: what is trained from now on needs the room.

Data parallel: the one state that a device has is changed where it lies, and a kill may come in the middle.

    claim: no step ── update: weights, optimizer state ── buffers and counters copied ── claim: this step

Weights and optimizer state change in an update alone. Buffers and counters change in every forward (and are put back),
so what they are after the step is copied beside. Two words a step are written for it, and no checksum: what is between
them is torn, and known to be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoop.engine.fault_tolerance.checkpoint import MOMENT, RUN, SNAPSHOT, unpacked
from hoop.engine.fault_tolerance.state_slices import LiveSlice, StateShard, described, part_of, rows, size_of
from hoop.engine.job import names_of
from hoop.engine.setup import TrainingSetup
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import FLOAT32, LOSS, SAMPLES, StateRow, StateVectors
from hoop.errors import FailedPrecondition
from hoop.memory import Arena, ArenaBuffer
from hoop.memory.commit_record import NO_STEP, SUFFIX, CommitRecord, commit_records
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.recovery import NO_STATE, SliceSpec

KEPT = 256
"""Steps that are remembered: more than are done between two times that they are told, four times a second."""
_NAME = "diary"
_BEFORE = 3
"""Elements of a row before the evidence."""


class StepLog:
    """The rows that one rank writes: where it knows the losses."""

    def __init__(self, vectors: StateVectors, evidence: Provenance) -> None:
        self._evidence = evidence
        claim = vectors.claim(_NAME, ())
        self._rows = vectors.new(_NAME, KEPT * (_BEFORE + evidence.places)).reshape(KEPT, -1)
        claim.step = 0

    def note(self, done: int, losses: Sequence[float]) -> None:
        """The last of so many steps, before anything says that they are done."""
        for step, loss in enumerate(losses, start=done - len(losses) + 1):
            row = self._rows[step % KEPT]
            row[0] = 0
            row[1:_BEFORE] = np.array([loss]).view(np.float32)
            row[_BEFORE:] = self._evidence.row(step - 1)
            row[0] = step


def remembered(arena: Arena, prefix: str, run: str) -> dict[int, list[float]]:
    """What the device that had this memory before wrote down of this run."""
    found: dict[int, list[float]] = {}
    buffers = {one.name: one for one in arena.buffers()}
    for name, _, _ in commit_records(arena, prefix, run):
        buffer = buffers.get(name.removesuffix(SUFFIX))
        if name.endswith(_NAME + SUFFIX) and buffer is not None:
            rows = arena.array(buffer.address, FLOAT32, buffer.size // 4).reshape(KEPT, -1)
            for row in rows[rows[:, 0] > 0]:
                loss = row[1:_BEFORE].view(np.float64)
                found[int(row[0])] = [*loss.tolist(), *row[_BEFORE:].tolist()]
    return found


def load_from_arena(arena: Arena, prefix: str, run: str) -> list[StateShard]:
    """The parts of this run's state that were whole, the newest first; buffers of these names are gone then."""
    buffers = {one.name: one for one in arena.buffers() if one.name.startswith(prefix)}
    found = [_copied(arena, buffers, step, about) for _, step, about in commit_records(arena, prefix, run)]
    found += [
        _sealed(arena, one, run) for name, one in buffers.items() if name[len(prefix) :].startswith(SNAPSHOT)
    ]
    for name in buffers:
        arena.free(name)
    parts = [one for one in found if one is not None and one.pieces]
    return sorted(parts, key=lambda one: one.step, reverse=True)


def _copied(
    arena: Arena, buffers: Mapping[str, ArenaBuffer], step: int, about: Mapping[str, Any]
) -> StateShard | None:
    rows = about["rows"]
    pieces = [SliceSpec(*row[:4]) for row in rows]
    part = StateShard(pieces, np.empty(size_of(pieces), np.uint8), step)
    for piece, (*_, name, offset) in zip(pieces, rows, strict=True):
        if name not in buffers or offset + piece.bytes > buffers[name].size:
            return None
        part[piece][:] = np.frombuffer(arena.view(buffers[name].address + offset, piece.bytes), np.uint8)
    return part


def _sealed(arena: Arena, buffer: ArenaBuffer, run: str) -> StateShard | None:
    try:
        tensors, metadata = unpacked(arena.read(buffer.address, buffer.size), buffer.name)
    except FailedPrecondition:
        return None
    return part_of(tensors, int(metadata["steps"])) if run and metadata.get(RUN) == run else None


def filled(
    wanted: Mapping[str, Tensor], part: StateShard, made: Collection[str] = ()
) -> dict[str, Tensor] | None:
    """These tensors as they are in a part, or None where it has not all of them, or others.

    ``made``: those that stay as they are where it has none.
    """
    known = {one.name: one for one in part.pieces if not one.low}
    found = {}
    for name, like in wanted.items():
        piece = known.get(name)
        if piece is None and name in made:
            found[name] = like
            continue
        if piece is None or (piece.elements, piece.bytes) != (
            like.numel(),
            like.numel() * like.element_size(),
        ):
            return None
        found[name] = torch.from_numpy(part[piece]).view(like.dtype).view(like.shape)
    return found


def newest_state(
    wanted: Mapping[str, Tensor], parts: Sequence[StateShard], made: Collection[str] = ()
) -> tuple[int, dict[str, Tensor]] | None:
    """Of parts in their order, the first that has all of these."""
    tensors = ((one.step, filled(wanted, one, made)) for one in parts)
    return next(((step, one) for step, one in tensors if one is not None), None)


_STAGE = "stage0."


class InPlaceState:
    """A replica's state, as its arena tells of it."""

    def __init__(
        self,
        ready: TrainingSetup,
        vectors: StateVectors,
        left: Sequence[StateShard],
        resumed: bool,
        outlives: bool,
    ) -> None:
        """``left``: what the device found in its arena, the newest first; ``resumed``: from a checkpoint.

        ``outlives``: the arena is there for who is restarted on it; otherwise nothing is written for them. What is not
        trained is as the model is made, and needs no copy; but for a run that was resumed.
        """
        self._ready, self.worker, self._left = ready, ready.worker, left
        self._claim: CommitRecord | None = None
        held, names = ready.worker.held[0], names_of(ready.model)
        layout = held.layout
        frozen = [LiveSlice(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in layout.frozen]
        self._made = {one.name for one in frozen}
        if not outlives:
            return
        told: list[StateRow] = []
        for place, one in zip(layout.places, layout.parameters, strict=False):
            name, size, start = names[id(one)], one.numel(), 4 * place
            told.append((name, 0, size, 4 * size, f"{_STAGE}weights", start))
            for index in range(len(held.moments)):
                moment = f"{MOMENT}{index}.{name}"
                told.append((moment, 0, size, 4 * size, f"{_STAGE}moment{index}", start))
        trained = len(layout.parameters)
        for place, buffer in zip(layout.places[trained:], layout.buffers, strict=True):
            start, size = 4 * (place - layout.trained), buffer.numel()
            told.append((names[id(buffer)], 0, size, 4 * size, "buffers", start))
        self._buffers = vectors.new("buffers", layout.state - layout.trained)
        self._moving = [LiveSlice(names[id(one)], 0, one.view(-1)) for one in layout.counters]
        known = {piece.name for part in left for piece in part.pieces}
        self._frozen = [one for one in frozen if resumed or one.name in known]
        self._counters = _room(vectors, "counters", self._moving)
        self._fixed = _room(vectors, "fixed", self._frozen)
        told += rows(self._counters.pieces, "counters") + rows(self._fixed.pieces, "fixed")
        self._claim = vectors.claim("state", told)
        self._diary = StepLog(vectors, ready.role.evidence)
        self._update = self.worker._handlers[InstructionKind.UPDATE]
        self.worker.handle({InstructionKind.UPDATE: self._claimed})

    def _claimed(self, instruction: Instruction) -> None:
        self.torn()
        self._update(instruction)
        tail = self.worker.held[0].tail
        self._diary.note(self.worker.updated, [float(tail[LOSS]) / float(tail[SAMPLES])])
        self.whole(self.worker.updated)

    def torn(self) -> None:
        """From now on it is of no step."""
        if self._claim is not None:
            self._claim.step = NO_STEP

    def whole(self, step: int) -> int:
        """What is there is the state after so many steps."""
        if self._claim is None:
            return step
        self.torn()
        held = self.worker.held[0]
        if self._fixed.step == NO_STEP:
            self._fixed.take(self._frozen, step)
        if self._buffers.size:
            self._buffers[:] = held.state_array[held.layout.trained :]
        if self._moving:
            self._counters.take(self._moving, step)
        self._claim.step = step
        return step

    def take_up(self) -> int:
        """Goes on from the newest of what the device left in its arena; the steps done with it, or ``NO_STATE``."""
        role, model = self._ready.role, self._ready.model
        found = newest_state(role.wanted(model), self._left, self._made)
        if found is None:
            return NO_STATE
        step, tensors = found
        role.restore(model, tensors, step)
        self.worker.updated = step
        return step


def _room(vectors: StateVectors, name: str, state: Sequence[LiveSlice]) -> StateShard:
    pieces = described(state)
    count = size_of(pieces)
    return StateShard(pieces, vectors.new(name, count // 4).view("uint8")[:count])
