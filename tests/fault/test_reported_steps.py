"""The membership changes during a job, and with it the rank that reports: each step is reported once, with its loss.

Ranks hold parts of the model here, so that the reporting rank changes with almost every change of membership.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    LARGE_SLOWDOWN,
    TIMEOUT_S,
    result_of,
    running_cluster,
    undisturbed,
    wait_for_event,
    wait_for_job,
    wait_for_step,
)
from faulty_ranks import Fault, run_with_faults
from reported_rows import check_events, check_run, check_same
from small_jobs import JOBS, alone_losses, settings

from hoop import job_events as ev

CHANGED = ev.Resized | ev.Recovered
SIZES = {"hybrid:replicas=2": 4, "pipeline:interleaved": 2}
"""Number of devices, where 3 do not fit the strategy or the model."""


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline:1f1b",
        pytest.param("pipeline:gpipe", id="gpipe", marks=pytest.mark.slow),
        "pipeline:interleaved",
        pytest.param("pipeline:zero-bubble", id="zero-bubble", marks=pytest.mark.slow),
        "ps:bsp",
        "ring",
        pytest.param("hybrid:replicas=2", id="hybrid", marks=pytest.mark.slow),
        pytest.param("data", id="data", marks=pytest.mark.slow),
    ],
)
def test_a_rank_dies_and_another_one_joins(strategy: str) -> None:
    """The last rank, which reports in most strategies, dies; later another one joins as the last rank and reports."""
    changes = {"epochs": 2}
    size = SIZES.get(strategy, 3)
    place = "instruction" if strategy == "data" else "keeps"  # data parallel has no replicas
    death = Fault(size - 1, place, 40 if strategy == "data" else 3)
    pause = Fault(0, place, 90 if strategy == "data" else 8, waits=True)
    results = run_with_faults(size, settings(strategy, **changes), JOBS["normed"], [death, pause], joins=1)
    assert len(results) == size
    losses = alone_losses("normed", tuple(changes.items()))
    check_events([result.outcome.events for result in results.values()], losses)
    evaluated = {event["steps"]: event for result in results.values() for event in result.outcome.of("evaluated")}
    assert sorted(evaluated) == [len(losses) // 2, len(losses)]


SYNCHRONOUS = [
    "pipeline:1f1b",
    *("pipeline:gpipe", "pipeline:zero-bubble", "ps:bsp", "ring", "hybrid:replicas=2", "data"),
]
"""The model has too few blocks for interleaved stages."""
ASYNCHRONOUS = ["ring:async", "ps:asp", "ps:ssp"]


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_device_is_killed_rejoins_another_leaves_and_a_third_joins(tmp_path: Path, strategy: str) -> None:
    """On a cluster: a device is killed and restarted on its arena, another one leaves, a third one joins."""
    size = SIZES.get(strategy, 3)
    long = ("--set", "epochs=40")
    with running_cluster(0, tmp_path) as processes:
        arenas = [("--id", str(number), "--arena", str(tmp_path / f"arena{number}")) for number in range(1, size + 1)]
        devices = [processes.start_device(*arena) for arena in arenas]
        processes.cluster.wait_for_devices(size, TIMEOUT_S)
        out = tmp_path / "out"
        options = [*JOB, *long, *LARGE_SLOWDOWN, "--strategy", strategy, "--out", str(out), "--json"]
        run = processes.start("train", *options, "--coordinator", processes.address)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 5)
        processes.kill(devices[-1])
        wait_for_event(processes.cluster, job, CHANGED, ranks=size - 1)
        processes.start_device(*arenas[-1])
        wait_for_event(processes.cluster, job, CHANGED, ranks=size)
        devices[0].send_signal(signal.SIGTERM)
        assert devices[0].wait(TIMEOUT_S) == 0
        wait_for_event(processes.cluster, job, CHANGED, 2, ranks=size - 1)
        processes.start_device("--id", "9")
        wait_for_event(processes.cluster, job, CHANGED, 2, ranks=size)
        processes.cluster.job(job).stop()
        result = result_of(run, out)
    if strategy in ASYNCHRONOUS:
        check_run(out, result["steps"])
    else:
        check_same(result, undisturbed(*long, "--set", f"max_steps={result['steps']}"))
