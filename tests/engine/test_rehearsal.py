"""Before the first step ranks measure what they cost each other, on any links, and nothing of the run changes by it."""

from __future__ import annotations

import pytest
from forked_ranks import checkpoint, differing, tensors_in, train
from small_jobs import JOBS, alone, settings

from hoop.runs.prediction import measured_job_costs, predicted_step_seconds

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "tcp")  # shm is there


@pytest.mark.parametrize(
    ("scheme", "strategy", "devices"), [("shm", "data", 2), ("shm", "pipeline:1f1b", 3), ("tcp", "ring", 2)]
)
def test_ranks_measure_what_they_cost_each_other(scheme: str, strategy: str, devices: int) -> None:
    wanted = settings(strategy)
    outcomes = train(scheme, devices, wanted, JOBS["mlp"])
    assert differing(alone("mlp"), tensors_in(checkpoint(outcomes))) == []
    (started,) = [told for one in outcomes for told in one.of("started")]
    told = started["costs"]
    assert all(told[name] > 0 for name in ("message_s", "agree_s", "update_s", "copy_s", "add_s"))
    assert ("meeting_s" in told) == (scheme == "shm")
    assert [size for size, _ in told["copy_at"]] == [size for size, _ in told["add_at"]]
    machine = measured_job_costs(told).machine
    assert (machine.message_s, machine.agree_s) == (told["message_s"], told["agree_s"])
    with_copies = predicted_step_seconds(told, wanted)
    without = predicted_step_seconds(told, wanted.replaced({"replicate": False}))
    assert with_copies is not None
    assert without is not None
    assert with_copies > without if strategy != "data" else with_copies == without


def test_one_rank_has_nobody_to_measure() -> None:
    (outcome,) = train("shm", 1, settings("data"), JOBS["mlp"])
    (started,) = outcome.of("started")
    assert "message_s" not in started["costs"]
    assert predicted_step_seconds(started["costs"], settings("data"))
