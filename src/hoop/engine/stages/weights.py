"""A stage's state as flat vectors in the device's arena, with the modules' tensors as views of them.

    | parameters, each at a multiple of 16 elements | float buffers | tail | evidence |     (a gradient slot's shape)

A gradient slot holds one shard's gradient, in the buffers' part what the shard did to them (a batch norm's running mean
moved by so much), in the tail what it measured (loss, hits, seconds), then what it was made of (``evidence``). All of
it is summed by the same operation, so the buffers and the figures do not depend on who computed which shard either.

Vectors are padded to a multiple of 64 elements: then no elementwise kernel has a remainder that a scalar loop would
round differently, and a stage's update gives the same bits as the whole model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hoop.engine.stages.evidence import PLACES
from hoop.errors import InvalidArgument
from hoop.memory import Arena
from hoop.memory.claims import Claim
from hoop.memory.dtypes import dtype

ALIGN = 16
PAD = 64
TAIL = 64
LOSS, HITS, SAMPLES, STOP, MOVE = range(5)
"""Places in the tail; from ``SPEED`` on, each rank's seconds a shard."""
SPEED = 5
MOST_SPEEDS = TAIL - SPEED
FLOAT32 = dtype("float32")
Row = tuple[str, int, int, int, str, int]
"""A piece of a state and where it lies: its name, first element, elements and bytes; the vector, and the byte in it."""


def _padded(count: int, to: int) -> int:
    return -(-count // to) * to


class Layout:
    """Where each tensor of some blocks lies in a vector."""

    def __init__(self, blocks: Iterable[nn.Module], shards: int = 0) -> None:
        """``shards``: so many may be in a gradient, and have places for evidence."""
        module = nn.ModuleList(blocks)
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.frozen = [one for one in module.parameters() if not one.requires_grad]
        buffers = list(module.buffers())
        self.buffers = [one for one in buffers if one.is_floating_point()]
        self.counters = [one for one in buffers if not one.is_floating_point()]
        for one in [*self.parameters, *self.buffers]:
            if one.dtype != torch.float32:
                raise InvalidArgument(
                    f"model: a tensor of {one.dtype}; Hoop trains float32 (call model.float())"
                )
        self.places: list[int] = []
        end = 0
        for one in self.parameters:
            self.places.append(end)
            end += _padded(one.numel(), ALIGN)
        self.trained = _padded(end, PAD)
        """Elements of the part that the optimizer updates."""
        end = self.trained
        for one in self.buffers:
            self.places.append(end)
            end += _padded(one.numel(), ALIGN)
        self.state = _padded(end, PAD)
        """Elements of parameters and buffers."""
        self.total = self.state + TAIL + _padded(PLACES * shards, PAD)
        """Elements of a gradient slot."""

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parameters, *self.buffers]

    def views(self, vector: Tensor) -> list[Tensor]:
        """A vector's parts, in the shapes of the tensors."""
        return [
            vector[place : place + one.numel()].view(one.shape)
            for place, one in zip(self.places, self.tensors, strict=True)
        ]

    def views_trained(self, vector: Tensor) -> list[Tensor]:
        """A vector of the trained part alone, in the shapes of the parameters."""
        return [
            vector[place : place + one.numel()].view(one.shape)
            for place, one in zip(self.places, self.parameters, strict=False)
        ]


class Vectors:
    """Named float32 vectors in an arena, freed together."""

    def __init__(self, arena: Arena, prefix: str, run: str = "") -> None:
        """``run``: whose they are, for who is restarted on the arena."""
        self._arena, self._prefix, self._run = arena, prefix, run
        self._names: list[str] = []

    def new(self, name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """A vector of zeros; one of that name that was made here before is gone."""
        full = f"{self._prefix}{name}"
        if full in self._names and self._arena.buffer(full).size != max(count, 1) * 4:
            self._arena.free(full)  # it is to have another size
            self._names.remove(full)
        if full in self._names:
            self._names.remove(full)
            self._arena.free(full)
        buffer = self._arena.allocate(full, max(count, 1) * 4, reuse=True)
        self._names.append(full)
        array = self._arena.array(buffer.address, FLOAT32, count)
        array[:] = 0
        return array

    def beside(self, prefix: str) -> Vectors:
        """Others in the same arena, whose names go on like this."""
        return Vectors(self._arena, self._prefix + prefix, self._run)

    def claim(self, name: str, rows: Iterable[Row]) -> Claim:
        """Says of bytes of vectors here, should the device be restarted, which step of the run they hold."""
        told = [(*row[:-2], self._prefix + row[-2], row[-1]) for row in rows]
        claim = Claim(self._arena, self._prefix + name, self._run, {"rows": told})
        self._names.append(claim.name)
        return claim

    def free(self, but: str = "") -> None:
        """All of them, but for those whose name ends so."""
        left = [name for name in self._names if but and name.endswith(but)]
        for name in self._names:
            if name not in left:
                self._arena.free(name)
        self._names = left


def adopt(layout: Layout, state: Tensor) -> None:
    """Moves parameters and buffers into the vector; the modules' tensors are views of it from then on."""
    with torch.no_grad():
        for tensor, view in zip(layout.tensors, layout.views(state), strict=True):
            view.copy_(tensor)
            tensor.data = view


def shared_parameters(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Pairs of blocks that share a parameter: no cut may come between them."""
    seen: dict[int, int] = {}
    pairs = []
    for index, block in enumerate(blocks):
        for parameter in block.parameters():
            first = seen.setdefault(id(parameter), index)
            if first != index:
                pairs.append((first, index))
    return pairs
