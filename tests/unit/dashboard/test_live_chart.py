"""Charts as HTML and SVG: places of points and bars, ticks, and texts."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from hoop.dashboard.live_chart import PIECE, Line, bars_html, curves_html, ticks

Points = list[tuple[int, ...]]


def pieces(text: str) -> list[Points]:
    """The points of the pieces of all lines."""
    found = re.findall(r'points="([^"]*)"', text)
    return [[tuple(map(int, one.split(","))) for one in piece.split()] for piece in found]


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


def test_a_line_is_drawn_between_round_values() -> None:
    text = curves_html("Loss", [Line([10, 20, 30], [1.9, 1.0, 0.1], "#000000")], str)
    ((first, second, third),) = pieces(text)
    assert (first[0], first[1], third[1]) == (0, 50, 950)
    assert third[0] == pytest.approx(2 * second[0], abs=1)
    assert 900 < third[0] <= 1000
    assert 'data-x0="10"' in text
    assert 'data-y0="0" data-y1="2"' in text


@pytest.mark.parametrize(("low", "high"), [(0.1, 8.5), (3.0, 3.0), (0.0, 0.0), (-1.0, -0.999), (1e-9, 1e9)])
def test_every_value_is_within_the_chart(low: float, high: float) -> None:
    (((_, first), (_, second)),) = pieces(curves_html("Loss", [Line([1, 2], [low, high], "#000000")], str))
    assert 0 <= second <= first <= 1000


def test_new_points_leave_the_old_ones_in_their_places() -> None:
    """So that a browser draws only the last piece."""

    def drawn(count: int) -> list[Points]:
        return pieces(curves_html("Loss", [Line(range(count), [step % 7 for step in range(count)], "#000000")], str))

    before, after = drawn(100), drawn(102)
    assert [len(piece) for piece in before] == [PIECE + 1, PIECE + 1, 100 - 2 * PIECE]
    assert before[:2] == after[:2]
    assert before[2] == after[2][:-2]
    assert before[0][-1] == before[1][0], "without a gap"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_chart_of_few_points_is_drawn(count: int) -> None:
    (found,) = pieces(curves_html("Loss", [Line(range(count), [3.0] * count, "#000000")], str))
    assert len(found) == count
    assert all(0 <= x <= 1000 and 0 < y < 1000 for x, y in found)


def test_the_level_is_within_the_chart() -> None:
    text = curves_html("Time", [Line([1, 2], [1.0, 2.0], "#000000")], str, level=4.0)
    assert 'class="level" d="M0 0H1000"' in text
    assert 'class="level" d=""' in curves_html("Time", [Line([1, 2], [1.0, 2.0], "#000000")], str)


def test_bars_have_the_same_scale_and_their_names_are_escaped() -> None:
    text = bars_html("Step", [("<b>", {"load": 1.0}), ("two", {"load": 2.0})], {"load": "#000000"}, "ms")
    assert re.findall(r"width:([\d.]+)%", text) == ["47.6", "95.2"]
    assert "<b>&lt;b&gt;</b>" in text
    assert 'title="load 1.00 ms"' in text
