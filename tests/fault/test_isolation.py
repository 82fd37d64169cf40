"""If the coordinator hears no device at all, it takes itself for isolated and declares none dead; the job continues."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import JOB, SLOWDOWN, result_of, running_cluster, undisturbed, wait_for_event, wait_for_job

from hoop import job_events as ev
from hoop.runs.audit import audit


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["data"], id="data", marks=pytest.mark.slow),
        pytest.param(["pipeline:1f1b", "--set", "cut=[1]"], id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_all_devices_are_stopped_and_continue(tmp_path: Path, strategy: list[str]) -> None:
    """As with a suspended laptop or VM: longer than a lease and than a connection is kept open; no device is dead."""
    with running_cluster(2, tmp_path) as processes:
        options = [*JOB, *SLOWDOWN, "--strategy", *strategy, "--json", "--coordinator", processes.address]
        run = processes.start("train", *options, "--out", str(tmp_path / "out"))
        job = wait_for_job(processes.cluster)
        wait_for_event(processes.cluster, job, ev.Steps)
        last = list(processes.cluster.events())[-1].sequence
        for device in processes.devices:
            device.send_signal(signal.SIGSTOP)
        try:
            suspects = set()
            for event in processes.cluster.events(follow=True):  # connections are closed after two leases
                if event.sequence > last and event.kind == "device_suspect":
                    suspects.add(event.fields["device"])
                if len(suspects) == 2:
                    break
        finally:
            for device in processes.devices:
                device.send_signal(signal.SIGCONT)
        result = result_of(run)
        kinds = {event.kind for event in processes.cluster.events()}
    assert result["weights_sha256"] == undisturbed()["weights_sha256"]
    assert not kinds & {"device_dead", "communicator_failed", "communicator_rebuilt"}
    audited = audit(tmp_path / "out")
    assert audited.holds, audited
