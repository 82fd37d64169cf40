"""A chart panel of lines: values over steps, time or a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from hoop.errors import InvalidArgument
from hoop.report.panel import Area, Key, colour, vertical_axis
from hoop.report.scale import Floats, Kind, Scale, plottable, scale
from hoop.report.svg import clean, line, number, tag, text

MARKED = 40
"""A line with at most this many points has a marker at each."""

_COLUMNS = 700  # about the width of a panel in pixels; more than two points per pixel are not visible
_DASHES = (None, "7 3", "2 3", "9 3 2 3")

Style = Literal["solid", "dashed", "faint"]


@dataclass(frozen=True)
class ChartLine:
    """One line. A point that is not finite is a gap.

    ``faint`` is the unsmoothed line behind a smooth one of the same name; it is not in the legend. ``band``: minimum
    and maximum of several runs, shaded around the line.
    """

    name: str
    x: ArrayLike
    y: ArrayLike
    style: Style = "solid"
    band: tuple[ArrayLike, ArrayLike] | None = None

    def __post_init__(self) -> None:
        for what, values in (("y", self.y), *zip(("low", "high"), self.band or (), strict=False)):
            if np.size(self.x) != np.size(values):
                raise InvalidArgument(
                    f"line {self.name!r}: {np.size(self.x)} x and {np.size(values)} {what}; give one for each"
                )


@dataclass(frozen=True)
class Lines:
    """Lines over one horizontal axis. ``rules``: named reference levels."""

    label: str
    lines: Sequence[ChartLine]
    kind: Kind = "linear"
    limits: tuple[float | None, float | None] = (None, None)
    rules: Mapping[str, float] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(dict.fromkeys(one.name for one in self.lines if one.name))

    def keys(self, colours: Mapping[str, int]) -> dict[str, Key]:
        """The legend; empty if there is only one line."""
        shown = {one.name: one for one in self.lines if one.name and one.style != "faint"}
        if list(shown) in ([], [self.label], [self.label.partition(" (")[0]]):
            return {}
        return {name: partial(_key, one, colour(name, colours), colours[name]) for name, one in shown.items()}

    def vertical(self) -> Scale:
        bands = [side for one in self.lines for side in one.band or ()]
        values = [*(one.y for one in self.lines), *bands, list(self.rules.values())]
        return scale(values, self.kind, limits=self.limits)

    def foot(self, width: float) -> float:
        return 0.0

    def draw(self, area: Area, horizontal: Scale, colours: Mapping[str, int], last: bool) -> list[str]:
        vertical = self.vertical()
        parts = vertical_axis(area, vertical)
        parts += _horizontal_axis(area, horizontal, last)
        parts += [part for one in self.lines for part in _band(one, area, horizontal, vertical, colours)]
        for name, level in self.rules.items():
            for share in vertical.at(level):
                if 0 <= share <= 1:
                    y = area.y(float(share))
                    parts.append(line(area.left, y, area.right, y, "axis", stroke_dasharray="5 4"))
                    parts.append(_haloed(area.right - 4, y - 5, name))
        for one in self.lines:
            parts += _drawn(one, area, horizontal, vertical, colours)
        if not any(np.isfinite(plottable(one.y, self.kind)).any() for one in self.lines):
            middle = (area.left + area.width / 2, area.top + area.height / 2)
            parts.append(text(*middle, "no data", anchor="middle"))
        return parts


def smoothed(values: ArrayLike, window: int) -> Floats:
    """Moving average over ``window`` values, fewer at the ends; gaps stay gaps."""
    array = plottable(values)
    known = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places, reach = np.arange(len(array)), max(window, 1) // 2
    first, last = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(array))
    total, count = sums[last] - sums[first], counts[last] - counts[first]
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _haloed(x: float, y: float, words: str) -> str:
    """Text with an outline in the colour of the background, so that it is readable on a line."""
    behind = tag("g", text(x, y, words, anchor="end"), class_="halo", stroke_width=4, stroke_linejoin="round")
    return behind + text(x, y, words, anchor="end")


def _horizontal_axis(area: Area, axis: Scale, labelled: bool) -> list[str]:
    parts = [line(area.left, area.bottom, area.right, area.bottom, "axis")]
    for share, words in zip(axis.at(axis.ticks), axis.labels(), strict=True):
        x = area.x(float(share))
        parts.append(line(x, area.bottom, x, area.bottom + 4, "axis"))
        if labelled:
            parts.append(text(x, area.bottom + 17, words, anchor="middle"))
    return parts


def _places(one: ChartLine, values: ArrayLike, area: Area, horizontal: Scale, vertical: Scale) -> tuple[Floats, Floats]:
    """Pixel coordinates of a line; points outside the limits become gaps."""
    x, y = horizontal.at(one.x), vertical.at(values)
    with np.errstate(invalid="ignore"):
        outside = (y < -0.001) | (y > 1.001) | (x < -0.001) | (x > 1.001)
    y = np.where(outside | np.isnan(x), np.nan, y)
    return area.left + x * area.width, area.bottom - y * area.height


def _runs(y: Floats) -> Iterator[slice]:
    """Ranges without a gap."""
    known = np.concatenate([[False], np.isfinite(y), [False]])
    edges = np.flatnonzero(known[1:] != known[:-1])
    yield from (slice(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Keep the minimum and maximum of each column of pixels: it looks the same, and the file stays small."""
    if len(x) <= 3 * _COLUMNS:
        return x, y
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), _COLUMNS):
        keep |= {int(part[np.argmin(y[part])]), int(part[np.argmax(y[part])])}
    index = sorted(keep)
    return x[index], y[index]


def _points(x: Floats, y: Floats) -> str:
    return " ".join(f"{number(float(a))},{number(float(b))}" for a, b in zip(x, y, strict=True))


def _stroke(one: ChartLine, place: int) -> dict[str, object]:
    if one.style == "faint":
        return {"stroke_width": 1, "stroke_opacity": 0.3}
    dash = "6 4" if one.style == "dashed" else _DASHES[place // 6 % len(_DASHES)]
    return {"stroke_width": 2, "stroke_linejoin": "round", "stroke_linecap": "round", "stroke_dasharray": dash}


def _drawn(one: ChartLine, area: Area, horizontal: Scale, vertical: Scale, colours: Mapping[str, int]) -> Iterator[str]:
    x, y = _places(one, one.y, area, horizontal, vertical)
    which, place = colour(one.name, colours), colours.get(one.name, 0)
    marked = len(x) <= MARKED and one.style != "faint"
    raw_x, raw_y = plottable(one.x), plottable(one.y)
    for run in _runs(y):
        if run.stop - run.start > 1:
            points = _points(*_thinned(x[run], y[run]))
            yield tag("polyline", points=points, class_=f"l{which}", **_stroke(one, place))
        if marked or run.stop - run.start == 1:
            for index in range(run.start, run.stop):
                hint = f"<title>{clean(one.name)}: {raw_y[index]:.6g} at {raw_x[index]:.6g}</title>"
                yield _marker(float(x[index]), float(y[index]), which, hint)


def _band(one: ChartLine, area: Area, horizontal: Scale, vertical: Scale, colours: Mapping[str, int]) -> Iterator[str]:
    if one.band is not None:
        x, low = _places(one, one.band[0], area, horizontal, vertical)
        _, high = _places(one, one.band[1], area, horizontal, vertical)
        for run in _runs(low + high):
            points = f"{_points(x[run], low[run])} {_points(x[run][::-1], high[run][::-1])}"
            yield tag("polygon", points=points, class_=f"f{colour(one.name, colours)}", fill_opacity=0.15)


def _marker(x: float, y: float, which: int, hint: str = "") -> str:
    """A marker with a different shape for each colour, for readers who cannot distinguish colours."""
    corners = {
        1: [(-3.2, -3.2), (3.2, -3.2), (3.2, 3.2), (-3.2, 3.2)],
        2: [(0, -4.2), (3.9, 3), (-3.9, 3)],
        3: [(0, -4.5), (4.5, 0), (0, 4.5), (-4.5, 0)],
        4: [(0, 4.2), (3.9, -3), (-3.9, -3)],
        5: [(-3.9, -3.9), (3.9, -3.9), (-3.9, 3.9), (3.9, 3.9)],
    }.get(which)
    look = {"class_": f"f{which} halo", "stroke_width": 1}
    if corners is None:
        return tag("circle", hint, cx=x, cy=y, r=3.4, **look)
    return tag("polygon", hint, points=" ".join(f"{number(x + a)},{number(y + b)}" for a, b in corners), **look)


def _key(one: ChartLine, which: int, place: int, x: float, y: float) -> str:
    sample = line(x, y, x + 20, y, f"l{which}", **_stroke(one, place))
    return sample + (_marker(x + 10, y, which) if np.size(one.x) <= MARKED else "")
