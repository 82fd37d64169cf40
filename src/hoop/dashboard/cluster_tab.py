"""The tab "Cluster": the devices as a ring, their memory by named buffer, and communicators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bokeh.layouts import column
from bokeh.models import FactorRange, HoverTool, LayoutDOM

from hoop.dashboard.palette import CYCLE, GREY, RED, SHARE_COLOURS, STATE_COLOURS, STATE_SHAPES
from hoop.dashboard.parts import Source, bytes_text, chart, paragraph, set_text, shown_with_rows, table, text_block
from hoop.dashboard.updates import PageUpdates
from hoop.dashboard.view import ClusterView, DeviceView
from hoop.texts import counted

MAX_MEMORY_BARS = 64
"""Devices whose memory is drawn; the table has all."""
MAX_DRAWN_LINKS = 256
MAX_LISTED_LINKS = 1000
_AT_DEVICE = ("work", "memory", "time", "sends", "reason")
"""What is shown of a device only when the pointer is there."""
CIRCLES = "The circle around a device is its time: computing blue, communicating orange, idle grey."
MAX_NAMED = 48
"""With more devices on the ring their numbers would overlap; the pointer and the table tell them."""


def ring_places(count: int) -> list[tuple[float, float]]:
    """Places on the unit circle, clockwise from the top."""
    angles = [math.pi / 2 - 2 * math.pi * index / max(1, count) for index in range(count)]
    return [(math.cos(angle), math.sin(angle)) for angle in angles]


def ring_rows(devices: Sequence[DeviceView]) -> list[dict[str, Any]]:
    """The rows of the ring's devices: place, state, and the text at the pointer."""
    hosts = list(dict.fromkeys(one.host for one in devices))
    size = 26 if len(devices) <= MAX_NAMED else 12
    return [
        {
            "x": x,
            "y": y,
            "label_x": 1.34 * x,
            "label_y": 1.34 * y,
            "device": one.id,
            "host": one.host,
            "state": str(one.state),
            "colour": STATE_COLOURS[one.state],
            "host_colour": CYCLE[hosts.index(one.host) % len(CYCLE)],
            "shape": STATE_SHAPES[one.state],
            "size": size,
            "label": str(one.id) if len(devices) <= MAX_NAMED else "",
            "work": _work(one),
            "memory": f"{bytes_text(one.used)} of {bytes_text(one.capacity)}",
            "time": one.activity.figures.summary if one.activity is not None else "",
            "sends": _sends(one),
            "reason": one.reason,
        }
        for (x, y), one in zip(ring_places(len(devices)), devices, strict=True)
    ]


def share_rows(devices: Sequence[DeviceView]) -> list[dict[str, Any]]:
    """The rows of the circles around training devices: the shares of their time, clockwise from the top.

    What is left of a circle is other work: evaluation, checkpoints, recovery.
    """
    inner, outer = (0.17, 0.23) if len(devices) <= MAX_NAMED else (0.05, 0.08)
    rows = []
    for (x, y), one in zip(ring_places(len(devices)), devices, strict=True):
        shares = one.activity.figures.shares if one.activity is not None else None
        if shares is None:
            continue
        start = math.pi / 2
        kinds = ("computing", "communicating", "idle")
        for what, share in zip(kinds, shares, strict=True):
            end = start - 2 * math.pi * min(1.0, share)
            rows.append(
                {
                    "x": x,
                    "y": y,
                    "inner": inner,
                    "outer": outer,
                    "start": start,
                    "end": end,
                    "colour": SHARE_COLOURS[what],
                    "what": f"device {one.id}, {what}",
                    "share": f"{share:.0%} of its time",
                }
            )
            start = end
    return rows


def link_rows(view: ClusterView) -> list[dict[str, Any]]:
    """The rings of running jobs and of communicators, in rank order, between devices that are there."""
    alive = [one for one in view.on_ring if not one.state.is_gone]
    places = {one.id: place for one, place in zip(view.on_ring, ring_places(len(view.on_ring)), strict=True)}
    present = {one.id for one in alive}
    groups = [(job.devices, f"job {job.id}") for job in view.jobs if job.status == "running"]
    groups += [(one.devices, f"communicator {one.id}") for one in view.communicators]
    rows = []
    for number, (members, name) in enumerate(groups):
        ranks = [one for one in members if one in present]
        ends = zip(ranks, ranks[1:] + ranks[:1], strict=True) if len(ranks) > 1 else []
        for here, there in ends:
            (x0, y0), (x1, y1) = places[here], places[there]
            row = {"x0": x0, "y0": y0, "x1": x1, "y1": y1, "colour": CYCLE[number % len(CYCLE)], "name": name}
            rows.append({**row, "carries": "", "width": 2.0})
    return [*rows, *_traffic_rows(view, places)]


def _traffic_rows(view: ClusterView, places: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    """Lines of the links over TCP that carry bytes now; wider where they carry more."""
    rows = []
    for one in traffic(view)[:MAX_DRAWN_LINKS]:
        if one.device in places and one.peer in places:
            (x0, y0), (x1, y1) = places[one.device], places[one.peer]
            rows.append(
                {
                    "x0": x0,
                    "y0": y0,
                    "x1": x1,
                    "y1": y1,
                    "colour": RED,
                    "name": f"device {one.device} to device {one.peer}",
                    "carries": f"{bytes_text(one.sent)}/s",
                    "width": 1 + min(7.0, math.log10(max(1.0, one.sent / 1e3))),
                }
            )
    return rows


class Traffic(NamedTuple):
    """What one device sends to another over TCP, in bytes a second."""

    device: int
    peer: int
    sent: float


def traffic(view: ClusterView) -> list[Traffic]:
    """The links over TCP that carry bytes now, the busiest first. Devices of one host share memory instead."""
    found = [
        Traffic(one.id, link.peer, link.sent)
        for one in view.devices
        if one.activity is not None
        for link in one.activity.figures.links
        if link.sent > 0
    ]
    return sorted(found, key=lambda one: (-one.sent, one.device, one.peer))


def link_table_rows(view: ClusterView) -> list[dict[str, Any]]:
    """One row a device for what it sends in all, and one for each of its links over TCP."""
    rows = []
    for one in view.devices:
        if one.activity is not None and one.activity.figures.bytes_a_second is not None:
            rows.append(
                {"from": f"device {one.id}", "to": "all ranks of its job", "rate": _sends(one), "way": _ways(one)}
            )
    rows += [
        {
            "from": f"device {one.device}",
            "to": f"device {one.peer}",
            "rate": f"{bytes_text(one.sent)}/s",
            "way": "TCP",
        }
        for one in traffic(view)
    ]
    return rows[:MAX_LISTED_LINKS]


def _ways(device: DeviceView) -> str:
    return (
        "links and shared memory" if device.activity is not None and device.activity.figures.links else "shared memory"
    )


def _busy(device: DeviceView) -> str:
    shares = device.activity.figures.shares if device.activity is not None else None
    return f"{shares.compute:.0%}" if shares is not None else ""


def _sends(device: DeviceView) -> str:
    rate = device.activity.figures.bytes_a_second if device.activity is not None else None
    return f"{bytes_text(rate)}/s" if rate is not None else ""


def memory_rows(devices: Sequence[DeviceView]) -> list[dict[str, Any]]:
    """One bar a named buffer, side by side by device; what no buffer explains is "unnamed"."""
    names = list(dict.fromkeys(buffer.name for one in devices for buffer in one.buffers))
    colours = {name: CYCLE[index % len(CYCLE)] for index, name in enumerate(names)}
    rows = []
    for one in devices:
        left = 0
        parts = [(buffer.name, buffer.bytes, buffer.on_gpu) for buffer in one.buffers]
        unnamed = one.used + one.gpu_used - sum(size for _, size, _ in parts)
        if unnamed > 0:
            parts.append(("unnamed", unnamed, False))
        for name, size, on_gpu in parts:
            where = "GPU" if on_gpu else "arena"
            rows.append(
                {
                    "device": bar_name(one),
                    "left": left / 2**20,
                    "right": (left + size) / 2**20,
                    "name": name,
                    "bytes": f"{bytes_text(size)} ({where})",
                    "colour": colours.get(name, GREY),
                }
            )
            left += size
    return rows


def bar_name(device: DeviceView) -> str:
    return f"device {device.id}"


def _work(device: DeviceView) -> str:
    return f"job {device.job}, rank {device.rank}" if device.job else ""


def summary(view: ClusterView) -> str:
    """The ring in words, for screen readers."""
    if not view.devices:
        return "No devices yet."
    states = Counter(str(one.state) for one in view.on_ring)
    listed = ", ".join(f"{number} {state}" for state, number in states.most_common())
    hosts = len({one.host for one in view.on_ring})
    return f"{counted(len(view.on_ring), 'device')} on {counted(hosts, 'host')}: {listed}."


def shown_by_tab(view: ClusterView) -> tuple[object, ...]:
    """Everything of a view that the tab shows, to be compared with that of another view."""
    devices = [
        (replace(one, silent_s=0.0, activity=None), one.activity and one.activity.figures) for one in view.devices
    ]
    jobs = [(one.id, one.devices) for one in view.jobs if one.status == "running"]
    return devices, [one.id for one in view.on_ring], jobs, view.communicators


class ClusterTab:
    """The tab of one browser."""

    shows_jobs = False

    def __init__(self, updates: PageUpdates) -> None:
        self._shown: tuple[object, ...] = ()
        """What the tab shows (``shown_by_tab``)."""
        self._head = text_block("cluster-text")
        self._devices = Source(
            "ring",
            *("x", "y", "label_x", "label_y", "device", "host", "state", "colour", "host_colour", "shape", "size"),
            *("label", *_AT_DEVICE),
            updates=updates,
            at_pointer=_AT_DEVICE,
        )
        wedges = ("x", "y", "inner", "outer", "start", "end", "colour", "what", "share")
        self._shares = Source("shares", *wedges, updates=updates, at_pointer=("share",))
        lines = ("x0", "y0", "x1", "y1", "colour", "name", "carries", "width")
        self._links = Source("links", *lines, updates=updates, at_pointer=("carries",))
        self._traffic = Source("traffic", "from", "to", "rate", "way", updates=updates)
        self._memory = Source("memory", "device", "left", "right", "name", "bytes", "colour")
        listed = ("device", "state", "host", "pid", "work", "busy", "sends", "memory", "address", "reason")
        self._list = Source("devices", *listed, updates=updates)
        self._communicators = Source("communicators", "id", "generation", "devices", "status", "reason")
        self._bars = FactorRange()
        self._memory_chart = self._draw_memory()
        self.layout: LayoutDOM = column(
            self._head,
            self._draw_ring(),
            table(
                self._list,
                "device-table",
                {
                    "device": ("device", 50),
                    "state": ("state", 70),
                    "host": ("host", 90),
                    "pid": ("pid", 50),
                    "work": ("work", 90),
                    "busy": ("computes", 60),
                    "sends": ("sends", 80),
                    "memory": ("memory", 130),
                    "address": ("address", 120),
                    "reason": ("why", 160),
                },
            ),
            table(
                self._traffic,
                "link-table",
                {"from": ("from", 80), "to": ("to", 110), "rate": ("bytes a second", 90), "way": ("over", 130)},
                height=150,
            ),
            shown_with_rows(self._memory_chart, self._memory),
            table(
                self._communicators,
                "communicator-table",
                {
                    "id": ("communicator", 80),
                    "generation": ("generation", 70),
                    "devices": ("devices, in rank order", 150),
                    "status": ("status", 70),
                    "reason": ("why", 150),
                },
                height=130,
            ),
            sizing_mode="stretch_width",
        )

    def _draw_ring(self) -> LayoutDOM:
        plot = chart(
            "Devices (shape and colour: state, dots: host)",
            height=420,
            hover=[
                ("device", "@device"),
                ("state", "@state"),
                ("host", "@host"),
                ("work", "@work"),
                ("memory", "@memory"),
                ("time", "@time"),
                ("sends", "@sends"),
                ("why", "@reason"),
            ],
            tools="reset,save",
            sizing_mode="scale_width",
            aspect_ratio=1,
            max_width=480,
            x_range=(-1.6, 1.6),
            y_range=(-1.6, 1.6),
        )
        plot.axis.visible = plot.grid.visible = False
        links = plot.segment(
            "x0", "y0", "x1", "y1", source=self._links.model, line_width="width", color="colour", alpha=0.6
        )
        plot.add_tools(
            HoverTool(renderers=[links], tooltips=[("link", "@name"), ("carries", "@carries")], description="Links")
        )
        nodes = plot.scatter(
            "x", "y", source=self._devices.model, marker="shape", size="size", fill_color="colour", line_color="colour",
            line_width=3,
        )  # fmt: skip
        shares = plot.annular_wedge(
            "x", "y", "inner", "outer", "start", "end", direction="clock", source=self._shares.model, color="colour"
        )
        plot.add_tools(
            HoverTool(renderers=[shares], tooltips=[("device", "@what"), ("share", "@share")], description="Time")
        )
        plot.scatter("label_x", "label_y", source=self._devices.model, marker="dot", size=28, color="host_colour")
        plot.text(
            "label_x", "label_y", text="label", source=self._devices.model, x_offset=8, text_baseline="middle",
            text_font_size="13px", text_color="#808080",
        )  # fmt: skip
        plot.hover[0].renderers = [nodes]
        self._devices.chart = self._shares.chart = self._links.chart = plot
        return plot

    def _draw_memory(self) -> Any:
        plot = chart(
            "Memory by named buffer (MiB)",
            hover=[("device", "@device"), ("buffer", "@name"), ("size", "@bytes")],
            tools="xwheel_zoom,xpan,reset,save",
            y_range=self._bars,
        )
        plot.hbar(
            y="device", left="left", right="right", height=0.7, source=self._memory.model, color="colour",
            line_color="#ffffff",
        )  # fmt: skip
        return plot

    def update(self, view: ClusterView) -> None:
        """Shows the view, if there is anything new in it: a job that trains changes the view all the time."""
        shown = shown_by_tab(view)
        if shown == self._shown:
            return
        self._shown = shown
        devices = view.on_ring
        set_text(self._head, paragraph("Cluster", tag="h2"), paragraph(summary(view)), paragraph(CIRCLES))
        self._devices.show(ring_rows(devices))
        self._shares.show(share_rows(devices))
        self._links.show(link_rows(view))
        self._list.show(
            [
                {
                    "device": str(one.id),
                    "state": str(one.state),
                    "host": one.host,
                    "pid": str(one.pid),
                    "work": _work(one),
                    "busy": _busy(one),
                    "sends": _sends(one),
                    "memory": f"{bytes_text(one.used)} of {bytes_text(one.capacity)}",
                    "address": one.address,
                    "reason": one.reason,
                }
                for one in view.devices
            ]
        )
        self._traffic.show(link_table_rows(view))
        drawn = [one for one in devices if not one.state.is_gone][:MAX_MEMORY_BARS]
        names = list(reversed([bar_name(one) for one in drawn]))
        if names != list(self._bars.factors):
            self._bars.factors = names
            self._memory_chart.height = 110 + 22 * len(names)
        self._memory.show(memory_rows(drawn))
        self._communicators.show(
            [
                {
                    "id": str(one.id),
                    "generation": str(one.generation),
                    "devices": " ".join(map(str, one.devices)),
                    "status": one.status,
                    "reason": one.reason,
                }
                for one in view.communicators
            ]
        )
