"""The live split of a step's time, and links, as rows of charts and tables."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

from hoop.dashboard.activity_view import PARTS, ActivityView, LinkBytes, Sample
from hoop.dashboard.cluster_tab import link_rows, link_table_rows, share_rows, traffic
from hoop.dashboard.job_tab import shard_rows
from hoop.dashboard.job_view import JobView
from hoop.dashboard.updates import PageUpdates
from hoop.dashboard.view import ClusterView, DeviceState, DeviceView
from hoop.dashboard.work_panel import WorkPanel, bar_rows, ranges_text, table_rows

ZERO = (0.0,) * 6


def worker(number: int, rank: int, *, sends: int = 0, links: tuple[LinkBytes, ...] = ()) -> DeviceView:
    """A device that did 10 steps in 2 s, of which 0.5 s forward and 1 s idle."""
    first = Sample(1.0, 0, ZERO, 0, tuple(LinkBytes(one.peer, 0, 0) for one in links))
    last = Sample(3.0, 10, (0.0, 0.5, 0.0, 0.0, 0.0, 1.0), sends, links)
    activity = ActivityView(1, rank, 1, (first, last), last.at_s, shards=(0, 1, 2, 5), stages=(0,))
    return DeviceView(number, "a", "", 1, f"run-{number}", DeviceState.TRAINING, job=1, rank=rank, activity=activity)


def test_ranges() -> None:
    assert ranges_text([3, 0, 1, 2, 8]) == "0-3, 8"
    assert ranges_text([]) == ""


def test_the_bars_and_the_table_have_each_devices_step() -> None:
    job = JobView(1, status="running", stragglers=((1, 2.5),))
    devices = [worker(7, 0, sends=4096), worker(8, 1)]
    (name, first), _ = bar_rows(devices)
    assert name == "device 7 (rank 0)"
    assert {part: round(first[part]) for part in PARTS} == {
        "load": 0, "forward": 50, "backward": 0, "communicate": 0, "update": 0, "idle": 100, "other": 50,
    }  # fmt: skip
    fast, slow = table_rows(job, devices)
    assert (fast["shards"], fast["step"], fast["sends"], fast["note"]) == ("0-2, 5", "200 ms", "2.0 KiB/s", "")
    assert (fast["compute"], fast["communicate"], fast["idle"]) == ("25%", "0%", "50%")
    assert slow["note"] == "2.5 times slower"
    assert [(row["rank"], row["shards"], row["which"]) for row in shard_rows(job, devices)] == [
        ("0", 4, "0-2, 5"),
        ("1", 4, "0-2, 5"),
    ]


def test_the_circle_around_a_device_has_the_shares_of_its_time() -> None:
    idle = replace(worker(9, 2), activity=None)
    rows = share_rows([worker(7, 0), idle])
    assert [(row["what"], row["share"]) for row in rows] == [
        ("device 7, computing", "25% of its time"),
        ("device 7, communicating", "0% of its time"),
        ("device 7, idle", "50% of its time"),
    ]
    turns = [(row["start"] - row["end"]) / (2 * math.pi) for row in rows]
    assert turns == pytest.approx([0.25, 0, 0.5])
    assert [row["start"] for row in rows[1:]] == [row["end"] for row in rows[:-1]], "one after the other"


def test_without_activity_the_shards_are_those_of_the_balancer() -> None:
    assert [row["shards"] for row in shard_rows(JobView(1, shards=(3, 5)), [])] == [3, 5]


def test_the_panel_shows_the_prediction_and_one_bar_a_device() -> None:
    panel = WorkPanel(PageUpdates())
    panel.update(JobView(1, predicted_step_seconds=0.15), [worker(7, 0), worker(8, 1)])
    text = panel._bars.text
    assert text.count('class="bar"') == 2
    assert text.index("device 7 (rank 0)") < text.index("device 8 (rank 1)")
    assert 'title="forward 50.00 ms"' in text
    assert 'class="predicted" style="left:71.4%"' in text, "150 of 210 ms"
    panel.update(JobView(1), [worker(7, 0)])
    assert "predicted" not in panel._bars.text


def test_links_over_tcp_are_drawn_and_listed_with_their_bytes_a_second() -> None:
    one = worker(1, 0, sends=6000, links=(LinkBytes(2, 2_000_000, 500),))
    two = worker(2, 1, links=(LinkBytes(1, 500, 2_000_000), LinkBytes(99, 8, 0)))
    view = ClusterView(devices=(one, two), jobs=(JobView(1, status="running", devices=(1, 2)),), now=3.0)
    assert [(link.device, link.peer, link.sent) for link in traffic(view)] == [
        (1, 2, 1_000_000.0),
        (2, 1, 250.0),
        (2, 99, 4.0),
    ]
    drawn = [row for row in link_rows(view) if row["carries"]]
    assert [row["carries"] for row in drawn] == ["976.6 KiB/s", "250 B/s"], "device 99 is not on the ring"
    assert drawn[0]["width"] > drawn[1]["width"]
    rows = link_table_rows(view)
    assert rows[0] == {
        "from": "device 1", "to": "all ranks of its job", "rate": "2.9 KiB/s", "way": "links and shared memory",
    }  # fmt: skip
    assert [row["from"] for row in rows if row["way"] == "TCP"] == ["device 1", "device 2", "device 2"]
    quiet = replace(view, devices=tuple(replace(device, activity=None) for device in view.devices))
    assert link_table_rows(quiet) == []
