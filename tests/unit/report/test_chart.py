"""Charts are self-contained, valid SVG for any input."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.report.chart import Bars, Chart, ChartLine, Lines, smoothed
from hoop.report.training import training_chart

SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: Chart) -> ET.Element:
    """The SVG as XML; checks that it has no NaN, no infinity and no external reference."""
    svg = chart.svg()
    assert "nan" not in re.sub(r">[^<]*<", "><", svg)
    assert "inf" not in re.sub(r">[^<]*<|points", "><", svg)
    assert re.findall(r"(?:href|src|url|@import)\b", svg) == []
    assert "prefers-color-scheme:dark" in svg
    return ET.fromstring(svg)


def words(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def points(root: ET.Element, name: str = "polyline") -> list[list[tuple[float, float]]]:
    def pairs(text: str) -> Iterator[tuple[float, float]]:
        for pair in text.split():
            x, y = pair.split(",")
            yield float(x), float(y)

    return [list(pairs(element.attrib["points"])) for element in root.iter(f"{SVG}{name}")]


def test_two_panels_share_their_horizontal_axis() -> None:
    root = parsed(
        Chart(
            "mnist",
            [
                Lines("loss", [ChartLine("training", [0, 10], [2, 1]), ChartLine("test", [0, 5, 10], [3, 2, 1])]),
                Lines("accuracy (%)", [ChartLine("test", [0, 10], [90, 98])], rules={"paper": 92.89}),
            ],
            x_label="step",
        )
    )
    shown = words(root)
    for expected in ("mnist", "loss", "training", "test", "accuracy (%)", "step", "paper"):
        assert expected in shown
    upper, lower = points(root)[0], points(root)[2]
    assert [x for x, _ in upper] == [x for x, _ in lower]
    assert upper[0][1] < upper[1][1], "a falling loss is drawn downwards"
    assert lower[0][1] > lower[1][1], "a rising accuracy is drawn upwards"
    assert shown.count("10") == 1, "the steps are labelled once, below the last panel"
    colours = {e.attrib["class"] for e in root.iter(f"{SVG}polyline")}
    assert colours == {"l0", "l1"}, "a name has one colour in all panels"


def test_gaps_single_points_and_empty_panels() -> None:
    y = [1, math.nan, 3, math.inf, 5, 6]
    root = parsed(Chart("gaps", [Lines("y", [ChartLine("a", range(6), y), ChartLine("one", [3], [2])])]))
    assert [len(line) for line in points(root)] == [2]
    assert len(list(root.iter(f"{SVG}circle"))) == 4 + 1  # and one in the legend
    for empty in (
        Lines("y", []),
        Lines("y", [ChartLine("a", [], [])]),
        Lines("y", [ChartLine("a", [1], [math.nan])], "log"),
        Lines("y", [ChartLine("a", [1], [-1])], "log"),
        Bars("y", [], {}),
        Bars("y", ["a"], {"b": [math.nan]}),
    ):
        assert "no data" in words(parsed(Chart("nothing", [empty])))
    parsed(Chart("no panels", []))


def test_points_outside_the_limits_are_not_drawn() -> None:
    root = parsed(Chart("t", [Lines("y", [ChartLine("a", range(5), [1, 2, 1000, 1, 2])], limits=(0, 10))]))
    assert [len(line) for line in points(root)] == [2, 2]


def test_a_long_line_is_thinned_and_keeps_its_peaks() -> None:
    y = np.sin(np.arange(200_000) / 1000)
    y[77_777] = 9
    root = parsed(Chart("long", [Lines("y", [ChartLine("a", np.arange(200_000), y)])]))
    (line,) = points(root)
    assert len(line) < 2000
    assert min(line, key=lambda point: point[1])[1] < sorted(point[1] for point in line)[1] - 50


def test_bands_and_styles() -> None:
    band = ([1, 1, 1], [3, 4, 5])
    lines = [ChartLine("a", [1, 2, 3], [2, 2, 2], band=band), ChartLine("a", [1, 2, 3], [2, 3, 2], "faint")]
    root = parsed(Chart("t", [Lines("y", [*lines, ChartLine("b", [1, 2], [1, 2], "dashed")])]))
    assert [len(shape) for shape in points(root, "polygon") if len(shape) == 6] == [6]
    assert words(root).count("a") == 1
    assert [e.get("stroke-dasharray") for e in root.iter(f"{SVG}polyline")] == [None, None, "6 4"]


def test_bars_start_at_zero() -> None:
    root = parsed(Chart("t", [Bars("time (s)", ["a", "b"], {"x": [10, -5], "y": [math.nan, 2.5]})]))
    bars = {
        e.find(f"{SVG}title").text: (float(e.attrib["y"]), float(e.attrib["height"]))  # type: ignore[union-attr]
        for e in root.iter(f"{SVG}rect")
        if e.find(f"{SVG}title") is not None
    }
    assert set(bars) == {"a, x: 10", "b, x: -5", "b, y: 2.5"}
    zero = sum(bars["a, x: 10"])
    assert bars["b, x: -5"][0] == pytest.approx(zero)
    assert sum(bars["b, y: 2.5"]) == pytest.approx(zero)
    assert bars["a, x: 10"][1] == pytest.approx(2 * bars["b, x: -5"][1], rel=0.01)
    long = [f"a very long name of a strategy, number {index}" for index in range(8)]
    slanted = parsed(Chart("t", [Bars("y", long, {"x": list(range(8))})]))
    assert sum("rotate(" in e.get("transform", "") for e in slanted.iter(f"{SVG}text")) == 8


def test_inconsistent_lengths_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="line 'a': 2 x and 1 y"):
        ChartLine("a", [1, 2], [1])
    with pytest.raises(InvalidArgument, match="line 'a': 1 x and 2 high"):
        ChartLine("a", [1], [1], band=([1], [1, 2]))
    with pytest.raises(InvalidArgument, match="bars 'a': 1 values for 2 groups"):
        Bars("y", ["g", "h"], {"a": [1]})


@given(
    title=st.text(),
    name=st.text(),
    y=st.lists(st.floats() | st.integers(-5, 5), max_size=6),
    kind=st.sampled_from(["linear", "log"]),
)
def test_any_input_makes_valid_xml(title: str, name: str, y: list[float], kind: str) -> None:
    lines = Lines(name, [ChartLine(name, range(len(y)), y)], kind, rules={name: 1.0})  # type: ignore[arg-type]
    bars = Bars(name, [name] * len(y), {name: y}, kind, rules={name: 1.0})  # type: ignore[arg-type]
    svg = Chart(title, [lines, bars], x_label=name, x_kind=kind, subtitle=title).svg()  # type: ignore[arg-type]
    ET.fromstring(svg.encode())


def test_smoothing() -> None:
    assert smoothed([1, 1, 4, 1, 1], 3).tolist() == [1, 2, 2, 2, 1]
    assert smoothed([], 3).tolist() == []
    assert np.isnan(smoothed([1, math.nan, 3], 3)).tolist() == [False, True, False]


def test_the_training_chart_shows_the_metrics_of_the_rows() -> None:
    rows = [{"step": step, "loss": 1 / (step + 1)} for step in range(500)]
    rows += [{"step": 499, "test_loss": 0.1, "test_accuracy": 0.98}]
    chart = training_chart(rows, "mnist", rules={"paper": 0.9289})
    assert [panel.label for panel in chart.panels] == ["loss", "accuracy (%)"]
    assert [line.style for line in chart.panels[0].lines] == ["faint", "solid", "solid"]  # type: ignore[union-attr]
    assert {"training", "test", "paper"} <= set(words(parsed(chart)))
    training_only = training_chart([*rows[:-1], {"step": 499, "train_loss": 0.1, "train_accuracy": 0.98}], "mnist")
    assert [panel.label for panel in training_only.panels] == ["loss", "accuracy (%)"]
    assert "training, evaluated" in words(parsed(training_only))
    assert "test" not in words(parsed(training_only))
    assert [panel.label for panel in training_chart([], "empty").panels] == ["loss"]
    assert "no data" in words(parsed(training_chart([], "empty")))
