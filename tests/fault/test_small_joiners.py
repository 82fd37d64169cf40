"""Devices with little memory join a running job: one that has enough for its part takes part, another is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    LARGE_SLOWDOWN,
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

LIMIT = ("--set", "max_steps=30")


def test_a_device_joins_a_job_whose_state_fits_only_with_a_sharded_update(tmp_path: Path) -> None:
    """``sharded_update=auto``: the ranks have chosen it, and the device does not check its memory for a whole state."""
    memory = ("--memory", "5MiB")
    with running_cluster(0, tmp_path) as processes:
        for number in (1, 2, 3):
            processes.start_device("--id", str(number), *memory)
        processes.cluster.wait_for_devices(3, TIMEOUT_S)
        options = (*JOB, *LIMIT, *LARGE_SLOWDOWN, "--coordinator", processes.address, "--out", str(tmp_path / "out"))
        run = processes.start("train", *options, "--json")
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 1)
        processes.start_device("--id", "4", *memory)
        wait_for_event(processes.cluster, job, ev.Resized | ev.Refused)
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
    started = next(event for event in events if isinstance(event, ev.Started))
    assert started.sharded_update
    assert not [event.text for event in events if isinstance(event, ev.Refused)]
    assert sorted(result["device_ids"]) == [1, 2, 3, 4]
    check_same(result, undisturbed(*LIMIT))


@pytest.mark.parametrize("strategy", ["pipeline", pytest.param("data:sharded", marks=pytest.mark.slow)])
def test_a_device_without_memory_for_its_part_is_refused_and_the_others_go_on(strategy: str, tmp_path: Path) -> None:
    """All ranks find out in the recovery that it does not fit; the job once ended by that."""
    with running_cluster(2, tmp_path) as processes:
        options = (*JOB, *LIMIT, *LARGE_SLOWDOWN, "--coordinator", processes.address, "--out", str(tmp_path / "out"))
        run = processes.start("train", *options, "--strategy", strategy, "--json")
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 1)
        processes.start_device("--id", "3", "--memory", "64KiB")
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
    (refused,) = [event for event in events if isinstance(event, ev.Refused)]
    assert refused.device == 3
    assert "cannot take part: memory: " in refused.text
    assert sorted(result["device_ids"]) == [1, 2]
    check_same(result, undisturbed(*LIMIT))
