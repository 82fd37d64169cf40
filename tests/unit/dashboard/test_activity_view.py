"""Where a device's time goes: differences of the sums in its heartbeats."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hoop.dashboard.activity_view import (
    HELD_S,
    MAX_SAMPLES,
    PARTS,
    SHOWN_S,
    STALLED_S,
    WINDOW_S,
    ActivityView,
    Figures,
    LinkRate,
    about_equal,
    after_heartbeat,
    refreshed_together,
)
from hoop.dashboard.view import ClusterView, with_status
from hoop.wire.generated import hoop_pb2 as pb


def heartbeat(at_s: float, steps: int = 0, **fields: Any) -> pb.TaskActivity:
    return pb.TaskActivity(job_id=1, rank=2, generation=3, at_s=at_s, steps=steps, **fields)


def after(*messages: pb.TaskActivity) -> ActivityView:
    view: ActivityView | None = None
    for one in messages:
        view = after_heartbeat(view, one)
    assert view is not None
    return view


def test_a_step_is_split_by_part() -> None:
    view = after(
        heartbeat(10.0, 5, load_s=1.0, forward_s=2.0, backward_s=3.0, communicate_s=4.0, update_s=5.0, idle_s=6.0),
        heartbeat(12.0, 9, load_s=1.04, forward_s=2.4, backward_s=3.8, communicate_s=4.2, update_s=5.08, idle_s=6.4),
    )
    expected = {"load": 0.01, "forward": 0.1, "backward": 0.2, "communicate": 0.05, "update": 0.02, "idle": 0.1}
    assert view.figures.split == pytest.approx({**expected, "other": 0.5 - 0.48})
    assert tuple(view.figures.split) == PARTS
    assert view.figures.step_seconds == 0.5
    assert view.figures.summary == "computes 66%, communicates 10%, waits 20%"


def test_without_a_step_in_the_window_nothing_is_split() -> None:
    view = after(heartbeat(1.0, 5, forward_s=1.0), heartbeat(2.0, 5, forward_s=2.0))
    assert (view.figures.split, view.figures.summary, view.figures.step_seconds) == ({}, "", None)


def test_bytes_a_second_in_all_and_by_link() -> None:
    def links(*bytes_by_peer: tuple[int, int, int]) -> list[pb.LinkDescription]:
        return [pb.LinkDescription(device_id=peer, sent=sent, received=got) for peer, sent, got in bytes_by_peer]

    view = after(
        heartbeat(1.0, 1, bytes_sent=1000, links=links((7, 100, 10), (8, 1, 1), (8, 2, 2))),
        heartbeat(3.0, 2, bytes_sent=5000, links=links((7, 500, 30), (8, 11, 21), (8, 22, 32), (9, 8, 0))),
    )
    assert view.figures.bytes_a_second == 2000
    assert view.figures.links == (LinkRate(7, 200.0, 10.0), LinkRate(8, 15.0, 25.0), LinkRate(9, 4.0, 0.0))
    assert after(heartbeat(1.0, bytes_sent=9)).figures.bytes_a_second is None


def test_the_window_slides_and_its_samples_are_bounded() -> None:
    view = after(*(heartbeat(0.1 * number, number) for number in range(200)))
    assert len(view.samples) <= MAX_SAMPLES
    assert WINDOW_S <= view.samples[-1].at_s - view.samples[0].at_s < 2 * WINDOW_S
    assert view.figures.step_seconds == pytest.approx(0.1)


def test_a_window_of_long_steps_reaches_from_the_end_of_one_to_the_end_of_the_next() -> None:
    view = after(*(heartbeat(0.5 * number, number // 60, forward_s=0.1 * number) for number in range(300)))
    assert len(view.samples) <= MAX_SAMPLES
    assert view.figures.step_seconds == 30.0
    assert view.figures.split["forward"] == pytest.approx(6.0)


def test_a_device_that_does_no_steps_any_more_shows_none() -> None:
    busy = [heartbeat(0.5 * number, number, forward_s=0.4 * number, bytes_sent=number) for number in range(10)]
    stopped = heartbeat(4.5 + STALLED_S, 9, forward_s=9.0, bytes_sent=9)
    assert after(*busy).figures.split
    view = after(*busy, stopped)
    assert view.figures == Figures(None, {}, 0.0, ())


def test_pages_show_the_same_figures_as_long_as_they_are_about_right() -> None:
    def steps(count: int, step_s: float, view: ActivityView | None) -> ActivityView:
        """Goes on for some steps of this duration, with a heartbeat after each."""
        at_s, done = (view.at_s, view.samples[-1].steps) if view is not None else (0.0, 0)
        for number in range(1, count + 1):
            view = after_heartbeat(view, heartbeat(at_s + number * step_s, done + number))
        assert view is not None
        return view

    view = steps(10, 0.5, None)
    first = view.figures
    view = steps(9, 0.51, view)
    assert view.figures is first, "2 % slower"
    assert view.current != first
    view = steps(round(SHOWN_S / 0.51) + 1, 0.51, view)
    assert view.figures is not first, "after some time the current figures are shown anyway"
    assert view.figures.step_seconds == pytest.approx(0.51, rel=0.01)
    view = steps(40, 0.25, view)
    assert view.current.step_seconds == pytest.approx(0.25)
    assert view.figures.step_seconds == pytest.approx(0.25, rel=0.05)


def test_figures_are_held_until_the_window_has_other_samples_but_not_when_the_steps_stop() -> None:
    busy = [heartbeat(0.5 * number, number, forward_s=0.4 * number) for number in range(10)]
    view = after(*busy).with_current_figures()
    shown = view.figures
    at_s, done = view.at_s, 9
    while view.figures is shown:
        at_s, done = at_s + 1.0, done + 1
        view = after_heartbeat(view, heartbeat(at_s, done, forward_s=3.6))
    assert at_s == 4.5 + HELD_S, "the steps take twice as long, but for so long the window has some of before"
    assert view.figures.step_seconds == pytest.approx(1.0)
    stopped = after(*busy, heartbeat(4.5 + STALLED_S, 9, forward_s=3.6))
    assert not stopped.figures.split


def test_the_figures_of_all_devices_change_together() -> None:
    """So that a browser draws once. A device that shows none yet goes on to show none."""
    steady = after(*(heartbeat(0.5 * number, number) for number in range(6)))
    current = after(*(heartbeat(0.5 * number, number) for number in range(8)))
    kept = replace(steady, shown_since_s=0.0)
    first = after(heartbeat(1.0))
    assert refreshed_together([kept, first]) == [kept, first]
    again, same, none = refreshed_together([kept, current.with_current_figures(), first])
    assert again.shown_since_s == kept.at_s
    assert same == current.with_current_figures()
    assert none is first


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (Figures(1.04, {"forward": 0.52, "idle": 0.52}, 104.0, (LinkRate(7, 10.4, 0.0),)), True),
        (Figures(1.1, {"forward": 0.55, "idle": 0.55}, 100.0, (LinkRate(7, 10.0, 0.0),)), False),
        (Figures(1.0, {"forward": 0.56, "idle": 0.44}, 100.0, (LinkRate(7, 10.0, 0.0),)), False),
        (Figures(1.0, {"forward": 0.5, "idle": 0.5}, 110.0, (LinkRate(7, 10.0, 0.0),)), False),
        (Figures(1.0, {"forward": 0.5, "idle": 0.5}, 100.0, (LinkRate(7, 12.0, 0.0),)), False),
        (Figures(1.0, {"forward": 0.5, "idle": 0.5}, 100.0, (LinkRate(8, 10.0, 0.0),)), False),
        (Figures(1.0, {"forward": 0.5, "idle": 0.5}, 100.0, ()), False),
        (Figures(1.0, {"forward": 0.5, "idle": 0.5}, None, (LinkRate(7, 10.0, 0.0),)), False),
        (Figures(math.nan, {"forward": math.nan, "idle": 0.5}, 100.0, (LinkRate(7, 10.0, 0.0),)), False),
        (Figures(None, {}, 100.0, ()), False),
    ],
)
def test_figures_are_about_equal_if_no_share_and_no_rate_has_changed_much(other: Figures, expected: bool) -> None:
    shown = Figures(1.0, {"forward": 0.5, "idle": 0.5}, 100.0, (LinkRate(7, 10.0, 0.0),))
    assert about_equal(shown, other) is about_equal(other, shown) is expected
    assert about_equal(other, other) is (other.step_seconds is None or math.isfinite(other.step_seconds))


def test_another_generation_or_a_task_that_was_started_again_begins_anew() -> None:
    first = heartbeat(1.0, 50, forward_s=9.0)
    again = heartbeat(2.0, 1, forward_s=0.1)
    assert len(after(first, again).samples) == 1
    moved = heartbeat(2.0, 51, forward_s=9.1)
    moved.generation = 4
    assert len(after(first, moved).samples) == 1
    assert len(after(first, first).samples) == 1, "the same heartbeat twice"


def test_numbers_that_are_none_do_no_harm() -> None:
    view = after(
        heartbeat(math.nan, 1, forward_s=math.inf),
        heartbeat(1.0, 2, forward_s=-5.0, bytes_sent=2**63),
        heartbeat(2.0, 3, forward_s=math.nan),
    )
    assert all(math.isfinite(one) and one >= 0 for one in view.figures.split.values())
    assert view.figures.bytes_a_second is not None
    assert view.figures.bytes_a_second >= 0


def test_a_device_has_the_activity_of_its_own_job_only() -> None:
    described = pb.DeviceDescription(device_id=4, incarnation="x")
    activities = [pb.TaskActivity(job_id=9, rank=1), heartbeat(1.0, 2, shards=[0, 2])]
    status = pb.GetStatusResponse(
        devices=[pb.Member(device=described, state="alive", activities=activities)],
        jobs=[pb.Job(id=1, device_ids=[3, 5, 4], status="running")],
    )
    view = with_status(ClusterView(), status, 1.0)
    (worker,) = view.workers(1)
    assert worker.activity is not None
    assert (worker.rank, worker.activity.job, worker.activity.shards) == (2, 1, (0, 2))
    assert view.workers(9) == ()
    status.jobs[0].status = "ended"
    assert with_status(view, status, 2.0).workers(1) == ()
