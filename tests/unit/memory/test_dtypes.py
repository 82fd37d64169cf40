"""Element types, and bfloat16 conversion against a reference that converts one number at a time."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.memory import dtypes
from hoop.memory.dtypes import DTYPES, bfloat16_to_float32, dtype, float32_to_bfloat16


@pytest.mark.parametrize(
    ("name", "itemsize", "stored"),
    [
        ("float16", 2, np.float16),
        ("float32", 4, np.float32),
        ("float64", 8, np.float64),
        ("bfloat16", 2, np.uint16),
        ("int8", 1, np.int8),
        ("int32", 4, np.int32),
        ("int64", 8, np.int64),
        ("uint8", 1, np.uint8),
    ],
)
def test_every_type_has_its_size_and_storage(name: str, itemsize: int, stored: type) -> None:
    found = dtype(name)
    assert (found.name, found.itemsize, found.numpy) == (name, itemsize, np.dtype(stored))


def test_the_error_for_an_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="'float31'") as caught:
        dtype("float31")
    assert len(DTYPES) == 8
    assert all(name in str(caught.value) for name in DTYPES)


def reference(bits: int) -> int:
    """Return the bfloat16 of one float32, both as bits: round to nearest, ties to even."""
    value = struct.unpack("<f", struct.pack("<I", bits))[0]
    if math.isnan(value):
        return (bits >> 16) | 0x0040
    below = bits >> 16  # the neighbour nearer to zero
    distance, whole = bits & 0xFFFF, 0x10000
    if distance * 2 == whole:
        return below + (below & 1)
    return below + (distance * 2 > whole)


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
@example([0, 0x80000000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF])  # ties, largest
@example([0x7F800000, 0xFF800000, 0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])  # inf, NaN
@example([1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x007FFFFF])  # subnormal
def test_rounding_matches_the_reference_bit_for_bit(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    assert float32_to_bfloat16(values).tolist() == [reference(each) for each in bits]


def test_every_bfloat16_widens_exactly_and_rounds_back() -> None:
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    wide = bfloat16_to_float32(bits)
    assert wide.dtype == np.float32
    assert np.array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    nan = np.isnan(wide)
    assert np.array_equal(float32_to_bfloat16(wide), np.where(nan, bits | 0x40, bits))
    assert np.isnan(bfloat16_to_float32(float32_to_bfloat16(wide)))[nan].all()


def test_conversion_is_correct_at_block_boundaries() -> None:
    count = 2 * dtypes._BLOCK + 7
    bits = np.random.default_rng(1).integers(0, 2**32, count, dtype=np.uint32)
    edges = [0, dtypes._BLOCK - 1, dtypes._BLOCK, 2 * dtypes._BLOCK, count - 1]
    bits[edges] = 0xFFFFFFFF
    found = float32_to_bfloat16(bits.view(np.float32))
    assert (found[edges] == 0xFFFF).all()
    sample = [*edges, *range(0, count, 997)]
    assert found[sample].tolist() == [reference(int(each)) for each in bits[sample]]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (0, 5)])
def test_out_is_filled_and_the_shape_is_kept(shape: tuple[int, ...]) -> None:
    values = np.ones(shape, np.float32)
    narrow = np.empty(shape, np.uint16)
    assert float32_to_bfloat16(values, out=narrow) is narrow
    assert narrow.shape == shape
    wide = np.empty(shape, np.float32)
    assert bfloat16_to_float32(narrow, out=wide) is wide
    assert np.array_equal(wide, values)


def test_a_strided_input_is_read_in_its_order() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4).T
    narrow = float32_to_bfloat16(values)
    assert np.array_equal(bfloat16_to_float32(narrow), values)
    assert np.array_equal(bfloat16_to_float32(narrow[:, ::2]), values[:, ::2])


def test_unsuitable_arrays_are_refused() -> None:
    values = np.ones(4, np.float32)
    with pytest.raises(InvalidArgument, match="input is float64, it must be float32"):
        float32_to_bfloat16(values.astype(np.float64))
    with pytest.raises(InvalidArgument, match=r"of shape \(4,\), it is uint16 of shape \(3,\)"):
        float32_to_bfloat16(values, out=np.empty(3, np.uint16))
    with pytest.raises(InvalidArgument, match="not contiguous"):
        float32_to_bfloat16(values, out=np.empty(8, np.uint16)[::2])
    with pytest.raises(InvalidArgument, match="shares memory"):
        float32_to_bfloat16(values, out=values.view(np.uint16)[:4])
    with pytest.raises(InvalidArgument, match="must be a contiguous float32"):
        bfloat16_to_float32(np.ones(4, np.uint16), out=np.empty(4, np.float64))
