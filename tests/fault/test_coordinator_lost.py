"""The coordinator is killed in the middle of a training and started again: nobody has to begin anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    SLOWLY,
    STEPS,
    all_events,
    cluster_of,
    job_of,
    result_of,
    steps_reported,
    undisturbed,
    until_step,
)
from reported_rows import check_same

from hoop import job_events as ev


@pytest.mark.slow
def test_training_goes_on_and_is_found_again(tmp_path: Path) -> None:
    """Killed twice; whoever follows it, and whoever comes later, see the whole of it."""
    with cluster_of(3, tmp_path) as up:
        out = ("--out", str(tmp_path / "out"))
        run = up.start("train", *JOB, *SLOWLY, "--json", "--coordinator", up.address, *out)
        job = job_of(up.cluster)
        for step in (10, 40):
            until_step(up.cluster, job, step)
            up.kill(up.coordinator)
            up.again()
            assert job_of(up.cluster, "job_found") == job
        result = result_of(run, tmp_path / "out")
        events = all_events(up.cluster, job)
    assert result["steps"] == STEPS
    check_same(result, undisturbed())
    assert steps_reported(events) == list(range(STEPS)), "the restarted coordinator has every step"
    assert not any(isinstance(one, ev.DeviceLost | ev.Reassigned | ev.Recovered) for one in events), (
        "nobody was disturbed"
    )


def test_devices_die_while_it_is_away_and_while_they_recover(tmp_path: Path) -> None:
    """One dies without a coordinator, another when it is just back: whoever is left finishes, to the same bits."""
    with cluster_of(3, tmp_path) as up:
        out = ("--out", str(tmp_path / "out"))
        run = up.start("train", *JOB, *SLOWLY, "--json", "--coordinator", up.address, *out)
        job = job_of(up.cluster)
        until_step(up.cluster, job, 10)
        up.kill(up.coordinator)
        up.kill(up.devices[0])
        up.again()
        for event in up.cluster.events(follow=True):
            if event.kind == "communicator_rebuilt":  # the survivors are just being seated
                up.kill(up.devices[1])
                break
        result = result_of(run, tmp_path / "out")
        events = all_events(up.cluster, job)
    assert [one.device for one in events if isinstance(one, ev.DeviceLost)] == [1, 2]
    check_same(result, undisturbed())
    assert steps_reported(events)[-1] == STEPS - 1
