"""Element types of buffers, and conversion between bfloat16 and float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hoop.errors import InvalidArgument


@dataclass(frozen=True)
class DType:
    """An element type: its name, its size in bytes, and the NumPy type that stores it."""

    name: str
    itemsize: int
    numpy: np.dtype[Any]


# NumPy has no bfloat16: its bits are stored as uint16, and arithmetic converts them to float32 and back.
_STORED_AS = {"bfloat16": "uint16"}
DTYPES: dict[str, DType] = {
    name: DType(name, storage.itemsize, storage)
    for name in ("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8")
    for storage in (np.dtype(_STORED_AS.get(name, name)),)
}


def dtype(name: str) -> DType:
    """The element type called ``name``; raises InvalidArgument."""
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidArgument(f"dtype: {name!r} is not known; use one of {', '.join(DTYPES)}") from None


# Elements converted at a time. The scratch array (256 KiB) stays in the cache, so a large array is read from and
# written to memory once; whole-array temporaries would go through memory at every operation.
_BLOCK = 65536
_QUIET = 0x0040


def bfloat16_to_float32(bits: NDArray[np.uint16], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Convert bfloat16 bits to float32. Exact: a bfloat16 is the upper half of a float32."""
    result = np.empty(bits.shape, np.float32) if out is None else out
    _check("bfloat16_to_float32", bits, np.uint16, result, np.float32)
    np.left_shift(bits, 16, out=result.view(np.uint32), dtype=np.uint32)
    return result


def float32_to_bfloat16(values: NDArray[np.float32], out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bits: nearest, ties to even. Infinities stay; a NaN stays a (quiet) NaN."""
    result = np.empty(values.shape, np.uint16) if out is None else out
    _check("float32_to_bfloat16", values, np.float32, result, np.uint16)
    source = np.ascontiguousarray(values).reshape(-1)
    target = result.reshape(-1)
    scratch = np.empty(min(_BLOCK, source.size), np.uint32)
    for start in range(0, source.size, _BLOCK):
        block = source[start : start + _BLOCK]
        bits = block.view(np.uint32)
        upper = target[start : start + _BLOCK]
        work = scratch[: bits.size]
        # Add half of the last kept bit, minus one unless that bit is odd: a tie then carries only into an odd bit.
        np.right_shift(bits, 16, out=work)
        work &= 1
        work += 0x7FFF
        work += bits
        work >>= 16
        upper[...] = work
        # The carry may have turned a NaN into an infinity or a zero. NaNs are rare, so test before the repair.
        nan = np.isnan(block)
        if nan.any():
            upper[nan] = (bits[nan] >> 16) | _QUIET
    return result


def _check(subject: str, source: NDArray[Any], source_type: type, out: NDArray[Any], out_type: type) -> None:
    if source.dtype != source_type:
        raise InvalidArgument(f"{subject}: the input is {source.dtype}, it must be {np.dtype(source_type)}")
    if out.dtype != out_type or out.shape != source.shape or not out.flags.c_contiguous:
        raise InvalidArgument(
            f"{subject}: out must be a contiguous {np.dtype(out_type)} array of shape {source.shape}, "
            f"it is {out.dtype} of shape {out.shape}{'' if out.flags.c_contiguous else ', not contiguous'}"
        )
    if np.may_share_memory(source, out):
        raise InvalidArgument(f"{subject}: out shares memory with the input, which would be read half overwritten")
