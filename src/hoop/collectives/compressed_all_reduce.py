"""An all_reduce that loses a little, as an operation like any other: ``Operation(…, compression="int8")``.

What a compressor did not send belongs to the vector, and a vector is known by where it lies: a gradient that is
reduced in the same memory every step gets back next time what it lost this time. Different vectors need different
places; a new communicator starts without any rest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hoop.collectives.compression import Compressor, compressor
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.memory.dtypes import dtype

VECTORS = 256
"""Vectors of one operation whose rests are kept; the one that came first goes first."""
_BYTES = dtype("uint8")


class CompressedAllReduce:
    """One operation, for any vectors: ``compressed(source, destination, deadline)``; one at a time."""

    def __init__(
        self,
        operation: Operation,
        size: int,
        ready: Callable[[Operation], Callable[[Array, Array, float], None]],
    ) -> None:
        self._operation, self._ready = operation, ready
        self.size = size
        self._compressors: dict[int, Compressor] = {}
        self._deadline = 0.0

    @np.errstate(all="ignore")
    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        count, self._deadline = self._operation.count, deadline
        result = destination[:count]
        if destination is not source:
            np.copyto(result, source[:count])
        self._of(source).all_reduce(self, result)
        if self._operation.op == "avg":
            result /= self.size

    def _of(self, source: Array) -> Compressor:
        place = source.__array_interface__["data"][0]
        found = self._compressors.get(place)
        if found is None:
            found = self._compressors[place] = compressor(self._operation.compression)
            if len(self._compressors) > VECTORS:
                del self._compressors[next(iter(self._compressors))]
        return found

    # ---- what a compressor asks of the other ranks

    def exchange(self, collective: str, source: Array) -> Array:
        given = source.reshape(-1).view(np.uint8)
        count = given.size // (self.size if collective == "all_to_all" else 1)
        result = np.empty(self.size * count, np.uint8)
        self._ready(Operation(collective, count, _BYTES))(given, result, self._deadline)
        return result

    def total(self, part: Array) -> Array:
        flat = np.ascontiguousarray(part, np.float32).reshape(-1)
        self._ready(Operation("all_reduce", flat.size))(flat, flat, self._deadline)
        return flat.reshape(part.shape)
