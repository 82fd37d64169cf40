"""NumPy arrays and torch tensors as bytes of an element type, and back.

A vector on every device of a communicator: where its parts lie, and how to fill and read them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hoop.client.device import Device
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType, dtype

Array = npt.NDArray[Any]


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def element_type(value: Any) -> DType:
    """The element type of an array or a tensor."""
    if not hasattr(value, "dtype"):
        raise InvalidArgument(f"values: a {type(value).__name__} is neither a NumPy array nor a torch tensor")
    return dtype(str(value.dtype).removeprefix("torch."))


def flatten(value: Any, kind: DType) -> Array:
    """A contiguous vector in the storage type of ``kind``; bfloat16 tensors keep their bits."""
    if is_tensor(value):
        tensor = value.detach().cpu().contiguous()
        if element_type(value) != kind:
            raise InvalidArgument(f"a tensor of {element_type(value).name} was given, {kind.name} is wanted")
        array = tensor.view(sys.modules["torch"].int16).numpy() if kind.name == "bfloat16" else tensor.numpy()
        return np.ascontiguousarray(array).view(kind.numpy).reshape(-1)
    array = np.asarray(value)
    if array.dtype != kind.numpy:
        raise InvalidArgument(f"an array of {array.dtype} was given, {kind.name} is wanted")
    return np.ascontiguousarray(array).reshape(-1)


def restore(vector: Array, like: Any, kind: DType) -> Any:
    """The vector as what ``like`` is, an array or a tensor, and in its shape where the size is the same."""
    if is_tensor(like):
        torch = sys.modules["torch"]
        bits = vector.view(np.int16) if kind.name == "bfloat16" else vector
        tensor = torch.from_numpy(bits.copy())
        tensor = tensor.view(torch.bfloat16) if kind.name == "bfloat16" else tensor
        return tensor.reshape(like.shape) if tensor.numel() == like.numel() else tensor
    like = np.asarray(like)
    return vector.reshape(like.shape) if vector.size == like.size else vector


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
