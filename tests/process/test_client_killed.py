"""A client is killed in the middle of an operation: what it had on the cluster is freed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hoop

if TYPE_CHECKING:
    from background import Running

    Wait = Callable[..., Any]

UP = ("--devices", "2", "--memory", "64MiB")
CLIENT = """
import sys
import numpy as np
import hoop
with hoop.connect(sys.argv[1]) as cluster:
    comm = cluster.communicator(2)
    print(comm.id, flush=True)
    while True:
        comm.all_reduce([np.ones(1_000_000, "float32")] * 2)
"""


def used(cluster: hoop.Cluster) -> list[str]:
    """The names of all buffers of all devices."""
    ids = [one.device.device_id for one in cluster.status().devices]
    return [name for device_id in ids for name in cluster.device(device_id).buffers()]


def test_its_memory_and_communicators_are_freed(up: Running, cluster: hoop.Cluster, await_event: Wait) -> None:
    """A communicator of somebody else stays, as does memory that has a name of its own."""
    mine = cluster.communicator(2)
    mine.buffer("weights", 10)
    command = [sys.executable, "-c", CLIENT, up.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            theirs = int(client.stdout.readline())
            while not any(name.startswith("hoop.staging.") for name in used(cluster)):
                assert client.poll() is None
        finally:
            client.kill()
    await_event(up.address, "communicator_destroyed", communicator=theirs)
    while any(name.startswith("hoop.staging.") for name in used(cluster)):  # the next thing that the coordinator does
        assert mine.status().status != "failed"
    assert used(cluster) == ["weights", "weights"]
    mine.barrier()
    mine.destroy()
