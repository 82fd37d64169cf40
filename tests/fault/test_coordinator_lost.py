"""The coordinator is killed and restarted during a job: the job continues and loses no step."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    SLOWDOWN,
    STEPS,
    TIMEOUT_S,
    all_events,
    reported_steps,
    result_of,
    running_cluster,
    undisturbed,
    wait_for_job,
    wait_for_step,
)
from reported_rows import check_same

from hoop import job_events as ev
from hoop.client.cluster import DrainProgress

FEW = 60
LIMIT = ("--set", f"max_steps={FEW}")


@pytest.mark.slow
def test_the_job_continues_and_the_restarted_coordinator_finds_it(tmp_path: Path) -> None:
    """Killed twice: the client that follows the job, and one that connects later, get all its events."""
    with running_cluster(3, tmp_path) as processes:
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        job = wait_for_job(processes.cluster)
        for step in (10, 40):
            wait_for_step(processes.cluster, job, step)
            processes.kill(processes.coordinator)
            processes.restart_coordinator()
            assert wait_for_job(processes.cluster, "job_found") == job
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
    assert result["steps"] == STEPS
    check_same(result, undisturbed())
    assert reported_steps(events) == list(range(STEPS)), "the restarted coordinator lacks steps"
    assert not any(isinstance(event, ev.DeviceLost | ev.Reassigned | ev.Recovered) for event in events), (
        "a device was disturbed"
    )


def test_devices_die_during_the_outage_and_during_recovery(tmp_path: Path) -> None:
    """One dies while there is no coordinator, another after the restart: the third finishes with the same weights."""
    with running_cluster(3, tmp_path) as processes:
        out = ("--out", str(tmp_path / "out"))
        options = (*JOB, *LIMIT, *SLOWDOWN, "--json", *out)
        run = processes.start("train", *options, "--coordinator", processes.address)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 10)
        processes.kill(processes.coordinator)
        processes.kill(processes.devices[0])
        processes.restart_coordinator()
        for event in processes.cluster.events(follow=True):
            if event.kind == "communicator_rebuilt":  # the survivors are getting their new ranks
                processes.kill(processes.devices[1])
                break
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
    assert [event.device for event in events if isinstance(event, ev.DeviceLost)] == [1, 2]
    check_same(result, undisturbed(*LIMIT))
    assert reported_steps(events)[-1] == FEW - 1


def test_a_drain_goes_on_after_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """The only device of a job is drained; the coordinator is killed while the drain waits for another device."""
    with running_cluster(1, tmp_path) as processes:
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        wait_for_step(processes.cluster, wait_for_job(processes.cluster), 1)
        stages: list[str] = []

        def interfere(progress: DrainProgress) -> None:
            if progress.stage == "moving":
                return  # so it is, too, while the restarted coordinator asks the devices for their tasks
            if progress.stage == "waiting" and not stages:
                processes.kill(processes.coordinator)
                processes.restart_coordinator()
            if progress.stage == "waiting" and stages[-1:] == ["interrupted"]:
                processes.start_device("--id", "2")
            stages.extend([progress.stage] * (stages[-1:] != [progress.stage]))

        processes.cluster.drain(1, TIMEOUT_S, interfere)
        result = result_of(run, tmp_path / "out")
    assert stages[:3] == ["waiting", "interrupted", "waiting"]
    assert stages[-2:] == ["leaving", "left"]
    assert result["device_ids"] == [2]
    check_same(result, undisturbed())
