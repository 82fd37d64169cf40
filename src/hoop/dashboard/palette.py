"""Colours, shapes and the two themes of the page.

The colours are those of Okabe and Ito, which people with any common colour blindness tell apart. No state is shown by
colour alone: every one has a shape, and its name in the table.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoop.dashboard.marks import MarkKind
from hoop.dashboard.view import DeviceState

BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
SKY, PURPLE, YELLOW, GREY = "#56b4e9", "#cc79a7", "#f0e442", "#8a8a8a"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY)
"""Colours of numbered things, such as hosts, buffers and ranks: number i has colour i modulo the length."""

STATE_COLOURS = {
    DeviceState.TRAINING: BLUE,
    DeviceState.STANDBY: GREEN,
    DeviceState.JOINING: SKY,
    DeviceState.DRAINING: PURPLE,
    DeviceState.SUSPECT: ORANGE,
    DeviceState.UNREACHABLE: YELLOW,
    DeviceState.DEAD: RED,
    DeviceState.LEFT: GREY,
}
STATE_SHAPES = {
    DeviceState.TRAINING: "circle",
    DeviceState.STANDBY: "square",
    DeviceState.JOINING: "triangle",
    DeviceState.DRAINING: "inverted_triangle",
    DeviceState.SUSPECT: "diamond",
    DeviceState.UNREACHABLE: "hex",
    DeviceState.DEAD: "x",
    DeviceState.LEFT: "cross",
}
MARK_COLOURS = {
    MarkKind.FAULT: RED,
    MarkKind.RECOVERY: GREEN,
    MarkKind.JOIN: BLUE,
    MarkKind.LEAVE: PURPLE,
    MarkKind.STRAGGLER: ORANGE,
    MarkKind.CHECKPOINT: GREY,
    MarkKind.JOB: SKY,
}
MARK_SHAPES = {
    MarkKind.FAULT: "x",
    MarkKind.RECOVERY: "circle",
    MarkKind.JOIN: "triangle",
    MarkKind.LEAVE: "inverted_triangle",
    MarkKind.STRAGGLER: "diamond",
    MarkKind.CHECKPOINT: "square",
    MarkKind.JOB: "star",
}

IDLE, OLIVE = "#c4c4c4", "#a39600"
SHARE_COLOURS = {"computing": BLUE, "communicating": ORANGE, "idle": IDLE}
PART_COLOURS = {
    "load": OLIVE,
    "forward": BLUE,
    "backward": PURPLE,
    "communicate": ORANGE,
    "update": GREEN,
    "idle": IDLE,
    "other": "#6e6e6e",
}
"""By part of a step's time (``activity_view.PARTS``); in the hues of ``report.palette.KINDS``."""
CATEGORY_COLOURS = {
    "load": OLIVE,
    "forward": BLUE,
    "backward": PURPLE,
    "update": GREEN,
    "reduce": ORANGE,
    "gather": YELLOW,
    "send": RED,
    "push": RED,
    "recv": SKY,
    "wait": IDLE,
}
"""By category of an instruction (``plan.instructions.CATEGORY``)."""


@dataclass(frozen=True)
class Theme:
    """Colours of the page's surfaces and texts."""

    background: str
    panel: str
    text: str
    muted: str
    grid: str


LIGHT = Theme("#ffffff", "#ffffff", "#1a1a1a", "#595959", "#e0e0e0")
DARK = Theme("#14171a", "#1b1f23", "#eceff1", "#a9b2ba", "#353b41")
