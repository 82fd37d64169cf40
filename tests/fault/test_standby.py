"""The machine of the coordinator is lost during a job: the standby coordinator takes over."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from fault_cluster import (
    JOB,
    SLOWDOWN,
    STEPS,
    TIMEOUT_S,
    ClusterProcesses,
    all_events,
    reported_steps,
    result_of,
    undisturbed,
    wait_for_job,
    wait_for_step,
)
from free_ports import free_port
from real_etcd import RealEtcd, needs_etcd, running_etcd
from reported_rows import check_same

from hoop import job_events as ev


class CoordinatorPair(ClusterProcesses):
    """A coordinator and a standby coordinator on one journal in etcd; devices and clients know both addresses."""

    def __init__(self, folder: Path, cleanup: ExitStack, devices: int, etcd: RealEtcd) -> None:
        self._journal = ("--journal", f"etcd://{etcd.address}/test", "--journal-lease", "2s")
        super().__init__(folder, cleanup, devices)

    def start_coordinator(self, *_: str) -> subprocess.Popen[str]:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.address = ",".join(addresses)
        first, self.standby = (self._coordinator(address) for address in addresses)
        return first

    def _coordinator(self, address: str) -> subprocess.Popen[str]:
        """Starts a coordinator; waits until it holds the journal or reports that another one does."""
        process = self.start("coordinator", *self._journal, "--port", address.rpartition(":")[2])
        log, deadline = self.folder / "coordinator.err", time.monotonic() + TIMEOUT_S
        while f"pid {process.pid}" not in log.read_text() and "waiting" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        return process


@needs_etcd
def test_the_standby_takes_over_the_job_and_the_members(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, ExitStack() as cleanup:
        processes = CoordinatorPair(tmp_path, cleanup, 3, etcd)
        out = ("--out", str(tmp_path / "out"))
        run = processes.start("train", *JOB, *SLOWDOWN, "--json", "--coordinator", processes.address, *out)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 10)
        processes.kill(processes.coordinator)
        processes.cluster.wait_ready(TIMEOUT_S)
        assert wait_for_job(processes.cluster, "job_found") == job
        status = processes.cluster.status()
        assert status.pid == processes.standby.pid, "the standby did not answer"
        assert sorted(member.device.device_id for member in status.devices) == [1, 2, 3]
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
    assert result["steps"] == STEPS
    check_same(result, undisturbed())
    assert reported_steps(events) == list(range(STEPS)), "the standby lacks steps"
    assert not any(isinstance(event, ev.DeviceLost | ev.Reassigned | ev.Recovered) for event in events), (
        "a device was disturbed"
    )
