"""Parts that the tabs share: texts, tables and charts in the page's style, and sources that send only changes.

``paragraph`` is the only way in which a text becomes HTML. Everything else is drawn on a canvas or set as text.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    DataTable,
    Div,
    FactorRange,
    HoverTool,
    InlineStyleSheet,
    LayoutDOM,
    TableColumn,
)
from bokeh.models.widgets.tables import StringFormatter
from bokeh.plotting import figure

from hoop.dashboard.updates import PageUpdates

TOOLS = "xpan,xwheel_zoom,box_zoom,reset,save"
_TEXT_STYLE = """
:host { color: var(--hoop-text); font: 14px/1.5 system-ui, sans-serif; contain: content; }
h2 { font-size: 16px; margin: 8px 0 2px; }
p { margin: 2px 0; overflow-wrap: anywhere; }
.bk-clearfix { display: block !important; }
progress { width: 100%; max-width: 600px; height: 14px; accent-color: #0072b2; }
.muted { color: var(--hoop-muted); }
.problem { color: var(--hoop-text); border-left: 6px solid #d55e00; padding-left: 8px; font-weight: 600; }
"""
_TABLE_STYLE = """
:host { background: var(--hoop-panel); color: var(--hoop-text); font-size: 13px; }
.slick-header-column, .slick-row, .slick-cell, .slick-viewport, .slick-pane {
  background: var(--hoop-panel) !important; color: var(--hoop-text) !important;
  border-color: var(--hoop-grid) !important;
}
"""


def input_style() -> InlineStyleSheet:
    """For inputs, whose titles are in the colour of the page's text."""
    return InlineStyleSheet(
        css=":host { color: var(--hoop-text); } .bk-input { color: #1a1a1a; background-color: #ffffff; }"
    )


def text_block(name: str) -> Div:
    """A place for paragraphs."""
    return Div(
        name=name,
        text="",
        disable_math=True,  # "$$" in a name is no formula
        sizing_mode="stretch_width",
        stylesheets=[InlineStyleSheet(css=_TEXT_STYLE)],
    )


def paragraph(text: str, kind: str = "", tag: str = "p") -> str:
    """The text as HTML, escaped. ``kind`` is a class of the style sheet, and ``tag`` an element: literals."""
    return f'<{tag} class="{kind}">{html.escape(text)}</{tag}>'


def set_text(block: Div, *paragraphs: str) -> None:
    """Shows these paragraphs, if they are others than before."""
    joined = "".join(paragraphs)
    if block.text != joined:
        block.text = joined


class Source:
    """A data source that is sent to the browser only when its columns have changed."""

    def __init__(
        self,
        name: str,
        *columns: str,
        updates: PageUpdates | None = None,
        at_pointer: Sequence[str] = (),
        paced: bool = False,
    ) -> None:
        """``updates``: sends the changes, for sources that change with every update.

        ``at_pointer``: columns that are shown only in the text at the pointer. ``paced``: the drawing may
        wait, so that it takes no more than ``updates.PACED_SHARE`` of the browser's time.
        """
        self.model = ColumnDataSource(data={column: [] for column in columns}, name=name)
        self.table: DataTable | None = None
        """The table that shows it."""
        self.chart: figure | None = None
        """The chart that draws it: outside the viewport it is not drawn."""
        self._paced = paced
        self._updates, self._columns, self._at_pointer = updates, columns, frozenset(at_pointer)
        self._shown: dict[str, list[Any]] = {column: [] for column in columns}

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the rows, each with a value by column."""
        self.show_columns({column: [row[column] for row in rows] for column in self._columns})

    def show_columns(self, columns: dict[str, list[Any]]) -> None:
        changed = {column for column in self._columns if columns[column] != self._shown[column]}
        if not changed:
            return
        self._shown = columns
        if self._updates is None:
            self.model.data = dict(columns)
        else:
            drawn = bool(changed - self._at_pointer)
            self._updates.change_data(self.model, columns, drawn, self.table, self.chart, self._paced)


def table(source: Source, name: str, titles: Mapping[str, tuple[str, int]], height: int = 220) -> LayoutDOM:
    """A table with these columns: by field, the title and the width. Its cells are text, never HTML.

    On a page that is narrower than its columns together it is scrolled sideways.
    """
    found = DataTable(
        source=source.model,
        name=name,
        columns=[
            TableColumn(field=field, title=title, width=width, formatter=StringFormatter())
            for field, (title, width) in titles.items()
        ],
        index_position=None,
        height=height,
        min_width=sum(width for _, width in titles.values()),
        sizing_mode="stretch_width",
        autosize_mode="force_fit",  # "fit_viewport" fails for a table without rows
        reorderable=False,
        stylesheets=[InlineStyleSheet(css=_TABLE_STYLE)],
    )
    source.table = found
    # Bokeh 3.9 draws a table again only when the number of its rows changes.
    source.model.js_on_change("data", CustomJS(args={"view": found.view}, code="view.change.emit()"))
    return column(found, sizing_mode="stretch_width", styles={"overflow-x": "auto", "overflow-y": "hidden"})


def chart(title: str, height: int = 240, hover: Sequence[tuple[str, str]] = (), **options: Any) -> figure:
    """An empty chart in the page's width; ``hover`` are the names and values of the text at the pointer."""
    plot = figure(
        title=title,
        height=height,
        sizing_mode=options.pop("sizing_mode", "stretch_width"),
        tools=options.pop("tools", TOOLS),
        toolbar_location="above",
        output_backend="canvas",
        min_border_right=12,
        **options,
    )
    plot.toolbar.logo = None
    if hover:
        plot.add_tools(HoverTool(tooltips=list(hover)))
    return plot


def set_factors(axis: FactorRange, names: Sequence[str]) -> bool:
    """Sets the names on an axis, if they are others than before; whether they were."""
    if list(names) == list(axis.factors):
        return False
    axis.factors = list(names)
    return True


def bytes_text(size: float) -> str:
    """A size in binary units, like ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A duration like ``12 ms``, ``3.4 s``, ``5 min 20 s`` or ``2 h 5 min``."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def plural(number: int, what: str) -> str:
    """Like ``1 device``, ``3 devices``, ``2 recoveries``."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what[:-1]}ies" if what.endswith("ry") else f"{number} {what}s"
