"""Slices of a training state: contiguous elements of named tensors, as they were after one step.

    0.1.weight [0, 784)   0.1.bias [0, 30)   optimizer.moment0.0.1.weight [0, 784)   …

A ``SliceSpec`` (``membership/recovery.py``) describes a slice, a ``LiveSlice`` is its tensor in use, a ``StateShard``
holds copies of several slices. Tensors have the names of a checkpoint, so another partition of the model, another
strategy or another number of ranks finds the slices it needs. A slice is a whole tensor, or the elements of it that one
parameter server, or one rank of a sharded update, owns.
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
from hoop.engine.fault_tolerance.checkpoint_format import MOMENT
from hoop.engine.job import names_of
from hoop.engine.stage.state import StateLayout, StateRow
from hoop.membership.recovery import SliceSpec
from hoop.memory.commit_record import NO_STEP, CommitRecord

Bytes = npt.NDArray[np.uint8]
_ALIGN = 64


class LiveSlice(NamedTuple):
    """A slice of the live state: ``elements`` of tensor ``name`` from element ``low`` on."""

    name: str
    low: int
    elements: Tensor


class FlatState(NamedTuple):
    """One stage's weights and optimizer state, as the flat vectors that an update works on, or copies of them."""

    weights: Array
    trained: int
    """Number of the first elements of ``weights`` that the optimizer updates. The rest are buffers, to which the total
    is added."""
    moments: list[Tensor]


def slices_of_part(
    layout: StateLayout, span: tuple[int, int], weights: Tensor, moments: Sequence[Tensor], names: Mapping[int, str]
) -> list[LiveSlice]:
    """The elements ``span`` of a model's weight vector and its moments, as slices of its tensors.

    ``weights``, ``moments``: these elements. ``names``: see ``job.names_of``.
    """
    found, (first, last) = [], span
    for index, (offset, tensor) in enumerate(zip(layout.offsets, layout.tensors, strict=True)):
        low, high = max(offset, first), min(offset + tensor.numel(), last)
        trained = index < len(layout.parameters)
        for number, vector in enumerate([weights, *moments] if trained else [weights]):
            prefix = f"{MOMENT}{number - 1}." if number else ""
            if low < high:
                found.append(LiveSlice(prefix + names[id(tensor)], low - offset, vector[low - first : high - first]))
    return found


def specs_of(state: Iterable[LiveSlice]) -> list[SliceSpec]:
    return [
        SliceSpec(one.name, one.low, one.elements.numel(), one.elements.numel() * one.elements.element_size())
        for one in state
    ]


def bytes_of(slices: Sequence[SliceSpec]) -> int:
    """Bytes of a ``StateShard`` of these slices, with alignment."""
    return sum(align(one.bytes) for one in slices)


def align(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def state_rows(slices: Sequence[SliceSpec], vector: str) -> list[StateRow]:
    """Rows of a commit record: the offset of each slice in a shard of them, which is stored in ``vector``."""
    starts = itertools.accumulate((bytes_of([one]) for one in slices), initial=0)
    return [(*one, vector, start) for one, start in zip(slices, starts, strict=False)]


def shard_of_tensors(tensors: Mapping[str, Tensor], step: int) -> StateShard:
    """Copies whole tensors into a new shard."""
    return StateShard.copy_of(
        [LiveSlice(name, 0, one.detach().contiguous().view(-1)) for name, one in tensors.items()], step
    )


class StateShard:
    """Copies of some slices after one step, in one byte vector."""

    def __init__(
        self,
        slices: Sequence[SliceSpec],
        data: Bytes,
        step: int = NO_STEP,
        offsets: Sequence[int] | None = None,
        record: CommitRecord | None = None,
    ) -> None:
        """``offsets``: first byte of each slice in ``data``; None: one after the other, aligned.

        ``record``: commit record in the arena, for a device that is restarted on it; it always has this shard's step.
        """
        self.slices, self.data, self._record = list(slices), data, record
        self.step = step
        ends = itertools.accumulate((bytes_of([one]) for one in self.slices), initial=0)
        self._offsets = dict(zip(self.slices, offsets or ends, strict=False))

    @property
    def step(self) -> int:
        """The shard holds the state after this step; ``NO_STEP`` if it was never written or is being written."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._record is not None:
            self._record.step = step

    def copy_from(self, state: Sequence[LiveSlice], step: int) -> None:
        """Overwrites the shard with the live state after ``step``. Invalid while it is written."""
        self.step = NO_STEP
        for spec, live in zip(self.slices, state, strict=True):
            self[spec][:] = live.elements.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self.step = step

    def __contains__(self, spec: SliceSpec) -> bool:
        return spec in self._offsets

    def __getitem__(self, spec: SliceSpec) -> Bytes:
        start = self._offsets[spec]
        return self.data[start : start + spec.bytes]

    def clone(self) -> StateShard:
        """A copy in private memory, for when the arena's buffer is needed otherwise."""
        copy = StateShard(self.slices, np.empty(bytes_of(self.slices), np.uint8), self.step)
        for spec in self.slices:
            copy[spec][:] = self[spec]
        return copy

    @property
    def places(self) -> list[int]:
        """Where in this process's memory each slice begins."""
        return [_address(self.data) + offset for spec, offset in self._offsets.items() if spec.bytes]

    @classmethod
    def in_place(cls, state: Sequence[LiveSlice], step: int, memory: Bytes) -> tuple[StateShard, StateShard]:
        """The live state after ``step`` where it is in ``memory``, and a copy of the slices that are elsewhere."""
        inside, offsets, elsewhere = [], [], []
        for one in state:
            offset = one.elements.data_ptr() - _address(memory)
            if 0 <= offset < memory.nbytes and one.elements.is_contiguous():
                inside.append(one)
                offsets.append(offset)
            else:
                elsewhere.append(one)
        return cls(specs_of(inside), memory, step, offsets), cls.copy_of(elsewhere, step)

    @classmethod
    def copy_of(cls, state: Sequence[LiveSlice], step: int) -> StateShard:
        """Copies the live state after ``step`` into private memory."""
        slices = specs_of(state)
        shard = cls(slices, np.empty(bytes_of(slices), np.uint8))
        shard.copy_from(state, step)
        return shard


def _address(memory: Bytes) -> int:
    return int(memory.__array_interface__["data"][0])


def whole_state(model: nn.Module, moments: int) -> dict[str, int]:
    """Name and number of elements of every tensor in a model's training state, with ``moments`` per parameter."""
    found = {}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor_id, name in names_of(model).items():
        tensor = named[name]
        assert id(tensor) == tensor_id
        found[name] = tensor.numel()
        if tensor.requires_grad:
            found |= {f"{MOMENT}{index}.{name}": tensor.numel() for index in range(moments)}
    return found
