"""Where a device's memory outlives it: what it held after the last two steps, for who is restarted on it.

Each copy names its step in the arena, and none while it is written; ranks are a step apart at most. So should all be
killed at once, there is a step of which each has its part whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from hoop.engine.role import Role
from hoop.engine.stages.weights import Vectors
from hoop.engine.survival.parts import Part, described, rows, size_of
from hoop.plan.recovery import Piece

COPIES = 2


class Own:
    """The copies that one rank keeps of its own state."""

    def __init__(self, vectors: Vectors, role: Role, model: nn.Module) -> None:
        self._role, self._model = role, model
        pieces = described(role.state(model))
        self._parts = [claimed(vectors, f"own{turn}", pieces) for turn in range(COPIES)]

    def take(self, step: int) -> None:
        """What is held now is the state after so many steps."""
        self._parts.append(self._parts.pop(0))
        self._parts[-1].take(self._role.state(self._model), step)


def claimed(vectors: Vectors, name: str, pieces: Sequence[Piece]) -> Part:
    """Room for these, of which the arena says what is in it."""
    claim = vectors.claim(name, rows(pieces, name))  # before there is anything that it could be wrong about
    return Part(pieces, vectors.new(name, size_of(pieces) // 4).view(np.uint8), claim=claim)
