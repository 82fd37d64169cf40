"""If the process that runs ``hoop chaos`` is killed, none of its processes outlives it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TIMEOUT_S = 240.0
OWNER = """
import sys
from pathlib import Path
from hoop.lab.chaos.processes import ClusterProcesses
from hoop.client.cluster import connect
with ClusterProcesses(Path(sys.argv[1]), 1, 1 << 20) as fleet, connect(fleet.address) as cluster:
    cluster.wait_for_devices(1, 240.0)
    print(fleet.coordinator.pid, fleet.devices[0].pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_the_processes_exit_when_their_owner_is_killed() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", OWNER, str(Path(folder))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as owner,
    ):
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        owner.kill()
        for pid, pidfd in zip(pids, pidfds, strict=True):
            exited, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
            os.close(pidfd)
            assert exited, f"process {pid} outlived its owner"
    assert len(pids) == 2
