"""Axis scales: ranges chosen from the data, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hoop.errors import InvalidArgument

Kind = Literal["linear", "log"]
Floats = NDArray[np.float64]

_HUGE, _TINY = 1e300, 1e-280  # beyond these the differences and steps of a range overflow or underflow
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plottable(values: ArrayLike, kind: Kind = "linear") -> Floats:
    """The values as floats, with NaN for values that cannot be on an axis of this kind."""
    array = np.atleast_1d(np.asarray(values, np.float64)).ravel()
    with np.errstate(invalid="ignore"):
        good = np.abs(array) < _HUGE
        if kind == "log":
            good &= array > _TINY
        array = np.where(np.abs(array) < _TINY, 0.0, array)
    return np.where(good, array, np.nan)


@dataclass(frozen=True)
class Scale:
    """A range of values, linear or logarithmic, and the ticks on it."""

    low: float
    high: float
    kind: Kind
    ticks: tuple[float, ...]

    def at(self, values: ArrayLike) -> Floats:
        """Positions of values on the axis: 0 at the low end, 1 at the high end."""
        array = plottable(values, self.kind)
        if self.kind == "log":
            low, high = math.log(self.low), math.log(self.high)
            result: Any = (np.log(array) - low) / (high - low)
        else:
            result = (array - self.low) / (self.high - self.low)
        return np.asarray(result, np.float64)

    def labels(self) -> list[str]:
        """The text of each tick."""
        steps = np.diff(self.ticks)
        step = float(steps.min()) if self.kind == "linear" and len(steps) else None
        return [label(tick, step) for tick in self.ticks]


def scale(
    values: Iterable[ArrayLike],
    kind: Kind = "linear",
    *,
    about: int = 5,
    tight: bool = False,
    zero: bool = False,
    limits: tuple[float | None, float | None] = (None, None),
    own: bool = False,
) -> Scale:
    """A scale that contains all values.

    ``about``: approximate number of ticks. ``tight``: end at the data instead of at a tick. ``zero``: always include
    zero; otherwise it is included if it is near. ``own``: use a few distinct values as ticks (1, 2, 4, 8 devices).
    """
    if kind not in ("linear", "log"):
        raise InvalidArgument(f"scale: {kind!r} is not known; use 'linear' or 'log'")
    arrays = [plottable(one, kind) for one in values]
    known = np.concatenate([one[~np.isnan(one)] for one in arrays]) if arrays else np.empty(0)
    low, high = (float(known.min()), float(known.max())) if len(known) else (1.0, 10.0) if kind == "log" else (0.0, 1.0)
    distinct = sorted(set(known.tolist()))[:13] if own else []
    if kind == "log":
        return _logarithmic(low, high, limits, about, tight, distinct)
    if zero or 0 < low < 0.4 * high:
        low = min(low, 0.0) if not tight or zero else low
    if zero:
        high = max(high, 0.0)
    low, high = _widened(low, high, limits)
    whole = own and len(known) > 0 and bool(np.all(known == np.round(known)))
    step = nice_step((high - low) / about, whole)
    if not tight:
        low = math.floor(low / step + 1e-9) * step if limits[0] is None else low
        high = math.ceil(high / step - 1e-9) * step if limits[1] is None else high
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))
    return Scale(low, high, "linear", ticks)


def nice_step(rough: float, whole: bool = False) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten above ``rough``; ``whole``: at least 1, and never 2.5."""
    if whole and rough < 5:
        return next(float(step) for step in (1, 2, 5) if rough <= step)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if rough <= power * factor * (1 + 1e-9))


def label(value: float, step: float | None = None) -> str:
    """Format a number for an axis: 0.25, 1.5k, 20M, 1e-5."""
    if value == 0:
        return "0"
    size = abs(value)
    for factor, suffix in _SUFFIXES:
        if size >= factor and (factor > 1e3 or size >= 1e4):
            return f"{value / factor:.4g}{suffix}"
    if size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-")
    if step is None:
        return f"{value:.4g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) % 1:  # a step of 0.25, or 2.5, needs one digit more
        decimals += 1
    return f"{value:.{decimals}f}"


def _widened(low: float, high: float, limits: Sequence[float | None]) -> tuple[float, float]:
    """Apply the limits, and widen a range of a single value."""
    low = low if limits[0] is None else float(limits[0])
    high = high if limits[1] is None else float(limits[1])
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    room = max(abs(low) * 0.1, 1e-12) if low else 1.0
    return (low - room if limits[0] is None and low else low), low + room


def _logarithmic(
    low: float,
    high: float,
    limits: tuple[float | None, float | None],
    about: int,
    tight: bool,
    distinct: Sequence[float],
) -> Scale:
    low = low if limits[0] is None else float(limits[0])
    high = high if limits[1] is None else float(limits[1])
    if low <= 0:
        raise InvalidArgument(f"limits: {low:g} is not on a logarithmic axis; use a limit above 0")
    if high < low * 1.001:  # as good as one value
        low, high = low / 2, high * 2
    decades = math.log10(high) - math.log10(low)
    if 1 < len(distinct) <= 12 and tight:
        return Scale(low, high, "log", tuple(distinct))
    factors: tuple[int, ...] = (1,) if decades > 1.7 else (1, 2, 5) if decades > 0.7 else (1, 2, 3, 4, 5, 6, 7, 8, 9)
    every = max(1, math.ceil(decades / about)) if factors == (1,) else 1
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    marks = [factor * 10.0**power for power in powers if power % every == 0 for factor in factors]
    if not tight:
        low = max((mark for mark in marks if mark <= low * 1.0001), default=low) if limits[0] is None else low
        high = min((mark for mark in marks if mark >= high * 0.9999), default=high) if limits[1] is None else high
    within = tuple(float(f"{mark:.12g}") for mark in marks if low * 0.9999 <= mark <= high * 1.0001)
    return Scale(low, high, "log", within or (low, high))
