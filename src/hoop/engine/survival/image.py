"""A rank's state as its holder keeps it: the same vectors, one after the other, so that the same update fits them.

    | weights | moment 0 | moment 1 |   of each stage, or of a server's slice   | counters, what is not trained |

It is sent whole once. From then on the holder is sent what each step's update is made with, the summed gradient (a
third of Adam's state), and makes the update itself, when it has nothing else to do: every element is updated by itself,
by the same kernel, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hoop.engine.stages.optimizer import OptimizerSettings, go_on, updating
from hoop.engine.stages.weights import Vectors
from hoop.engine.survival.parts import Bytes, Flat, Live, Part, aligned, described
from hoop.memory.claims import NOTHING
from hoop.plan.recovery import Piece

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Receive = Callable[[memoryview], None]


@dataclass(frozen=True)
class Image:
    """Where everything is in it: plain values, which can be told."""

    vectors: list[tuple[int, int]]
    """Each one's place and bytes, in the order they are sent."""
    flats: list[tuple[int, int, int]]
    """Of each stage: the number of its first vector, its elements, and how many of them are trained."""
    pieces: list[tuple[Piece, int]]
    """With their places."""
    counters: list[tuple[int, int]]
    """Their places and bytes."""

    @classmethod
    def heard(cls, said: dict[str, Any]) -> Image:
        pieces = [(Piece(*piece), place) for piece, place in said["pieces"]]
        return cls(**{**said, "pieces": pieces})

    @property
    def size(self) -> int:
        return sum(aligned(count) for _, count in self.vectors)


def imaged(
    flats: Sequence[Flat], counters: Sequence[str], state: Sequence[Live]
) -> tuple[Image, list[Bytes]]:
    """What a rank holds: where it goes in an image, and the vectors that go there; ``counters`` by name."""
    arrays: list[Bytes] = []
    firsts = []
    for flat in flats:
        firsts.append((len(arrays), len(flat.weights), flat.trained))
        arrays += [flat.weights.view(np.uint8), *(one.numpy().view(np.uint8) for one in flat.moments)]
    vectors, spans, pieces = [], [], []
    end = 0

    def add(array: Bytes, start: int) -> None:
        nonlocal end
        vectors.append((end, array.nbytes))
        spans.append((start, start + array.nbytes, end))
        end += aligned(array.nbytes)

    def place_of(address: int) -> int | None:
        return next((at + address - low for low, high, at in spans if low <= address < high), None)

    for array in arrays:
        add(array, array.__array_interface__["data"][0])
    for one, piece in zip(state, described(state), strict=True):
        place = place_of(one.elements.data_ptr())
        if place is None:  # no update goes over it
            place = end
            arrays.append(one.elements.detach().view(torch.uint8).numpy())
            add(arrays[-1], one.elements.data_ptr())
        pieces.append((piece, place))
    named = {piece.name: (place, piece.bytes) for piece, place in pieces}
    return Image(vectors, firsts, pieces, [named[name] for name in counters]), arrays


class Mirror:
    """Another rank's state, kept here; and what brings it a step further, once that has come."""

    def __init__(
        self, image: Image, vectors: Vectors, name: str, optimizer: OptimizerSettings, follows: bool
    ) -> None:
        """``follows``: it will be brought further; otherwise it comes whole each time."""
        self._image = image
        self._data: Bytes = vectors.new(name, image.size // 4).view(np.uint8)
        pieces, places = [one for one, _ in image.pieces], [place for _, place in image.pieces]
        self.part = Part(pieces, self._data, places=places)
        self._updates = []
        self.totals: list[Floats] = []
        """Where a step's gradients are put …"""
        for number, (first, elements, trained) in enumerate(image.flats if follows else ()):
            weights = self._vector(first)
            assert len(weights) == elements, "an image is laid out as it was told"
            self.totals.append(vectors.new(f"{name}.total{number}", elements))
            moments = [torch.from_numpy(self._vector(first + 1 + one)) for one in range(optimizer.slots)]
            update = updating(optimizer, torch.from_numpy(weights[:trained]), moments)
            self._updates.append((update, weights, trained))
        self.counts: Bytes = np.empty(sum(count for _, count in image.counters), np.uint8)
        """… and what its counters are then."""
        self._due: tuple[int, float] | None = None

    def _vector(self, number: int) -> Floats:
        place, count = self._image.vectors[number]
        return self._data[place : place + count].view(np.float32)

    def take(self, receive: Receive, step: int) -> None:
        """All of it comes, as it is after so many steps."""
        self.part.step = NOTHING
        for place, count in self._image.vectors:
            if count:
                receive(self._data[place : place + count].data)
        self.part.step = step

    def due(self, step: int, rate: float) -> None:
        """What the update to this step is made with has come."""
        assert self.part.step == step - 1, "a mirror goes on step by step"
        self._due = step, rate

    def go_on(self) -> bool:
        """Makes the update that is due; whether there was one."""
        if self._due is None:
            return False
        (step, rate), self._due = self._due, None
        self.part.step = NOTHING
        for (update, weights, trained), total in zip(self._updates, self.totals, strict=True):
            go_on(update, weights, trained, total, rate, step - 1)
        at = 0
        for place, count in self._image.counters:
            self._data[place : place + count] = self.counts[at : at + count]
            at += count
        self.part.step = step
        return True

    def apart(self) -> list[Part]:
        """What is whole, in memory of its own: as it is, and as it will be."""
        found = [self.part.apart()] if self.part.step != NOTHING else []
        return found + ([self.part.apart()] if self.go_on() else [])
