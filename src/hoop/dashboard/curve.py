"""A chart line of bounded length that always covers the whole run: old points are merged in pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_POINTS = 400
"""As many as a chart in half of a screen of 1280 pixels shows apart."""


@dataclass(frozen=True)
class Curve:
    """Points in the order of x. Each is the mean of ``stride`` values; the last may still lack some."""

    x: tuple[float, ...] = ()
    y: tuple[float, ...] = ()
    stride: int = 1
    """Values that one point stands for."""
    pending: tuple[tuple[float, float], ...] = ()
    """The values of the next point, fewer than ``stride``."""

    def extended(self, points: Iterable[tuple[float, float]], max_points: int = MAX_POINTS) -> Curve:
        """With further points. A value that is not finite is left out: a chart has no place for it."""
        x, y, stride = list(self.x), list(self.y), self.stride
        pending = list(self.pending)
        for point in points:
            if not (math.isfinite(point[0]) and math.isfinite(point[1])):
                continue
            pending.append(point)
            if len(pending) >= stride:
                x.append(pending[-1][0])
                y.append(sum(value for _, value in pending) / len(pending))
                pending.clear()
            if len(x) > max_points:
                x, y, odd = _merged(x, y)
                pending = [one for one in odd for _ in range(stride)] + pending
                stride *= 2
        return Curve(tuple(x), tuple(y), stride, tuple(pending))

    @property
    def last(self) -> float | None:
        """The newest point's value; None if there is none."""
        return self.y[-1] if self.y else None


def _merged(x: list[float], y: list[float]) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """Half of the points, and a point that has no partner."""
    even = len(x) // 2 * 2
    means = [(y[at] + y[at + 1]) / 2 for at in range(0, even, 2)]
    return x[1:even:2], means, list(zip(x[even:], y[even:], strict=True))
