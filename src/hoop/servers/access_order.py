"""The order of accesses to device memory: which request waits for which, decided when a request is accepted.

A collective, a copy between devices and a Memcpy each touch ranges of bytes. Two of them conflict if they share a byte
and at least one writes it. The later one waits for the earlier one; everything else runs at once. A request waits only
for requests accepted before it, so no cycle can form.

The coordinator orders every request that it accepts. A device orders the direct requests of clients (Read, Write and
the lab's streams) behind the launches that it runs and behind those that the coordinator has announced (Reserve).
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from hoop.errors import DeadlineExceeded

Interval = tuple[int, int]


@dataclass(frozen=True)
class MemoryRange:
    """Bytes ``[start, stop)`` of a device: addresses, or offsets into a named buffer."""

    device_id: int
    start: int
    stop: int
    writes: bool
    buffer: str = ""
    """Name of the buffer into which ``start`` and ``stop`` are offsets; empty: they are absolute addresses."""

    def __str__(self) -> str:
        where = f"buffer {self.buffer!r} of " if self.buffer else ""
        return f"[{self.start:#x}, {self.stop:#x}) of {where}device {self.device_id}"


IntervalsByBuffer = dict[int, dict[str, list[Interval]]]
"""Sorted, disjoint intervals, by device, then by buffer."""


class MemoryFootprint:
    """All bytes that one request touches."""

    def __init__(self, ranges: Iterable[MemoryRange]) -> None:
        ranges = [one for one in ranges if one.start < one.stop]
        self.touched = _intervals(ranges)
        self.written = _intervals([one for one in ranges if one.writes])

    def conflicts(self, other: MemoryFootprint) -> bool:
        return _share(self.written, other.touched) or _share(self.touched, other.written)


def _intervals(ranges: Iterable[MemoryRange]) -> IntervalsByBuffer:
    found: defaultdict[int, defaultdict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for one in ranges:
        found[one.device_id][one.buffer].append((one.start, one.stop))
    return {
        device_id: {buffer: _merged(intervals) for buffer, intervals in buffers.items()}
        for device_id, buffers in found.items()
    }


def _merged(intervals: list[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _share(one: IntervalsByBuffer, other: IntervalsByBuffer) -> bool:
    for device_id in one.keys() & other.keys():
        mine, theirs = one[device_id], other[device_id]
        # A name and an address: only the device knows whether they are the same bytes.
        if ("" in mine and theirs.keys() - {""}) or ("" in theirs and mine.keys() - {""}):
            return True
        if any(_overlap(mine[buffer], theirs[buffer]) for buffer in mine.keys() & theirs.keys()):
            return True
    return False


def _overlap(intervals: list[Interval], others: list[Interval]) -> bool:
    fewer, more = sorted((intervals, others), key=len)
    for start, stop in fewer:
        at = bisect_right(more, start, key=lambda one: one[0])
        if (at and more[at - 1][1] > start) or (at < len(more) and more[at][0] < stop):
            return True
    return False


@dataclass(eq=False)
class Access:
    """One accepted request: the bytes that it touches, and the earlier requests that it waits for."""

    description: str
    """Text about the request, for error messages of requests that wait for it."""
    footprint: MemoryFootprint
    predecessors: list[Access] = field(default_factory=list)
    """Conflicting requests that were accepted before this one, and had not ended then."""
    deadline: float | None = None
    """Time (``time.monotonic``) when the access lapses; None: the code that accepted it always ends it."""
    max_wait_s: float = math.inf
    """Maximum seconds that a later request waits for this one."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def expired(self, now: float) -> bool:
        return self.ended.is_set() or (self.deadline is not None and self.deadline <= now)

    async def wait_turn(self, timeout: float) -> None:
        """Returns when all predecessors have ended. Raises after ``timeout`` seconds, naming one that has not."""
        began = time.monotonic()
        until = began + timeout
        for one in self.predecessors:
            limit = min(until, began + one.max_wait_s, math.inf if one.deadline is None else one.deadline)
            try:
                await asyncio.wait_for(one.ended.wait(), max(0.0, limit - time.monotonic()))
            except TimeoutError:
                if one.ended.is_set():
                    continue
                waited = time.monotonic() - began
                raise DeadlineExceeded(
                    f"{self.description} waited {waited:.1f} s for {one.description}, which uses the same memory and "
                    "is still in progress; wait for its end first (GetCommStatus), or raise the coordinator's --timeout"
                ) from None
        self.predecessors = []  # else a long queue would keep every access before it in memory


class AccessOrder:
    """The accesses that were accepted and have not ended."""

    def __init__(self) -> None:
        self._accesses: dict[Access, None] = {}

    def accept(self, description: str, ranges: Iterable[MemoryRange], deadline: float | None = None) -> Access:
        """Registers a request. Later requests that conflict with it wait until ``end``."""
        access = self.wait_only(description, ranges)
        access.deadline = deadline
        if access.footprint.touched:
            self._accesses[access] = None
        return access

    def wait_only(self, description: str, ranges: Iterable[MemoryRange]) -> Access:
        """A request that waits for earlier ones. It is not registered: no later request waits for it."""
        footprint = MemoryFootprint(ranges)
        self._expire()
        predecessors = [one for one in self._accesses if footprint.conflicts(one.footprint)]
        return Access(description, footprint, predecessors)

    def end(self, access: Access) -> None:
        """The request has finished, or will never run."""
        self._accesses.pop(access, None)
        access.ended.set()

    def __len__(self) -> int:
        return len(self._accesses)

    def _expire(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._accesses if one.expired(now)]:
            self.end(one)

    @asynccontextmanager
    async def in_turn(self, description: str, ranges: Iterable[MemoryRange], timeout: float) -> AsyncIterator[None]:
        """Accepts a request, waits for its turn, and ends it with the context."""
        access = self.accept(description, ranges)
        try:
            await access.wait_turn(timeout)
            yield
        finally:
            self.end(access)
