"""Timelines: one row per device, one bar per span, at its time and in the colour of its kind."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.report.palette import KINDS
from hoop.report.spans import COMMUNICATE, COMPUTE, Span
from hoop.report.timeline import MAX_ROWS, TimelineChart, kind_of

SVG = "{http://www.w3.org/2000/svg}"


def bars(root: ET.Element) -> dict[str, dict[str, str]]:
    """Every bar by its tooltip."""
    tooltips = ((element, element.find(f"{SVG}title")) for element in root.iter(f"{SVG}rect"))
    return {tooltip.text or "": element.attrib for element, tooltip in tooltips if tooltip is not None}


def words(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_bars_are_where_the_spans_are() -> None:
    spans = [
        Span("device 1", "F0", "forward", 100, 50),
        Span("device 1", "B0", "backward", 150, 100),
        Span("device 2", "wait", "idle", 100, 100),
        Span("device 2", "F0", "forward", 200, 50),
        Span("device 2", "send", "send", 240, 10, lane="links"),
    ]
    root = ET.fromstring(TimelineChart("one step", spans).svg())
    found = bars(root)
    assert set(found) == {
        "device 1: F0, 50 us",
        "device 1: B0, 100 us",
        "device 2: F0, 50 us",
        "device 2: send, 10 us",
    }
    position = {tooltip: (float(e["x"]), float(e["width"]), float(e["y"])) for tooltip, e in found.items()}
    first, second = position["device 1: F0, 50 us"], position["device 1: B0, 100 us"]
    assert second[0] == pytest.approx(first[0] + first[1], abs=0.02)
    assert second[1] == pytest.approx(2 * first[1], abs=0.02)
    assert position["device 2: F0, 50 us"][2] > first[2], "device 2 is below device 1"
    assert position["device 2: send, 10 us"][2] > position["device 2: F0, 50 us"][2], "lanes do not overlap"
    assert found["device 1: B0, 100 us"]["class"].split()[0] == f"f{KINDS['backward']}"
    shown = words(root)
    for expected in (
        "device 1",
        "device 2",
        "F0",
        "forward",
        "backward",
        "communicate",
        "idle",
        "0 % idle",
        "67 % idle",
    ):
        assert expected in shown
    assert "update" not in shown, "the legend lists only kinds that occur"


def test_a_window_clips_the_spans() -> None:
    spans = [Span("d", str(at), "forward", at, 10) for at in (0, 10, 20)]
    found = bars(ET.fromstring(TimelineChart("t", spans, start_us=5, end_us=20).svg()))
    assert set(found) == {"d: 0, 10 us", "d: 10, 10 us"}
    assert float(found["d: 10, 10 us"]["width"]) == pytest.approx(2 * float(found["d: 0, 10 us"]["width"]), abs=0.02)


def test_many_devices_and_spans_make_a_small_picture() -> None:
    spans = [Span(f"device {d}", "F", "forward", i, 0.9) for d in range(80) for i in range(2000)]
    svg = TimelineChart("many", spans).svg()
    shown = words(ET.fromstring(svg))
    assert f"{MAX_ROWS} of 80 devices shown" in shown
    assert {"device 0", "device 79"} <= set(shown)
    assert len(svg) < 200_000, "spans too narrow to be visible are merged"


def test_every_kind_has_a_colour() -> None:
    assert {kind_of(category) for category in COMPUTE + COMMUNICATE} == set(KINDS)
    assert kind_of("idle") is None


@given(
    st.lists(
        st.builds(
            Span,
            st.text(max_size=3),
            st.text(max_size=3),
            st.sampled_from(["forward", "send", "idle", "other"]),
            st.floats(0, 1e9),
            st.floats(0, 1e9),
        ),
        max_size=5,
    )
)
def test_any_spans_make_valid_xml(spans: list[Span]) -> None:
    svg = TimelineChart("<&>", spans).svg()
    ET.fromstring(svg.encode())
    assert "nan" not in svg.partition("</style>")[2] or any("nan" in s.track + s.name for s in spans)
