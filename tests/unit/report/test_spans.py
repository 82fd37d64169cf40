"""The shares of time in which a device computes, communicates and is idle."""

from __future__ import annotations

import pytest

from hoop.report.palette import KINDS
from hoop.report.spans import COMMUNICATE, COMPUTE, Shares, Span, by_track, kind_of, shares, window


def test_shares_add_up_and_overlapped_communication_is_not_counted() -> None:
    spans = [
        Span("device 10", "F", "forward", 0, 40),
        Span("device 10", "reduce", "reduce", 20, 30, lane="links"),  # 20 us of it overlap the forward
        Span("device 10", "wait", "idle", 50, 50),
        Span("device 2", "B", "backward", 0, 60),
        Span("device 2", "B", "backward", 50, 50),  # overlapping time counts once
        Span("device 3", "wait", "idle", 0, 1),
    ]
    found = shares(spans)
    assert list(found) == ["device 2", "device 3", "device 10"]
    assert found["device 10"] == pytest.approx(Shares(0.4, 0.1, 0.5))
    assert found["device 2"] == pytest.approx(Shares(1.0, 0.0, 0.0))
    assert found["device 3"] == pytest.approx(Shares(0.0, 0.0, 1.0))
    assert shares(spans, 40, 60)["device 10"] == pytest.approx(Shares(0.0, 0.5, 0.5))


def test_no_spans_and_zero_durations() -> None:
    assert shares([]) == {}
    assert window([]) == (0.0, 0.0)
    assert shares([Span("d", "x", "forward", 5, 0)]) == {"d": Shares(0.0, 0.0, 1.0)}
    assert list(by_track([Span("b1", "", "", 0, 0), Span("1", "", "", 0, 0), Span("a", "", "", 0, 0)])) == [
        "1",
        "a",
        "b1",
    ]


def test_every_category_has_a_colour() -> None:
    assert {kind_of(category) for category in COMPUTE + COMMUNICATE} == set(KINDS)
    assert kind_of("idle") is kind_of("wait") is None
