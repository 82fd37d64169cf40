"""Charts as data: what a chart shows, without a drawing library.

Studies, ``hoop bench``, ``simulate`` and ``plan`` describe their charts with these classes. ``components.draw`` makes
interactive figures of them where Bokeh is installed; ``Chart.plain`` has the same values as JSON everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hoop.errors import InvalidArgument
from hoop.report.spans import Span

Kind = Literal["linear", "log"]
MAX_SPANS = 20_000
"""Maximum number of spans in a timeline: about 1 MB of a page, and a browser still zooms smoothly."""
IDLE = "idle"
"""Kind of a time split besides those of spans: waiting."""
OTHER = "other"
"""Kind of a time split: time of none of the named kinds."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ChartLine:
    """One line. A point that is not finite is a gap. ``dashed``: predicted instead of measured."""

    name: str
    x: ArrayLike
    y: ArrayLike
    dashed: bool = False

    def __post_init__(self) -> None:
        if np.size(self.x) != np.size(self.y):
            raise InvalidArgument(f"line {self.name!r}: {np.size(self.x)} x and {np.size(self.y)} y; give one for each")


@dataclass(frozen=True)
class Lines:
    """Lines over one horizontal axis. ``label``: the quantity with its unit; ``rules``: named reference levels."""

    label: str
    lines: Sequence[ChartLine]
    kind: Kind = "linear"
    rules: Mapping[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        lines = [{"name": one.name, "x": numbers(one.x), "y": numbers(one.y)} for one in self.lines]
        return {"label": self.label, "scale": self.kind, "lines": lines, "rules": dict(self.rules)}


@dataclass(frozen=True)
class Bars:
    """Values by series and group: a row of bars a group. A value that is not finite has no bar."""

    label: str
    groups: Sequence[str]
    values: Mapping[str, Sequence[float]]
    kind: Kind = "linear"
    rules: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in self.values.items():
            if len(values) != len(self.groups):
                raise InvalidArgument(
                    f"bars {name!r}: {len(values)} values for {len(self.groups)} groups; give one for each"
                )

    def plain(self) -> dict[str, Any]:
        values = {name: numbers(one) for name, one in self.values.items()}
        return {
            "label": self.label,
            "scale": self.kind,
            "groups": list(self.groups),
            "values": values,
            "rules": dict(self.rules),
        }


@dataclass(frozen=True)
class TimeSplit:
    """Stacked bars: how each row (a device, a strategy) spends its time. ``rows``: ``device``, a number a kind."""

    label: str
    rows: Sequence[Mapping[str, Any]]
    kinds: Sequence[str]

    def plain(self) -> dict[str, Any]:
        return {"label": self.label, "rows": [dict(row) for row in self.rows]}


@dataclass(frozen=True)
class Timeline:
    """What each device does when. ``shown_ms``: the time that is visible at first, by default all."""

    spans: Sequence[Span]
    shown_ms: float | None = None

    def plain(self) -> dict[str, Any]:
        """Without the spans: a trace file has them."""
        return {"spans": len(self.spans)}


Panel = Lines | Bars | TimeSplit | Timeline


@dataclass(frozen=True)
class Chart:
    """A title, and one or more panels below each other; panels of lines share their horizontal axis.

    ``name``: of the chart in its page and of the file when it is exported.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    x_label: str = ""
    x_kind: Kind = "linear"
    subtitle: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+", self.name):
            raise InvalidArgument(f"chart: its name {self.name!r} becomes a file's; use letters, digits, - and _")

    def plain(self) -> dict[str, Any]:
        """Every value of the chart, as JSON values; a value that is not finite is None."""
        about = {"name": self.name, "title": self.title, "subtitle": self.subtitle}
        axis = {"x_label": self.x_label, "x_scale": self.x_kind}
        return {**about, **axis, "panels": [panel.plain() for panel in self.panels]}


def numbers(values: ArrayLike) -> list[float | None]:
    """The values as JSON numbers; None for one that is not finite."""
    return [float(value) if np.isfinite(value) else None for value in np.asarray(values, np.float64).ravel()]


def smoothed(values: ArrayLike, window: int) -> Floats:
    """Moving average over ``window`` values, fewer at the ends; gaps stay gaps."""
    array = np.asarray(values, np.float64).ravel()
    known = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places, reach = np.arange(len(array)), max(window, 1) // 2
    first, last = np.maximum(places - reach, 0), np.minimum(places + reach + 1, len(array))
    total, count = sums[last] - sums[first], counts[last] - counts[first]
    return np.where(known, total / np.maximum(count, 1), np.nan)
