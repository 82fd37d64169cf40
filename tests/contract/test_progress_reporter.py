"""Which step rows a rank emits, keeps and drops, and which it receives when the ranks change."""

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
def no_timed_emission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are emitted when there are EMIT_ROWS of them, or on request."""
    monkeypatch.setattr(module, "EMIT_S", float("inf"))


class Rank:
    """A reporter and the events that it has emitted."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.evidence = Provenance(SHARDS)
        self.reporter = ProgressReporter(lambda event: self.events.append(event.to_fields()), self.evidence)

    def step(self, *steps: int) -> None:
        """Runs these steps; the loss of step n is n / 3."""
        for step in steps:
            summed = np.zeros(ELEMENTS_PER_SHARD * SHARDS, np.float32)
            for shard in range(SHARDS):
                mark(summed, shard, DEVICE, step)
            self.evidence.record(step - 1, summed)
            self.reporter.add(step, [step / 3], 0.5)

    def report(self, force: bool = True) -> list[int]:
        """Reports, and returns the steps that were emitted."""
        before = len(self.events)
        self.reporter.report(0.1, True, force)
        return self.steps(self.events[before:])

    def steps(self, events: list[dict[str, Any]] | None = None) -> list[int]:
        """The steps in the events; checks their losses and provenance."""
        found = []
        for event in self.events if events is None else events:
            if event["kind"] != "steps":
                continue
            for index, (loss, fed) in enumerate(zip(event["loss"], event["fed"], strict=True)):
                step = event["first"] + index + 1
                assert loss == step / 3
                assert fed == ([DEVICE] * SHARDS, f"{step:06x}" * SHARDS)
                found.append(step)
        return found


class SingleRankCommunicator:
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


def test_rows_are_emitted_before_the_step_log_is_full() -> None:
    rank = Rank()
    rank.step(*range(1, EMIT_ROWS))
    assert rank.report(force=False) == []
    rank.step(EMIT_ROWS)
    assert rank.report(force=False) == list(range(1, EMIT_ROWS + 1))


def test_a_new_reporting_rank_emits_all_its_rows_in_events_of_bounded_size() -> None:
    rank = Rank()
    last = KEPT_ROWS + 100
    rank.step(*range(1, last + 1))
    assert rank.report() == list(range(last - KEPT_ROWS + 1, last + 1))
    assert {len(event["loss"]) for event in rank.events} == {EVENT_ROWS}


def test_repeated_steps_are_emitted_again() -> None:
    rank = Rank()
    rank.step(1, 2, 3, 4)
    rank.report()
    rank.reporter.take_over(SingleRankCommunicator(), 2, 1.0)  # type: ignore[arg-type]
    assert rank.report() == []
    rank.step(3, 4, 5)
    assert rank.report() == [3, 4, 5]


def test_a_rank_that_lacks_steps_drops_its_rows() -> None:
    """The others have finished steps 3 and 4, so its own rows do not adjoin step 5."""
    rank = Rank()
    rank.step(1, 2)
    rank.reporter.take_over(SingleRankCommunicator(), 4, 1.0)  # type: ignore[arg-type]
    rank.step(5)
    assert rank.report() == [5]


def test_a_resumed_run_reports_from_its_first_step() -> None:
    rank = Rank()
    rank.step(101, 102)
    assert rank.report() == [101, 102]


def test_rows_of_a_step_log_are_used_if_they_reach_the_current_step() -> None:
    log = {step: [step / 3, 65536 + DEVICE, step, 65536 + DEVICE, step] for step in (3, 5, 6, 7, 8)}
    rank = Rank()
    rank.reporter.load_rows(9, log)
    assert rank.report() == []
    rank.reporter.load_rows(7, log)
    assert rank.report() == [5, 6, 7], "without a gap"
    rank = Rank()
    rank.step(4, 5, 6, 7)
    rank.reporter.load_rows(7, log)
    assert rank.report() == [4, 5, 6, 7], "it has more rows itself"


def test_an_evaluation_is_emitted_once_after_the_rows_of_its_steps() -> None:
    rank = Rank()
    rank.step(1, 2)
    rank.reporter.add_evaluation(Evaluation(2, 1, 0.25, 0.5), 0.1, True)
    rank.step(3)
    rank.report()
    assert [event["kind"] for event in rank.events] == ["steps", "evaluated", "steps"]
    fields = {"epoch": 1, "loss": 0.25, "accuracy": 0.5, "split": "test", "metrics": {}, "best": True}
    assert rank.events[1] == {"kind": "evaluated", "steps": 2, **fields}


# ---- rows are handed over when ranks change, so that every possible reporting rank has all of them


def hand_over(scheme: str, reporters: list[Rank], step: int) -> None:
    def change(comm: Communicator) -> None:
        reporters[comm.rank].reporter.take_over(comm, step, LONG_S)

    with Ranks(scheme, len(reporters)) as ranks:
        ranks.run(change)


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_a_new_rank_that_becomes_the_reporting_rank_emits_all_rows(scheme: str) -> None:
    old, new = Rank(), Rank()
    old.step(1, 2, 3)
    assert old.report() == [1, 2, 3]
    old.step(4, 5)
    hand_over(scheme, [old, new], 5)
    new.step(6)
    assert new.report() == [1, 2, 3, 4, 5, 6], "also rows that the old rank has emitted: it may be killed now"


def test_a_rank_gets_the_rows_that_it_lacks() -> None:
    """The reporting rank was killed after one of the other two had synchronized step 3 with it."""
    synchronized, behind = Rank(), Rank()
    synchronized.step(1, 2, 3)
    behind.step(1, 2)
    hand_over("inproc", [synchronized, behind], 3)
    assert behind.report() == [1, 2, 3]


def test_rows_of_steps_that_will_be_repeated_are_dropped_on_every_rank() -> None:
    ahead, others = Rank(), [Rank(), Rank()]
    ahead.step(1, 2, 3, 4)
    ahead.report()
    others[0].step(1, 2)
    hand_over("inproc", [*others, ahead], 2)
    for one in (ahead, *others):
        one.step(3)
    assert ahead.report() == [3]
    assert [one.report() for one in others] == [[1, 2, 3], [1, 2, 3]]


def test_the_rank_with_the_most_rows_broadcasts_them() -> None:
    """One rank joined at step 4, one just now, one has run from the beginning."""
    reporters = [Rank(), Rank(), Rank()]
    reporters[0].step(5, 6)
    reporters[2].step(*range(1, 7))
    hand_over("inproc", reporters, 6)
    assert [one.report() for one in reporters] == [list(range(1, 7))] * 3


def test_hand_over_when_no_rank_has_rows() -> None:
    reporters = [Rank(), Rank()]
    hand_over("inproc", reporters, 7)
    reporters[1].step(8)
    assert reporters[1].report() == [8]


def test_the_last_evaluation_is_handed_over_too() -> None:
    lost, survivor, new = Rank(), Rank(), Rank()
    for one in (lost, survivor):
        one.step(1, 2)
        one.reporter.add_evaluation(Evaluation(2, 1, 0.1, 0.7), 0.1, one is lost)
    hand_over("inproc", [survivor, new], 2)
    new.report()
    assert new.events[-1] == lost.events[-1]
    assert new.events[-1]["kind"] == "evaluated"
