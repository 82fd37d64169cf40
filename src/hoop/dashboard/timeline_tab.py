"""The tab "Timeline": every fault, recovery, join and leave of the run as a mark, and a trace of some steps."""

from __future__ import annotations

import time
from typing import Any

from bokeh.layouts import column
from bokeh.models import Button, FactorRange, LayoutDOM

from hoop.dashboard.marks import Mark, MarkKind, count_happenings
from hoop.dashboard.palette import CATEGORY_COLOURS, GREY, MARK_COLOURS, MARK_SHAPES
from hoop.dashboard.parts import (
    Source,
    button_style,
    chart,
    paragraph,
    seconds_text,
    set_factors,
    set_text,
    shown_with_rows,
    text_block,
)
from hoop.dashboard.tracer import Tracer, TraceSpan, TraceView
from hoop.dashboard.view import ClusterView
from hoop.texts import counted


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


def span_rows(trace: TraceView) -> list[dict[str, Any]]:
    """The rows of a trace; times in milliseconds."""
    return [
        {
            "device": lane_name(one),
            "left": 1e3 * one.start,
            "right": 1e3 * (one.start + one.seconds),
            "text": one.instruction,
            "category": one.category if one.category in CATEGORY_COLOURS else "other",
            "ms": f"{1e3 * one.seconds:.3f} ms",
            "colour": CATEGORY_COLOURS.get(one.category, GREY),
        }
        for one in trace.spans
    ]


def lane_name(span: TraceSpan) -> str:
    return f"device {span.device} (rank {span.rank})"


def trace_text(trace: TraceView, busy: bool) -> str:
    """What the chart of the trace shows."""
    if busy:
        return "The next steps are recorded …"
    if not trace.number:
        return "Press the button to record the next steps of the newest job."
    if not trace.spans:
        return f"No trace: {trace.problem}"
    problem = f" Not all devices answered: {trace.problem}." if trace.problem else ""
    spans = f"{len(trace.spans):,} instructions"
    return (
        f"Job {trace.job}, steps from {trace.first_step + 1}: {spans} on {counted(trace.devices, 'device')}.{problem}"
    )


class TimelineTab:
    """The tab of one browser."""

    shows_jobs = True

    def __init__(self, tracer: Tracer | None = None) -> None:
        """``tracer`` None: there is no button for a trace."""
        self._tracer, self._view, self._shown_trace = tracer, ClusterView(), -1
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
        parts: list[LayoutDOM] = [self._head, plot]
        if tracer is not None:
            parts += self._draw_trace()
        self.layout: LayoutDOM = column(*parts, sizing_mode="stretch_width")

    def _draw_trace(self) -> list[LayoutDOM]:
        button = Button(label="Trace the next steps", width=180, name="trace", stylesheets=[button_style()])
        button.on_click(self._ask)
        self._trace_text = text_block("trace-text")
        self._spans = Source("spans", "device", "left", "right", "text", "category", "ms", "colour")
        self._lanes = FactorRange()
        plot = chart(
            "Steps by device, in ms (drag to move, wheel to zoom)",
            hover=[("", "@text"), ("what", "@category"), ("took", "@ms"), ("", "@device")],
            y_range=self._lanes,
        )
        plot.hbar(
            y="device", left="left", right="right", height=0.75, source=self._spans.model, color="colour",
            line_color=None, legend_field="category",
        )  # fmt: skip
        legend = plot.legend[0]
        legend.orientation, legend.ncols, legend.location = "horizontal", 3, "left"
        legend.label_text_font_size, legend.spacing, legend.padding = "12px", 6, 4
        plot.add_layout(legend, "above")
        self._trace_chart = plot
        return [button, self._trace_text, shown_with_rows(plot, self._spans)]

    def _ask(self) -> None:
        """Called by Bokeh on the server's thread: it only asks."""
        job = self._view.current_job
        if self._tracer is not None and job is not None:
            self._tracer.ask(job.id, [one.id for one in self._view.workers(job.id)])

    def _show_trace(self, tracer: Tracer) -> None:
        trace = tracer.trace
        set_text(self._trace_text, paragraph(trace_text(trace, tracer.busy)))
        if trace.number == self._shown_trace:
            return
        self._shown_trace = trace.number
        rows = span_rows(trace)
        lanes = list(dict.fromkeys(row["device"] for row in rows))
        if set_factors(self._lanes, list(reversed(lanes))):
            self._trace_chart.height = 170 + 26 * max(2, len(lanes))
        self._spans.show(rows)

    def update(self, view: ClusterView) -> None:
        """Shows the marks of the view, the last ones in words, and the newest trace."""
        self._view = view
        if self._tracer is not None:
            self._show_trace(self._tracer)
        counts = count_happenings(view.marks)
        shown = ", ".join(counted(number, str(kind)) for kind, number in counts.items() if number)
        last = [one for one in view.marks if one.kind in (MarkKind.FAULT, MarkKind.RECOVERY)][-5:]
        set_text(
            self._head,
            paragraph("Timeline", tag="h2"),
            paragraph(f"Until now: {shown or 'nothing'}."),
            *(paragraph(f"{time.strftime('%H:%M:%S', time.localtime(one.time))} {one.text}", "muted") for one in last),
        )
        self._marks.show([mark_row(one) for one in view.marks])
