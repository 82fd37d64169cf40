"""Each step and each evaluation of a job is passed on once, whichever rank reports it, and how often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hoop import job_events as ev
from hoop.runs.job_follower import REMEMBERED_STEPS, Deduplicator

STARTED = ev.Started(
    steps=1000,
    done=0,
    steps_an_epoch=100,
    samples=100,
    parameters=1,
    stages=[],
    seconds=0.0,
    data="",
    same="",
)


def rows(first: int, last: int, **changes: Any) -> ev.Steps:
    """An event with the steps from ``first`` to ``last``, counted from 1."""
    steps = range(first, last + 1)
    event = ev.Steps(
        first=first - 1,
        loss=[step / 3 for step in steps],
        seconds=[0.1 for _ in steps],
        rate=0.1,
        fed=[[[1], f"{step:06x}"] for step in steps],
    )
    return replace(event, **changes)


def evaluated(steps: int) -> ev.Evaluated:
    return ev.Evaluated(steps, epoch=1, loss=0.5, accuracy=0.5, split="test")


def started(synchronous: bool = True, done: int = 0) -> Deduplicator:
    seen = Deduplicator(synchronous)
    assert seen.filtered(replace(STARTED, done=done)) is not None
    return seen


def test_what_another_rank_repeats_is_taken_out() -> None:
    seen = started()
    assert seen.filtered(rows(1, 4)) is not None
    assert seen.filtered(rows(2, 6)) == rows(5, 6)
    assert seen.filtered(rows(1, 6)) is None
    assert seen.step == 6
    assert seen.warnings() == []


def test_steps_that_nobody_reported_are_named() -> None:
    seen = started()
    seen.filtered(rows(1, 4))
    assert seen.filtered(rows(7, 8)) is not None
    (said,) = seen.warnings()
    assert "the steps 5 to 6" in said
    assert seen.warnings() == [], "once"


def test_a_run_that_is_resumed_begins_later() -> None:
    seen = started(done=100)
    assert seen.filtered(rows(101, 102)) is not None
    assert seen.warnings() == []


def test_a_second_start_in_the_middle_takes_no_row_away() -> None:
    """All devices were restarted at step 6, of which nobody had read the last two rows."""
    seen = started()
    seen.filtered(rows(1, 4))
    assert seen.filtered(replace(STARTED, done=6)) is not None
    assert seen.filtered(rows(3, 7)) == rows(5, 7)
    assert seen.warnings() == []


def test_two_ranks_that_report_different_values_are_a_bug() -> None:
    seen = started()
    seen.filtered(rows(1, 4))
    seen.filtered(rows(3, 4, loss=[1.0, 5.0]))
    (said,) = seen.warnings()
    assert said.startswith("step 4 was reported twice, with the losses 1.3333333333333333 and 5.0")
    seen.filtered(rows(1, 1, fed=[[[2], "000001"]]))
    assert seen.warnings() == [], "another device may have computed it"
    seen.filtered(rows(1, 1, fed=[[[1], "000002"]]))
    assert len(seen.warnings()) == 1


def test_an_asynchronous_step_that_is_run_again_may_have_another_loss() -> None:
    seen = started(synchronous=False)
    seen.filtered(rows(1, 2))
    assert seen.filtered(rows(2, 2, loss=[7.0])) is None
    assert seen.warnings() == []


def test_what_is_remembered_is_bounded() -> None:
    seen = started()
    seen.filtered(rows(1, REMEMBERED_STEPS + 10))
    assert len(seen._values) == REMEMBERED_STEPS
    seen.filtered(rows(11, 11, loss=[0.0]))
    assert len(seen.warnings()) == 1


def test_an_evaluation_is_passed_once() -> None:
    seen = started()
    assert seen.filtered(evaluated(4)) is not None
    assert seen.filtered(evaluated(4)) is None
    assert seen.filtered(evaluated(8)) is not None
