"""Plain arrays in collectives: copied to the devices, worked on there, copied back."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hoop.client.arrays import element_type, flatten, restore
from hoop.client.buffer import Buffer
from hoop.errors import HoopError, InvalidArgument
from hoop.memory.dtypes import DType
from hoop.wire.channels import STAGING


class Allocates(Protocol):
    """What staging needs of a communicator."""

    @property
    def size(self) -> int: ...

    @property
    def session(self) -> str: ...

    def buffer(self, name: str, count: int, kind: DType) -> Buffer: ...


class Staging:
    """One array or tensor a rank, on the devices for the length of one operation."""

    def __init__(self, owner: Allocates, values: Sequence[Any], blocks_in: int, blocks_out: int) -> None:
        """``blocks_out`` of the result for every ``blocks_in`` of a value: n for a gather, 1 for its input."""
        self._values = list(values)
        if len(self._values) != owner.size:
            raise InvalidArgument(f"values: {len(self._values)} were given for {owner.size} ranks")
        self._kind = element_type(self._values[0])
        vectors = [flatten(value, self._kind) for value in self._values]
        count = vectors[0].size
        if any(vector.size != count for vector in vectors):
            raise InvalidArgument(f"values: their sizes differ: {[vector.size for vector in vectors]}")
        if count % blocks_in:
            raise InvalidArgument(f"values: {count} elements do not make {blocks_in} equal blocks")
        name = f"{STAGING}{owner.session}.{secrets.token_hex(8)}"
        self._made: list[Buffer] = []
        try:
            for end, length in (("in", count), ("out", count // blocks_in * blocks_out)):
                self._made.append(owner.buffer(f"{name}.{end}", length, self._kind))
            self.source, self.out = self._made
            self.source.fill(vectors)
            if self.out.count == count:
                self.out.fill(vectors)  # what a rank does not receive it keeps
            else:
                self.out.fill([np.zeros(self.out.count, self._kind.numpy)] * owner.size)  # or is zero
        except BaseException:
            self.free()
            raise

    def collect(self, _: object) -> list[Any]:
        """The results, one a rank, as what was given; the memory is free again."""
        try:
            ranks = range(len(self._values))
            return [restore(self.out.read(rank), self._values[rank], self._kind) for rank in ranks]
        finally:
            self.free()

    def free(self) -> None:
        """Gives the memory back, where there still is a device to give it back to."""
        made, self._made = self._made, []
        for buffer in made:
            for device, place in zip(buffer.devices, buffer.places, strict=True):
                with contextlib.suppress(HoopError):
                    device.free(str(place))
