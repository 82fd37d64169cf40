"""The machine with the coordinator is lost in the middle of a training: one that stands by takes over."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from fault_cluster import (
    JOB,
    PATIENCE_S,
    SLOWLY,
    STEPS,
    Processes,
    all_events,
    job_of,
    result_of,
    steps_reported,
    undisturbed,
    until_step,
)
from real_etcd import RealEtcd, free_port, needs_etcd, running_etcd
from reported_rows import check_same

from hoop import job_events as ev


class Pair(Processes):
    """Two coordinators on one journal in etcd, the second standing by; everybody knows both addresses."""

    def __init__(self, folder: Path, ended: ExitStack, devices: int, etcd: RealEtcd) -> None:
        self._journal = ("--journal", f"etcd://{etcd.address}/test", "--journal-lease", "2s")
        super().__init__(folder, ended, devices)

    def coordinate(self, *_: str) -> subprocess.Popen[str]:
        places = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.address = ",".join(places)
        first, self.second = (self._coordinator(place) for place in places)
        return first

    def _coordinator(self, place: str) -> subprocess.Popen[str]:
        """Started; it has the journal, or says that another has."""
        process = self.start("coordinator", *self._journal, "--port", place.rpartition(":")[2])
        said, until = self.folder / "coordinator.err", time.monotonic() + PATIENCE_S
        while f"pid {process.pid}" not in said.read_text() and "waiting" not in said.read_text():
            assert time.monotonic() < until, said.read_text()
            time.sleep(0.02)
        return process


@needs_etcd
def test_the_job_and_the_members_are_found_by_the_other(tmp_path: Path) -> None:
    with running_etcd(tmp_path) as etcd, ExitStack() as ended:
        up = Pair(tmp_path, ended, 3, etcd)
        out = ("--out", str(tmp_path / "out"))
        run = up.start("train", *JOB, *SLOWLY, "--json", "--coordinator", up.address, *out)
        job = job_of(up.cluster)
        until_step(up.cluster, job, 10)
        up.kill(up.coordinator)
        up.cluster.wait_ready(PATIENCE_S)
        assert job_of(up.cluster, "job_found") == job
        now = up.cluster.status()
        assert now.pid == up.second.pid, "the second answers"
        assert sorted(one.device.device_id for one in now.devices) == [1, 2, 3]
        result = result_of(run, tmp_path / "out")
        events = all_events(up.cluster, job)
    assert result["steps"] == STEPS
    check_same(result, undisturbed())
    assert steps_reported(events) == list(range(STEPS)), "the second has every step"
    assert not any(isinstance(one, ev.DeviceLost | ev.Reassigned | ev.Recovered) for one in events), (
        "nobody was disturbed"
    )
