"""The tabs Plan and Simulator, and traces on request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs bokeh: pip install 'hoop[dashboard]'")

import itertools

from bokeh.document import Document
from bokeh.events import ButtonClick

from hoop.dashboard.document import Page, PageTools
from hoop.dashboard.job_view import JobView, with_settings
from hoop.dashboard.plan_tab import grid_of, plan_grid
from hoop.dashboard.simulator import MAX_DEVICES, MAX_WAITING, Answer, Question, Simulator
from hoop.dashboard.simulator_tab import STRATEGIES, answer_texts, bar_rows
from hoop.dashboard.timeline_tab import span_rows, trace_text
from hoop.dashboard.tracer import MAX_SPANS, TraceView, trace_of
from hoop.dashboard.view import ClusterView
from hoop.errors import PeerLost
from hoop.strategies.catalog import parse
from hoop.wire.generated import hoop_pb2 as pb

WITHIN_S = 60.0
QUESTION = Question(1, "data", 4, 2, "1Gbps,0.5ms")


def test_the_grid_has_every_instruction_of_the_engines_plan() -> None:
    grid = plan_grid("pipeline:1f1b", 2, 4)
    plan = parse("pipeline:1f1b").plan(2, 4)
    for rank, instructions in enumerate(plan.ranks):
        rows = [row for row in grid.rows if row["rank"] == f"rank {rank}"]
        assert [row["text"] for row in rows] == [str(one) for one in instructions]
        assert all(before["right"] <= after["left"] for before, after in itertools.pairwise(rows))
    assert grid.lists[1] == " ".join(map(str, plan.ranks[1]))
    first, second = (min(row["left"] for row in grid.rows if row["text"] == text) for text in ("0F0", "1F0"))
    assert first < second, "the second stage waits for the first"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_of_the_simulator_has_a_grid(strategy: str) -> None:
    grid = plan_grid(strategy, 4, 8)
    assert grid.rows, grid.note


@pytest.mark.parametrize(
    ("strategy", "devices", "shards", "note"),
    [
        ("no-such", 2, 4, "no-such"),
        ("data", 60_000, 60_000, "too many"),
        ("pipeline", 64, 512, "too many"),
    ],
)
def test_a_plan_that_cannot_be_drawn_says_why(strategy: str, devices: int, shards: int, note: str) -> None:
    grid = plan_grid(strategy, devices, shards)
    assert not grid.rows
    assert note in grid.note


def test_the_plan_follows_the_jobs_settings_and_devices() -> None:
    job = JobView(1, devices=(4, 7), status="running")
    assert not grid_of(job).rows
    job = with_settings(job, {"strategy": "data", "shards": 3, "accumulate": 2})
    assert job.num_microbatches == 6
    assert grid_of(job).ranks == 2
    assert with_settings(JobView(1), {"strategy": "data", "shards": "many"}).num_microbatches == 0
    document = Document()
    Page(document, lambda: ClusterView(jobs=(job,)), tab="plan")
    (cells,) = document.select({"name": "plan"})
    assert "0F5" in cells.data["text"]


def wait_for(condition: Callable[[], object]) -> Any:
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.01)):
        if found := condition():
            return found
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def test_the_simulator_answers_once_and_survives_errors() -> None:
    asked: list[Question] = []

    def run(costs: dict[str, Any], settings: str, question: Question) -> Answer:
        asked.append(question)
        if question.strategy == "bad":
            raise KeyError("cores")
        return Answer(step_seconds=costs["x"], speedup=2.0)

    simulator = Simulator(run, lambda job: ({"x": 0.5}, "{}") if job == 1 else None)
    try:
        assert simulator.ask(QUESTION) == ""
        assert wait_for(lambda: simulator.answer(QUESTION)).step_seconds == 0.5
        assert simulator.ask(QUESTION) == ""
        bad, unknown = Question(1, "bad", 1, 1, ""), Question(2, "data", 1, 1, "")
        for question in (bad, unknown):
            simulator.ask(question)
        assert "KeyError" in wait_for(lambda: simulator.answer(bad)).problem
        assert "not reported" in wait_for(lambda: simulator.answer(unknown)).problem
        assert asked == [QUESTION, bad]
        simulator.ask(bad)
        wait_for(lambda: simulator.answer(bad))
        assert asked == [QUESTION, bad, bad], "an answer with a problem is asked for again, a good one is not"
        assert "1..256" in simulator.ask(Question(1, "data", MAX_DEVICES + 1, 1, ""))
    finally:
        simulator.close()


def test_at_most_a_few_simulations_wait() -> None:
    gate, began = threading.Event(), threading.Event()

    def run(*_: object) -> Answer:
        began.set()
        gate.wait(WITHIN_S)
        return Answer()

    simulator = Simulator(run, lambda job: ({}, ""))
    try:
        simulator.ask(QUESTION)
        assert began.wait(WITHIN_S)
        refused = [simulator.ask(Question(1, "data", number, 1, "")) for number in range(1, MAX_WAITING + 2)]
        assert refused[:-1] == [""] * MAX_WAITING
        assert "try again later" in refused[-1]
    finally:
        gate.set()
        simulator.close()


def test_the_simulator_tab_asks_for_what_was_chosen_and_shows_it_beside_the_measured_step() -> None:
    asked: list[Question] = []

    class Answering(Simulator):
        def ask(self, question: Question) -> str:
            asked.append(question)
            return ""

        def answer(self, question: Question) -> Answer | None:
            return Answer(0.002, 3.0, 1e6, ((0.001, 0.0005, 0.0005),) * 2)

    job = JobView(7, "mnist", status="running")
    document = Document()
    page = Page(
        document,
        lambda: ClusterView(jobs=(job,)),
        PageTools(simulator=Answering(lambda *_: Answer(), lambda job: None)),
    )
    page._choose("Simulator")
    for name, value in (("sim-strategy", "pipeline:1f1b"), ("sim-devices", 2), ("sim-hosts", 1)):
        (found,) = document.select({"name": name})
        found.value = value
    (button,) = document.select({"name": "simulate"})
    button._trigger_event(ButtonClick(button))
    page.update()
    assert asked == [Question(7, "pipeline:1f1b", 2, 1, "1Gbps,0.5ms")]
    (shown,) = document.select({"name": "simulator-answer"})
    assert "a step takes 2 ms" in shown.text
    (bars,) = document.select({"name": "simulated"})
    assert bars.data["compute"] == [1.0, 1.0]


def test_answers_in_words() -> None:
    job = JobView(7)
    assert "simulating" in answer_texts(QUESTION, None, job)[0]
    assert "does not fit" in answer_texts(QUESTION, Answer(problem="it does not fit"), job)[0]
    measured = JobView(7, step_seconds=JobView(1).step_seconds.extended([(1, 0.004)]))
    assert "job 7 takes 4 ms now, so 0.50 times that" in answer_texts(QUESTION, Answer(0.002), measured)[0]
    assert bar_rows(Answer()) == []


def answer(rank: int, *starts: float) -> pb.TraceTaskResponse:
    spans = [
        pb.TraceSpan(instruction=f"0F{at}", category="forward", start=one, seconds=0.1) for at, one in enumerate(starts)
    ]
    return pb.TraceTaskResponse(rank=rank, first_step=10 + rank, steps=3, spans=spans)


def test_a_trace_puts_all_devices_on_one_axis() -> None:
    trace = trace_of(1, {5: answer(0, 100.0, 100.5), 6: answer(1, 100.2), 7: PeerLost("gone")}, 1)
    assert (trace.devices, trace.first_step, trace.problem) == (2, 10, "device 7: gone")
    rows = span_rows(trace)
    assert [(row["device"], round(row["left"]), round(row["right"])) for row in rows] == [
        ("device 5 (rank 0)", 0, 100),
        ("device 5 (rank 0)", 500, 600),
        ("device 6 (rank 1)", 200, 300),
    ]
    assert "steps from 11" in trace_text(trace, False)
    assert "Not all devices" in trace_text(trace, False)


def test_a_trace_is_bounded_and_says_why_it_is_empty() -> None:
    many = {device: answer(device, *map(float, range(MAX_SPANS // 2))) for device in range(4)}
    assert len(trace_of(1, many, 1).spans) == MAX_SPANS
    assert "no step ended" in trace_text(trace_of(1, {1: pb.TraceTaskResponse()}, 1), False)
    assert "gone" in trace_text(trace_of(1, {1: PeerLost("gone")}, 1), False)
    assert trace_text(TraceView(), True) == "The next steps are recorded …"
    hostile = pb.TraceTaskResponse(spans=[pb.TraceSpan(instruction="x" * 999, category="<b>", start=1.0, seconds=-1.0)])
    (row,) = span_rows(trace_of(1, {1: hostile}, 1))
    assert (len(row["text"]), row["category"], row["left"], row["right"]) == (40, "other", 0.0, 0.0)
