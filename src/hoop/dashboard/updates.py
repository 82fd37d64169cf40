"""The changes of a page, which its browser gets and applies as one message, at most twice a second.

Bokeh would send a message for every source and text that has changed. For a changed text it would lay out the whole
page again, for a changed table measure all its columns, and for a changed text at the pointer draw the chart. On a
machine that also trains this takes time from the devices, so the browser runs ``_APPLY`` instead: it changes the cells,
the text, or the data that is read when the pointer is there, and Bokeh draws only charts whose drawing has changed.

Until the browser has the page, changes are made in the models, which the page is made from.
"""

from __future__ import annotations

import json
import math
from typing import Any

from bokeh.document import Document
from bokeh.events import DocumentReady
from bokeh.models import ColumnDataSource, CustomJS, DataTable, Div

ACKNOWLEDGED_UPDATES = 4
"""The browser acknowledges every update whose number is a multiple of this: an answer costs as much as an update."""
MAX_UNACKNOWLEDGED = 2 * ACKNOWLEDGED_UPDATES
"""A browser that is this many updates behind gets no more until it has caught up."""

_APPLY = """
const [number, changes] = cb_obj.tags, {texts, sources} = JSON.parse(changes)
const {document} = cb_obj, {index} = cb_context
const views = cb_obj.hoop_views ??= new Map()  // to find one is a walk through all views of the page
const view_of = (model) => {
  const view = views.get(model) ?? index.find_one(model)  // null: Bokeh has not built it yet
  if (view != null) views.set(model, view)
  return view
}
for (const [id, text] of texts) {
  const block = document.get_model_by_id(id), view = view_of(block)
  block.setv({text}, {silent: true, sync: false})
  if (view != null) view.markup_el.innerHTML = text
}
for (const [id, data, drawn, table_id] of sources) {
  const source = document.get_model_by_id(id), rows = source.get_length(), before = source.data
  for (const [name, column] of Object.entries(data)) {
    if (column.includes(null)) data[name] = column.map((value) => value ?? NaN)
  }
  const table = table_id ? document.get_model_by_id(table_id) : null
  const view = table != null ? view_of(table) : null
  const cells_only = view != null && Object.values(data)[0].length == rows && view.grid.getSortColumns().length == 0
  source.setv({data}, {silent: cells_only || !drawn, sync: false})
  if (cells_only) {
    for (const [cell, {field}] of view.grid.getColumns().entries()) {
      for (let row = 0; row < rows; row++) {
        if (before[field][row] !== data[field][row]) view.grid.updateCell(row, cell)
      }
    }
  }
}
if (number % every == 0 || acknowledged.tags[0] == 0) acknowledged.tags = [number]
"""


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
        self._sources: dict[str, tuple[dict[str, list[Any]], bool, str]] = {}
        """By the id of the source: its columns, whether they are drawn, and the id of the table that shows them."""
        apply = CustomJS(args={"acknowledged": self._acknowledged, "every": ACKNOWLEDGED_UPDATES}, code=_APPLY)
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

    def change_data(
        self, source: ColumnDataSource, columns: dict[str, list[Any]], drawn: bool, table: DataTable | None
    ) -> None:
        """Changes the columns of a source, which ``table`` may show. ``drawn`` False: the drawing stays the same."""
        if not self.live:
            source.data = dict(columns)
            return
        _, drawn_before, _ = self._sources.get(source.id, ({}, False, ""))
        self._sources[source.id] = (columns, drawn or drawn_before, table.id if table is not None else "")

    def send(self) -> None:
        """Sends the changes since the last call. Without any, a browser that has the page gets nothing."""
        if self.live and not self._texts and not self._sources:
            return
        changes = {
            "texts": list(self._texts.items()),
            "sources": [[name, *change] for name, change in self._sources.items()],
        }
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
