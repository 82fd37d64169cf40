"""A vector on every device of a communicator: where its parts lie, and how to fill and read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hoop.client.arrays import Array, flatten
from hoop.client.device import Device
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType


@dataclass(frozen=True)
class Buffer:
    """``count`` elements on each device, by rank: at an address, or in a named buffer."""

    devices: tuple[Device, ...]
    places: tuple[int | str, ...]
    offset: int
    """Bytes past each place."""
    count: int
    dtype: DType

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def write(self, rank: int, values: Any) -> None:
        """Fills one rank's part from an array or a tensor of exactly ``count`` elements."""
        vector = flatten(values, self.dtype)
        if vector.size != self.count:
            raise InvalidArgument(f"values: {vector.size} elements were given, the buffer has {self.count}")
        self.devices[rank].write(self.places[rank], vector.view(np.uint8).data, self.offset)

    def read(self, rank: int) -> Array:
        """One rank's part, in the element type's storage (bfloat16 as uint16)."""
        data = self.devices[rank].read(self.places[rank], self.bytes, self.offset)
        return np.frombuffer(data, self.dtype.numpy).copy()

    def fill(self, values: Sequence[Any]) -> Buffer:
        """Fills every rank's part, one array or tensor a rank."""
        if len(values) != len(self.devices):
            raise InvalidArgument(f"values: {len(values)} were given for {len(self.devices)} ranks")
        for rank, value in enumerate(values):
            self.write(rank, value)
        return self

    def part(self, start: int, stop: int) -> Buffer:
        """Elements ``[start, stop)``, as a buffer of their own over the same memory."""
        if not 0 <= start <= stop <= self.count:
            raise InvalidArgument(f"part: [{start}, {stop}) is not within the buffer's {self.count} elements")
        offset = self.offset + start * self.dtype.itemsize
        return Buffer(self.devices, self.places, offset, stop - start, self.dtype)

    def free(self) -> None:
        """Gives named memory back on every device."""
        for device, place in zip(self.devices, self.places, strict=True):
            if isinstance(place, str):
                device.free(place)
