"""How two vectors are combined: SUM PROD MIN MAX AVG, for every element type.

Integers wrap on overflow, as they do everywhere; AVG of integers is the wrapped sum divided, rounded
towards zero. bfloat16 is combined as float32 and rounded to nearest even after every combination.
NaN wins in MIN and MAX, so that a diverged rank is seen by all.
"""

from __future__ import annotations

from collections.abc import Callable
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
        if self._brain:
            mine, theirs = bfloat16_to_float32(into), bfloat16_to_float32(other)
            self._kernel(mine, theirs, out=mine)
            float32_to_bfloat16(mine, out=into)
        else:
            with np.errstate(all="ignore"):
                self._kernel(into, other, out=into)

    def finish(self, into: Array, size: int) -> None:
        """What comes last, when ``into`` holds the combination of ``size`` vectors."""
        if self.op != "avg":
            return
        if self._brain:
            float32_to_bfloat16(bfloat16_to_float32(into) / np.float32(size), out=into)
        elif into.dtype.kind in "iu":
            quotient = into // into.dtype.type(size)
            quotient += (into < 0) & (quotient * into.dtype.type(size) != into)
            into[...] = quotient
        else:
            np.divide(into, into.dtype.type(size), out=into)
