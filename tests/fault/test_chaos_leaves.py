"""Whoever leads a run under faults may be killed without a word: none of its processes outlives it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PATIENCE_S = 60.0
OWNER = """
import sys
from pathlib import Path
from hoop.lab.chaos.processes import ClusterProcesses
from hoop.client.cluster import connect
with ClusterProcesses(Path(sys.argv[1]), 1, 1 << 20) as fleet, connect(fleet.address) as cluster:
    cluster.wait_for_devices(1)
    print(fleet.coordinator.pid, fleet.devices[0].pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_its_processes_leave_when_it_is_killed() -> None:
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
        ends = [os.pidfd_open(pid) for pid in pids]
        owner.kill()
        for pid, end in zip(pids, ends, strict=True):
            gone, _, _ = select.select([end], [], [], PATIENCE_S)
            os.close(end)
            assert gone, f"process {pid} outlived its owner"
    assert len(pids) == 2
