"""All devices fall silent at once: the coordinator, or the machine, is the one in trouble, and the job goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fault_cluster import JOB, SLOWLY, cluster_of, job_of, result_of, undisturbed, until

from hoop import job_events as ev
from hoop.runs.audit import audit


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["data"], id="data"),
        pytest.param(["pipeline:1f1b", "--set", "cut=[1]"], id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_all_devices_are_stopped_and_go_on(tmp_path: Path, strategy: list[str]) -> None:
    """A laptop's lid, a paused VM: longer than a lease, and than a connection is kept; nobody is dead."""
    with cluster_of(2, tmp_path) as up:
        options = [*JOB, *SLOWLY, "--strategy", *strategy, "--json", "--coordinator", up.address]
        run = up.start("train", *options, "--out", str(tmp_path / "out"))
        job = job_of(up.cluster)
        until(up.cluster, job, ev.Steps)
        last = list(up.cluster.events())[-1].sequence
        for device in up.devices:
            device.send_signal(signal.SIGSTOP)
        try:
            suspects = set()
            for event in up.cluster.events(follow=True):  # connections are given up after twice a lease
                if event.sequence > last and event.kind == "device_suspect":
                    suspects.add(event.fields["device"])
                if len(suspects) == 2:
                    break
        finally:
            for device in up.devices:
                device.send_signal(signal.SIGCONT)
        result = result_of(run)
        kinds = {event.kind for event in up.cluster.events()}
    assert result["weights_sha256"] == undisturbed()["weights_sha256"]
    assert not kinds & {"device_dead", "communicator_failed", "communicator_rebuilt"}
    audited = audit(tmp_path / "out")
    assert audited.holds, audited
