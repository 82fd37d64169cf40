"""A rank's activity for other threads: sums without work for the training thread, and traces on request."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hoop.engine.executor import PlanExecutor
from hoop.engine.live_activity import MAX_SPANS, LiveActivity
from hoop.engine.profiler import InstructionProfiler
from hoop.errors import FailedPrecondition
from hoop.plan.instructions import Instruction
from hoop.strategies.catalog import parse

WITHIN_S = 60.0


def executor(rank: int = 0, strategy: str = "data") -> PlanExecutor:
    """What ``LiveActivity`` reads of an executor, with a real plan and a real profiler."""
    plan = parse(strategy).plan(2, 4)
    return cast(PlanExecutor, SimpleNamespace(plan=plan, rank=rank, profiler=InstructionProfiler(), bytes_sent=17))


def run_step(activity: LiveActivity, one: Any, done: int, first_steps: bool = False) -> None:
    activity.begin_step(first_steps)
    for at, text in enumerate(("0L0", "0F0", "0B0", "0A", "0U")):
        one.profiler.record(Instruction.parse(text), float(at), at + 0.5, 0.25 if text == "0A" else 0.0)
    activity.end_step(done, 1)


def test_the_sums_are_those_of_the_profiler() -> None:
    activity, one = LiveActivity(0.0), executor()
    assert activity.read().steps == 0
    activity.attach(one)
    for done in (1, 2):
        run_step(activity, one, done)
    found = activity.read()
    assert (found.steps, found.load_s, found.forward_s, found.backward_s) == (2, 1.0, 1.0, 1.0)
    assert (found.communicate_s, found.idle_s, found.update_s, found.bytes_sent) == (0.5, 0.5, 1.0, 17)
    assert (found.shards, found.stages) == ((0, 1), (0,))
    assert one.profiler.seconds == {"compute": 4.0, "communicate": 0.5, "idle": 0.5}
    assert one.profiler.spans == [], "nothing is kept by step"
    activity.attach(executor(1, "pipeline"))
    assert (activity.read().shards, activity.read().stages) == ((0, 1, 2, 3), (1,))
    activity.attach(None)
    assert activity.read().shards == ()


def traced(activity: LiveActivity, one: Any, steps: int, first_steps: bool = False) -> Any:
    """A trace that another thread asks for while steps run."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(activity.trace(steps, WITHIN_S)))
    thread.start()
    done = 100
    while thread.is_alive():
        done += 1
        run_step(activity, one, done, first_steps)
        if activity._request is None:
            thread.join(0.01)
    return found[0]


@pytest.mark.parametrize("first_steps", [False, True])
def test_a_trace_has_the_instructions_of_the_steps_asked_for(first_steps: bool) -> None:
    activity, one = LiveActivity(0.0), executor()
    activity.attach(one)
    run_step(activity, one, 100, first_steps=True)
    before = len(one.profiler.spans)
    found = traced(activity, one, 3, first_steps)
    assert (found.rank, found.steps) == (0, 3)
    assert found.first_step >= 100
    names = [span.instruction for span in found.spans]
    assert names == ["0L0", "0F0", "0B0", "wait", "0A", "0U"] * 3
    assert found.spans[1].start - found.spans[0].start == pytest.approx(1.0, abs=1e-3)
    kept = len(one.profiler.spans) - before
    assert kept == 0 or first_steps, "the run's own trace has the first steps only"
    assert not first_steps or kept >= 18, "the run's own trace keeps its spans"


def test_a_failed_step_leaves_no_spans_behind() -> None:
    activity, one = LiveActivity(0.0), executor()
    activity.attach(one)
    waiting = threading.Thread(target=lambda: activity.trace(1, WITHIN_S))
    waiting.start()
    while activity._request is None:
        threading.Event().wait(0.001)
    activity.begin_step(False)
    one.profiler.record(Instruction.parse("0F0"), 0.0, 1.0)
    run_step(activity, one, 7)  # the step before was interrupted, and is run again
    waiting.join(WITHIN_S)
    assert one.profiler.spans == []


def test_a_trace_is_bounded_in_spans_and_time_and_there_is_one_at_a_time() -> None:
    activity, one = LiveActivity(0.0), executor()
    with pytest.raises(FailedPrecondition, match="trains no more"):
        activity.trace(1, 1.0)
    activity.attach(one)
    assert activity.trace(1, 0.01).steps == 0, "no step came"
    assert len(traced(activity, one, MAX_SPANS // 6 + 10).spans) == MAX_SPANS
    with activity._asking, pytest.raises(FailedPrecondition, match="another trace"):
        activity.trace(1, 1.0)
