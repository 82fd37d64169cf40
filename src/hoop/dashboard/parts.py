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
        css=":host { color: var(--hoop-text); } .bk-input { color: var(--hoop-text); "
        "background-color: var(--hoop-panel); border-color: var(--hoop-grid); }"
    )


def button_style() -> InlineStyleSheet:
    """For buttons, in the colours of the page."""
    return InlineStyleSheet(
        css=".bk-btn-default { color: var(--hoop-text); background-color: var(--hoop-panel); "
        "border-color: var(--hoop-muted); } "
        ".bk-btn-default:hover, .bk-btn-default.bk-active { background-color: var(--hoop-grid); }"
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
        self._boxes: list[_Box] = []
        """Tables and charts of this source that are hidden while they have no rows."""
        self._paced = paced
        self._updates, self._columns, self._at_pointer = updates, columns, frozenset(at_pointer)
        self._shown: dict[str, list[Any]] = {column: [] for column in columns}

    @property
    def _in_page(self) -> bool:
        """Whether the browser has the model: not that of a chart or table without rows."""
        return all(box.is_shown for box in self._boxes)

    @property
    def has_rows(self) -> bool:
        return any(self._shown.values())

    def show(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the rows, each with a value by column."""
        self.show_columns({column: [row[column] for row in rows] for column in self._columns})

    def show_columns(self, columns: dict[str, list[Any]]) -> None:
        changed = {column for column in self._columns if columns[column] != self._shown[column]}
        if not changed:
            return
        self._shown = columns
        in_page = self._in_page
        if not in_page:  # the browser gets the data with the model
            self.model.data = dict(columns)
        for box in self._boxes:
            box.update()
        if self._updates is None:
            if in_page:
                self.model.data = dict(columns)
        elif not (in_page and self._in_page):
            self._updates.forget(self.model)
            self.model.data = dict(columns)
        else:
            drawn = bool(changed - self._at_pointer)
            self._updates.change_data(self.model, columns, drawn, self.table, self.chart, self._paced)


class _Box:
    """The place of a table or chart, which is empty while none of its sources has a row.

    An empty box tells nobody anything, and Bokeh warns of a chart without data each time that it draws the page.
    """

    def __init__(self, content: LayoutDOM, sources: tuple[Source, ...], place: LayoutDOM) -> None:
        self._content, self._sources, self._place = content, sources, place
        self.is_shown = False
        self._place.visible = False

    def update(self) -> None:
        """Shows the content if there are rows now, else removes it."""
        shown = any(source.has_rows for source in self._sources)
        if shown != self.is_shown:
            self.is_shown = shown
            self._place.children = [self._content] if shown else []
            self._place.visible = shown


def shown_with_rows(content: LayoutDOM, *sources: Source, **options: Any) -> LayoutDOM:
    """A place for a table or chart that shows it while one of these sources, which it draws, has a row.

    ``options``: of the place.
    """
    place = column(sizing_mode="stretch_width", **{"min_width": content.min_width, **options})
    box = _Box(content, sources, place)
    for source in sources:
        source._boxes.append(box)
    box.update()
    return place


def table(
    source: Source, name: str, titles: Mapping[str, tuple[str, int]], height: int = 220, always: bool = False
) -> LayoutDOM:
    """A table with these columns: by field, the title and the width. Its cells are text, never HTML. Without rows it is
    hidden, unless ``always``.

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
    styles = {"overflow-x": "auto", "overflow-y": "hidden"}
    if always:
        return column(found, sizing_mode="stretch_width", styles=styles)
    return shown_with_rows(found, source, styles=styles, min_width=None)


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
