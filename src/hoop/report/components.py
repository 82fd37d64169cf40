"""Interactive charts, made with Bokeh: functions from data to a figure. All reports use them, and live pages may.

    draw         a ``chart.Chart``: a figure for each of its panels
    curve        values over steps, sizes or devices     lines; the measured values faintly behind a smoothed line
    grouped_bars values by group and series              bars, a row a group
    time_split   how each device spent its time          stacked bars, a row a device
    timeline     what each device did when               a row a device, zoom along the time
    run_marks    faults, recoveries, joins, checkpoints  a row a kind of mark, hover tells what happened

Each takes rows, or a ``ColumnDataSource`` with the same columns, which a live page may stream to. A legend names kinds
or series, never devices, and a click on an entry hides it. Colours are those of ``palette``: ``_themed`` notes in a
model's tags which colour of the theme each of its properties has, and ``PAGE_SCRIPT`` applies the light or dark theme.

Texts are untrusted: Bokeh draws them on a canvas or escapes them, and ``plain`` keeps it from reading them as formulas.

This module imports Bokeh: import it only where a page is made (``pip install 'hoop[dashboard]'``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from bokeh.core.properties import value as constant
from bokeh.models import (
    BoxZoomTool,
    CDSView,
    ColumnDataSource,
    FactorRange,
    GroupFilter,
    HoverTool,
    LabelSet,
    Legend,
    LegendItem,
    Model,
    Range,
    Range1d,
)
from bokeh.plotting import figure
from bokeh.transform import dodge
from numpy.typing import ArrayLike

from hoop.report import strict_json
from hoop.report.chart import MAX_SPANS, OTHER, Bars, Chart, ChartLine, Kind, Lines, Timeline, TimeSplit, smoothed
from hoop.report.palette import DARK, FONT, KINDS, LIGHT, Theme
from hoop.report.spans import Span, by_track, kind_of
from hoop.texts import printable

MAX_POINTS = 2000
"""Maximum number of points of a line; of a longer one the minimum and the maximum of each part are drawn."""
_SMOOTHED_FROM = 120
_LEVEL_DASHES = ("dotted", "dotdash")
_DASHES = ("solid", "dashed", "dotted", "dotdash")
_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "x")
_TEXT_BYTES = 400
_LEGEND_CHARACTERS = 48
"""Characters of the legend entries in one row: as many as fit on a phone."""
_LEGEND_ROW = 21
_NAME_BESIDE = 16
"""Maximum number of characters of a row's name beside the row; longer names are above the rows."""
_NAME_ABOVE = 60
"""Maximum number of characters of a row's name above the row."""
_MAX_OWN_TICKS = 12
_MAX_VALUES = 24
"""Maximum number of bars that have their values beside them; with more, hovering shows the value."""


class MarkKind(StrEnum):
    """The kinds of marks of a run, in the order of their rows."""

    FAULT = "fault"
    LOST = "device lost"
    RECOVERED = "recovered"
    JOINED = "joined"
    LEFT = "left"
    RESIZED = "resized"
    RESUMED = "resumed"
    STRAGGLER = "straggler"
    CHECKPOINT = "checkpoint"
    WARNING = "warning"


_MARK_LOOKS: dict[MarkKind, tuple[int, str]] = {
    MarkKind.FAULT: (1, "x"),
    MarkKind.LOST: (1, "inverted_triangle"),
    MarkKind.RECOVERED: (2, "circle"),
    MarkKind.JOINED: (0, "triangle"),
    MarkKind.LEFT: (3, "inverted_triangle"),
    MarkKind.RESIZED: (2, "diamond"),
    MarkKind.RESUMED: (0, "circle"),
    MarkKind.STRAGGLER: (4, "hex"),
    MarkKind.CHECKPOINT: (5, "square"),
    MarkKind.WARNING: (4, "triangle"),
}
"""Number of the colour, and marker, of each kind of mark."""


@dataclass(frozen=True)
class Mark:
    """Something that happened in a run. ``seconds``: since its first event."""

    kind: MarkKind
    step: int
    seconds: float
    text: str
    pause_s: float | None = None
    """Seconds in which no step was done because of it; None: no pause."""
    repeated: str = ""
    """Text that says which work was done again because of it."""


@dataclass(frozen=True)
class Series:
    """One line of a curve: a source with columns ``x`` and ``y``; with ``smooth`` also ``smooth``, drawn over it."""

    name: str
    source: ColumnDataSource
    smooth: bool = False
    dashed: bool = False

    @classmethod
    def of(cls, name: str, x: ArrayLike, y: ArrayLike, dashed: bool = False) -> Series:
        """A series of values; a long one is thinned, and smoothed if it is a measurement of every step."""
        xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
        columns = {"x": xs, "y": ys}
        if len(xs) > _SMOOTHED_FROM:
            columns["smooth"] = smoothed(ys, len(ys) // 50)
        keep = _thinned(ys)
        source = ColumnDataSource({key: one[keep] for key, one in columns.items()})
        return cls(name, source, "smooth" in columns, dashed)


@dataclass(frozen=True)
class Axis:
    """An axis of a curve: its label, and whether it is linear or logarithmic."""

    label: str
    kind: Kind = "linear"


STEPS = Axis("step")


def plain(text: object) -> str:
    """A text for a label: printable, of limited length, and not read as a formula by Bokeh (``$$…$$``)."""
    return re.sub(r"(\$|\\)(?=[$(\[\])])", "\\1\u200b", printable(str(text), _TEXT_BYTES))


def draw(chart: Chart) -> list[figure]:
    """A figure for each panel, in order. Panels of lines zoom together; a name has one colour in all panels."""
    found: list[figure] = []
    x_range: Range | None = None
    lines = [panel for panel in chart.panels if isinstance(panel, Lines)]
    names = list(dict.fromkeys(one.name for panel in lines for one in panel.lines))
    for panel in chart.panels:
        match panel:
            case Lines():
                last = panel is lines[-1]
                drawn = _draw_lines(panel, chart, names, x_range, chart.x_label if last else "")
                x_range = drawn.x_range
            case Bars():
                drawn = grouped_bars(panel)
            case TimeSplit():
                drawn = time_split(panel.rows, panel.kinds, panel.label)
            case Timeline():
                drawn = timeline(panel.spans, list(by_track(panel.spans)), panel.shown_ms)
        found.append(drawn)
    return found


def _draw_lines(panel: Lines, chart: Chart, names: Sequence[str], x_range: Range | None, x_label: str) -> figure:
    series = [Series.of(one.name, *_points(one, panel.kind, chart.x_kind), one.dashed) for one in panel.lines]
    found = curve(
        series,
        Axis(panel.label, panel.kind),
        x_axis=Axis(x_label, chart.x_kind),
        x_range=x_range,
        colours=[names.index(one.name) for one in panel.lines],
    )
    _add_levels(found, panel.rules, series)
    every = sorted({float(x) for one in series for x in one.source.data["x"]})
    if 1 < len(every) <= _MAX_OWN_TICKS:
        found.xaxis[0].ticker = every
        found.xaxis[0].major_label_overrides = {x: short(x) for x in every}
    return found


def _points(one: ChartLine, y_kind: Kind, x_kind: Kind) -> tuple[Any, Any]:
    """A line's points; NaN, which is a gap, for a value that a logarithmic axis does not have."""
    x, y = (np.asarray(values, np.float64).ravel() for values in (one.x, one.y))
    bad = ~np.isfinite(x) | ~np.isfinite(y) | ((x <= 0) & (x_kind == "log")) | ((y <= 0) & (y_kind == "log"))
    return np.where(np.isfinite(x), x, 0.0) if x_kind == "linear" else np.where(x > 0, x, 1.0), np.where(bad, np.nan, y)


def curve(
    series: Sequence[Series],
    y_axis: Axis,
    *,
    x_axis: Axis = STEPS,
    x_range: Range | None = None,
    colours: Sequence[int] = (),
    height: int = 280,
) -> figure:
    """Lines over steps. Pass another figure's ``x_range`` to zoom both together.

    ``colours``: the number of each series' colour, by default its place.
    """
    found = _figure(
        height, x_axis.label, y_axis.label, x_range=x_range, x_axis_type=x_axis.kind, y_axis_type=y_axis.kind
    )
    items = []
    for one, number in zip(series, colours or range(len(series)), strict=True):
        colour, dash = number % len(LIGHT.colours), _DASHES[number // len(LIGHT.colours) % len(_DASHES)]
        renderers = []
        if one.smooth:
            renderers.append(found.line("x", "y", source=one.source, line_width=1, line_alpha=0.3))
        column, dash = "smooth" if one.smooth else "y", "dashed" if one.dashed else dash
        renderers.append(found.line("x", column, source=one.source, line_width=2, line_dash=dash))
        for line in renderers:
            _themed(line.glyph, line_color=f"c{colour}")
        if not one.smooth:
            points = found.scatter("x", "y", source=one.source, size=6, marker=_MARKERS[colour])
            _themed(points.glyph, line_color=f"c{colour}", fill_color=f"c{colour}")
            renderers.append(points)
        items.append(LegendItem(label={"value": plain(one.name)}, renderers=renderers))
        tooltips = [(plain(x_axis.label) or "x", "@x{0,0.[000]}"), (plain(one.name), "@y{0,0.[0000]}")]
        hover = HoverTool(renderers=renderers[-1:], tooltips=tooltips, mode="vline" if one.smooth else "mouse")
        found.add_tools(hover)
    _legend(found, items)
    return found


def _add_levels(found: figure, levels: Mapping[str, float], series: Sequence[Series]) -> None:
    """A dotted line across the figure for each named level; its name is in the legend, as that of a series."""
    every = [float(x) for one in series for x in one.source.data["x"]] or [1.0, 2.0]
    items = []
    for index, (name, level) in enumerate(levels.items()):
        source = ColumnDataSource({"x": [min(every), max(every)], "y": [level, level]})
        line = found.line("x", "y", source=source, line_width=2, line_dash=_LEVEL_DASHES[index % 2])
        _themed(line.glyph, line_color="soft")
        found.add_tools(HoverTool(renderers=[line], tooltips=[(plain(name), "@y{0,0.[0000]}")]))
        items.append(LegendItem(label={"value": plain(name)}, renderers=[line]))
    _legend(found, items)


def grouped_bars(bars: Bars) -> figure:
    """Bars, a row a group, side by side in the order of the series; ``rules`` are lines across all rows."""
    groups = [plain(group) for group in bars.groups]
    if len(set(groups)) < len(groups):  # rows need different names
        groups = [f"{index}: {group}" for index, group in enumerate(groups, start=1)]
    finite = [
        float(value) for one in (*bars.values.values(), bars.rules.values()) for value in one if _fits(value, bars.kind)
    ]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    ground = low / 2 if bars.kind == "log" else min(low, 0.0)
    end = high * 2 if bars.kind == "log" else max(high, 0.0) + 0.12 * ((max(high, 0.0) - ground) or 1.0)
    x_range = Range1d(ground if bars.kind == "log" or low >= 0 else ground * 1.12, end)
    rows = len(groups) * max(1, len(bars.values)) if len(groups) <= 16 else len(groups)
    found = _figure(
        _rows_height(rows), bars.label, "", x_range=x_range, y_range=_rows_range(groups), x_axis_type=bars.kind,
        tools="xbox_zoom,xpan,reset,save",
    )  # fmt: skip
    middle, height = _name_rows(found, groups)
    items, thick = [], height / max(1, len(bars.values))
    for index, (name, values) in enumerate(bars.values.items()):
        kept = [(group, float(value)) for group, value in zip(groups, values, strict=True) if _fits(value, bars.kind)]
        source = ColumnDataSource(
            {
                "group": [group for group, _ in kept],
                "value": [value for _, value in kept],
                "text": [short(value) for _, value in kept],
            }
        )
        place = dodge("group", middle + height / 2 - (index + 0.5) * thick, range=found.y_range)
        left = ground if bars.kind == "log" else 0.0
        drawn = [found.hbar(y=place, left=left, right="value", height=thick * 0.92, source=source)]
        _themed(drawn[0].glyph, fill_color=f"c{index % len(LIGHT.colours)}", line_color="paper")
        tooltips = [("", "@group"), (plain(name), "@value{0,0.[0000]}")]
        found.add_tools(HoverTool(renderers=list(drawn), tooltips=tooltips))
        if len(groups) * len(bars.values) <= _MAX_VALUES:
            words = found.text("value", place, text="text", source=source, x_offset=4, text_baseline="middle")
            words.glyph.text_font, words.glyph.text_font_size = constant(FONT), constant("11px")
            _themed(words.glyph, text_color="ink")
            drawn.append(words)
        items.append(LegendItem(label={"value": plain(name)}, renderers=drawn))
    for index, (name, level) in enumerate(bars.rules.items()):
        line = found.vspan(x=[level], line_width=2, line_dash=_LEVEL_DASHES[index % 2])
        _themed(line.glyph, line_color="soft")
        items.append(LegendItem(label={"value": plain(name)}, renderers=[line]))
    _legend(found, items if len(items) > 1 else [])
    return found


def _fits(value: float, kind: Kind) -> bool:
    return bool(np.isfinite(value)) and (kind == "linear" or value > 0)


def short(value: float) -> str:
    """A number in a few characters: ``0.25``, ``1 500``, ``438k``, ``4.19M``."""
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor and (factor > 1e3 or abs(value) >= 1e4):
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def time_split(
    rows: Sequence[Mapping[str, Any]] | ColumnDataSource, kinds: Sequence[str], x_label: str = "share of its time (%)"
) -> figure:
    """Stacked bars, a row a device. Columns: ``device``, and a number for each of ``kinds``."""
    source = rows if isinstance(rows, ColumnDataSource) else ColumnDataSource(_columns(rows, ("device", *kinds)))
    devices = [plain(device) for device in source.data["device"]]
    source.data["device"] = devices
    found = _figure(_rows_height(len(devices)), x_label, "", y_range=_rows_range(devices), tools="reset,save")
    found.x_range.start = 0
    middle, height = _name_rows(found, devices)
    place = dodge("device", middle, range=found.y_range)
    renderers = found.hbar_stack(list(kinds), y=place, height=height, source=source)
    items = []
    for kind, bars in zip(kinds, renderers, strict=True):
        _themed(bars.glyph, fill_color=_kind_colour(kind), line_color="paper")
        items.append(LegendItem(label={"value": plain(kind)}, renderers=[bars]))
    tooltips = [("device", "@device"), *((plain(kind), f"@{{{kind}}}{{0.0[00]}}") for kind in kinds)]
    found.add_tools(HoverTool(tooltips=tooltips))
    _legend(found, items)
    return found


def timeline(spans: Sequence[Span] | ColumnDataSource, devices: Sequence[str], shown_ms: float | None = None) -> figure:
    """Activities, a row a device. ``shown_ms``: the time that is visible at first, by default all.

    Columns of a source: those of ``span_columns``. Devices that are not in ``devices`` are not shown.
    """
    source = spans if isinstance(spans, ColumnDataSource) else ColumnDataSource(span_columns(spans))
    rows = [plain(device) for device in devices]
    end = float(np.max(source.data["end"])) if len(source.data["end"]) else 1.0
    window = Range1d(0, min(shown_ms or end, end), bounds=(0, end))
    found = _figure(
        _rows_height(len(rows)),
        "time (ms)",
        "",
        x_range=window,
        y_range=_rows_range(rows),
        tools="xbox_zoom,xpan,xwheel_zoom,xzoom_in,xzoom_out,reset,save",
    )
    items = []
    middle, height = _name_rows(found, rows)
    place = dodge("device", middle, range=found.y_range)
    present = set(source.data["kind"])
    for kind in [kind for kind in KINDS if kind in present] or list(KINDS):
        view = CDSView(filter=GroupFilter(column_name="kind", group=kind))
        bars = found.hbar(y=place, left="start", right="end", height=height, source=source, view=view)
        _themed(bars.glyph, fill_color=_kind_colour(kind), line_color="paper")
        bars.glyph.line_width = 0.5
        items.append(LegendItem(label={"value": kind}, renderers=[bars]))
    found.add_tools(
        HoverTool(
            tooltips=[
                ("device", "@device"),
                ("instruction", "@name (@kind)"),
                ("start", "@start{0.000} ms"),
                ("duration", "@duration{0.000} ms"),
            ]
        )
    )
    _legend(found, items)
    return found


def span_columns(spans: Sequence[Span]) -> dict[str, Any]:
    """The columns of a timeline's source, in milliseconds since the first span: the first ``MAX_SPANS`` that are busy.

    ``device``, ``name``, ``kind`` (``forward``, ``backward``, ``update``, ``communicate``, ``load``, ``compute``),
    ``start``, ``end``, ``duration``.
    """
    busy = sorted((span for span in spans if kind_of(span.category)), key=lambda span: span.start_us)[:MAX_SPANS]
    first = busy[0].start_us if busy else 0.0
    starts = np.array([span.start_us - first for span in busy], dtype=float) / 1000
    durations = np.array([span.duration_us for span in busy], dtype=float) / 1000
    return {
        "device": [plain(span.track) for span in busy],
        "name": [plain(span.name) for span in busy],
        "kind": [kind_of(span.category) for span in busy],
        "start": starts,
        "end": starts + durations,
        "duration": durations,
    }


def run_marks(marks: Sequence[Mark] | ColumnDataSource, x_range: Range | None = None) -> figure:
    """What happened at which step, a row a kind. Columns of a source: those of ``mark_columns``."""
    source = marks if isinstance(marks, ColumnDataSource) else ColumnDataSource(mark_columns(marks))
    live = isinstance(marks, ColumnDataSource) and not len(source.data["kind"])
    kinds = [kind for kind in MarkKind if live or kind.value in set(source.data["kind"])]
    rows = [kind.value for kind in kinds]
    found = _figure(_rows_height(len(rows)), "step", "", x_range=x_range, y_range=_rows_range(rows))
    for kind in kinds:
        view = CDSView(filter=GroupFilter(column_name="kind", group=kind.value))
        colour, marker = _MARK_LOOKS[kind]
        points = found.scatter("step", "kind", source=source, view=view, size=11, marker=marker)
        _themed(points.glyph, line_color=f"c{colour}", fill_color=f"c{colour}")
        points.glyph.line_width = 2
    found.add_tools(
        HoverTool(
            tooltips=[
                ("", "@kind: @text"),
                ("step", "@step"),
                ("time", "@time"),
                ("pause", "@pause"),
                ("repeated", "@repeated"),
            ]
        )
    )
    return found


def mark_columns(marks: Sequence[Mark]) -> dict[str, list[Any]]:
    """The columns of the source of ``run_marks``: ``kind``, ``step``, ``text``, and as texts time, pause, repeated."""
    return {
        "kind": [mark.kind.value for mark in marks],
        "step": [mark.step for mark in marks],
        "text": [printable(mark.text, _TEXT_BYTES) for mark in marks],
        "time": [f"{mark.seconds:.1f} s" for mark in marks],
        "pause": ["–" if mark.pause_s is None else duration(mark.pause_s) for mark in marks],
        "repeated": [mark.repeated or "–" for mark in marks],
    }


def add_mark_lines(found: figure, source: ColumnDataSource, kinds: Sequence[MarkKind]) -> None:
    """Draws a vertical line in a curve at each mark of these kinds; its legend gets an entry for each kind."""
    present = set(source.data["kind"])
    for kind in (kind for kind in kinds if kind.value in present):
        view = CDSView(filter=GroupFilter(column_name="kind", group=kind.value))
        lines = found.vspan(x="step", source=source, view=view, line_width=1.5, line_dash="dashed")
        _themed(lines.glyph, line_color=f"c{_MARK_LOOKS[kind][0]}")
        _legend(found, [LegendItem(label={"value": kind.value}, renderers=[lines])])


def duration(seconds: float) -> str:
    """A duration as text, in milliseconds, seconds or minutes."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {seconds % 60:.0f} s"


# ---- look


def _figure(
    height: int,
    x_label: str,
    y_label: str,
    *,
    tools: str = "xbox_zoom,xpan,xwheel_zoom,reset,save",
    **options: Any,
) -> figure:
    """An empty figure; ``options`` are Bokeh's. A range that is None is the figure's own."""
    given = {name: one for name, one in options.items() if one is not None}
    found = figure(height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="above", **given)
    found.toolbar.logo = None
    found.toolbar.active_drag = next((tool for tool in found.tools if isinstance(tool, BoxZoomTool)), None)
    found.min_width, found.min_border_right = 250, 16
    found.border_fill_color = None  # the page's; a colour of its own leaves a bright edge when the theme changes
    _themed(found, background_fill_color="paper", outline_line_color="grid")
    for axis, label in ((found.xaxis[0], x_label), (found.yaxis[0], y_label)):
        axis.axis_label = plain(label) or None
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_style = "normal"
        _themed(
            axis,
            axis_label_text_color="ink",
            major_label_text_color="ink",
            axis_line_color="soft",
            major_tick_line_color="soft",
            minor_tick_line_color="grid",
        )
    for grid in found.grid:
        _themed(grid, grid_line_color="grid")
    if isinstance(found.y_range, FactorRange):
        found.ygrid.visible = False
    return found


def _legend(found: figure, items: Sequence[LegendItem]) -> None:
    """A legend above the plot, so that it covers nothing; items are added to the one that is there already."""
    if not items:
        return
    every = [*(found.legend[0].items if found.legend else ()), *items]
    longest = max(len(str(item.label["value"])) for item in every) + 4
    columns = max(1, min(3, _LEGEND_CHARACTERS // longest))
    rows_before = 0 if not found.legend else -(-(len(every) - len(items)) // found.legend[0].ncols)
    if not found.legend:
        legend = Legend(items=[], orientation="horizontal", click_policy="hide")
        legend.label_text_font, legend.label_text_font_size = FONT, "12px"
        legend.border_line_color, legend.padding, legend.margin = None, 2, 2
        _themed(legend, label_text_color="ink", background_fill_color="paper", inactive_fill_color="paper")
        found.add_layout(legend, "above")
    found.legend[0].items, found.legend[0].ncols = every, columns
    found.height += _LEGEND_ROW * (-(-len(every) // columns) - rows_before)


def _rows_range(names: Sequence[str]) -> FactorRange:
    """The first row is the topmost."""
    return FactorRange(factors=list(dict.fromkeys(names))[::-1], range_padding=0.02)


def _row_height(rows: int) -> int:
    return 24 if rows <= 16 else 16 if rows <= 32 else 12


def _rows_height(rows: int) -> int:
    return max(rows, 1) * _row_height(rows) + 95


def _name_rows(found: figure, names: Sequence[str]) -> tuple[float, float]:
    """Names the rows: beside them, or above each row's bars if that would leave no room for the bars on a phone.

    Returns the middle of a row's bars, relative to the row's, and their height, as parts of the row's height.
    """
    axis, rows = found.yaxis[0], len(names)
    axis.major_label_text_font_size = "11px" if rows <= 32 else "9px"
    if max(map(len, names), default=0) <= _NAME_BESIDE:
        return 0.0, 0.84
    axis.major_label_text_font_size, axis.major_tick_line_color = "0px", None
    axis.tags = [tag for tag in axis.tags if "major_tick" not in tag]
    found.height += (34 - _row_height(rows)) * rows
    source = ColumnDataSource({"row": list(names), "name": [one[:_NAME_ABOVE] for one in names]})
    labels = LabelSet(x=constant(3), x_units="screen", y=dodge("row", 0.28, range=found.y_range), text="name")
    labels.source, labels.text_font, labels.text_font_size = source, constant(FONT), constant("11px")
    labels.text_baseline = constant("middle")
    _themed(labels, text_color="ink")
    found.add_layout(labels)
    return -0.17, 0.5


def _kind_colour(kind: str) -> str:
    return f"c{KINDS[kind]}" if kind in KINDS else "soft" if kind == OTHER else "idle"


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [row.get(name, 0.0) for row in rows] for name in names}


def _thinned(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[int]:
    """Indices that keep the minimum and the maximum of each of ``MAX_POINTS / 2`` parts."""
    if len(values) <= MAX_POINTS:
        return list(range(len(values)))
    keep = {0, len(values) - 1}
    finite = np.where(np.isfinite(values), values, 0.0)
    for part in np.array_split(np.arange(len(values)), MAX_POINTS // 2):
        keep |= {int(part[np.argmin(finite[part])]), int(part[np.argmax(finite[part])])}
    return sorted(keep)


def _themed(model: Model, **colours: str) -> None:
    """Gives each property its colour of the light theme, and notes it for ``PAGE_SCRIPT``."""
    for name, colour in colours.items():
        setattr(model, name, _theme_colours(LIGHT)[colour])
    model.tags = [*model.tags, *(f"theme:{name}={colour}" for name, colour in colours.items())]


def _theme_colours(theme: Theme) -> dict[str, str]:
    """The colours of a theme by name; those of the series are ``c0``, ``c1`` …"""
    named = {"paper": theme.paper, "ink": theme.ink, "soft": theme.soft, "grid": theme.grid, "idle": theme.idle}
    return named | {f"c{index}": colour for index, colour in enumerate(theme.colours)}


_SCRIPT = """
(() => {
  const themes = THEMES;
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)").matches;
  let chosen = "";
  const models = () => (window.Bokeh ? Bokeh.documents : []).flatMap((one) => [...one._all_models.values()]);
  const apply = () => {
    const name = chosen || (preferred.matches ? "dark" : "light");
    root.dataset.theme = name;
    for (const model of models()) {
      const values = {};
      for (const tag of model.tags || []) {
        const found = /^theme:(\\w+)=(\\w+)$/.exec(tag);
        if (found) values[found[1]] = themes[name][found[2]];
      }
      if (Object.keys(values).length) {
        // Glyphs wrap a colour in a value object; a setter of plain colours takes the text.
        for (const key of Object.keys(values)) {
          const now = model[key];
          if (now !== null && typeof now === "object" && "value" in now) values[key] = {value: values[key]};
        }
        model.setv(values);
      }
    }
    for (const button of document.querySelectorAll("[data-toggle-theme]")) {
      button.setAttribute("aria-pressed", String(name === "dark"));
    }
  };
  const toggle = () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; apply(); };
  const save = async (button) => {
    const roots = button.closest("figure").querySelectorAll("[data-root-id]");
    for (const [index, root] of roots.entries()) {
      const view = Bokeh.index.get_by_id(root.dataset.rootId);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(await view.export("svg", false).to_blob());
      link.download = `${button.dataset.saveSvg}${index ? `-${index + 1}` : ""}.svg`;
      link.click();
      URL.revokeObjectURL(link.href);
    }
  };
  const begin = () => {
    for (const button of document.querySelectorAll("[data-save-svg]")) {
      button.addEventListener("click", () => save(button));
    }
    for (const button of document.querySelectorAll("[data-toggle-theme]")) button.addEventListener("click", toggle);
    preferred.addEventListener("change", apply);
    apply();
    const deadline = Date.now() + 60000;
    const wait = () => {
      if (models().length) {
        apply();
        // On a phone a drag scrolls the page; a tap on the tool turns the zoom on.
        if (coarse) for (const one of models()) if (one.type === "BoxZoomTool") one.active = false;
      } else if (Date.now() < deadline) setTimeout(wait, 20);
    };
    wait();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin); else begin();
})();
"""

PAGE_SCRIPT = _SCRIPT.replace(
    "THEMES", strict_json.dumps({"light": _theme_colours(LIGHT), "dark": _theme_colours(DARK)}), 1
)
"""JavaScript for a page with these figures. It applies the theme that the reader prefers, until a button with the
attribute ``data-toggle-theme`` is pressed: it sets ``data-theme`` of the page's root to ``light`` or ``dark``. A button
with ``data-save-svg`` saves the figures of its ``figure`` element as SVG files of that name."""
