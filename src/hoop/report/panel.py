"""Common parts of a chart's panels: the area, the heading with the legend, and the vertical axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hoop.report.palette import COLOURS
from hoop.report.scale import Scale
from hoop.report.svg import NORMAL, SMALL, line, text, width_of

Key = Callable[[float, float], str]
"""Draws the sample of a legend entry at (x, y)."""


@dataclass(frozen=True)
class Area:
    """A rectangle of the picture, in pixels."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, share: float) -> float:
        return self.left + share * self.width

    def y(self, share: float) -> float:
        return self.bottom - share * self.height


class Panel(Protocol):
    """One panel of a chart: lines or bars."""

    @property
    def label(self) -> str:
        """Quantity of the vertical axis, with its unit."""

    def names(self) -> list[str]:
        """Names of the coloured series, in order. A name has the same colour in all panels of a chart."""

    def keys(self, colours: Mapping[str, int]) -> dict[str, Key]:
        """Legend entries by name."""

    def vertical(self) -> Scale: ...

    def foot(self, width: float) -> float:
        """Height of the panel's own labels below its area."""

    def draw(self, area: Area, horizontal: Scale, colours: Mapping[str, int], last: bool) -> list[str]: ...


def colour(name: str, colours: Mapping[str, int]) -> int:
    return colours.get(name, 0) % COLOURS


def vertical_axis(area: Area, axis: Scale) -> list[str]:
    """A grid line and a number for each tick."""
    parts = []
    for share, words in zip(axis.at(axis.ticks), axis.labels(), strict=True):
        y = area.y(float(share))
        parts.append(line(area.left, y, area.right, y, "grid"))
        parts.append(text(area.left - 8, y + 4, words, anchor="end"))
    return parts


def heading_rows(label: str, names: Sequence[str], width: float) -> list[list[tuple[float, str]]]:
    """The legend entries with their left edges, in as many rows as needed; the first row follows the label."""
    rows: list[list[tuple[float, str]]] = [[]]
    x = width_of(label, NORMAL) * 1.08 + 20 if label else 0.0
    for name in names:
        wide = 26 + width_of(name, SMALL) + 16
        if x + wide > width and x > 0:
            rows.append([])
            x = 0.0
        rows[-1].append((x, name))
        x += wide
    return rows


ROW = 18
"""The height of a row of the legend."""


def heading(area: Area, left: float, label: str, keys: Mapping[str, Key]) -> list[str]:
    """The panel's label and legend above the area, from the left edge of the picture."""
    rows = heading_rows(label, list(keys), area.right - left)
    top = area.top - 12 - ROW * (len(rows) - 1)
    parts = [text(left, top, label, class_="ink", size=NORMAL, weight=600)] if label else []
    for index, row in enumerate(rows):
        for x, name in row:
            parts.append(keys[name](left + x, top + index * ROW - 4))
            parts.append(text(left + x + 26, top + index * ROW, name, class_="ink"))
    return parts
