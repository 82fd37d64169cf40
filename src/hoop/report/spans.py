"""What a device did, and when: the spans that a trace, a timeline and a summary are all made from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

COMPUTE = ("forward", "backward", "update", "load", "compute")
"""Kinds of span in which a device works on the model."""

COMMUNICATE = ("communicate", "send", "recv", "reduce", "push", "pull")
"""Kinds in which it moves or awaits data. Whatever else a span says (``idle``, ``wait``), it is idle."""


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a device did. ``lane`` tells apart what it does at once: kernels, and links."""

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
    """How a device spent its time; the three add up to one."""

    compute: float
    communicate: float
    """Communication that nothing was computed behind: what it cost."""
    idle: float


def by_track(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Each track with its spans, ``device 2`` before ``device 10``."""
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.track, []).append(span)
    return {track: found[track] for track in sorted(found, key=_natural)}


def window(spans: Iterable[Span]) -> tuple[float, float]:
    """From the first start to the last end."""
    times = [(span.start_us, span.end_us) for span in spans] or [(0.0, 0.0)]
    return min(start for start, _ in times), max(end for _, end in times)


def shares(
    spans: Iterable[Span], start_us: float | None = None, end_us: float | None = None
) -> dict[str, Shares]:
    """Each track's shares of the window, by default the one that all tracks together span."""
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
            Shares(compute / whole, (busy - compute) / whole, 1 - busy / whole)
            if whole > 0
            else Shares(0.0, 0.0, 1.0)
        )
    return found


def _covered(spans: Iterable[Span], kinds: tuple[str, ...], first: float, last: float) -> float:
    """The time in which at least one span of these kinds is under way."""
    total, reached = 0.0, first
    for span in sorted((one for one in spans if one.category in kinds), key=lambda one: one.start_us):
        start, end = max(span.start_us, reached), min(span.end_us, last)
        if end > start:
            total, reached = total + end - start, end
    return total


def _natural(text: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", text) if part]
