"""The ranks change while a job runs, and with them the one that reports: each step is reported once, with its loss.

Devices hold parts of the model here, so that another rank reports after almost every change.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    PATIENCE_S,
    SLOWEST,
    cluster_of,
    job_of,
    result_of,
    undisturbed,
    until,
    until_step,
)
from mortal_ranks import Fault, survive
from reported_rows import check_events, check_run, check_same
from small_jobs import JOBS, alone_losses, settings

from hoop import job_events as ev

CHANGED = ev.Resized | ev.Recovered
SIZES = {"hybrid:replicas=2": 4, "pipeline:interleaved": 2}
"""Devices, where 3 do not fit the strategy or the model."""


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
def test_one_dies_and_another_joins(strategy: str) -> None:
    """The last rank, which reports in most strategies, dies; later a newcomer takes the last place, and reports."""
    changes = {"epochs": 2}
    size = SIZES.get(strategy, 3)
    place = "instruction" if strategy == "data" else "keeps"  # data parallel has no mirrors
    dies = Fault(size - 1, place, 40 if strategy == "data" else 3)
    waits = Fault(0, place, 90 if strategy == "data" else 8, waits=True)
    ended = survive(size, settings(strategy, **changes), JOBS["normed"], [dies, waits], joins=1)
    assert len(ended) == size
    losses = alone_losses("normed", tuple(changes.items()))
    check_events([one.outcome.events for one in ended.values()], losses)
    evaluated = {told["steps"]: told for one in ended.values() for told in one.outcome.of("evaluated")}
    assert sorted(evaluated) == [len(losses) // 2, len(losses)]


SYNCHRONOUS = [
    "pipeline:1f1b",
    *("pipeline:gpipe", "pipeline:zero-bubble", "ps:bsp", "ring", "hybrid:replicas=2", "data"),
]
"""The model has too few blocks for interleaved stages."""
ASYNCHRONOUS = ["ring:async", "ps:asp", "ps:ssp"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "strategy",
    [
        SYNCHRONOUS[0],
        *(pytest.param(one, id=f"{one}", marks=pytest.mark.slow) for one in [*SYNCHRONOUS[1:], *ASYNCHRONOUS]),
    ],
)
def test_a_kill_a_return_a_leave_and_a_join(tmp_path: Path, strategy: str) -> None:
    """On a cluster: one is killed and comes back on its arena, another leaves on notice, a third joins."""
    size = SIZES.get(strategy, 3)
    long = ("--set", "epochs=40")
    with cluster_of(0, tmp_path) as up:
        arenas = [("--id", str(number), "--arena", str(tmp_path / f"arena{number}")) for number in range(1, size + 1)]
        devices = [up.device(*arena) for arena in arenas]
        up.cluster.wait_for_devices(size)
        out = tmp_path / "out"
        options = [*JOB, *long, *SLOWEST, "--strategy", strategy, "--out", str(out), "--json"]
        run = up.start("train", *options, "--coordinator", up.address)
        job = job_of(up.cluster)
        until_step(up.cluster, job, 5)
        up.kill(devices[-1])
        until(up.cluster, job, CHANGED, ranks=size - 1)
        up.device(*arenas[-1])
        until(up.cluster, job, CHANGED, ranks=size)
        devices[0].send_signal(signal.SIGTERM)
        assert devices[0].wait(PATIENCE_S) == 0
        until(up.cluster, job, CHANGED, 2, ranks=size - 1)
        up.device("--id", "9")
        until(up.cluster, job, CHANGED, 2, ranks=size)
        up.cluster.job(job).stop()
        result = result_of(run, out)
    if strategy in ASYNCHRONOUS:
        check_run(out, result["steps"])
    else:
        check_same(result, undisturbed(*long, "--set", f"max_steps={result['steps']}"))
