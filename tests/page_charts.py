"""Reads what a page's charts show: their data, from the JSON of Bokeh's document in the HTML."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import ColumnDataSource, GlyphRenderer, Legend
from bokeh.plotting import figure


@dataclass(frozen=True)
class ShownChart:
    """One figure of a page."""

    model: figure

    @property
    def legend(self) -> list[str]:
        return [item.label["value"] for legend in self.model.select({"type": Legend}) for item in legend.items]

    @property
    def labels(self) -> tuple[str | None, str | None]:
        return self.model.xaxis[0].axis_label, self.model.yaxis[0].axis_label

    def columns(self, series: str) -> dict[str, list[Any]]:
        """The data of the series with this name in the legend; KeyError if there is none."""
        for legend in self.model.select({"type": Legend}):
            for item in legend.items:
                if item.label["value"] == series:
                    return _lists(item.renderers[0].data_source)
        raise KeyError(f"{series!r} is not drawn; there are {self.legend}")

    def all_columns(self) -> list[dict[str, list[Any]]]:
        sources = {one.data_source.id: one.data_source for one in self.model.select({"type": GlyphRenderer})}
        return [_lists(source) for source in sources.values()]


def charts_in(page: str) -> list[ShownChart]:
    """The charts of an HTML page, in order."""
    found = []
    for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL):
        for part in json.loads(html.unescape(text)).values():
            found += [ShownChart(root) for root in Document.from_json(part).roots]
    return found


def texts_of(page: str) -> str:
    """The page without scripts and styles, unescaped."""
    return html.unescape(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL))


def assert_offline(page: str) -> None:
    """It loads nothing, and its policy forbids it."""
    assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)\s*=", page) == []
    assert "default-src 'none'" in page


def _lists(source: ColumnDataSource) -> dict[str, list[Any]]:
    return {name: np.asarray(values).tolist() for name, values in source.data.items()}
