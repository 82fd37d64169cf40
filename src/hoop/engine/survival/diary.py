"""What the last steps came to, in the arena: should all devices die at once, what none had told yet is not lost.

| step | loss (a float64 in two elements) | what the update was made of (``evidence``) |      a row a step, in turn;
                                                                                           the step is written last
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hoop.engine.stages.evidence import Evidence
from hoop.engine.stages.weights import FLOAT32, Vectors
from hoop.memory import Arena
from hoop.memory.claims import SUFFIX, claims

KEPT = 256
"""Steps that are remembered: more than are done between two times that they are told, four times a second."""
_NAME = "diary"
_BEFORE = 3
"""Elements of a row before the evidence."""


class Diary:
    """The rows that one rank writes: where it knows the losses."""

    def __init__(self, vectors: Vectors, evidence: Evidence) -> None:
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
    for name, _, _ in claims(arena, prefix, run):
        buffer = buffers.get(name.removesuffix(SUFFIX))
        if name.endswith(_NAME + SUFFIX) and buffer is not None:
            rows = arena.array(buffer.address, FLOAT32, buffer.size // 4).reshape(KEPT, -1)
            for row in rows[rows[:, 0] > 0]:
                loss = row[1:_BEFORE].view(np.float64)
                found[int(row[0])] = [*loss.tolist(), *row[_BEFORE:].tolist()]
    return found
