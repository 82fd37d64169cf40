"""Combines vectors by SUM, PROD, MIN, MAX or AVG, for every dtype.

Integers wrap on overflow, as in NumPy; AVG of integers is the wrapped sum divided, rounded towards zero. bfloat16 is
combined as float32 and rounded to nearest even after every combination. NaN wins in MIN and MAX, so that every rank
sees that one has diverged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType, bfloat16_to_float32, float32_to_bfloat16

Array = npt.NDArray[Any]
_KERNELS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
}
OPERATIONS = tuple(_KERNELS)
_BLOCK_BYTES = 256 * 1024
"""The cache of a core holds four of these at once."""


class _Quiet(threading.local):
    """``run`` calls a function without NumPy's warnings about overflow and NaN.

    NumPy 2 keeps its error state in a context variable. Entering a prepared context costs 30 ns, ``errstate`` costs a
    microsecond. A context cannot be entered twice at once, so each thread has its own, and ``run`` must not be nested.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] = Context().run if int(np.__version__.split(".")[0]) >= 2 else _with_errstate
        self.run(np.seterr, all="ignore")


def _with_errstate(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **options)


QUIET = _Quiet()


class Reduction:
    """One reduction operator on one dtype. Used by one thread at a time."""

    def __init__(self, op: str, dtype: DType) -> None:
        if op not in _KERNELS:
            raise InvalidArgument(f"op: {op!r} is unknown; known: {', '.join(OPERATIONS)}")
        self.op = op
        self.dtype = dtype
        self._kernel = _KERNELS[op]
        self._is_bfloat16 = dtype.name == "bfloat16"
        self._block = _BLOCK_BYTES // dtype.itemsize
        self._temporary: Array | None = None

    def combine(self, into: Array, other: Array) -> None:
        """``into = into op other``."""
        self.combine_into(into, other, into)

    def combine_into(self, left: Array, right: Array, into: Array) -> None:
        """``into = left op right``."""
        QUIET.run(self._combine_into, left, right, into)

    def _combine_into(self, left: Array, right: Array, into: Array) -> None:
        if self._is_bfloat16:
            wide_left, wide_right = bfloat16_to_float32(left), bfloat16_to_float32(right)
            self._kernel(wide_left, wide_right, out=wide_left)
            float32_to_bfloat16(wide_left, out=into)
        else:
            self._kernel(left, right, out=into)

    def fold(self, vectors: Sequence[Array], into: Sequence[Array]) -> None:
        """Combines the vectors in their order, finishes the result, and writes it to every array of ``into``.

        It works block by block, so that a result is still in the cache when it is copied. ``into`` may contain the
        vectors themselves: a block is written only after it was read.
        """
        QUIET.run(self._fold, vectors, into)

    def bind(self, vectors: Sequence[Array], into: Sequence[Array]) -> Callable[[], None]:
        """``fold`` of fixed arrays, for repeated calls by ``QUIET.run``; for two small vectors it is one NumPy call."""
        one_call = not self._is_bfloat16 and self.op != "avg" and vectors[0].size <= self._block
        if one_call and len(vectors) == 2 and len(into) == 1:
            return partial(self._kernel, *vectors, out=into[0])
        return partial(self._fold, vectors, into)

    def _fold(self, vectors: Sequence[Array], into: Sequence[Array]) -> None:
        size, block = vectors[0].size, self._block
        if size <= block:
            self._fold_block(vectors, into)
            return
        for start in range(0, size, block):
            stop = start + block
            self._fold_block([vector[start:stop] for vector in vectors], [target[start:stop] for target in into])

    def _fold_block(self, parts: Sequence[Array], targets: Sequence[Array]) -> None:
        total, kernel = targets[0], self._kernel
        if len(parts) == 1:
            total[...] = parts[0]
        elif self._is_bfloat16:
            total[...] = self._fold_bfloat16(parts)
        elif len(parts) == 2:
            kernel(parts[0], parts[1], out=total)
        else:
            # Partial results go to a temporary: ``total`` may be the memory of a vector that was not read yet.
            temporary = self._temporary_for(parts[0])
            kernel(parts[0], parts[1], out=temporary)
            for part in parts[2:-1]:
                kernel(temporary, part, out=temporary)
            kernel(temporary, parts[-1], out=total)
        if self.op == "avg":
            self.finish(total, len(parts))
        for target in targets[1:]:
            target[...] = total

    def _temporary_for(self, part: Array) -> Array:
        """A block of memory, kept between calls."""
        if self._temporary is None or self._temporary.size < part.size:
            self._temporary = np.empty(part.size, part.dtype)
        return self._temporary[: part.size]

    def _fold_bfloat16(self, parts: Sequence[Array]) -> Array:
        total = parts[0].copy()
        for part in parts[1:]:
            self._combine_into(total, part, total)
        return total

    def finish(self, into: Array, size: int) -> None:
        """The last step, in place, on the combination of ``size`` vectors: AVG divides."""
        if self.op != "avg":
            return
        if self._is_bfloat16:
            float32_to_bfloat16(bfloat16_to_float32(into) / np.float32(size), out=into)
        elif into.dtype.kind in "iu":
            wide = into.astype(np.int64)
            quotient = wide // size
            quotient += (wide < 0) & (quotient * size != wide)
            into[...] = quotient
        else:
            np.divide(into, into.dtype.type(size), out=into)
