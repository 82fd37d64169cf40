"""Devices leave, stall, are evicted and rejoin while a job runs; the weights equal those of an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    LARGE_SLOWDOWN,
    SLOWDOWN,
    STEPS,
    TIMEOUT_S,
    all_events,
    result_of,
    running_cluster,
    undisturbed,
    wait_for_event,
    wait_for_job,
    wait_for_step,
)
from reported_rows import check_same

from hoop import job_events as ev


@pytest.mark.slow
def test_a_device_that_leaves_hands_over_its_shards(tmp_path: Path) -> None:
    """SIGTERM: it finishes the step, the other devices take its shards, it exits with code 0; there is no recovery."""
    with running_cluster(3, tmp_path) as processes:
        out = tmp_path / "out"
        run = processes.start("train", *JOB, *SLOWDOWN, "--json", "--coordinator", processes.address, "--out", str(out))
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 5)
        processes.devices[0].send_signal(signal.SIGTERM)  # the rank that reports the steps
        assert processes.devices[0].wait(TIMEOUT_S) == 0
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
        cluster_kinds = [event.kind for event in processes.cluster.events()]
    kinds = [event.kind for event in events]
    assert kinds.count("resized") == 1, kinds
    assert kinds.count("left") == 1, kinds
    assert not {"lost", "recovered", "failed"} & set(kinds), kinds
    assert "device_left" in cluster_kinds
    assert not {"device_dead", "device_suspect", "communicator_failed", "job_failing"} & set(cluster_kinds), (
        cluster_kinds
    )
    assert result["steps"] == STEPS
    check_same(result, undisturbed())


@pytest.mark.slow
def test_a_stalled_device_is_evicted_and_rejoins_by_itself(tmp_path: Path) -> None:
    """SIGSTOP, eviction, SIGCONT: what it still writes has no effect, and it gets a rank again."""
    long = ("--set", "epochs=40")
    with running_cluster(3, tmp_path) as processes:
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *long, *LARGE_SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 5)
        last_sequence = 0
        for times in (1, 2):  # the second stall is detected as quickly as the first
            processes.devices[1].send_signal(signal.SIGSTOP)
            events = processes.cluster.events(after=last_sequence, follow=True)
            evicted = next(
                event for event in events if (event.kind, event.fields.get("device")) == ("device_dead", "2")
            )
            assert "no heartbeat" in evicted.text
            processes.devices[1].send_signal(signal.SIGCONT)  # while the other devices get their new ranks
            last_sequence = evicted.sequence
            later_events = processes.cluster.events(after=last_sequence, follow=True)
            rejoined = next(
                event for event in later_events if (event.kind, event.fields.get("device")) == ("device_joined", "2")
            )
            assert "is here again" in rejoined.text
            wait_for_event(processes.cluster, job, ev.Resized | ev.Recovered, times, ranks=3)
        processes.cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
    check_same(result, undisturbed(*long, "--set", f"max_steps={result['steps']}"))


@pytest.mark.slow
def test_a_killed_device_rejoins_on_its_arena(tmp_path: Path) -> None:
    """It is restarted with its device id and arena while the other device continues, and gets a rank again."""
    long, arena = ("--set", "epochs=40"), ("--id", "9", "--arena", str(tmp_path / "arena"))
    with running_cluster(1, tmp_path) as processes:
        first = processes.start_device(*arena)
        processes.cluster.wait_for_devices(2, TIMEOUT_S)
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *long, *LARGE_SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 5)
        processes.kill(first)
        wait_for_event(processes.cluster, job, ev.Recovered, ranks=1)
        processes.start_device(*arena)
        wait_for_event(processes.cluster, job, ev.Resized, ranks=2)
        processes.cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
        (restarted,) = [member for member in processes.cluster.status().devices if member.device.device_id == 9]
        assert restarted.state == "alive"
        assert [name for name in processes.cluster.device(9).buffers() if "snapshot" not in name] == []
    check_same(result, undisturbed(*long, "--set", f"max_steps={result['steps']}"))


@pytest.mark.slow
def test_devices_of_a_sharded_update_come_and_go(tmp_path: Path) -> None:
    """One joins and one leaves at a step's end, one is killed, and comes back on its arena, which has a part."""
    long, arena = (
        ("--set", "epochs=40", "--set", "sharded_update=on"),
        ("--id", "9", "--arena", str(tmp_path / "arena")),
    )
    with running_cluster(2, tmp_path) as processes:
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *long, *LARGE_SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 3)
        third = processes.start_device(*arena)
        wait_for_event(processes.cluster, job, ev.Resized, ranks=3)
        processes.devices[0].send_signal(signal.SIGTERM)
        assert processes.devices[0].wait(TIMEOUT_S) == 0
        wait_for_event(processes.cluster, job, ev.Resized, ranks=2)
        processes.kill(third)
        wait_for_event(processes.cluster, job, ev.Recovered, ranks=1)
        processes.start_device(*arena)
        wait_for_event(processes.cluster, job, ev.Resized, 2, ranks=2)
        processes.cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
        kinds = [event.kind for event in all_events(processes.cluster, job)]
    assert kinds.count("recovered") == 1, kinds
    check_same(result, undisturbed("--set", "epochs=40", "--set", f"max_steps={result['steps']}"))


@pytest.mark.slow
def test_a_joining_device_needs_the_memory_of_one_of_five_ranks(tmp_path: Path) -> None:
    """Without balancing, a rank of five has two gradient slots, and a rank alone has four, which do not fit here."""
    options = ("--set", "balance=false", "--set", "epochs=40")
    with running_cluster(4, tmp_path) as processes:
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *options, *SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        job = wait_for_job(processes.cluster)
        processes.start_device("--memory", "5632KiB")
        for observed in processes.cluster.job(job).events(coordinator_timeout=TIMEOUT_S):
            assert not isinstance(observed.event, ev.Refused), observed.event.text
            if isinstance(observed.event, ev.Resized | ev.Recovered):
                break
        assert isinstance(observed.event, ev.Resized | ev.Recovered)
        assert observed.event.ranks == 5
        processes.cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
    check_same(result, undisturbed(*options, "--set", f"max_steps={result['steps']}"))
