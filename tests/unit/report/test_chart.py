"""Charts as data: lengths are checked, and every value is in their JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hoop.errors import InvalidArgument
from hoop.report import strict_json
from hoop.report.chart import Bars, Chart, ChartLine, Lines, Timeline, TimeSplit, smoothed
from hoop.report.spans import Span


def test_inconsistent_lengths_and_names_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="line 'a': 2 x and 1 y"):
        ChartLine("a", [1, 2], [1])
    with pytest.raises(InvalidArgument, match="bars 'a': 1 values for 2 groups"):
        Bars("y", ["g", "h"], {"a": [1]})
    with pytest.raises(InvalidArgument, match=r"chart: its name '\.\./x'"):
        Chart("../x", "title", [])


def test_the_json_of_a_chart_has_every_value() -> None:
    chart = Chart(
        "all",
        "title",
        [
            Lines("ms", [ChartLine("a", [1, 2], np.array([3.0, math.nan]))], "log", {"paper": 83.0}),
            Bars("s", ["g", "h"], {"b": [4, math.inf]}),
            TimeSplit("share (%)", [{"device": "device 0", "compute": 60.0}], ("compute",)),
            Timeline([Span("device 0", "0F0", "forward", 0.0, 1.0)]),
        ],
        x_label="bytes",
        subtitle="measured",
    )
    lines, bars, split, timeline = json.loads(strict_json.dumps(chart.plain()))["panels"]
    assert lines["lines"] == [{"name": "a", "x": [1.0, 2.0], "y": [3.0, None]}]
    assert (lines["scale"], lines["rules"]) == ("log", {"paper": 83.0})
    assert (bars["groups"], bars["values"]) == (["g", "h"], {"b": [4.0, None]})
    assert split["rows"] == [{"device": "device 0", "compute": 60.0}]
    assert timeline == {"spans": 1}


def test_smoothing() -> None:
    assert smoothed([1, 1, 4, 1, 1], 3).tolist() == [1, 2, 2, 2, 1]
    assert smoothed([], 3).tolist() == []
    assert np.isnan(smoothed([1, math.nan, 3], 3)).tolist() == [False, True, False]
