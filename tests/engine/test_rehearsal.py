"""Before the first step ranks measure what a step costs, and rehearse whole steps; the results do not change."""

from __future__ import annotations

import pytest
from forked_ranks import checkpoint, differing, tensors_in, train
from short_jobs import JOBS, alone
from small_jobs import settings

from hoop.cli.dashboard import simulated
from hoop.dashboard.simulator import Question
from hoop.engine import rehearsal
from hoop.runs.prediction import measured_job_costs, predicted_step_seconds

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "tcp")  # shm is there


@pytest.mark.parametrize(
    ("scheme", "strategy", "devices"), [("shm", "data", 2), ("shm", "pipeline:1f1b", 3), ("tcp", "ring", 2)]
)
def test_ranks_measure_communication_costs(scheme: str, strategy: str, devices: int) -> None:
    job_settings = settings(strategy)
    outcomes = train(scheme, devices, job_settings, JOBS["mlp"], briefly=False)
    assert differing(alone("mlp"), tensors_in(checkpoint(outcomes))) == []
    (started,) = [event for one in outcomes for event in one.of("started")]
    costs = {name: value for name, value in started["costs"].items() if name != "rehearsed_s"}
    assert all(costs[name] > 0 for name in ("message_s", "agree_s", "update_s", "copy_s", "add_s"))
    assert ("meeting_s" in costs) == (scheme == "shm")
    assert costs["late_share"] >= 0
    later = predicted_step_seconds({**costs, "late_share": costs["late_share"] + 1}, job_settings)
    assert later is not None
    assert [size for size, _ in costs["copy_at"]] == [size for size, _ in costs["add_at"]]
    machine = measured_job_costs(costs).machine
    assert (machine.message_s, machine.agree_s) == (costs["message_s"], costs["agree_s"])
    with_replicas = predicted_step_seconds(costs, job_settings)
    without_replicas = predicted_step_seconds(costs, job_settings.replaced({"replicate": False}))
    assert with_replicas is not None
    assert later > with_replicas, "a step ends when the slowest rank has computed"
    assert without_replicas is not None
    assert with_replicas > without_replicas if strategy != "data" else with_replicas == without_replicas


@pytest.mark.parametrize(
    ("strategy", "devices", "job", "cut"),
    [
        ("data", 1, "normed", ()),
        ("data", 3, "normed", ()),
        ("data:sharded", 2, "normed", ()),
        ("pipeline:zero-bubble", 3, "mlp", ()),
        ("ring", 2, "normed", (2,)),
        ("hybrid:replicas=2", 4, "normed", (2,)),
        ("ps:bsp,servers=2", 4, "normed", ()),
    ],
)
def test_rehearsed_steps_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, strategy: str, devices: int, job: str, cut: tuple[int, ...]
) -> None:
    """Batch norms, dropout and counters: state, bytes and counted work are those of a run that rehearsed nothing."""
    wanted = settings(strategy, cut=cut)  # what is sent depends on it
    monkeypatch.setattr(rehearsal, "SECONDS", 600.0)  # steps on a busy machine are rehearsed too
    monkeypatch.setattr(rehearsal, "MAX_STEPS", 9)
    outcomes = train("shm", devices, wanted, JOBS[job], briefly=False)
    assert differing(alone(job), tensors_in(checkpoint(outcomes))) == []
    monkeypatch.setattr(rehearsal, "SECONDS", 0.0)
    plain = train("shm", devices, wanted, JOBS[job], briefly=False)
    for rehearsed, other in zip(outcomes, plain, strict=True):
        assert rehearsed.account["bytes_sent"] == other.account["bytes_sent"]
        assert rehearsed.account["instructions"] == other.account["instructions"]
        assert sorted(rehearsed.executed) == sorted(other.executed)  # the order of a rule depends on arrivals
        assert rehearsed.losses == other.losses
        fed, its = ([row for event in one.of("steps") for row in event["fed"]] for one in (rehearsed, other))
        assert fed == its
    costs, without = (one["costs"] for run in (outcomes, plain) for rank in run for one in rank.of("started"))
    assert "rehearsed_s" not in without
    predicted = predicted_step_seconds(costs, wanted)
    assert predicted is not None
    twice = predicted_step_seconds({**costs, "rehearsed_s": 2 * costs["rehearsed_s"]}, wanted)
    assert twice == pytest.approx(2 * predicted)


@pytest.mark.parametrize("strategy", ["ring:async", "ps:asp"])
def test_steps_of_asynchronous_strategies_are_not_rehearsed(strategy: str) -> None:
    outcomes = train("shm", 2, settings(strategy), JOBS["mlp"], briefly=False)
    (started,) = [event for one in outcomes for event in one.of("started")]
    assert "rehearsed_s" not in started["costs"]


def test_the_dashboards_simulator_answers_from_the_costs_that_a_job_has_measured() -> None:
    job_settings = settings("data")
    outcomes = train("shm", 2, job_settings, JOBS["mlp"], briefly=False)
    (started,) = [event for one in outcomes for event in one.of("started")]
    text = job_settings.to_json()
    for strategy, devices, per_host in (("data", 4, 2), ("pipeline:1f1b", 2, 1), ("ps:asp", 3, 3)):
        answer = simulated(started["costs"], text, Question(1, strategy, devices, per_host, "1Gbps,0.5ms"))
        assert answer.problem == ""
        assert answer.step_seconds > 0
        assert len(answer.shares) == devices
        assert all(sum(shares) <= 1.01 * answer.step_seconds for shares in answer.shares)
    slow, fast = (
        simulated(started["costs"], text, Question(1, "data", 4, 1, link)).step_seconds
        for link in ("100Mbps,10ms", "100Gbps,0.01ms")
    )
    assert slow > fast
    huge = simulated(started["costs"], text, Question(1, "ring:async", 256, 8, "1Gbps,0.5ms"))
    assert "choose fewer devices" in huge.problem


KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("devices", "memory"), [(1, 24 << 20), (2, 24 << 20)])
def test_a_step_on_a_gpu_is_measured_without_a_trace(kind: str, devices: int, memory: int) -> None:
    """Batch norms and dropout: the weights are those of a run that measured on another number of devices."""
    wanted = settings("data", accelerator=kind)
    outcomes = train("shm", devices, wanted, JOBS["normed"], memory=memory, briefly=False)
    if kind == "emulated":
        assert differing(alone("normed"), tensors_in(checkpoint(outcomes))) == []
    (started,) = [event for one in outcomes for event in one.of("started")]
    gpu = started["costs"]["gpu"]
    assert gpu["rows"] == wanted.batch_size // devices
    assert (gpu["finish_s"] > 0, gpu["bytes_read"] > 0) == (devices > 1, devices > 1)
    assert gpu["compute_s"] > 0
    assert gpu["step_s"] > 0
    assert gpu["copy_s"] > 0
    assert (gpu["sharing"], gpu["name"] != "") == (devices if gpu["gpus"] == 1 else 1, True)
    predicted = predicted_step_seconds(started["costs"], wanted)
    assert predicted is not None
    assert predicted >= gpu["step_s"]
    executed = [one.account["instructions"] for one in outcomes]
    assert len(set(executed)) == 1
    steps = sum(len(event["loss"]) for one in outcomes for event in one.of("steps"))
    assert executed[0] <= 3 * steps + 8  # the measured steps are not among them


def test_a_state_that_does_not_fit_on_the_gpu_is_refused() -> None:
    """All ranks raise the same error, before the first step."""
    with pytest.raises(AssertionError, match=r"memory: rank 0 needs .* on its GPU .*; use --memory \d+MiB"):
        train("shm", 2, settings("data", accelerator="emulated", shards=32), JOBS["mlp"], memory=10 << 20)


def test_one_rank_measures_no_communication() -> None:
    (outcome,) = train("shm", 1, settings("data"), JOBS["mlp"], briefly=False)
    (started,) = outcome.of("started")
    assert "message_s" not in started["costs"]
    assert predicted_step_seconds(started["costs"], settings("data"))
