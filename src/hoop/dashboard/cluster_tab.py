"""The tab "Cluster": the devices as a ring, their memory by named buffer, and communicators."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bokeh.layouts import column
from bokeh.models import FactorRange, LayoutDOM

from hoop.dashboard.palette import CYCLE, GREY, STATE_COLOURS, STATE_SHAPES
from hoop.dashboard.parts import Source, bytes_text, chart, paragraph, plural, set_text, table, text_block
from hoop.dashboard.view import ClusterView, DeviceView

MAX_MEMORY_BARS = 64
"""Devices whose memory is drawn; the table has all."""
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
            "label_x": 1.22 * x,
            "label_y": 1.22 * y,
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
            "reason": one.reason,
        }
        for (x, y), one in zip(ring_places(len(devices)), devices, strict=True)
    ]


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
            colour = CYCLE[number % len(CYCLE)]
            rows.append({"x0": x0, "y0": y0, "x1": x1, "y1": y1, "colour": colour, "name": name})
    return rows


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
    counted = ", ".join(f"{number} {state}" for state, number in states.most_common())
    hosts = len({one.host for one in view.on_ring})
    return f"{plural(len(view.on_ring), 'device')} on {plural(hosts, 'host')}: {counted}."


class ClusterTab:
    """The tab of one browser."""

    def __init__(self) -> None:
        self._head = text_block("cluster-text")
        self._devices = Source(
            "ring",
            *("x", "y", "label_x", "label_y", "device", "host", "state", "colour", "host_colour", "shape", "size"),
            *("label", "work", "memory", "reason"),
        )
        self._links = Source("links", "x0", "y0", "x1", "y1", "colour", "name")
        self._memory = Source("memory", "device", "left", "right", "name", "bytes", "colour")
        self._list = Source("devices", "device", "state", "host", "work", "memory", "address", "reason")
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
                    "host": ("host", 110),
                    "work": ("work", 90),
                    "memory": ("memory", 130),
                    "address": ("address", 120),
                    "reason": ("why", 160),
                },
            ),
            self._memory_chart,
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
            "Devices: shape and colour are the state, dots the host",
            height=420,
            hover=[
                ("device", "@device"),
                ("state", "@state"),
                ("host", "@host"),
                ("work", "@work"),
                ("memory", "@memory"),
                ("why", "@reason"),
            ],
            tools="reset,save",
            sizing_mode="scale_width",
            aspect_ratio=1,
            max_width=480,
            x_range=(-1.5, 1.5),
            y_range=(-1.5, 1.5),
        )
        plot.axis.visible = plot.grid.visible = False
        plot.segment("x0", "y0", "x1", "y1", source=self._links.model, line_width=2, color="colour", alpha=0.6)
        nodes = plot.scatter(
            "x", "y", source=self._devices.model, marker="shape", size="size", fill_color="colour", line_color="colour",
            line_width=3,
        )  # fmt: skip
        plot.scatter("label_x", "label_y", source=self._devices.model, marker="dot", size=28, color="host_colour")
        plot.text(
            "label_x", "label_y", text="label", source=self._devices.model, x_offset=8, text_baseline="middle",
            text_font_size="13px", text_color="#808080",
        )  # fmt: skip
        plot.hover.renderers = [nodes]
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
        """Shows the view."""
        devices = view.on_ring
        set_text(self._head, paragraph("Cluster", tag="h2"), paragraph(summary(view)))
        self._devices.show(ring_rows(devices))
        self._links.show(link_rows(view))
        self._list.show(
            [
                {
                    "device": str(one.id),
                    "state": str(one.state),
                    "host": f"{one.pid}@{one.host}",
                    "work": _work(one),
                    "memory": f"{bytes_text(one.used)} of {bytes_text(one.capacity)}",
                    "address": one.address,
                    "reason": one.reason,
                }
                for one in view.devices
            ]
        )
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
