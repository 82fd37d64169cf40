"""The order of accesses to device memory: who must wait for whom, decided when a request is accepted.

A collective, a copy between devices and a Memcpy each touch ranges of bytes. Two of them conflict if they share a byte
and at least one writes it. The later one waits for the earlier one; everything else runs at once. A request waits only
for requests accepted before it, so no cycle can form.

The coordinator orders everything that it accepts. A device orders what clients ask it for directly (Read, Write and
the lab's streams) behind the launches it runs and behind those that the coordinator has announced (Reserve).
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
    """Empty: ``start`` and ``stop`` are absolute addresses."""

    def __str__(self) -> str:
        where = f"buffer {self.buffer!r} of " if self.buffer else ""
        return f"[{self.start:#x}, {self.stop:#x}) of {where}device {self.device_id}"


Ranges = dict[int, dict[str, list[Interval]]]
"""By device, then by buffer: sorted, disjoint intervals."""


class MemoryFootprint:
    """All bytes that one request touches."""

    def __init__(self, spans: Iterable[MemoryRange]) -> None:
        spans = [span for span in spans if span.start < span.stop]
        self.touched = _ranges(spans)
        self.written = _ranges([span for span in spans if span.writes])

    def conflicts(self, other: MemoryFootprint) -> bool:
        return _share(self.written, other.touched) or _share(self.touched, other.written)


def _ranges(spans: Iterable[MemoryRange]) -> Ranges:
    found: defaultdict[int, defaultdict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        found[span.device_id][span.buffer].append((span.start, span.stop))
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


def _share(one: Ranges, other: Ranges) -> bool:
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
    """One accepted request: what it is, which bytes it touches, and whom it waits for."""

    what: str
    """For people: who waits for it is told this."""
    footprint: MemoryFootprint
    earlier: list[Access] = field(default_factory=list)
    """Accepted before, conflicting, and not ended when this one was accepted."""
    deadline: float | None = None
    """When it is given up, by ``time.monotonic``; None: the code that accepted it always ends it."""
    patience: float = math.inf
    """How many seconds a later one waits for it at most."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def expired(self, now: float) -> bool:
        return self.ended.is_set() or (self.deadline is not None and self.deadline <= now)

    async def turn(self, timeout: float) -> None:
        """Returns when all earlier ones have ended; raises after ``timeout`` seconds, naming the one that has not."""
        began = time.monotonic()
        until = began + timeout
        for one in self.earlier:
            limit = min(until, began + one.patience, math.inf if one.deadline is None else one.deadline)
            try:
                await asyncio.wait_for(one.ended.wait(), max(0.0, limit - time.monotonic()))
            except TimeoutError:
                if one.ended.is_set():
                    continue
                waited = time.monotonic() - began
                raise DeadlineExceeded(
                    f"{self.what} waited {waited:.1f} s for {one.what}, which uses the same memory and is still in "
                    "progress; wait for its end first (GetCommStatus), or raise the coordinator's --timeout"
                ) from None
        self.earlier = []  # a long queue must not keep everything that was ever before it


class MemoryOrder:
    """The accesses that are accepted and have not ended."""

    def __init__(self) -> None:
        self._accesses: dict[Access, None] = {}

    def accept(self, what: str, spans: Iterable[MemoryRange], deadline: float | None = None) -> Access:
        """Enters a request; from now on later ones that conflict with it wait until ``end``."""
        access = self.behind(what, spans)
        access.deadline = deadline
        if access.footprint.touched:
            self._accesses[access] = None
        return access

    def behind(self, what: str, spans: Iterable[MemoryRange]) -> Access:
        """A request that waits for those before it, and for which none waits."""
        footprint = MemoryFootprint(spans)
        self._expire()
        earlier = [one for one in self._accesses if footprint.conflicts(one.footprint)]
        return Access(what, footprint, earlier)

    def end(self, access: Access) -> None:
        """The request has had its effect, or never will."""
        self._accesses.pop(access, None)
        access.ended.set()

    def __len__(self) -> int:
        return len(self._accesses)

    def _expire(self) -> None:
        now = time.monotonic()
        for one in [one for one in self._accesses if one.expired(now)]:
            self.end(one)

    @asynccontextmanager
    async def turn(self, what: str, spans: Iterable[MemoryRange], timeout: float) -> AsyncIterator[None]:
        """Accepts a request, waits for its turn, and ends it with the context."""
        access = self.accept(what, spans)
        try:
            await access.turn(timeout)
            yield
        finally:
            self.end(access)
