"""Which rows of steps a rank emits, keeps, drops and gets when the ranks change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks import LONG_S, Ranks

import hoop.engine.progress_reporter as module
from hoop.collectives.communicator import Communicator
from hoop.engine.progress_reporter import EMIT_ROWS, EVENT_ROWS, KEPT_ROWS, Evaluation, ProgressReporter
from hoop.engine.stage.provenance import ELEMENTS_PER_SHARD, Provenance, mark

SHARDS = 2
DEVICE = 3


@pytest.fixture(autouse=True)
def never_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are emitted when there are many, or when it is asked for."""
    monkeypatch.setattr(module, "EMIT_S", float("inf"))


class Rank:
    """A reporter, and what it has emitted."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.evidence = Provenance(SHARDS)
        self.reporter = ProgressReporter(lambda event: self.events.append(event.to_fields()), self.evidence)

    def step(self, *steps: int) -> None:
        """Does these steps; the loss of step n is n / 3."""
        for step in steps:
            summed = np.zeros(ELEMENTS_PER_SHARD * SHARDS, np.float32)
            for shard in range(SHARDS):
                mark(summed, shard, DEVICE, step)
            self.evidence.record(step - 1, summed)
            self.reporter.add(step, [step / 3], 0.5)

    def report(self, force: bool = True) -> list[int]:
        """The steps that it emits now."""
        before = len(self.events)
        self.reporter.report(0.1, True, force)
        return self.steps(self.events[before:])

    def steps(self, events: list[dict[str, Any]] | None = None) -> list[int]:
        """Those of events, each with its loss and evidence, which are checked."""
        found = []
        for told in self.events if events is None else events:
            if told["kind"] != "steps":
                continue
            for index, (loss, fed) in enumerate(zip(told["loss"], told["fed"], strict=True)):
                step = told["first"] + index + 1
                assert loss == step / 3
                assert fed == ([DEVICE] * SHARDS, f"{step:06x}" * SHARDS)
                found.append(step)
        return found


class Alone:
    """A communicator of one rank."""

    size, rank = 1, 0


def test_only_the_reporting_rank_emits_and_each_row_once() -> None:
    rank = Rank()
    rank.step(1, 2, 3)
    rank.reporter.report(0.1, False, force=True)
    assert rank.events == []
    assert rank.report() == [1, 2, 3]
    assert rank.report() == []
    rank.step(4)
    assert rank.report() == [4]


def test_rows_are_emitted_before_there_are_more_than_the_diary_keeps() -> None:
    rank = Rank()
    rank.step(*range(1, EMIT_ROWS))
    assert rank.report(force=False) == []
    rank.step(EMIT_ROWS)
    assert rank.report(force=False) == list(range(1, EMIT_ROWS + 1))


def test_a_rank_that_begins_to_report_emits_all_that_it_keeps_in_events_of_bounded_size() -> None:
    rank = Rank()
    last = KEPT_ROWS + 100
    rank.step(*range(1, last + 1))
    assert rank.report() == list(range(last - KEPT_ROWS + 1, last + 1))
    assert {len(told["loss"]) for told in rank.events} == {EVENT_ROWS}


def test_steps_that_are_run_again_are_emitted_again() -> None:
    rank = Rank()
    rank.step(1, 2, 3, 4)
    rank.report()
    rank.reporter.take_over(Alone(), 2, 1.0)  # type: ignore[arg-type]
    assert rank.report() == []
    rank.step(3, 4, 5)
    assert rank.report() == [3, 4, 5]


def test_steps_that_a_rank_does_not_know_leave_no_wrong_rows() -> None:
    """It had not met the others after steps 3 and 4, which they know: what it keeps is of another place."""
    rank = Rank()
    rank.step(1, 2)
    rank.reporter.take_over(Alone(), 4, 1.0)  # type: ignore[arg-type]
    rank.step(5)
    assert rank.report() == [5]


def test_a_run_that_is_resumed_reports_from_there() -> None:
    rank = Rank()
    rank.step(101, 102)
    assert rank.report() == [101, 102]


def test_rows_of_an_arena_count_if_they_reach_the_step_where_all_go_on() -> None:
    diary = {step: [step / 3, 65536 + DEVICE, step, 65536 + DEVICE, step] for step in (3, 5, 6, 7, 8)}
    rank = Rank()
    rank.reporter.load_rows(9, diary)
    assert rank.report() == []
    rank.reporter.load_rows(7, diary)
    assert rank.report() == [5, 6, 7], "without a gap"
    rank = Rank()
    rank.step(4, 5, 6, 7)
    rank.reporter.load_rows(7, diary)
    assert rank.report() == [4, 5, 6, 7], "what it knows itself is more"


def test_an_evaluation_comes_after_the_rows_of_its_steps_and_once() -> None:
    rank = Rank()
    rank.step(1, 2)
    rank.reporter.add_evaluation(Evaluation(2, 1, 0.25, 0.5), 0.1, True)
    rank.step(3)
    rank.report()
    assert [told["kind"] for told in rank.events] == ["steps", "evaluated", "steps"]
    about = {"epoch": 1, "loss": 0.25, "accuracy": 0.5, "split": "test"}
    assert rank.events[1] == {"kind": "evaluated", "steps": 2, **about}


# ---- the rows are handed over when ranks change: no rank that reports next lacks one


def handed_over(scheme: str, reporters: list[Rank], step: int) -> None:
    def change(one: Communicator) -> None:
        reporters[one.rank].reporter.take_over(one, step, LONG_S)

    with Ranks(scheme, len(reporters)) as ranks:
        ranks.run(change)


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_a_newcomer_that_reports_next_has_what_the_others_had_not_emitted(scheme: str) -> None:
    old, newcomer = Rank(), Rank()
    old.step(1, 2, 3)
    assert old.report() == [1, 2, 3]
    old.step(4, 5)
    handed_over(scheme, [old, newcomer], 5)
    newcomer.step(6)
    assert newcomer.report() == [1, 2, 3, 4, 5, 6], "those that were emitted too: the old rank may be killed now"


def test_a_rank_that_did_not_meet_the_others_gets_the_row_it_lacks() -> None:
    """The reporting rank was killed when one of the two that are left had met it after step 3, and one had not."""
    met, behind = Rank(), Rank()
    met.step(1, 2, 3)
    behind.step(1, 2)
    handed_over("inproc", [met, behind], 3)
    assert behind.report() == [1, 2, 3]


def test_what_is_run_again_is_dropped_everywhere() -> None:
    ahead, others = Rank(), [Rank(), Rank()]
    ahead.step(1, 2, 3, 4)
    ahead.report()
    others[0].step(1, 2)
    handed_over("inproc", [*others, ahead], 2)
    for one in (ahead, *others):
        one.step(3)
    assert ahead.report() == [3]
    assert [one.report() for one in others] == [[1, 2, 3], [1, 2, 3]]


def test_the_rank_with_the_most_rows_gives_them() -> None:
    """One came at step 4, one came just now, one has been there from the beginning."""
    reporters = [Rank(), Rank(), Rank()]
    reporters[0].step(5, 6)
    reporters[2].step(*range(1, 7))
    handed_over("inproc", reporters, 6)
    assert [one.report() for one in reporters] == [list(range(1, 7))] * 3


def test_nobody_has_any_rows() -> None:
    reporters = [Rank(), Rank()]
    handed_over("inproc", reporters, 7)
    reporters[1].step(8)
    assert reporters[1].report() == [8]


def test_the_last_evaluation_is_handed_over_too() -> None:
    lost, left, newcomer = Rank(), Rank(), Rank()
    for one in (lost, left):
        one.step(1, 2)
        one.reporter.add_evaluation(Evaluation(2, 1, 0.1, 0.7), 0.1, one is lost)
    handed_over("inproc", [left, newcomer], 2)
    newcomer.report()
    assert newcomer.events[-1] == lost.events[-1]
    assert newcomer.events[-1]["kind"] == "evaluated"
