"""What the elements of a buffer are, and how bfloat16 becomes something NumPy can add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hoop.errors import InvalidArgument


@dataclass(frozen=True)
class DType:
    """One element type: its name, its bytes, and the NumPy type that stores it."""

    name: str
    itemsize: int
    numpy: np.dtype[Any]


# NumPy has no bfloat16: its bits are kept as uint16 and converted at the edges of arithmetic.
_STORED_AS = {"bfloat16": "uint16"}
DTYPES: dict[str, DType] = {
    name: DType(name, storage.itemsize, storage)
    for name in ("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8")
    for storage in (np.dtype(_STORED_AS.get(name, name)),)
}


def dtype(name: str) -> DType:
    """The element type with this name."""
    try:
        return DTYPES[name]
    except KeyError:
        raise InvalidArgument(f"dtype: {name!r} is not known; use one of {', '.join(DTYPES)}") from None


# Elements converted at a time: the scratch (256 KiB) stays in the cache, so a large array is read once from
# memory and written once, where whole-array temporaries would travel to memory and back for every operation.
_BLOCK = 65536
_QUIET = 0x0040


def bfloat16_to_float32(
    bits: NDArray[np.uint16], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """The float32 values that these bits stand for: exact, a bfloat16 is the upper half of a float32."""
    result = np.empty(bits.shape, np.float32) if out is None else out
    _check("bfloat16_to_float32", bits, np.uint16, result, np.float32)
    np.left_shift(bits, 16, out=result.view(np.uint32), dtype=np.uint32)
    return result


def float32_to_bfloat16(
    values: NDArray[np.float32], out: NDArray[np.uint16] | None = None
) -> NDArray[np.uint16]:
    """The nearest bfloat16 bits, ties to even; infinities stay, and a NaN stays a (quiet) NaN."""
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
        # Half of the last kept bit, less one unless that bit is odd: a tie then carries only into an odd one.
        np.right_shift(bits, 16, out=work)
        work &= 1
        work += 0x7FFF
        work += bits
        work >>= 16
        upper[...] = work
        # The carry may have turned a NaN into an infinity or a zero. NaNs are rare, so look before mending.
        nan = np.isnan(block)
        if nan.any():
            upper[nan] = (bits[nan] >> 16) | _QUIET
    return result


def _check(who: str, source: NDArray[Any], source_type: type, out: NDArray[Any], out_type: type) -> None:
    if source.dtype != source_type:
        raise InvalidArgument(f"{who}: the input is {source.dtype}, it must be {np.dtype(source_type)}")
    if out.dtype != out_type or out.shape != source.shape or not out.flags.c_contiguous:
        raise InvalidArgument(
            f"{who}: out must be a contiguous {np.dtype(out_type)} array of shape {source.shape}, "
            f"it is {out.dtype} of shape {out.shape}{'' if out.flags.c_contiguous else ', not contiguous'}"
        )
    if np.may_share_memory(source, out):
        raise InvalidArgument(
            f"{who}: out shares memory with the input, which would be read half overwritten"
        )
