"""Devices leave on notice, join, stall and come back while a job runs; the weights are those of an undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    PATIENCE_S,
    SLOWEST,
    SLOWLY,
    STEPS,
    all_events,
    cluster_of,
    job_of,
    result_of,
    undisturbed,
    until,
    until_step,
)
from reported_rows import check_same

from hoop import job_events as ev


def test_a_device_that_is_told_to_leave_hands_over(tmp_path: Path) -> None:
    """SIGTERM: it finishes the step, the others take its shards, it ends with code 0; nothing is recovered."""
    with cluster_of(3, tmp_path) as up:
        out = tmp_path / "out"
        run = up.start("train", *JOB, *SLOWLY, "--json", "--coordinator", up.address, "--out", str(out))
        job = job_of(up.cluster)
        until_step(up.cluster, job, 5)
        up.devices[0].send_signal(signal.SIGTERM)  # the one that tells the figures
        assert up.devices[0].wait(PATIENCE_S) == 0
        result = result_of(run, tmp_path / "out")
        events = all_events(up.cluster, job)
        happened = [event.kind for event in up.cluster.events()]
    kinds = [one.kind for one in events]
    assert kinds.count("resized") == 1, kinds
    assert kinds.count("left") == 1, kinds
    assert not {"lost", "recovered", "failed"} & set(kinds), kinds
    assert "device_left" in happened
    assert not {"device_dead", "device_suspect", "communicator_failed", "job_failing"} & set(happened), happened
    assert result["steps"] == STEPS
    check_same(result, undisturbed())


@pytest.mark.slow
def test_one_that_stalls_is_evicted_and_comes_back_by_itself(tmp_path: Path) -> None:
    """SIGSTOP, eviction, SIGCONT: what it still writes changes nothing, and it takes part again."""
    long = ("--set", "epochs=40")
    with cluster_of(3, tmp_path) as up:
        out = ("--out", str(tmp_path / "out"))
        run = up.start("train", *JOB, *long, *SLOWEST, "--json", "--coordinator", up.address, *out)
        job = job_of(up.cluster)
        until_step(up.cluster, job, 5)
        seen = 0
        for times in (1, 2):  # a second time it is known by its silence as quickly as the first
            up.devices[1].send_signal(signal.SIGSTOP)
            news = up.cluster.events(after=seen, follow=True)
            evicted = next(one for one in news if (one.kind, one.fields.get("device")) == ("device_dead", "2"))
            assert "no heartbeat" in evicted.text
            up.devices[1].send_signal(signal.SIGCONT)  # while the others are being seated
            seen = evicted.sequence
            after = up.cluster.events(after=seen, follow=True)
            back = next(one for one in after if (one.kind, one.fields.get("device")) == ("device_joined", "2"))
            assert "is here again" in back.text
            until(up.cluster, job, ev.Resized | ev.Recovered, times, ranks=3)
        up.cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
    check_same(result, undisturbed(*long, "--set", f"max_steps={result['steps']}"))


@pytest.mark.slow
def test_one_that_is_killed_comes_back_on_its_memory(tmp_path: Path) -> None:
    """Restarted on its arena under its old number while the others go on, it is one of them again."""
    long, arena = ("--set", "epochs=40"), ("--id", "9", "--arena", str(tmp_path / "arena"))
    with cluster_of(1, tmp_path) as up:
        first = up.device(*arena)
        up.cluster.wait_for_devices(2)
        out = ("--out", str(tmp_path / "out"))
        run = up.start("train", *JOB, *long, *SLOWEST, "--json", "--coordinator", up.address, *out)
        job = job_of(up.cluster)
        until_step(up.cluster, job, 5)
        up.kill(first)
        until(up.cluster, job, ev.Recovered, ranks=1)
        up.device(*arena)
        until(up.cluster, job, ev.Resized, ranks=2)
        up.cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
        (restarted,) = [one for one in up.cluster.status().devices if one.device.device_id == 9]
        assert restarted.state == "alive"
        assert [name for name in up.cluster.device(9).buffers() if "snapshot" not in name] == []
    check_same(result, undisturbed(*long, "--set", f"max_steps={result['steps']}"))
