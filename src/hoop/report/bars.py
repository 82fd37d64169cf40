"""A chart panel of grouped bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hoop.errors import InvalidArgument
from hoop.report.panel import Area, Key, colour, vertical_axis
from hoop.report.scale import Kind, Scale, label, plottable, scale
from hoop.report.svg import SMALL, box, clean, line, shortened, text, width_of

_TURNED = 75  # maximum height of slanted labels


@dataclass(frozen=True)
class Bars:
    """Values by group and name. A value that is not finite has no bar."""

    label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float]]
    kind: Kind = "linear"
    limits: tuple[float | None, float | None] = (None, None)
    rules: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.values.items():
            if len(values) != len(self.groups):
                raise InvalidArgument(
                    f"bars {name!r}: {len(values)} values for {len(self.groups)} groups; give one for each"
                )

    def names(self) -> list[str]:
        return list(self.values)

    def keys(self, colours: Mapping[str, int]) -> dict[str, Key]:
        """The legend; empty if there is only one series."""
        if list(self.values) in ([], [""], [self.label], [self.label.partition(" (")[0]]):
            return {}
        return {name: partial(_key, colour(name, colours)) for name in self.values}

    def vertical(self) -> Scale:
        values = [*self.values.values(), list(self.rules.values())]
        return scale(values, self.kind, zero=self.kind == "linear", limits=self.limits)

    def foot(self, width: float) -> float:
        return 6 + (_slanted(self.groups) if self._slants(width) else 14)

    def draw(self, area: Area, horizontal: Scale, colours: Mapping[str, int], last: bool) -> list[str]:
        vertical = self.vertical()
        parts = vertical_axis(area, vertical)
        ground = min(max(float(vertical.at(0.0)[0]), 0.0), 1.0) if self.kind == "linear" else 0.0
        group = area.width / max(len(self.groups), 1)
        wide = min(group * 0.72 / max(len(self.values), 1), 56.0)
        shares = {name: vertical.at(list(values)) for name, values in self.values.items()}
        for index, words in enumerate(self.groups):
            middle = area.left + (index + 0.5) * group
            left = middle - wide * len(self.values) / 2
            for place, (name, values) in enumerate(self.values.items()):
                share = float(shares[name][index])
                if math.isfinite(share):
                    x = left + place * wide
                    which = colour(name, colours)
                    hint = f"<title>{clean(f'{words}, {name}: {values[index]:.6g}')}</title>"
                    parts += _bar(area, x, wide, ground, share, float(values[index]), which, hint)
            parts.append(self._group_label(words, middle, area.bottom, area.width))
        base = area.y(ground)
        parts.append(line(area.left, base, area.right, base, "axis"))
        for name, level in self.rules.items():
            y = area.y(float(vertical.at(level)[0]))
            parts.append(line(area.left, y, area.right, y, "axis", stroke_dasharray="5 4"))
            parts.append(text(area.right, y - 4, name, anchor="end"))
        if not any(np.isfinite(plottable(list(one), self.kind)).any() for one in self.values.values()):
            middle, height = area.left + area.width / 2, area.top + area.height / 2
            parts.append(text(middle, height, "no data", anchor="middle"))
        return parts

    def _slants(self, width: float) -> bool:
        room = width / max(len(self.groups), 1) - 6
        return any(width_of(words) > room for words in self.groups)

    def _group_label(self, words: str, x: float, bottom: float, width: float) -> str:
        if not self._slants(width):
            return text(x, bottom + 17, words, anchor="middle")
        room = min(_TURNED / 0.5, (x - 8) / 0.87)  # it ends here, and must begin within the picture
        return text(x + 4, bottom + 14, shortened(words, room), anchor="end", turn=-30)


def _slanted(groups: Sequence[str]) -> float:
    return min(max((width_of(words) for words in groups), default=0) * 0.5, _TURNED) + 14


def _bar(
    area: Area, x: float, wide: float, ground: float, share: float, value: float, which: int, hint: str
) -> list[str]:
    """The bar, and its value above it (below a negative bar) if that fits."""
    share = min(max(share, 0.0), 1.0)
    top, low = area.y(max(share, ground)), area.y(min(share, ground))
    gap = min(1.0, wide * 0.1)
    parts = [box(x + gap, top, wide - 2 * gap, max(low - top, 0.5), f"f{which}", hint, rx=1.5)]
    words = label(value) if abs(value) < 100 else label(round(value))
    if width_of(words, SMALL - 1) <= wide + 6:
        y = top - 4 if share >= ground else low + 12
        parts.append(text(x + wide / 2, y, words, class_="ink", size=SMALL - 1, anchor="middle"))
    return parts


def _key(which: int, x: float, y: float) -> str:
    return box(x + 8, y - 5, 11, 11, f"f{which}", rx=1.5)
