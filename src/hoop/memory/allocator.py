"""Placement of named buffers in a device's memory.

    0                                                       capacity
    |······ free ······|  adam  |······|  grads  |··|  weights  |
                                                  ^ gap left by alignment

Named buffers are placed from the top down. Callers that use raw addresses (the lab's programs) start at the
bottom, so the two overlap only when the memory is full. This module does bookkeeping only; it reads and writes
no buffer bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfMemory

MAX_NAME = 128
_MAX_LISTED = 4  # buffers that an error message lists before "and N more"


@dataclass(frozen=True)
class Span:
    """A named byte range ``[offset, offset + size)``."""

    name: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of the first byte after the range."""
        return self.offset + self.size


class Allocator:
    """Named, non-overlapping ranges of ``[0, capacity)``. Each is placed in the highest gap that fits it."""

    def __init__(self, capacity: int, *, owner: str = "allocator") -> None:
        if capacity < 0:
            raise InvalidArgument(f"{owner}: capacity is {capacity}, it must be zero or more bytes")
        self.capacity = capacity
        self._owner = owner  # prefix of error messages
        self._by_name: dict[str, Span] = {}
        self._placed: list[Span] = []  # sorted by offset; spans of size zero are left out
        self._used = 0

    @classmethod
    def restore(cls, capacity: int, spans: Iterable[Span], *, owner: str = "allocator") -> Allocator:
        """Rebuild an allocator from ``spans``. Raises InvalidArgument if they overlap or exceed ``capacity``."""
        allocator = cls(capacity, owner=owner)
        previous: Span | None = None
        for span in sorted(spans, key=_by_offset):
            _check_name(span.name, owner)
            if span.name in allocator._by_name:
                raise InvalidArgument(f"{owner}: two buffers are called {span.name!r}")
            if span.offset < 0 or span.size < 0 or span.end > capacity:
                raise InvalidArgument(
                    f"{owner}: buffer {span.name!r} [{span.offset}, {span.end}) is outside [0, {capacity})"
                )
            if span.size and previous is not None and span.offset < previous.end:
                raise InvalidArgument(
                    f"{owner}: buffers {previous.name!r} [{previous.offset}, {previous.end}) and "
                    f"{span.name!r} [{span.offset}, {span.end}) overlap"
                )
            previous = span if span.size else previous
            allocator._add(span)
        return allocator

    def allocate(self, name: str, size: int, alignment: int = 64) -> Span:
        """Place a new buffer in the highest gap that fits ``size`` bytes at ``alignment``."""
        _check_name(name, self._owner)
        if size < 0:
            raise InvalidArgument(f"{self._owner}: buffer {name!r} of {size} bytes; a size is zero or more")
        if alignment < 1 or alignment & (alignment - 1):
            raise InvalidArgument(
                f"{self._owner}: buffer {name!r} with alignment {alignment}; it must be a power of two"
            )
        if (taken := self._by_name.get(name)) is not None:
            raise FailedPrecondition(
                f"{self._owner}: buffer {name!r} already exists, {format_size(taken.size)} "
                f"({taken.size} bytes); free it first or choose another name"
            )
        for start, end in reversed(list(self._gaps())):
            offset = (end - size) // alignment * alignment
            if offset >= start:
                return self._add(Span(name, offset, size))
        raise OutOfMemory(self._out_of_memory_message(name, size, alignment))

    def free(self, name: str) -> Span:
        """Release a buffer and return its span."""
        span = self.find(name)
        del self._by_name[name]
        if span.size:
            del self._placed[bisect_left(self._placed, span.offset, key=_by_offset)]
        self._used -= span.size
        return span

    def find(self, name: str) -> Span:
        """The span called ``name``; raises NotFound."""
        span = self._by_name.get(name)
        if span is None:
            names = [repr(known) for known in self._by_name]
            raise NotFound(
                f"{self._owner}: no buffer is called {name!r}; "
                + (f"there are {_comma_list(names)}" if names else "it has no buffers")
            )
        return span

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def spans(self) -> list[Span]:
        """Every span, sorted by offset. Empty spans may share an offset; they are sorted by name."""
        return sorted(self._by_name.values(), key=lambda span: (span.offset, span.size, span.name))

    @property
    def used(self) -> int:
        """Allocated bytes."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """Unallocated bytes, over all gaps."""
        return self.capacity - self._used

    @property
    def largest_free(self) -> int:
        """Bytes of the largest gap."""
        return max(end - start for start, end in self._gaps())

    def _gaps(self) -> Iterator[tuple[int, int]]:
        # Yields empty gaps too: a buffer of zero bytes fits even in full memory.
        start = 0
        for span in self._placed:
            yield start, span.offset
            start = span.end
        yield start, self.capacity

    def _add(self, span: Span) -> Span:
        self._by_name[span.name] = span
        if span.size:
            insort(self._placed, span, key=_by_offset)
        self._used += span.size
        return span

    def _out_of_memory_message(self, name: str, size: int, alignment: int) -> str:
        largest = sorted(self._placed, key=lambda span: span.size, reverse=True)
        holders = [f"{span.name!r} {format_size(span.size)}" for span in largest]
        return (
            f"{self._owner}: cannot allocate {name!r}, {format_size(size)} "
            f"({size} bytes, alignment {alignment}): "
            f"{format_size(self.free_bytes)} free of {format_size(self.capacity)}, "
            f"largest free piece {format_size(self.largest_free)}; "
            + (f"held by {_comma_list(holders)}; free some of them or " if holders else "")
            + "give the device more memory (--memory)"
        )


def _by_offset(span: Span) -> int:
    return span.offset


def _check_name(name: str, owner: str) -> None:
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        shown = name if len(name) <= MAX_NAME else name[:32] + "…"
        raise InvalidArgument(
            f"{owner}: {shown!r} ({len(name)} characters) cannot name a buffer; "
            f"a name is 1 to {MAX_NAME} printable characters"
        )


def _comma_list(items: list[str]) -> str:
    more = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
