"""Parts of a training state as it was after some step: pieces of named tensors, one after the other in a vector.

    0.1.weight [0, 784)   0.1.bias [0, 30)   optimizer.moment0.0.1.weight [0, 784)   …

Names are a snapshot's, so whatever cut, strategy or number of devices comes next finds what it needs. A piece is a
whole tensor, or the elements of it that a parameter server keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hoop.collectives.reduction import Array
from hoop.engine.fault_tolerance.checkpoint import MOMENT
from hoop.engine.job import names_of
from hoop.engine.stage.state import StateRow
from hoop.memory.commit_record import NO_STEP, CommitRecord
from hoop.plan.recovery import SliceSpec

Bytes = npt.NDArray[np.uint8]
_ALIGN = 64


class LiveSlice(NamedTuple):
    """A piece where it is computed with: elements of a tensor from ``low`` on."""

    name: str
    low: int
    elements: Tensor


class FlatState(NamedTuple):
    """Weights and optimizer state as the vectors that an update goes over."""

    weights: Array
    trained: int
    """How many of them are updated; what shards did to the rest, buffers, is added."""
    moments: list[Tensor]
    total: Array
    """What the update of this step is made with."""


def described(state: Iterable[LiveSlice]) -> list[SliceSpec]:
    return [
        SliceSpec(one.name, one.low, one.elements.numel(), one.elements.numel() * one.elements.element_size())
        for one in state
    ]


def size_of(pieces: Sequence[SliceSpec]) -> int:
    """Bytes of a part of these."""
    return sum(aligned(one.bytes) for one in pieces)


def aligned(count: int) -> int:
    """So many bytes, up to where the next ones may begin."""
    return -(-count // _ALIGN) * _ALIGN


def rows(pieces: Sequence[SliceSpec], vector: str) -> list[StateRow]:
    """Where each lies in the vector of a part of these."""
    starts = itertools.accumulate((size_of([one]) for one in pieces), initial=0)
    return [(*one, vector, start) for one, start in zip(pieces, starts, strict=False)]


def part_of(tensors: Mapping[str, Tensor], step: int) -> StateShard:
    """Whole tensors, in memory of their own."""
    return StateShard.of(
        [LiveSlice(name, 0, one.detach().contiguous().view(-1)) for name, one in tensors.items()], step
    )


class StateShard:
    """Some pieces, as they were after one step."""

    def __init__(
        self,
        pieces: Sequence[SliceSpec],
        data: Bytes,
        step: int = NO_STEP,
        places: Sequence[int] | None = None,
        claim: CommitRecord | None = None,
    ) -> None:
        """``places``: where each piece begins; without, they lie one after the other.

        ``claim``: where the step is written down too, for who is restarted on the arena that this lies in.
        """
        self.pieces, self.data, self._claim = list(pieces), data, claim
        self.step = step
        ends = itertools.accumulate((size_of([one]) for one in self.pieces), initial=0)
        self._places = dict(zip(self.pieces, places or ends, strict=False))

    @property
    def step(self) -> int:
        """After which step it was so; ``NO_STEP`` while it is being written, and before."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._claim is not None:
            self._claim.step = step

    def take(self, state: Sequence[LiveSlice], step: int) -> None:
        """Becomes what this rank holds now."""
        self.step = NO_STEP
        for piece, live in zip(self.pieces, state, strict=True):
            self[piece][:] = live.elements.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self.step = step

    def __contains__(self, piece: SliceSpec) -> bool:
        return piece in self._places

    def __getitem__(self, piece: SliceSpec) -> Bytes:
        start = self._places[piece]
        return self.data[start : start + piece.bytes]

    def apart(self) -> StateShard:
        """A copy in memory of its own: the vector is needed for something else."""
        return StateShard(self.pieces, self.data.copy(), self.step, list(self._places.values()))

    @classmethod
    def of(cls, state: Sequence[LiveSlice], step: int) -> StateShard:
        """What a rank holds now, in memory of its own."""
        pieces = described(state)
        part = cls(pieces, np.empty(size_of(pieces), np.uint8))
        part.take(state, step)
        return part


def whole_state(model: nn.Module, moments: int) -> dict[str, int]:
    """Each tensor of a whole training state, and how many elements it has."""
    found = {}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor_id, name in names_of(model).items():
        tensor = named[name]
        assert id(tensor) == tensor_id
        found[name] = tensor.numel()
        if tensor.requires_grad:
            found |= {f"{MOMENT}{index}.{name}": tensor.numel() for index in range(moments)}
    return found
