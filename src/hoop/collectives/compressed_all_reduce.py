"""A lossy all_reduce as an operation of a communicator: ``Operation("all_reduce", …, compression="int8")``.

A compressor keeps the error of each step and adds it to the same vector in the next step (error feedback). A vector is
identified by its address: a gradient that is reduced in the same memory every step gets its error back. Different
vectors must be in different memory. A new communicator starts without errors of earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hoop.collectives.compression import Compressor, compressor
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.memory.dtypes import dtype

MAX_VECTORS = 256
"""Vectors of one operation whose compressors are kept; the oldest is dropped first."""
_BYTES = dtype("uint8")


class CompressedAllReduce:
    """One operation for any vectors: ``run(source, destination, deadline)``, one call at a time.

    It is the ``Peers`` of its compressors.
    """

    def __init__(
        self, operation: Operation, size: int, prepared: Callable[[Operation], Callable[[Array, Array, float], None]]
    ) -> None:
        """``prepared``: makes an operation callable, as part of this one."""
        self._operation, self._prepared = operation, prepared
        self.size = size
        self._compressors: dict[int, Compressor] = {}
        self._deadline = 0.0

    @np.errstate(all="ignore")
    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        count, self._deadline = self._operation.count, deadline
        result = destination[:count]
        if destination is not source:
            np.copyto(result, source[:count])
        self._compressor_of(source).all_reduce(self, result)
        if self._operation.op == "avg":
            result /= self.size

    def _compressor_of(self, source: Array) -> Compressor:
        address = source.__array_interface__["data"][0]
        found = self._compressors.get(address)
        if found is None:
            found = self._compressors[address] = compressor(self._operation.compression)
            if len(self._compressors) > MAX_VECTORS:
                del self._compressors[next(iter(self._compressors))]
        return found

    # ---- communication of the compressors

    def exchange(self, collective: str, source: Array) -> Array:
        sent = source.reshape(-1).view(np.uint8)
        count = sent.size // (self.size if collective == "all_to_all" else 1)
        result = np.empty(self.size * count, np.uint8)
        self._prepared(Operation(collective, count, _BYTES))(sent, result, self._deadline)
        return result

    def total(self, part: Array) -> Array:
        flat = np.ascontiguousarray(part, np.float32).reshape(-1)
        self._prepared(Operation("all_reduce", flat.size))(flat, flat, self._deadline)
        return flat.reshape(part.shape)
