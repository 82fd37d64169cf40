"""The grids and charts in docs/plans.md match the plans of the strategies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hoop.plan.unit_clock import chart
from hoop.strategies.catalog import parse

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plans.md"
DRAWN = re.findall(
    r"```text\n(chart|grid|messages) of (\S+), (\d+) devices, (\d+) micro-batches\n(.*?)\n```",
    PAGE.read_text("utf-8"),
    re.DOTALL,
)


def test_the_page_has_drawings() -> None:
    assert {view for view, *_ in DRAWN} == {"chart", "grid", "messages"}
    assert PAGE.read_text("utf-8").count("```text") == len(DRAWN)


@pytest.mark.parametrize(("view", "spec", "devices", "micros", "drawn"), DRAWN)
def test_drawings_match_the_plans(view: str, spec: str, devices: str, micros: str, drawn: str) -> None:
    plan = parse(spec).plan(int(devices), int(micros))
    assert drawn == (chart(plan) if view == "chart" else plan.grid(messages=view == "messages"))
