"""Each step and each evaluation of a job is passed on once, whichever rank reports it, and how often."""

from __future__ import annotations

from typing import Any

from hoop.runs.job_follower import REMEMBERED, Deduplicator


def rows(first: int, last: int, **changes: Any) -> dict[str, Any]:
    """An event with the steps from ``first`` to ``last``, counted from 1."""
    steps = range(first, last + 1)
    told = {"loss": [step / 3 for step in steps], "seconds": [0.1 for _ in steps]}
    return {"first": first - 1, **told, "fed": [[[1], f"{step:06x}"] for step in steps], **changes}


def started(synchronous: bool = True, done: int = 0) -> Deduplicator:
    seen = Deduplicator(synchronous)
    assert seen.passes("started", {"done": done})
    return seen


def test_what_another_rank_repeats_is_taken_out() -> None:
    seen = started()
    assert seen.passes("steps", rows(1, 4))
    told = rows(2, 6)
    assert seen.passes("steps", told)
    assert told == rows(5, 6)
    assert not seen.passes("steps", rows(1, 6))
    assert seen.step == 6
    assert seen.warnings() == []


def test_steps_that_nobody_reported_are_named() -> None:
    seen = started()
    seen.passes("steps", rows(1, 4))
    assert seen.passes("steps", rows(7, 8))
    (said,) = seen.warnings()
    assert "the steps 5 to 6" in said
    assert seen.warnings() == [], "once"


def test_a_run_that_is_resumed_begins_later() -> None:
    seen = started(done=100)
    assert seen.passes("steps", rows(101, 102))
    assert seen.warnings() == []


def test_a_second_start_in_the_middle_takes_no_row_away() -> None:
    """All devices were restarted at step 6, of which nobody had read the last two rows."""
    seen = started()
    seen.passes("steps", rows(1, 4))
    assert seen.passes("started", {"done": 6})
    told = rows(3, 7)
    assert seen.passes("steps", told)
    assert told == rows(5, 7)
    assert seen.warnings() == []


def test_two_ranks_that_report_different_values_are_a_bug() -> None:
    seen = started()
    seen.passes("steps", rows(1, 4))
    seen.passes("steps", rows(3, 4, loss=[1.0, 5.0]))
    (said,) = seen.warnings()
    assert said.startswith("step 4 was reported twice, with the losses 1.3333333333333333 and 5.0")
    seen.passes("steps", rows(1, 1, fed=[[[2], "000001"]]))
    assert seen.warnings() == [], "another device may have computed it"
    seen.passes("steps", rows(1, 1, fed=[[[1], "000002"]]))
    assert len(seen.warnings()) == 1


def test_an_asynchronous_step_that_is_run_again_may_have_another_loss() -> None:
    seen = started(synchronous=False)
    seen.passes("steps", rows(1, 2))
    assert not seen.passes("steps", rows(2, 2, loss=[7.0]))
    assert seen.warnings() == []


def test_what_is_remembered_is_bounded() -> None:
    seen = started()
    seen.passes("steps", rows(1, REMEMBERED + 10))
    assert len(seen._values) == REMEMBERED
    seen.passes("steps", rows(11, 11, loss=[0.0]))
    assert len(seen.warnings()) == 1


def test_an_evaluation_is_passed_once() -> None:
    seen = started()
    assert seen.passes("evaluated", {"steps": 4})
    assert not seen.passes("evaluated", {"steps": 4})
    assert seen.passes("evaluated", {"steps": 8})
