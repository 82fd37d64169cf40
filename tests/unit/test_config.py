"""parse_size, format_size and parse_duration: accepted forms, rejected text and limits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.config import format_size, parse_duration, parse_size
from hoop.errors import InvalidArgument

GARBAGE = [
    "",
    " ",
    "ten",
    "MiB",
    "1..5",
    ".5",
    "5.",
    "1e3",
    "0x10",
    "1,5",
    "1 2",
    "+1",
    "-1",
    "1_000",
    "1\n2",
]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (1048576, 1048576),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        (" 2 KiB ", 2048),
        ("256MiB", 256 * 1024**2),
        ("256mib", 256 * 1024**2),
        ("3GiB", 3 * 1024**3),
        ("1TiB", 1024**4),
        ("1KB", 1000),
        ("1.5 GB", 1_500_000_000),
        ("2TB", 2 * 1000**4),
        ("0.5KiB", 512),
        ("0.0001KB", 1),  # rounded up to a whole byte
        ("1.0001KB", 1001),
        ("1.001KB", 1001),  # exact, not rounded by a float
        ("1.005 MB", 1_005_000),
        ("9007199254740993", 2**53 + 1),  # exact beyond the 53 bits of a float
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize("text", [*GARBAGE, "1 XB", "1 KiBs", "1K", "1 MiB/s", "1s", "nan", "inf", "NaN GB", "infGB"])
def test_invalid_sizes_are_rejected_with_field_and_value(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_size(text, "memory")
    assert str(caught.value).startswith(f"memory: {text!r} is not a size")
    assert "256MiB" in str(caught.value)


@pytest.mark.parametrize("size", [-1, 2**63, "9223372036854775808", "9000000TiB"])
def test_a_size_fits_63_bits(size: str | int) -> None:
    with pytest.raises(InvalidArgument, match=rf"size: {size} is not in 0..2\^63 bytes"):
        parse_size(size)
    assert parse_size(2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5"], ids=["5000 digits", "beyond a float"])
def test_an_overlong_size_raises_invalid_argument(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"memory: '9{40}' is not a size"):
        parse_size(text, "memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1025, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (268435456, "256 MiB"),
        (1024**3, "1 GiB"),
        (5 * 1024**4, "5 TiB"),
        (1024**5, "1024 TiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**60))
def test_a_formatted_size_parses_back_within_five_percent(size: int) -> None:
    text = format_size(size)
    parsed = parse_size(text)
    assert abs(parsed - size) <= 0.05 * size
    assert parsed == size or "." in text, "a text without decimals is exact"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0.0),
        (2, 2.0),
        (0.25, 0.25),
        ("0", 0.0),
        ("2", 2.0),
        ("1.5s", 1.5),
        (" 500 ms ", 0.5),
        ("250us", 0.00025),
        ("2min", 120.0),
        ("0.5min", 30.0),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12, abs=0)
    assert isinstance(parse_duration(text), float)


@pytest.mark.parametrize("text", [*GARBAGE, "1h", "1m", "1 sec", "5MS", "1 KiB", "nan", "inf", "infs", "-1s"])
def test_invalid_durations_are_rejected_with_field_and_value(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_duration(text, "lease")
    assert str(caught.value).startswith(f"lease: {text!r} is not a duration")
    assert "500ms" in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, -1e-9, 10**400])
def test_a_duration_is_finite_and_not_negative(value: str | float) -> None:
    with pytest.raises(InvalidArgument, match=r"lease: .* is not a finite duration of zero or more"):
        parse_duration(value, "lease")


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 308 + "min"], ids=["5000 digits", "beyond a float"])
def test_an_overlong_duration_raises_invalid_argument(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"lease: '9{40}' is not a duration"):
        parse_duration(text, "lease")
