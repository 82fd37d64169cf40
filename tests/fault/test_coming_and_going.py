"""Devices leave on notice, join, stall and come back while a job runs; the weights are those of an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

from fault_cluster import (
    JOB,
    PATIENCE_S,
    SLOWLY,
    STEPS,
    all_told,
    cluster_of,
    job_of,
    result_of,
    undisturbed,
    until_step,
)


def test_a_device_that_is_told_to_leave_hands_over(tmp_path: Path) -> None:
    """SIGTERM: it finishes the step, the others take its shards, it ends with code 0; nothing is recovered."""
    with cluster_of(3, tmp_path) as up:
        run = up.start("train", *JOB, *SLOWLY, "--json", "--coordinator", up.address)
        job = job_of(up.cluster)
        until_step(up.cluster, job, 5)
        up.devices[0].send_signal(signal.SIGTERM)  # the one that tells the figures
        assert up.devices[0].wait(PATIENCE_S) == 0
        result = result_of(run)
        told = all_told(up.cluster, job)
        happened = [event.kind for event in up.cluster.events()]
    kinds = [one.kind for one in told]
    assert kinds.count("moved") == 1, kinds
    assert kinds.count("left") == 1, kinds
    assert not {"lost", "recovered", "failed"} & set(kinds), kinds
    assert "device_left" in happened
    assert not {"device_dead", "device_suspect", "communicator_failed", "job_failing"} & set(happened), (
        happened
    )
    assert result["weights_sha256"] == undisturbed()["weights_sha256"]
    assert result["steps"] == STEPS
