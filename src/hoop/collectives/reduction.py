"""How two vectors are combined: SUM PROD MIN MAX AVG, for every element type.

Integers wrap on overflow, as they do everywhere; AVG of integers is the wrapped sum divided, rounded
towards zero. bfloat16 is combined as float32 and rounded to nearest even after every combination.
NaN wins in MIN and MAX, so that a diverged rank is seen by all.
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
"""Four of these are in the cache of a core at once."""


class _Quiet(threading.local):
    """``run`` calls a function for which overflow and NaN are results like others.

    NumPy 2 keeps what it warns of in the context: to enter one that is kept costs 30 ns where ``errstate`` costs a
    microsecond. A context is entered once at a time, so there is one a thread, and ``run`` must not be nested.
    """

    def __init__(self) -> None:
        self.run: Callable[..., Any] = (
            Context().run if int(np.__version__.split(".")[0]) >= 2 else _with_errstate
        )
        self.run(np.seterr, all="ignore")


def _with_errstate(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args, **options)


QUIET = _Quiet()


class Reduction:
    """One operation on one element type."""

    def __init__(self, op: str, dtype: DType) -> None:
        if op not in _KERNELS:
            raise InvalidArgument(f"op: {op!r} is unknown; known: {', '.join(OPERATIONS)}")
        self.op = op
        self.dtype = dtype
        self._kernel = _KERNELS[op]
        self._brain = dtype.name == "bfloat16"
        self._block = _BLOCK_BYTES // dtype.itemsize
        self._aside: Array | None = None

    def combine(self, into: Array, other: Array) -> None:
        """``into = into op other``."""
        self.combine_into(into, other, into)

    def combine_into(self, left: Array, right: Array, into: Array) -> None:
        """``into = left op right``."""
        QUIET.run(self._combine_into, left, right, into)

    def _combine_into(self, left: Array, right: Array, into: Array) -> None:
        if self._brain:
            mine, theirs = bfloat16_to_float32(left), bfloat16_to_float32(right)
            self._kernel(mine, theirs, out=mine)
            float32_to_bfloat16(mine, out=into)
        else:
            self._kernel(left, right, out=into)

    def fold(self, vectors: Sequence[Array], into: Sequence[Array]) -> None:
        """Combines the vectors in their order, finishes, and puts the result into every one of ``into``.

        Block by block, so that what is combined is still in the cache when it is written. The results may be
        the vectors themselves: whatever is written has been read before.
        """
        QUIET.run(self._fold, vectors, into)

    def always(self, vectors: Sequence[Array], into: Sequence[Array]) -> Callable[[], None]:
        """``fold`` of these, for ``QUIET`` to run again and again; of two small vectors it is one call."""
        plain = not self._brain and self.op != "avg" and vectors[0].size <= self._block
        if plain and len(vectors) == 2 and len(into) == 1:
            return partial(self._kernel, *vectors, *into)
        return partial(self._fold, vectors, into)

    def _fold(self, vectors: Sequence[Array], into: Sequence[Array]) -> None:
        size, block = vectors[0].size, self._block
        if size <= block:
            self._fold_block(vectors, into)
            return
        for start in range(0, size, block):
            stop = start + block
            self._fold_block(
                [vector[start:stop] for vector in vectors], [target[start:stop] for target in into]
            )

    def _fold_block(self, parts: Sequence[Array], targets: Sequence[Array]) -> None:
        total, kernel = targets[0], self._kernel
        if len(parts) == 1:
            total[...] = parts[0]
        elif self._brain:
            total[...] = self._brain_fold(parts)
        elif len(parts) == 2:
            kernel(parts[0], parts[1], out=total)
        else:
            # Aside until the last one: a result may lie where a vector does that is still to be read.
            aside = self._aside_for(parts[0])
            kernel(parts[0], parts[1], out=aside)
            for part in parts[2:-1]:
                kernel(aside, part, out=aside)
            kernel(aside, parts[-1], out=total)
        if self.op == "avg":
            self.finish(total, len(parts))
        for target in targets[1:]:
            target[...] = total

    def _aside_for(self, part: Array) -> Array:
        """Memory for a block, kept: a reduction is used by one thread at a time."""
        if self._aside is None or self._aside.size < part.size:
            self._aside = np.empty(part.size, part.dtype)
        return self._aside[: part.size]

    def _brain_fold(self, parts: Sequence[Array]) -> Array:
        total = parts[0].copy()
        for part in parts[1:]:
            self._combine_into(total, part, total)
        return total

    def finish(self, into: Array, size: int) -> None:
        """What comes last, when ``into`` holds the combination of ``size`` vectors."""
        if self.op != "avg":
            return
        if self._brain:
            float32_to_bfloat16(bfloat16_to_float32(into) / np.float32(size), out=into)
        elif into.dtype.kind in "iu":
            wide = into.astype(np.int64)
            quotient = wide // size
            quotient += (wide < 0) & (quotient * size != wide)
            into[...] = quotient
        else:
            np.divide(into, into.dtype.type(size), out=into)
