"""Pipeline schedules: their exact grids, and their bubbles compared with the formulas."""

from __future__ import annotations

import pytest

from hoop.plan.unit_clock import chart, timeline
from hoop.strategies.base import Strategy
from hoop.strategies.pipeline import Pipeline
from hoop.strategies.ring import RingModel

GRIDS = {
    ("1f1b", 4, 8): """
        rank 0 | 0L0 0F0 0L1 0F1 0L2 0F2 0L3 0F3 0B0 0L4 0F4 0B1 0L5 0F5 0B2 0L6 0F6 0B3 0L7 0F7 0B4 0B5 0B6 0B7 0A  0U
        rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7 1A  1U
        rank 2 | 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7 2A  2U
        rank 3 | 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7 3A  3U
    """,
    ("gpipe", 2, 3): """
        rank 0 | 0L0 0F0 0L1 0F1 0L2 0F2 0B0 0B1 0B2 0A  0U
        rank 1 | 1F0 1F1 1F2 1B0 1B1 1B2 1A  1U
    """,
    ("zero-bubble", 3, 4): """
        rank 0 | 0L0 0F0 0L1 0F1 0L2 0F2 0I0 0W0 0L3 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0A  0U
        rank 1 | 1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1A  1U
        rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2A  2U
    """,
    ("interleaved", 2, 4): """
        rank 0 | 0L0 0F0 0L1 0F1 2F0 2F1 0L2 0F2 2B0 0L3 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3 0A  2A  0U  2U
        rank 1 | 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 1A  3A  1U  3U
    """,
}


def dedent(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


@pytest.mark.parametrize(("schedule", "devices", "micros"), GRIDS)
def test_grids(schedule: str, devices: int, micros: int) -> None:
    assert Pipeline(schedule).plan(devices, micros).grid() == dedent(GRIDS[schedule, devices, micros])


def test_messages_of_a_pipeline() -> None:
    assert Pipeline().plan(3, 2).grid(messages=True) == dedent("""
        rank 0 | 0L0   0F0   0>0@1 0L1   0F1   0>1@1 0(0@1 0B0   0(1@1 0B1   0A    0U
        rank 1 | 1<0@0 1F0   1>0@2 1<1@0 1F1   1>1@2 1(0@2 1B0   1)0@0 1(1@2 1B1   1)1@0 1A    1U
        rank 2 | 2<0@1 2F0   2B0   2)0@1 2<1@1 2F1   2B1   2)1@1 2A    2U
    """)


def test_an_interleaved_pipeline_receives_in_the_order_of_sending() -> None:
    """With two ranks and two slices, outputs and gradients share a link, so a receive may come before its use."""
    assert Pipeline("interleaved", 2).plan(2, 2).grid(messages=True) == dedent("""
        rank 0 | 0L0   0F0   0>0@1 0L1   0F1   0>1@1 2<0@1 2F0   2>0@1 2<1@1 2F1   2>1@1 2(0@1 2B0   2)0@1 2(1@1 2B1   2)1@1 0(0@1 0B0   0(1@1 0B1   0A    2A    0U    2U
        rank 1 | 1<0@0 1F0   1>0@0 1<1@0 1F1   1>1@0 3<0@0 3F0   3B0   3)0@0 3<1@0 3F1   3B1   3)1@0 1(0@0 1B0   1)0@0 1(1@0 1B1   1)1@0 1A    3A    1U    3U
    """)  # noqa: E501


def test_chart_of_1f1b() -> None:
    assert chart(Pipeline().plan(3, 4)) == dedent("""
        rank 0 | F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
        rank 1 | .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
        rank 2 | .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
    """)


def bubbles(strategy: Strategy, devices: int, micros: int) -> list[float]:
    times = timeline(strategy.plan(devices, micros))
    return [times.bubble(rank) for rank in range(devices)]


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("micros", range(1, 17))
def test_bubbles(devices: int, micros: int) -> None:
    """The formulas of strategies/pipeline.py, on every rank."""
    p, m = devices, micros
    for plain in (Pipeline("gpipe"), Pipeline("1f1b"), RingModel()):
        assert bubbles(plain, p, m) == pytest.approx([(p - 1) / m] * p), plain.spec
    if m >= p:
        assert bubbles(Pipeline("zero-bubble"), p, m) == pytest.approx([(p - 1) / (3 * m)] * p)
    if m % p == 0:
        for v in (1, 2, 3, 4):
            assert bubbles(Pipeline("interleaved", v), p, m) == pytest.approx([(p - 1) / (m * v)] * p)


@pytest.mark.parametrize("devices", range(2, 9))
@pytest.mark.parametrize("micros", range(1, 17))
def test_no_schedule_is_slower_than_gpipe_without_slices(devices: int, micros: int) -> None:
    """Compare step times, also where the condition of a formula does not hold; with v slices a unit is 1/v."""
    gpipe = timeline(Pipeline("gpipe").plan(devices, micros)).end
    assert timeline(Pipeline("zero-bubble").plan(devices, micros)).end <= gpipe
    for v in (2, 3, 4):
        assert timeline(Pipeline("interleaved", v).plan(devices, micros)).end / v <= gpipe


def test_the_ring_rule_finds_the_order_of_1f1b() -> None:
    for devices in range(1, 7):
        for micros in range(1, 13):
            scheduled, found = Pipeline().plan(devices, micros), RingModel().plan(devices, micros)
            assert found.grid() == scheduled.grid()
