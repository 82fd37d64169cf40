"""The part of the tab "Job" that shows, by device, where a step's time goes and which shards it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import FactorRange, LayoutDOM, Span

from hoop.dashboard.activity_view import PARTS
from hoop.dashboard.job_view import JobView
from hoop.dashboard.palette import PART_COLOURS, RED
from hoop.dashboard.parts import Source, bytes_text, chart, seconds_text, set_factors, shown_with_rows, table
from hoop.dashboard.updates import PageUpdates
from hoop.dashboard.view import DeviceView

MAX_BARS = 64
"""Devices whose time is drawn; the table has all."""
BAR_PX = 24


def ranges_text(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges, like ``0-3, 8``."""
    found: list[list[int]] = []
    for one in sorted(numbers):
        if found and found[-1][1] == one - 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in found)


def bar_name(device: DeviceView) -> str:
    return f"device {device.id} (rank {device.rank})"


def bar_rows(devices: Sequence[DeviceView]) -> list[dict[str, Any]]:
    """Milliseconds of a step by part, for each device that has ended a step lately."""
    rows = []
    for one in devices:
        split = one.activity.figures.split if one.activity is not None else {}
        if split:
            parts = {part: 1e3 * split[part] for part in PARTS}
            rows.append({"device": bar_name(one), **parts, "whole": sum(parts.values())})
    return rows


def table_rows(job: JobView, devices: Sequence[DeviceView]) -> list[dict[str, Any]]:
    """One row a device: its shards and stages, its step, what it sends, and whether it is a straggler."""
    slow = dict(job.stragglers)
    rows = []
    for one in devices:
        found = one.activity
        assert found is not None, "of ClusterView.workers"
        figures = found.figures
        seconds, sent, shares = figures.step_seconds, figures.bytes_a_second, figures.shares
        rows.append(
            {
                "rank": str(one.rank),
                "device": str(one.id),
                "shards": ranges_text(found.shards) or "none",
                "stages": ranges_text(found.stages) or "none",
                "step": seconds_text(seconds) if seconds is not None else "",
                "compute": f"{shares.compute:.0%}" if shares is not None else "",
                "communicate": f"{shares.communicate:.0%}" if shares is not None else "",
                "idle": f"{shares.idle:.0%}" if shares is not None else "",
                "sends": f"{bytes_text(sent)}/s" if sent is not None else "",
                "note": f"{slow[one.rank]:.1f} times slower" if one.rank in slow else "",
            }
        )
    return rows


class WorkPanel:
    """The panel of one browser."""

    def __init__(self, updates: PageUpdates) -> None:
        self._bars = Source("work", "device", *PARTS, "whole", updates=updates, paced=True)
        columns = ("rank", "device", "shards", "stages", "step", "compute", "communicate", "idle", "sends", "note")
        self._table = Source("workers", *columns, updates=updates)
        self._devices = FactorRange()
        self._predicted = Span(
            location=0, dimension="height", line_color=RED, line_dash="dashed", line_width=2, visible=False
        )
        self._bars.chart = self._chart = self._draw()
        self.layout: LayoutDOM = column(
            shown_with_rows(self._chart, self._bars),
            table(
                self._table,
                "worker-table",
                {
                    "rank": ("rank", 40),
                    "device": ("device", 50),
                    "shards": ("shards", 90),
                    "stages": ("stages", 60),
                    "step": ("step", 60),
                    "compute": ("computes", 60),
                    "communicate": ("communicates", 60),
                    "idle": ("waits", 60),
                    "sends": ("sends", 80),
                    "note": ("straggler", 120),
                },
                height=200,
            ),
            sizing_mode="stretch_width",
        )

    def _draw(self) -> Any:
        hover = [("device", "@device"), ("step", "@whole{0.00} ms")]
        hover += [(part, f"@{part}{{0.00}} ms") for part in PARTS]
        plot = chart(
            "A step now, in ms (dashed: predicted)",
            hover=hover,
            tools="xwheel_zoom,xpan,reset,save",
            y_range=self._devices,
        )
        plot.hbar_stack(
            list(PARTS), y="device", height=0.7, source=self._bars.model, color=[PART_COLOURS[one] for one in PARTS],
            legend_label=list(PARTS), line_color="#ffffff", line_width=0.5,
        )  # fmt: skip
        plot.x_range.start = 0
        legend = plot.legend[0]
        legend.orientation, legend.ncols, legend.location = "horizontal", 3, "left"
        legend.label_text_font_size, legend.spacing, legend.padding = "12px", 6, 4
        plot.add_layout(legend, "above")
        plot.add_layout(self._predicted)
        return plot

    def update(self, job: JobView, devices: Sequence[DeviceView]) -> None:
        """Shows the devices that do steps of the job, by rank."""
        rows = bar_rows(devices[:MAX_BARS])
        if set_factors(self._devices, [row["device"] for row in reversed(rows)]):
            self._chart.height = 170 + BAR_PX * max(2, len(rows))
        self._bars.show(rows)
        self._table.show(table_rows(job, devices))
        predicted = job.predicted_step_seconds
        if self._predicted.visible != bool(predicted):
            self._predicted.visible = bool(predicted)
        if predicted and self._predicted.location != 1e3 * predicted:
            self._predicted.location = 1e3 * predicted
