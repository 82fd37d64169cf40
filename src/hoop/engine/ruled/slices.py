"""How the weights are cut into slices, one a parameter server.

    | parameters … | buffers … | tail |        a gradient; the weights have no tail
    |  slice 0  |  slice 1  |  slice 2 |       cut at multiples of 64 elements, the tail with the last

Every element is updated by itself, and no kernel has a remainder at a multiple of 64: so a slice's update gives the
same bits as the whole vector's.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoop.engine.stages.weights import PAD, Layout
from hoop.plan.plan import split_evenly


@dataclass(frozen=True)
class Slice:
    """Elements ``[low, high)`` of the weights; ``end`` is where its gradient ends."""

    low: int
    high: int
    end: int
    trained: int
    """How many of its elements the optimizer updates; the rest are buffers."""

    @property
    def weights(self) -> int:
        return self.high - self.low

    @property
    def width(self) -> int:
        """Elements of its gradient."""
        return self.end - self.low


def slices(layout: Layout, servers: int) -> list[Slice]:
    """One a server; where there are more servers than pieces of 64 elements, the last ones have none."""
    found = []
    for part in split_evenly(layout.state // PAD, servers):
        low, high = part.start * PAD, part.stop * PAD
        found.append(Slice(low, high, high, max(0, min(high, layout.trained) - low)))
    last = found[-1]
    found[-1] = Slice(last.low, last.high, layout.total, last.trained)
    return found


@dataclass(frozen=True)
class Piece:
    """What of a parameter lies in a slice: elements ``[low, high)`` of the whole vector."""

    parameter: int
    low: int
    high: int
    home: int
    """The slice in which the parameter begins."""


def pieces(layout: Layout, parts: list[Slice]) -> list[list[Piece]]:
    """For each slice the pieces of parameters in it, in order."""
    found: list[list[Piece]] = [[] for _ in parts]
    for index, parameter in enumerate(layout.parameters):
        start = layout.places[index]
        stop = start + parameter.numel()
        home = next((number for number, one in enumerate(parts) if one.low <= start < one.high), 0)
        for number, one in enumerate(parts):
            low, high = max(start, one.low), min(stop, one.high)
            if low < high:
                found[number].append(Piece(index, low, high, home))
    return found
