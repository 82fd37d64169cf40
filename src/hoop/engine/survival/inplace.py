"""Data parallel: the one state that a device has is changed where it lies, and a kill may come in the middle.

    claim: no step ── update: weights, optimizer state ── buffers and counters copied ── claim: this step

Weights and optimizer state change in an update alone. Buffers and counters change in every forward (and are put back),
so what they are after the step is copied beside. Two words a step are written for it, and no checksum: what is between
them is torn, and known to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoop.engine.job import names_of
from hoop.engine.preparation import Ready
from hoop.engine.stages.weights import LOSS, SAMPLES, Row, Vectors
from hoop.engine.survival.diary import Diary
from hoop.engine.survival.heritage import newest
from hoop.engine.survival.parts import Live, Part, described, rows, size_of
from hoop.engine.survival.snapshot import MOMENT
from hoop.memory.claims import NOTHING, Claim
from hoop.plan.instructions import Instruction, Kind
from hoop.plan.recovery import NO_STATE

_STAGE = "stage0."


class InPlace:
    """A replica's state, as its arena tells of it."""

    def __init__(
        self, ready: Ready, vectors: Vectors, left: Sequence[Part], resumed: bool, outlives: bool
    ) -> None:
        """``left``: what the device found in its arena, the newest first; ``resumed``: from a checkpoint.

        ``outlives``: the arena is there for who is restarted on it; otherwise nothing is written for them. What is not
        trained is as the model is made, and needs no copy; but for a run that was resumed.
        """
        self._ready, self.worker, self._left = ready, ready.worker, left
        self._claim: Claim | None = None
        held, names = ready.worker.held[0], names_of(ready.model)
        layout = held.layout
        frozen = [Live(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in layout.frozen]
        self._made = {one.name for one in frozen}
        if not outlives:
            return
        told: list[Row] = []
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
        self._moving = [Live(names[id(one)], 0, one.view(-1)) for one in layout.counters]
        known = {piece.name for part in left for piece in part.pieces}
        self._frozen = [one for one in frozen if resumed or one.name in known]
        self._counters = _room(vectors, "counters", self._moving)
        self._fixed = _room(vectors, "fixed", self._frozen)
        told += rows(self._counters.pieces, "counters") + rows(self._fixed.pieces, "fixed")
        self._claim = vectors.claim("state", told)
        self._diary = Diary(vectors, ready.role.evidence)
        self._update = self.worker._handlers[Kind.UPDATE]
        self.worker.handle({Kind.UPDATE: self._claimed})

    def _claimed(self, instruction: Instruction) -> None:
        self.torn()
        self._update(instruction)
        tail = self.worker.held[0].tail
        self._diary.note(self.worker.updated, [float(tail[LOSS]) / float(tail[SAMPLES])])
        self.whole(self.worker.updated)

    def torn(self) -> None:
        """From now on it is of no step."""
        if self._claim is not None:
            self._claim.step = NOTHING

    def whole(self, step: int) -> int:
        """What is there is the state after so many steps."""
        if self._claim is None:
            return step
        self.torn()
        held = self.worker.held[0]
        if self._fixed.step == NOTHING:
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
        found = newest(role.wanted(model), self._left, self._made)
        if found is None:
            return NO_STATE
        step, tensors = found
        role.restore(model, tensors, step)
        self.worker.updated = step
        return step


def _room(vectors: Vectors, name: str, state: Sequence[Live]) -> Part:
    pieces = described(state)
    count = size_of(pieces)
    return Part(pieces, vectors.new(name, count // 4).view("uint8")[:count])
