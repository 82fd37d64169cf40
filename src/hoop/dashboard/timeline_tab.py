"""The tab "Timeline": every fault, recovery, join and leave of the run as a mark."""

from __future__ import annotations

import time
from typing import Any

from bokeh.layouts import column
from bokeh.models import LayoutDOM

from hoop.dashboard.marks import Mark, MarkKind
from hoop.dashboard.palette import MARK_COLOURS, MARK_SHAPES
from hoop.dashboard.parts import Source, chart, paragraph, plural, seconds_text, set_text, text_block
from hoop.dashboard.view import ClusterView


def mark_row(mark: Mark) -> dict[str, Any]:
    """The row of a mark; ``began`` and ``end`` in milliseconds, as Bokeh's time axes need them."""
    return {
        "time": 1e3 * mark.time,
        "began": 1e3 * (mark.time - mark.seconds),
        "lane": str(mark.kind),
        "text": mark.text,
        "source": mark.source,
        "clock": time.strftime("%H:%M:%S", time.localtime(mark.time)),
        "pause": seconds_text(mark.seconds) if mark.seconds else "none",
        "colour": MARK_COLOURS[mark.kind],
        "shape": MARK_SHAPES[mark.kind],
    }


class TimelineTab:
    """The tab of one browser."""

    def __init__(self) -> None:
        self._head = text_block("timeline-text")
        self._marks = Source("marks", "time", "began", "lane", "text", "source", "clock", "pause", "colour", "shape")
        plot = chart(
            "What happened (drag to move, wheel to zoom)",
            height=360,
            hover=[("", "@text"), ("at", "@clock"), ("pause", "@pause"), ("from", "@source")],
            x_axis_type="datetime",
            y_range=[str(kind) for kind in MarkKind],
        )
        plot.hbar(
            y="lane", left="began", right="time", height=0.35, source=self._marks.model, color="colour", alpha=0.5
        )
        points = plot.scatter(
            "time", "lane", source=self._marks.model, marker="shape", size=13, color="colour", line_width=2
        )
        plot.hover.renderers = [points]
        self.layout: LayoutDOM = column(self._head, plot, sizing_mode="stretch_width")

    def update(self, view: ClusterView) -> None:
        """Shows the marks of the view, and the last ones in words."""
        counts = {kind: sum(one.kind is kind for one in view.marks) for kind in reversed(MarkKind)}
        shown = ", ".join(plural(number, str(kind)) for kind, number in counts.items() if number)
        last = [one for one in view.marks if one.kind in (MarkKind.FAULT, MarkKind.RECOVERY)][-5:]
        set_text(
            self._head,
            paragraph("Timeline", tag="h2"),
            paragraph(f"Marks: {shown or 'none yet'}."),
            *(paragraph(f"{time.strftime('%H:%M:%S', time.localtime(one.time))} {one.text}", "muted") for one in last),
        )
        self._marks.show([mark_row(one) for one in view.marks])
