"""The allocator: each of its rules, and its invariants under any sequence of calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfMemory
from hoop.memory.allocator import Allocator, Span


def test_the_highest_gap_that_is_large_enough_is_taken() -> None:
    allocator = Allocator(1024)
    assert [allocator.allocate(name, 128).offset for name in "abcd"] == [896, 768, 640, 512]
    allocator.free("a")
    allocator.free("c")
    assert allocator.allocate("large", 129).offset == 320
    assert allocator.allocate("small", 128) == Span("small", 896, 128)
    assert allocator.allocate("next", 1).offset == 704
    assert allocator.used == 128 * 3 + 129 + 1
    assert allocator.free_bytes == 1024 - allocator.used
    assert allocator.largest_free == 320


def test_alignment_moves_the_offset_and_its_gap_stays_usable() -> None:
    allocator = Allocator(1024)
    assert allocator.allocate("odd", 1, alignment=1).offset == 1023
    assert allocator.allocate("aligned", 8).offset == 960
    assert allocator.allocate("page", 8, alignment=256).offset == 768
    assert allocator.allocate("filler", 8, alignment=1).offset == 1015


def test_named_buffers_reach_raw_addresses_at_the_bottom_only_when_the_memory_is_full() -> None:
    allocator, raw = Allocator(1024), 256  # bytes at the bottom, used without a name
    lowest = [allocator.allocate(f"b{number}", 64).offset for number in range(12)][-1]
    assert lowest == raw
    allocator.free("b0")
    assert allocator.allocate("again", 64).offset == 960  # a gap at the top comes before free bytes at the bottom
    assert allocator.allocate("one too many", 64).offset == raw - 64


@pytest.mark.parametrize("alignment", [0, -1, 3, 12, 100])
def test_alignment_must_be_a_power_of_two(alignment: int) -> None:
    with pytest.raises(InvalidArgument, match=f"'a' with alignment {alignment}; it must be a power of two"):
        Allocator(64).allocate("a", 1, alignment)


def test_a_full_allocator_refuses_one_more_byte() -> None:
    allocator = Allocator(100)
    allocator.allocate("all", 100)
    assert (allocator.free_bytes, allocator.largest_free) == (0, 0)
    with pytest.raises(OutOfMemory):
        allocator.allocate("more", 1)
    assert "more" not in allocator


def test_zero_bytes_always_fit_and_take_no_memory() -> None:
    allocator = Allocator(10)
    allocator.allocate("all", 10)
    assert allocator.allocate("none", 0) == Span("none", 0, 0)
    assert allocator.find("none").size == 0
    with pytest.raises(FailedPrecondition, match="'none' already exists, 0 B"):
        allocator.allocate("none", 0)
    assert Allocator.restore(10, allocator.spans()).spans() == allocator.spans()
    allocator.free("none")
    assert [span.name for span in allocator.spans()] == ["all"]
    assert Allocator(0).allocate("empty", 0).offset == 0


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "a\x00", "\x7f", "\ud800"])
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="1 to 128 printable characters") as caught:
        Allocator(64).allocate(name, 1)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a", "x" * 128, "layer 0/weight", "größe"])
def test_valid_names_are_accepted(name: str) -> None:
    assert Allocator(64).allocate(name, 1).name == name


def test_the_error_for_an_existing_name_states_its_size() -> None:
    allocator = Allocator(4096, owner="device 3")
    allocator.allocate("w", 2048)
    with pytest.raises(FailedPrecondition, match=r"device 3: buffer 'w' already exists, 2 KiB \(2048 bytes\)"):
        allocator.allocate("w", 1)
    assert allocator.used == 2048


def test_the_error_for_an_unknown_name_lists_existing_names() -> None:
    allocator = Allocator(4096, owner="device 3")
    with pytest.raises(NotFound, match="device 3: no buffer is called 'w'; it has no buffers"):
        allocator.find("w")
    for number in range(6):
        allocator.allocate(f"b{number}", 1)
    with pytest.raises(NotFound, match="'w'; there are 'b0', 'b1', 'b2', 'b3' and 2 more"):
        allocator.free("w")


def test_out_of_memory_states_the_request_the_free_bytes_and_the_largest_buffers() -> None:
    allocator = Allocator(64 * 1024, owner="device 3")
    for number, kib in enumerate([8, 4, 16, 2, 1, 1]):
        allocator.allocate(f"b{number}", kib * 1024)
    allocator.free("b1")
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate("grads", 33 * 1024)
    assert str(caught.value) == (
        "device 3: cannot allocate 'grads', 33 KiB (33792 bytes, alignment 64): 36 KiB free of 64 KiB, "
        "largest free piece 32 KiB; held by 'b2' 16 KiB, 'b0' 8 KiB, 'b3' 2 KiB, 'b5' 1 KiB and 1 more; "
        "free some of them or give the device more memory (--memory)"
    )
    with pytest.raises(OutOfMemory, match="largest free piece 8 B; give the device more memory"):
        Allocator(8).allocate("a", 9)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="'a' of -1 bytes"):
        Allocator(64).allocate("a", -1)
    with pytest.raises(InvalidArgument, match="capacity is -1"):
        Allocator(-1)


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([Span("a", 0, 10), Span("b", 9, 1)], r"'a' \[0, 10\) and 'b' \[9, 10\) overlap"),
        ([Span("a", 0, 90), Span("z", 50, 0), Span("b", 60, 1)], "'a'.* and 'b'.* overlap"),
        ([Span("a", 5, 5), Span("b", 5, 5)], "overlap"),
        ([Span("a", 0, 101)], r"'a' \[0, 101\) is outside \[0, 100\)"),
        ([Span("a", -1, 5)], "outside"),
        ([Span("a", 5, -1)], "outside"),
        ([Span("a", 101, 0)], "outside"),
        ([Span("a", 0, 1), Span("a", 1, 1)], "two buffers are called 'a'"),
        ([Span("a\n", 0, 1)], "printable"),
    ],
)
def test_restore_refuses_invalid_spans(spans: list[Span], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Allocator.restore(100, spans)


requests = st.lists(
    st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 400), st.sampled_from([1, 2, 8, 64, 256])),
    max_size=60,
)


@given(requests)
def test_no_history_makes_spans_overlap_or_loses_a_byte(history: list[tuple[bool, int, int, int]]) -> None:
    allocator = Allocator(1000)
    expected: dict[str, Span] = {}
    for allocate, number, size, alignment in history:
        name = f"b{number}"
        if allocate and name not in expected:
            gaps = free_ranges(list(expected.values()))
            fits = [(end - size) // alignment * alignment for _, end in gaps]
            fits = [offset for offset, (start, _) in zip(fits, gaps, strict=True) if offset >= start]
            try:
                span = allocator.allocate(name, size, alignment)
            except OutOfMemory:
                assert not fits
                continue
            # Zero bytes fit anywhere, also at the edge of another span.
            assert span == Span(name, max(fits) if size else span.offset, size)
            assert span.offset % alignment == 0
            expected[name] = span
        elif not allocate and name in expected:
            assert allocator.free(name) == expected.pop(name)
        spans = allocator.spans()
        assert sorted(spans, key=lambda span: span.name) == sorted(expected.values(), key=lambda span: span.name)
        sized = [span for span in spans if span.size]
        assert all(one.end <= two.offset for one, two in pairwise(sized))
        assert all(0 <= span.offset <= span.end <= 1000 for span in spans)
        assert allocator.used == sum(span.size for span in spans) == 1000 - allocator.free_bytes
        assert allocator.largest_free == max(end - start for start, end in free_ranges(spans))
    restored = Allocator.restore(1000, reversed(allocator.spans()))
    assert restored.spans() == allocator.spans()
    assert (restored.used, restored.largest_free) == (allocator.used, allocator.largest_free)
    for name in list(expected):
        restored.free(name)
    assert restored.allocate("everything", 1000, 1) == Span("everything", 0, 1000)


def free_ranges(spans: list[Span]) -> list[tuple[int, int]]:
    """Return the free ranges, found byte by byte."""
    taken = {byte for span in spans for byte in range(span.offset, span.end)}
    ranges, start = [], 0
    for byte in range(1001):
        if byte == 1000 or byte in taken:
            ranges.append((start, byte))
            start = byte + 1
    return ranges
