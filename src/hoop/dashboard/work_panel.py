"""The part of the tab "Job" that shows, by device, where a step's time goes and which shards it computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import LayoutDOM

from hoop.dashboard.activity_view import PARTS
from hoop.dashboard.job_view import JobView
from hoop.dashboard.live_chart import bars_html, chart_block
from hoop.dashboard.palette import PART_COLOURS
from hoop.dashboard.parts import Source, bytes_text, seconds_text, table
from hoop.dashboard.updates import PageUpdates
from hoop.dashboard.view import DeviceView

MAX_BARS = 64
"""Devices whose time is drawn; the table has all."""


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


def bar_rows(devices: Sequence[DeviceView]) -> list[tuple[str, dict[str, float]]]:
    """Milliseconds of a step by part, for each device that has ended a step lately."""
    rows = []
    for one in devices:
        split = one.activity.figures.split if one.activity is not None else {}
        if split:
            rows.append((bar_name(one), {part: 1e3 * split[part] for part in PARTS}))
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
        self._updates = updates
        self._bars = chart_block("work")
        columns = ("rank", "device", "shards", "stages", "step", "compute", "communicate", "idle", "sends", "note")
        self._table = Source("workers", *columns, updates=updates)
        self.layout: LayoutDOM = column(
            self._bars,
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

    def update(self, job: JobView, devices: Sequence[DeviceView]) -> None:
        """Shows the devices that do steps of the job, by rank."""
        predicted = 1e3 * job.predicted_step_seconds if job.predicted_step_seconds else None
        title = "A step now, in ms" + (" (dashed: predicted)" if predicted else "")
        bars = bars_html(title, bar_rows(devices[:MAX_BARS]), PART_COLOURS, "ms", predicted)
        self._updates.change_text(self._bars, bars)
        self._table.show(table_rows(job, devices))
