"""How two vectors are combined: SUM PROD MIN MAX AVG, for every element type.

Integers wrap on overflow, as they do everywhere; AVG of integers is the wrapped sum divided, rounded
towards zero. bfloat16 is combined as float32 and rounded to nearest even after every combination.
NaN wins in MIN and MAX, so that a diverged rank is seen by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Reduction:
    """One operation on one element type."""

    def __init__(self, op: str, dtype: DType) -> None:
        if op not in _KERNELS:
            raise InvalidArgument(f"op: {op!r} is unknown; known: {', '.join(OPERATIONS)}")
        self.op = op
        self.dtype = dtype
        self._kernel = _KERNELS[op]
        self._brain = dtype.name == "bfloat16"

    def combine(self, into: Array, other: Array) -> None:
        """``into = into op other``."""
        self.combine_into(into, other, into)

    def combine_into(self, left: Array, right: Array, into: Array) -> None:
        """``into = left op right``."""
        with np.errstate(all="ignore"):
            if self._brain:
                mine, theirs = bfloat16_to_float32(left), bfloat16_to_float32(right)
                self._kernel(mine, theirs, out=mine)
                float32_to_bfloat16(mine, out=into)
            else:
                self._kernel(left, right, out=into)

    def fold(self, vectors: Sequence[Array], into: Sequence[Array]) -> None:
        """Combines the vectors in their order, finishes, and puts the result into every one of ``into``."""
        self.folding(vectors, into)()

    def folding(self, vectors: Sequence[Array], into: Sequence[Array]) -> Callable[[], None]:
        """``fold``, ready to be called again and again on the same memory.

        Block by block, so that what is combined is still in the cache when it is written. The results may be
        the vectors themselves: two vectors are read before anything is written; more are summed aside.
        """
        block = _BLOCK_BYTES // self.dtype.itemsize
        size = len(vectors)
        aside = np.empty(min(block, vectors[0].size), vectors[0].dtype) if size > 2 else None
        steps = []
        for start in range(0, vectors[0].size, block):
            parts = [vector[start : start + block] for vector in vectors]
            targets = [target[start : start + block] for target in into]
            total = targets.pop(0) if aside is None else aside[: parts[0].size]
            steps.append((parts, total, targets))
        kernel, copy, finish = self._kernel, np.copyto, self.finish if self.op == "avg" else None

        def fold() -> None:
            with np.errstate(all="ignore"):
                for parts, total, targets in steps:
                    if size == 1:
                        copy(total, parts[0])
                    elif self._brain:
                        copy(total, self._brain_fold(parts))
                    else:
                        kernel(parts[0], parts[1], out=total)
                        for part in parts[2:]:
                            kernel(total, part, out=total)
                    if finish is not None:
                        finish(total, size)
                    for target in targets:
                        copy(target, total)

        return fold

    def _brain_fold(self, parts: list[Array]) -> Array:
        total = parts[0].copy()
        for part in parts[1:]:
            self.combine(total, part)
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
