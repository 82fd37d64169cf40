"""The tab "Events": the events of the coordinator and of jobs, newest first, filtered by words and origin."""

from __future__ import annotations

import time
from collections.abc import Sequence

from bokeh.layouts import column, row
from bokeh.models import LayoutDOM, Select, TextInput

from hoop.dashboard.marks import LogLine
from hoop.dashboard.parts import Source, input_style, table
from hoop.dashboard.view import ClusterView

MAX_ROWS = 500
"""Rows that are sent to a browser."""
ALL = "all"


def matching(lines: Sequence[LogLine], words: str, source: str) -> list[LogLine]:
    """The newest lines that contain all of these words and come from this source (``ALL``: any), newest first."""
    wanted = words.lower().split()
    found: list[LogLine] = []
    for line in reversed(lines):
        text = f"{line.kind} {line.text}".lower()
        if source in (ALL, line.source) and all(word in text for word in wanted):
            found.append(line)
        if len(found) == MAX_ROWS:
            break
    return found


class EventsTab:
    """The tab of one browser."""

    shows_jobs = True

    def __init__(self) -> None:
        self._words = TextInput(
            title="Only events with these words", name="event-words", width=260, stylesheets=[input_style()]
        )
        self._source = Select(
            title="From", value=ALL, options=[ALL], name="event-source", width=160, stylesheets=[input_style()]
        )
        self._lines = Source("events", "time", "source", "kind", "text")
        titles = {"time": ("time", 70), "source": ("from", 90), "kind": ("event", 130), "text": ("what", 500)}
        self.layout: LayoutDOM = column(
            row(self._words, self._source, styles={"flex-wrap": "wrap"}),
            table(self._lines, "event-table", titles, height=560, always=True),
            sizing_mode="stretch_width",
        )

    def update(self, view: ClusterView) -> None:
        """Shows the lines of the view that match the filters."""
        options = [ALL, *sorted({line.source for line in view.lines})]
        if options != self._source.options:
            self._source.options = options
        rows = matching(view.lines, self._words.value, self._source.value)
        self._lines.show(
            [
                {
                    "time": time.strftime("%H:%M:%S", time.localtime(one.time)),
                    "source": one.source,
                    "kind": one.kind,
                    "text": one.text,
                }
                for one in rows
            ]
        )
