"""Charts as HTML and SVG: places of points and bars, ticks, and texts."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from hoop.dashboard.live_chart import Line, bars_html, curves_html, ticks


def points(text: str) -> list[tuple[int, ...]]:
    """The points of the first line."""
    found = re.findall(r'points="([^"]*)"', text)[0]
    return [tuple(map(int, one.split(","))) for one in found.split()]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 10, [0, 5, 10]),
        (0.955, 0.985, [0.96, 0.97, 0.98]),
        (-7, 3, [-5, 0]),
        (3, 3, [3]),
        (0, float("inf"), [0]),
    ],
)
def test_ticks_are_round_numbers_in_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_steps_are_whole_numbers() -> None:
    text = curves_html("Loss", [Line([1, 2, 3], [2.0, 1.0, 0.0], "#000000")], str)
    assert re.findall(r'class="x"[^>]*>([^<]*)<', text) == ["1", "2", "3"]


def test_a_line_fills_the_chart_from_its_first_step_to_its_last() -> None:
    text = curves_html("Loss", [Line([10, 20, 30], [2.0, 1.0, 0.0], "#000000")], str)
    (x0, y0), (x1, _), (x2, y2) = points(text)
    assert (x0, x1, x2) == (0, 500, 1000)
    assert y0 == 45, "a margin above the highest value"
    assert y2 == 955
    assert 'data-x0="10" data-x1="30"' in text


def test_a_chart_without_points_and_one_with_a_single_point_are_drawn() -> None:
    assert points(curves_html("Loss", [Line([], [], "#000000")], str)) == []
    assert points(curves_html("Loss", [Line([7], [0.0], "#000000")], str)) == [(500, 500)]


def test_the_level_is_within_the_chart() -> None:
    text = curves_html("Time", [Line([1, 2], [1.0, 2.0], "#000000")], str, level=4.0)
    assert 'class="level" d="M0 45H1000"' in text
    assert "level" not in curves_html("Time", [Line([1, 2], [1.0, 2.0], "#000000")], str)


def test_bars_have_the_same_scale_and_their_names_are_escaped() -> None:
    text = bars_html("Step", [("<b>", {"load": 1.0}), ("two", {"load": 2.0})], {"load": "#000000"}, "ms")
    assert re.findall(r"width:([\d.]+)%", text) == ["47.6", "95.2"]
    assert "<b>&lt;b&gt;</b>" in text
    assert 'title="load 1.00 ms"' in text
