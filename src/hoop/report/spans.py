"""Spans of a device's time, from which the trace, the timeline and the time shares are made."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COMPUTE = ("forward", "backward", "update", "load", "compute")
"""Span categories of computation."""

COMMUNICATE = ("communicate", "send", "recv", "reduce", "gather", "push", "pull")
"""Span categories of communication. Every other category (``idle``, ``wait``) counts as idle."""


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a device. ``lane`` separates concurrent activities, such as kernels and links."""

    track: str
    name: str
    category: str
    start_us: float
    duration_us: float
    args: Mapping[str, Any] = field(default_factory=dict)
    lane: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


class Shares(NamedTuple):
    """Fractions of a device's time; they add up to one."""

    compute: float
    communicate: float
    """Exposed communication: not overlapped by computation."""
    idle: float


def kind_of(category: str) -> str | None:
    """The kind that determines the colour of a span; None is idle."""
    if category in COMMUNICATE:
        return "communicate"
    return category if category in COMPUTE else None


def by_track(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans by track, in natural order: ``device 2`` before ``device 10``."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.track, []).append(span)
    return {track: found[track] for track in sorted(found, key=_natural)}


def window(spans: Iterable[Span]) -> tuple[float, float]:
    """First start and last end."""
    times = [(span.start_us, span.end_us) for span in spans] or [(0.0, 0.0)]
    return min(start for start, _ in times), max(end for _, end in times)


def shares(spans: Iterable[Span], start_us: float | None = None, end_us: float | None = None) -> dict[str, Shares]:
    """Shares of each track in a time window, by default the window of all spans."""
    spans = list(spans)
    first, last = window(spans)
    first = first if start_us is None else start_us
    last = last if end_us is None else end_us
    whole = last - first
    found = {}
    for track, own in by_track(spans).items():
        compute = _covered(own, COMPUTE, first, last)
        busy = _covered(own, COMPUTE + COMMUNICATE, first, last)
        found[track] = (
            Shares(compute / whole, (busy - compute) / whole, 1 - busy / whole) if whole > 0 else Shares(0.0, 0.0, 1.0)
        )
    return found


def _covered(spans: Iterable[Span], kinds: tuple[str, ...], first: float, last: float) -> float:
    """Time that is covered by at least one span of these categories."""
    total, reached = 0.0, first
    for span in sorted((one for one in spans if one.category in kinds), key=lambda one: one.start_us):
        start, end = max(span.start_us, reached), min(span.end_us, last)
        if end > start:
            total, reached = total + end - start, end
    return total


def _natural(text: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text) if part]
