"""Each step and each evaluation of a job is passed on once, however many ranks report it, and however often."""

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
    """Return an event with the steps from ``first`` to ``last``, counted from 1."""
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


def new_deduplicator(synchronous: bool = True, done: int = 0) -> Deduplicator:
    deduplicator = Deduplicator(synchronous)
    assert deduplicator.filtered(replace(STARTED, done=done)) is not None
    return deduplicator


def test_steps_repeated_by_another_rank_are_removed() -> None:
    deduplicator = new_deduplicator()
    assert deduplicator.filtered(rows(1, 4)) is not None
    assert deduplicator.filtered(rows(2, 6)) == rows(5, 6)
    assert deduplicator.filtered(rows(1, 6)) is None
    assert deduplicator.step == 6
    assert deduplicator.warnings() == []


def test_steps_that_no_rank_reported_cause_a_warning() -> None:
    deduplicator = new_deduplicator()
    deduplicator.filtered(rows(1, 4))
    assert deduplicator.filtered(rows(7, 8)) is not None
    (warning,) = deduplicator.warnings()
    assert "the steps 5 to 6" in warning
    assert deduplicator.warnings() == [], "the warning is given once"


def test_a_resumed_run_begins_at_a_later_step() -> None:
    deduplicator = new_deduplicator(done=100)
    assert deduplicator.filtered(rows(101, 102)) is not None
    assert deduplicator.warnings() == []


def test_a_restart_of_all_devices_removes_no_step() -> None:
    """All devices restarted at step 6, before the last two steps were read."""
    deduplicator = new_deduplicator()
    deduplicator.filtered(rows(1, 4))
    assert deduplicator.filtered(replace(STARTED, done=6)) is not None
    assert deduplicator.filtered(rows(3, 7)) == rows(5, 7)
    assert deduplicator.warnings() == []


def test_different_values_for_one_step_cause_a_warning() -> None:
    deduplicator = new_deduplicator()
    deduplicator.filtered(rows(1, 4))
    deduplicator.filtered(rows(3, 4, loss=[1.0, 5.0]))
    (warning,) = deduplicator.warnings()
    assert warning.startswith("step 4 was reported twice, with the losses 1.3333333333333333 and 5.0")
    deduplicator.filtered(rows(1, 1, fed=[[[2], "000001"]]))
    assert deduplicator.warnings() == [], "another device may have computed it"
    deduplicator.filtered(rows(1, 1, fed=[[[1], "000002"]]))
    assert len(deduplicator.warnings()) == 1


def test_an_asynchronous_step_that_is_repeated_may_have_another_loss() -> None:
    deduplicator = new_deduplicator(synchronous=False)
    deduplicator.filtered(rows(1, 2))
    assert deduplicator.filtered(rows(2, 2, loss=[7.0])) is None
    assert deduplicator.warnings() == []


def test_the_number_of_remembered_steps_is_bounded() -> None:
    deduplicator = new_deduplicator()
    deduplicator.filtered(rows(1, REMEMBERED_STEPS + 10))
    assert len(deduplicator._values) == REMEMBERED_STEPS
    deduplicator.filtered(rows(11, 11, loss=[0.0]))
    assert len(deduplicator.warnings()) == 1


def test_an_evaluation_is_passed_on_once() -> None:
    deduplicator = new_deduplicator()
    assert deduplicator.filtered(evaluated(4)) is not None
    assert deduplicator.filtered(evaluated(4)) is None
    assert deduplicator.filtered(evaluated(8)) is not None
