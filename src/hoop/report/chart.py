"""A chart: a title and one or more panels above each other, as an SVG picture.

┌─ title ───────────────────────┐
│  subtitle                     │
│  label   ── one  ── another   │   each panel: its name, its legend, its lines or bars
│  ┌─────────────────────────┐  │
│  └─────────────────────────┘  │
│  label                        │   panels of lines share the horizontal axis
│  ┌─────────────────────────┐  │
│  └─────────────────────────┘  │
└───────────── x ───────────────┘
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoop.report.bars import Bars
from hoop.report.lines import ChartLine, Lines, smoothed
from hoop.report.panel import ROW, Area, Panel, heading, heading_rows
from hoop.report.scale import Kind, Scale, scale
from hoop.report.svg import LARGE, NORMAL, document, shortened, text, width_of

__all__ = ["Bars", "Chart", "ChartLine", "Lines", "smoothed"]

_MARGIN = 20.0


@dataclass(frozen=True)
class Chart:
    """A chart; ``svg`` renders it."""

    title: str
    panels: Sequence[Lines | Bars]
    x_label: str = ""
    x_kind: Kind = "linear"
    subtitle: str = ""
    width: float = 760.0
    panel_height: float = 210.0

    def svg(self) -> str:
        panels: Sequence[Panel] = self.panels
        colours = {name: index for index, name in enumerate(dict.fromkeys(n for p in panels for n in p.names()))}
        horizontal = self._horizontal()
        labels = [words for panel in panels for words in panel.vertical().labels()]
        left = _MARGIN + max(map(width_of, labels), default=0) + 10
        width = self.width - left - _MARGIN
        parts = [
            text(
                _MARGIN,
                34,
                shortened(self.title, self.width - 2 * _MARGIN, LARGE),
                class_="ink",
                size=LARGE,
                weight=600,
            )
        ]
        y = 34.0
        if self.subtitle:
            y += 20
            parts.append(text(_MARGIN, y, shortened(self.subtitle, self.width - 2 * _MARGIN, NORMAL), size=NORMAL))
        for index, panel in enumerate(panels):
            keys = panel.keys(colours)
            y += 42 + ROW * (len(heading_rows(panel.label, list(keys), self.width - 2 * _MARGIN)) - 1)
            area = Area(left, y, width, self.panel_height)
            shares_axis = index + 1 < len(panels) and isinstance(self.panels[index + 1], Lines)
            is_last = isinstance(panel, Lines) and not shares_axis
            parts += heading(area, _MARGIN, panel.label, keys)
            parts += panel.draw(area, horizontal, colours, is_last)
            y = area.bottom + panel.foot(width)
            if is_last:
                y += 22
                if self.x_label:
                    y += 16
                    parts.append(text(left + width / 2, y, self.x_label, class_="ink", size=NORMAL, anchor="middle"))
        return document(self.title, self.width, y + 18, parts)

    def _horizontal(self) -> Scale:
        values = [line.x for panel in self.panels if isinstance(panel, Lines) for line in panel.lines]
        return scale(values, self.x_kind, about=8, tight=True, own=True)
