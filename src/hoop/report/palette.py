"""The colours of every chart and page, with a light and a dark theme.

The six colours are distinguishable with any kind of colour blindness and have a contrast of at least 3:1 against the
background; a test measures both. Lines also differ in marker and dash.
"""

from __future__ import annotations

from typing import NamedTuple


class Theme(NamedTuple):
    """The colours of one theme. ``idle``: the background of a timeline row."""

    paper: str
    ink: str
    soft: str
    grid: str
    idle: str
    colours: tuple[str, ...]


LIGHT = Theme(
    paper="#ffffff",
    ink="#1c2026",
    soft="#5b6470",
    grid="#e4e7eb",
    idle="#edeff2",
    colours=("#1f66d6", "#a83a06", "#2aa06f", "#bf5b9c", "#a39600", "#2b2a63"),
)
DARK = Theme(
    paper="#15181e",
    ink="#eceff4",
    soft="#a3acb9",
    grid="#2c323c",
    idle="#2b313c",
    colours=("#8cc8ff", "#f2703a", "#3ddc97", "#cf66a8", "#f5dd5c", "#8a70e6"),
)

KINDS = {"forward": 0, "backward": 3, "update": 2, "communicate": 1, "load": 4, "compute": 5}
"""The colour of each kind of span, in the hues of the dashboard. ``send``, ``recv``, ``reduce``, ``gather``, ``push``
and ``pull`` are communication too."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def page_colours(theme: Theme) -> str:
    """The CSS variables of a page in this theme."""
    return (
        f"--paper:{theme.paper};--ink:{theme.ink};--soft:{theme.soft};--line:{theme.grid};"
        f"--shade:{theme.idle};--link:{theme.colours[0]}"
    )
