"""What the last steps came to, in the arena: should all devices die at once, what none had told yet is not lost.

| step | loss | what the update was made of (``evidence``) |      a row a step, in turn; the step is written last
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hoop.collectives.reduction import Array
from hoop.engine.stages.evidence import Evidence
from hoop.engine.stages.weights import FLOAT32, Vectors
from hoop.memory import Arena
from hoop.memory.claims import SUFFIX, claims

KEPT = 256
"""Steps that are remembered: more than are done between two times that they are told, four times a second."""
_NAME = "diary"

Rows = Mapping[int, Sequence[float]]
"""A step's loss and evidence, by the steps done with it."""


class Diary:
    """The rows that one rank writes: where it knows the losses."""

    def __init__(self, vectors: Vectors, evidence: Evidence) -> None:
        self._evidence = evidence
        claim = vectors.claim(_NAME, ())
        self._rows = vectors.new(_NAME, KEPT * (2 + evidence.places)).reshape(KEPT, -1)
        claim.step = 0

    def note(self, done: int, losses: Sequence[float]) -> None:
        """The last of so many steps, before anything says that they are done."""
        for step, loss in enumerate(losses, start=done - len(losses) + 1):
            row = self._rows[step % KEPT]
            row[0] = 0
            row[1], row[2:] = loss, self._evidence.row(step - 1)
            row[0] = step


def remembered(arena: Arena, prefix: str, run: str) -> dict[int, list[float]]:
    """What the device that had this memory before wrote down of this run."""
    found: dict[int, list[float]] = {}
    buffers = {one.name: one for one in arena.buffers()}
    for name, _, _ in claims(arena, prefix, run):
        buffer = buffers.get(name.removesuffix(SUFFIX))
        if name.endswith(_NAME + SUFFIX) and buffer is not None:
            rows = arena.array(buffer.address, FLOAT32, buffer.size // 4).reshape(KEPT, -1)
            found |= {int(row[0]): row[1:].tolist() for row in rows if row[0] > 0}
    return found


def together(told: Sequence[Rows], done: int) -> tuple[list[float], list[Array]]:
    """Losses and evidence of the last steps up to ``done`` of which all ranks together know every one."""
    known = {int(step): row for rows in told for step, row in rows.items()}
    first = done
    while first in known:
        first -= 1
    rows = [known[step] for step in range(first + 1, done + 1)]
    return [row[0] for row in rows], [np.array(row[1:], np.float32) for row in rows]
