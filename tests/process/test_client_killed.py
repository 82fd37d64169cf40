"""A client is killed during an operation: its communicators and staging memory on the cluster are freed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import preloaded

import hoop

if TYPE_CHECKING:
    from background import Running

    Wait = Callable[..., Any]

LONG_S = 240.0
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


def buffer_names(cluster: hoop.Cluster) -> list[str]:
    """The names of the buffers on all devices."""
    ids = [one.device.device_id for one in cluster.status().devices]
    return [name for device_id in ids for name in cluster.device(device_id).buffers()]


def test_memory_and_communicators_of_a_killed_client_are_freed(
    up: Running, cluster: hoop.Cluster, await_event: Wait
) -> None:
    """Another client's communicator and named buffers stay."""
    comm = cluster.communicator(2)
    comm.buffer("weights", 10)
    command = [sys.executable, "-c", CLIENT, up.address]
    with preloaded.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            killed_client_comm_id = int(client.stdout.readline())
            deadline = time.monotonic() + LONG_S
            while not any(name.startswith("hoop.staging.") for name in buffer_names(cluster)):
                assert client.poll() is None
                assert time.monotonic() < deadline, f"no staging memory within {LONG_S:g} s"
        finally:
            client.kill()
    await_event(up.address, "communicator_destroyed", communicator=killed_client_comm_id)
    # The coordinator frees the staging memory right after this event.
    deadline = time.monotonic() + LONG_S
    while any(name.startswith("hoop.staging.") for name in buffer_names(cluster)):
        assert time.monotonic() < deadline, f"the staging memory is not freed within {LONG_S:g} s"
    assert buffer_names(cluster) == ["weights", "weights"]
    comm.barrier()
    comm.destroy()
