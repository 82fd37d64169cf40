"""The Bokeh charts: legends, sizes, colours and untrusted texts, with one device and with 64."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Legend
from bokeh.plotting import figure

from hoop.report.chart import MAX_SPANS
from hoop.report.components import (
    MAX_POINTS,
    PAGE_SCRIPT,
    Axis,
    Mark,
    MarkKind,
    Series,
    add_mark_lines,
    curve,
    duration,
    mark_columns,
    plain,
    run_marks,
    short,
    span_columns,
    time_split,
    timeline,
)
from hoop.report.palette import DARK, LIGHT
from hoop.report.spans import Span

KINDS = ("load", "forward", "backward", "communicate", "update", "idle")


def spans_of(devices: int, each: int = 6) -> list[Span]:
    categories = ("load", "forward", "backward", "reduce", "update", "idle")
    return [
        Span(f"device {device}", f"0F{index}", categories[index % 6], 1e6 + index * 1000.0, 900.0)
        for device in range(1, devices + 1)
        for index in range(each)
    ]


def legend_labels(found: figure) -> list[str]:
    return [item.label["value"] for legend in found.select({"type": Legend}) for item in legend.items]


@pytest.mark.parametrize("devices", [1, 64])
def test_charts_of_devices_have_a_row_for_each_and_a_legend_of_kinds(devices: int) -> None:
    names = [f"device {number}" for number in range(1, devices + 1)]
    rows = [{"device": name} | dict.fromkeys(KINDS, 100 / 6) for name in names]
    split, line = time_split(rows, KINDS), timeline(spans_of(devices), names)
    for found, legend in ((split, list(KINDS)), (line, ["forward", "backward", "update", "communicate", "load"])):
        assert isinstance(found.y_range, FactorRange)
        assert found.y_range.factors == names[::-1], "the first device is on top"
        assert legend_labels(found) == legend
        assert all(one.click_policy == "hide" for one in found.select({"type": Legend}))
        assert found.height >= 10 * devices
        assert found.height < 1100
        assert found.select({"type": HoverTool})


def test_a_legend_is_beside_the_plot_and_covers_nothing() -> None:
    found = curve([Series.of("training", [1, 2], [3.0, 4.0])], Axis("loss"))
    (legend,) = found.select({"type": Legend})
    assert legend in found.above


def test_spans_are_in_milliseconds_from_the_first_and_idle_ones_are_left_out() -> None:
    columns = span_columns(spans_of(1))
    assert columns["start"].tolist() == pytest.approx([0, 1, 2, 3, 4])
    assert columns["end"].tolist() == pytest.approx([0.9, 1.9, 2.9, 3.9, 4.9])
    assert columns["kind"] == ["load", "forward", "backward", "communicate", "update"]


def test_a_timeline_is_limited_to_its_first_spans_and_shows_a_part_at_first() -> None:
    spans = spans_of(64, 400)
    assert len(spans) > MAX_SPANS
    columns = span_columns(spans)
    assert len(columns["start"]) == MAX_SPANS
    assert len({*columns["device"]}) == 64, "the cut is in time, not by device"
    found = timeline(spans, [f"device {one}" for one in range(1, 65)], shown_ms=5.0)
    assert (found.x_range.start, found.x_range.end) == (0, 5.0)


def test_no_spans_and_no_marks_make_empty_charts() -> None:
    assert timeline([], []).renderers
    assert run_marks([]).renderers == []


def test_a_source_is_used_itself_so_that_it_can_be_streamed_to() -> None:
    source = ColumnDataSource(span_columns(spans_of(2)))
    found = timeline(source, ["device 1", "device 2"])
    assert {id(one.data_source) for one in found.renderers} == {id(source)}
    marks = ColumnDataSource(mark_columns([]))
    rows = run_marks(marks).y_range.factors
    assert set(rows) == {kind.value for kind in MarkKind}, "a live chart has a row for marks that are to come"


def test_a_long_line_is_thinned_but_keeps_its_extremes_and_is_smoothed() -> None:
    values = np.ones(100_000)
    values[51_234], values[77_777] = 9.0, np.nan
    series = Series.of("training", np.arange(100_000), values)
    assert series.smooth
    assert len(series.source.data["y"]) <= MAX_POINTS + 2
    assert np.nanmax(series.source.data["y"]) == 9.0


def test_marks_tell_what_happened_how_long_it_took_and_what_was_repeated() -> None:
    marks = [
        Mark(MarkKind.RECOVERED, 40, 1.04, "rank 2 is gone", 0.0694, "shards 1, 2"),
        Mark(MarkKind.CHECKPOINT, 150, 3.8, "step-00000150.safetensors"),
    ]
    columns = mark_columns(marks)
    assert columns["pause"] == ["69 ms", "–"]
    assert columns["repeated"] == ["shards 1, 2", "–"]
    assert run_marks(marks).y_range.factors == ["checkpoint", "recovered"]
    found = curve([Series.of("training", [1, 2], [3.0, 4.0])], Axis("loss"))
    add_mark_lines(found, ColumnDataSource(columns), (MarkKind.LOST, MarkKind.RECOVERED))
    assert legend_labels(found) == ["training", "recovered"]


@pytest.mark.parametrize("text", ["$$\\href{x}{y}$$", "\\(a\\)", "\\[a\\]", "x\x1b[31m\ud800"])
def test_a_text_is_no_formula_and_printable(text: str) -> None:
    shown = plain(text)
    assert not any(mark in shown for mark in ("$$", "\\(", "\\[", "\x1b"))
    shown.encode()


def test_a_tooltip_template_has_no_text_from_outside() -> None:
    """Bokeh reads ``@name`` and HTML in the value of a tooltip, and shows its label as text."""
    hostile = "<img src=x onerror=alert(1)> @y"
    found = curve([Series.of(hostile, [1], [2.0])], Axis("loss"))
    for hover in found.select({"type": HoverTool}):
        assert all("<" not in value for _, value in hover.tooltips)


def test_every_colour_is_one_of_the_theme() -> None:
    found = timeline(spans_of(2), ["device 1", "device 2"])
    tags = [tag for model in found.references() for tag in model.tags]
    assert "theme:fill_color=c0" in tags
    assert "theme:major_label_text_color=ink" in tags
    themes = json.loads(PAGE_SCRIPT.partition("const themes = ")[2].partition(";\n")[0])
    assert themes["light"]["c0"] == LIGHT.colours[0]
    assert themes["dark"]["ink"] == DARK.ink
    names = {tag.partition("=")[2] for tag in tags if tag.startswith("theme:")}
    assert names <= set(themes["light"]) == set(themes["dark"])


def test_a_legend_has_as_many_columns_as_fit_on_a_phone_and_its_rows_do_not_shrink_the_plot() -> None:
    few = curve([Series.of(f"s{index}", [1], [1.0]) for index in range(6)], Axis("loss"))
    long = curve([Series.of(f"a rather long name, number {index}", [1], [1.0]) for index in range(6)], Axis("loss"))
    assert (few.legend[0].ncols, long.legend[0].ncols) == (3, 1)
    assert long.height - few.height == 4 * (few.height - curve([], Axis("loss")).height) / 2


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (1500, "1500"), (437544, "438k"), (4 << 20, "4.19M"), (-0.001, "-0.001")]
)
def test_numbers_in_a_few_characters(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.0694, "69 ms"), (3.25, "3.2 s"), (125, "2 min 5 s")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
