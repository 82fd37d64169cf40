"""Axis limits and ticks are round numbers for any data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.report.scale import Kind, label, nice_step, plottable, scale


def test_ticks_are_round_numbers() -> None:
    assert scale([[0, 2.3]]).labels() == ["0", "0.5", "1.0", "1.5", "2.0", "2.5"]
    assert scale([[92.1, 98.1]]).labels() == ["92", "94", "96", "98", "100"]
    assert scale([[0, 17e6]]).labels() == ["0", "5M", "10M", "15M", "20M"]
    assert scale([[-3, 31]], zero=True).ticks[0] == -10
    assert scale([[0, 19]], tight=True, own=True, about=8).labels() == ["0", "5", "10", "15"]
    assert scale([[1, 3]], tight=True, own=True, about=8).labels() == ["1", "2", "3"]
    assert scale([[0, 0.9]], about=4).labels() == ["0", "0.25", "0.50", "0.75", "1.00"]


def test_logarithmic_ticks() -> None:
    assert scale([[19, 7762]], "log").labels() == ["10", "100", "1000", "10k"]
    assert scale([[1, 16]], "log").labels() == ["1", "2", "5", "10", "20"]
    assert scale([[1, 2, 4, 8, 16]], "log", tight=True, own=True).labels() == ["1", "2", "4", "8", "16"]
    assert len(scale([[1e-30, 1e30]], "log").ticks) <= 8


def test_positions() -> None:
    assert scale([[0, 10]]).at([0, 5, 10]).tolist() == [0, 0.5, 1]
    assert scale([[1, 100]], "log").at([1, 10, 100]).tolist() == pytest.approx([0, 0.5, 1])
    assert np.isnan(scale([[1, 100]], "log").at([0, -1, math.nan])).all()


@pytest.mark.parametrize("kind", ["linear", "log"])
@given(values=st.lists(st.floats(), max_size=8), tight=st.booleans(), own=st.booleans(), zero=st.booleans())
def test_every_value_is_on_the_axis(kind: Kind, values: list[float], tight: bool, own: bool, zero: bool) -> None:
    axis = scale([values], kind, tight=tight, own=own, zero=zero)
    known = plottable(values, kind)
    known = known[np.isfinite(known)]
    assert axis.low < axis.high
    assert len(axis.ticks) <= 25
    assert len(axis.labels()) == len(axis.ticks)
    positions = axis.at(known)
    assert ((positions > -1e-6) & (positions < 1 + 1e-6)).all()
    ticks = axis.at(axis.ticks)
    assert ((ticks > -1e-3) & (ticks < 1 + 1e-3)).all()


def test_limits_hold_and_invalid_ones_are_rejected() -> None:
    axis = scale([[3, 50]], limits=(0, 100))
    assert (axis.low, axis.high) == (0, 100)
    with pytest.raises(InvalidArgument, match="limits: 0 is not on a logarithmic axis"):
        scale([[1, 2]], "log", limits=(0, None))
    with pytest.raises(InvalidArgument, match="scale: 'cubic'"):
        scale([[1]], "cubic")  # type: ignore[arg-type]


def test_labels_and_steps() -> None:
    assert [label(x) for x in (0, 1234, 12345, 1.5e9, 0.00002, -0.5)] == [
        "0",
        "1234",
        "12.35k",
        "1.5G",
        "2e-5",
        "-0.5",
    ]
    assert [nice_step(x) for x in (0.9, 1, 1.1, 2.2, 3, 7)] == [1, 1, 2, 2.5, 5, 10]
    assert [nice_step(x, whole=True) for x in (0.1, 1.1, 2.2, 30)] == [1, 2, 5, 50]
