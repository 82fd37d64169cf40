"""The changes of a page, which its browser gets and applies as one message, at most twice a second.

Bokeh would send a message for every source and text that has changed. For a changed text it would lay out the whole
page again, for a changed table measure all its columns, and for a changed text at the pointer draw the chart. On a
machine that also trains this takes time from the devices, so the browser runs ``_APPLY`` instead: it changes the cells,
the text, or the data that is read when the pointer is there, and Bokeh draws only charts whose drawing has changed.
Charts outside the viewport are drawn when they are scrolled into it, and paced ones as often as ``PACED_SHARE`` allows;
tables are always up to date.

Until the browser has the page, changes are made in the models, which the page is made from.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from bokeh.document import Document
from bokeh.events import DocumentReady
from bokeh.models import ColumnDataSource, CustomJS, DataTable, Div, Plot

ACKNOWLEDGED_UPDATES = 4
"""The browser acknowledges every update whose number is a multiple of this: an answer costs as much as an update."""
MAX_UNACKNOWLEDGED = 2 * ACKNOWLEDGED_UPDATES
"""A browser that is this many updates behind gets no more until it has caught up."""
PACED_SHARE = 0.01
"""Part of the browser's time that drawings of paced sources take at most. One chart takes it 5 to 40 ms."""

_APPLY = """
const [number, changes] = cb_obj.tags, {texts, sources} = JSON.parse(changes)
const {document: models} = cb_obj, {index} = cb_context
const page = cb_obj.hoop_page ??= begin()

function begin() {
  const shown = new Map()  // by element: whether it is in the viewport, and by source the data that wait
  const observer = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      const one = shown.get(target)
      one.visible = isIntersecting
      if (isIntersecting) draw(one)
    }
  })
  // A page that nobody sees acknowledges nothing, so the server soon sends it nothing.
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) acknowledged.tags = [cb_obj.tags[0]]
  })
  // To find a view is a walk through all views of the page.
  return {shown, observer, views: new Map(), paced_at: 0, timer: null}
}

function view_of(id) {
  const view = page.views.get(id) ?? index.find_one(models.get_model_by_id(id))  // null: Bokeh has not built it yet
  if (view != null) page.views.set(id, view)
  return view
}

function shown_of(view) {
  if (!page.shown.has(view.el)) {
    page.shown.set(view.el, {visible: true, waiting: new Map()})
    page.observer.observe(view.el)
  }
  return page.shown.get(view.el)
}

function draw(one) {
  for (const [source, data] of one.waiting) {
    put(source, data)
    notify(source)
  }
  one.waiting.clear()
}

function draw_paced() {
  page.timer = null
  const began = performance.now(), due = [...page.shown.values()].filter((one) => one.visible && one.waiting.size > 0)
  if (due.length == 0) return
  page.paced_at = began + 1000  // until it is known what drawing takes; a hidden page draws no frame
  for (const one of due) draw(one)
  requestAnimationFrame(() => setTimeout(() => {
    page.paced_at = performance.now() + (performance.now() - began) / share
  }))
}

function put(source, data) {
  // Silently: Bokeh would compare all values with those before, and look for models in them.
  source.setv({data}, {silent: true, sync: false})
}

function notify(source) {
  source.properties.data.change.emit()
  source.change.emit()
}

function show_text(element, html) {
  const template = document.createElement("template")
  template.innerHTML = html
  change_children(element, template.content)
}

function change_children(before, after) {
  const children = [...before.childNodes], fresh = [...after.childNodes]
  for (const [at, child] of children.entries()) {
    if (at < fresh.length) change(child, fresh[at])
    else child.remove()
  }
  before.append(...fresh.slice(children.length))
}

function change(before, after) {
  if (before.nodeName != after.nodeName) {
    before.replaceWith(after)
  } else if (before.nodeType == Node.TEXT_NODE) {
    if (before.data != after.data) before.data = after.data
  } else {
    for (const {name, value} of after.attributes) {
      if (before.getAttribute(name) != value) before.setAttribute(name, value)
    }
    for (const name of before.getAttributeNames()) if (!after.hasAttribute(name)) before.removeAttribute(name)
    change_children(before, after)
  }
}

for (const [id, text] of texts) {
  models.get_model_by_id(id).setv({text}, {silent: true, sync: false})
  const view = view_of(id)
  if (view != null) show_text(view.markup_el, text)
}
for (const [id, data, {appended, drawn, paced, table: table_id, chart: chart_id}] of sources) {
  const source = models.get_model_by_id(id), table = table_id ? view_of(table_id) : null
  const view = table ?? (chart_id ? view_of(chart_id) : null), one = view != null ? shown_of(view) : null
  const before = one?.waiting.get(source) ?? source.data
  for (const [name, column] of Object.entries(data)) {
    const values = column.includes(null) ? column.map((value) => value ?? NaN) : column
    data[name] = appended ? [...before[name], ...values] : values
  }
  // A source has the data that are drawn: Bokeh may draw its chart again for another reason.
  const waits = table == null && (one?.waiting.has(source) || (drawn && (paced || !one?.visible)))
  if (one != null && waits) {
    one.waiting.set(source, data)
    continue
  }
  const rows = source.get_length()
  put(source, data)
  if (table != null && Object.values(data)[0].length == rows && table.grid.getSortColumns().length == 0) {
    for (const [cell, {field}] of table.grid.getColumns().entries()) {
      for (let row = 0; row < rows; row++) {
        if (before[field][row] !== data[field][row]) table.grid.updateCell(row, cell)
      }
    }
  } else if (drawn) {
    notify(source)
  }
}
page.timer ??= setTimeout(draw_paced, Math.max(0, page.paced_at - performance.now()))
if (!document.hidden && (number % every == 0 || acknowledged.tags[0] == 0)) acknowledged.tags = [number]
"""


@dataclass
class _SourceChange:
    """The new columns of one source."""

    columns: dict[str, list[Any]]
    drawn: bool
    """Whether the drawing changes."""
    paced: bool
    """Whether the drawing may wait, so that drawing takes no more than ``PACED_SHARE`` of the browser's time."""
    table: str
    """Id of the table that shows it; empty: none. ``chart`` the same."""
    chart: str

    def message(self, before: dict[str, list[Any]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """The columns and how to show them; only the new rows if the browser has the rows before them."""
        rows = min((len(one) for one in before.values()), default=0)
        appended = rows > 0 and all(before.get(name) == column[:rows] for name, column in self.columns.items())
        columns = {name: column[rows:] for name, column in self.columns.items()} if appended else self.columns
        how = {"appended": appended, "drawn": self.drawn, "paced": self.paced}
        return columns, {**how, "table": self.table, "chart": self.chart}


class PageUpdates:
    """The changes of one page since its last update."""

    def __init__(self) -> None:
        self._sent = ColumnDataSource(name="updates", tags=[0, _NO_CHANGES])
        """Its tags are the number of the last update, and the texts and sources that it changes, as JSON.

        Bokeh looks at each element of a list for models in it, and a text is one element. A source has no view: a
        change of its tags makes the browser draw nothing.
        """
        self._acknowledged = ColumnDataSource(name="acknowledged", tags=[0])
        self._shown: dict[str, str] = {}
        """The last text of each block, by the block's id."""
        self._texts: dict[str, str] = {}
        self._sources: dict[str, _SourceChange] = {}
        """By the id of the source."""
        self._sent_columns: dict[str, dict[str, list[Any]]] = {}
        """By the id of the source: the columns that the browser has, since they were first sent."""
        values = {"acknowledged": self._acknowledged, "every": ACKNOWLEDGED_UPDATES, "share": PACED_SHARE}
        apply = CustomJS(args=values, code=_APPLY)
        self._sent.js_on_change("tags", apply)

    def attach(self, document: Document, owner: Div) -> None:
        """Makes this a part of the document, by the tags of ``owner``, which is in it."""
        owner.tags = [self._sent]
        # The page that the browser gets contains the updates that were made before.
        ready = CustomJS(
            args={"sent": self._sent, "acknowledged": self._acknowledged}, code="acknowledged.tags = [sent.tags[0]]"
        )
        document.js_on_event(DocumentReady, ready)

    @property
    def live(self) -> bool:
        """Whether the browser has the page: changes are then sent with the next update."""
        return self._last_acknowledged() > 0

    @property
    def behind(self) -> bool:
        """Whether the browser has not applied the last updates."""
        return bool(self._sent.tags[0] - self._last_acknowledged() >= MAX_UNACKNOWLEDGED)

    def _last_acknowledged(self) -> int:
        """The number of the last update that the browser has applied; 0 if it sent anything but a number."""
        match self._acknowledged.tags:
            case [int(number)]:
                return number
        return 0

    def change_text(self, block: Div, text: str) -> None:
        """Changes the HTML of a block, if it is another one than before."""
        if self._shown.get(block.id, block.text) == text:
            return
        self._shown[block.id] = text
        if self.live:
            self._texts[block.id] = text
        else:
            block.text = text

    def forget(self, source: ColumnDataSource) -> None:
        """The browser gets this whole source with what it shows: later changes are not compared with earlier ones."""
        self._sources.pop(source.id, None)
        self._sent_columns.pop(source.id, None)

    def change_data(
        self,
        source: ColumnDataSource,
        columns: dict[str, list[Any]],
        drawn: bool,
        table: DataTable | None = None,
        chart: Plot | None = None,
        paced: bool = False,
    ) -> None:
        """Changes the columns of a source, which ``table`` or ``chart`` may show.

        ``drawn`` False: the drawing stays the same. ``paced``: the drawing may wait (``PACED_SHARE``).
        """
        if not self.live:
            source.data = dict(columns)
            return
        before = self._sources.get(source.id)
        drawn = drawn or (before is not None and before.drawn)
        ids = (one.id if one is not None else "" for one in (table, chart))
        self._sources[source.id] = _SourceChange(columns, drawn, paced, *ids)

    def send(self) -> None:
        """Sends the changes since the last call. Without any, a browser that has the page gets nothing."""
        if self.live and not self._texts and not self._sources:
            return
        sources = []
        for name, change in self._sources.items():
            sources.append([name, *change.message(self._sent_columns.get(name, {}))])
            self._sent_columns[name] = change.columns
        changes = {"texts": list(self._texts.items()), "sources": sources}
        self._texts, self._sources = {}, {}
        self._sent.tags = [self._sent.tags[0] + 1, to_json(changes)]


def to_json(value: Any) -> str:
    """A value as JSON that a browser reads. Numbers that JSON does not have, like NaN, become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    match value:
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case float() if not math.isfinite(value):
            return None
    return value


_NO_CHANGES = to_json({"texts": [], "sources": []})
