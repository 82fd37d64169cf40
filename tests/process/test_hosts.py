"""Collectives on several hosts: shared memory within a host, TCP links between hosts.

A device with --advertise-data (as behind a proxy) shares no memory: the others treat it as a separate host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from free_ports import free_port

import hoop
from hoop.errors import InvalidArgument, PeerError

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]


@pytest.fixture
def processes(start: Start) -> tuple[Running, list[Running]]:
    """A coordinator and three devices: 1 and 3 share a host, 2 is on a separate host."""
    coordinator = start("coordinator")
    devices = []
    for separate in (False, True, False):
        port = free_port()
        options = ("--data-port", port, "--advertise-data", f"127.0.0.1:{port}") if separate else ()
        devices.append(start("device", "--join", coordinator.address, "--memory", "64MiB", *options))
        assert devices[-1].id == len(devices)
    return coordinator, devices


def vectors(count: int) -> list[Any]:
    return [np.arange(count, dtype="float32") % 7 + rank for rank in range(3)]


def test_all_reduce_is_hierarchical_when_some_devices_share_a_host(
    processes: tuple[Running, list[Running]], connect: Connect
) -> None:
    with connect(processes[0].address) as cluster:
        comm = cluster.communicator(3)
        for count in (1, 2, 5, 1000, 1_000_001):
            buffer = comm.buffer(f"x{count}", count, "float32")
            buffer.fill(vectors(count))
            report = comm.all_reduce(buffer, wait=False).wait()
            assert report.algorithm == "hierarchical"
            for rank in range(3):
                np.testing.assert_array_equal(buffer.read(rank), sum(vectors(count)), err_msg=f"rank {rank}")
            ring = comm.all_reduce(vectors(count), algorithm="ring")
            for rank, found in enumerate(ring):
                np.testing.assert_array_equal(found, sum(vectors(count)), err_msg=f"rank {rank}")
        for rank, found in enumerate(comm.broadcast(vectors(9), root=1)):
            np.testing.assert_array_equal(found, vectors(9)[1], err_msg=f"rank {rank}")
        pair = cluster.communicator([1, 3])
        with pytest.raises(InvalidArgument, match="hierarchical needs several hosts"):
            pair.all_reduce(vectors(4)[:2], algorithm="hierarchical")


@pytest.mark.parametrize("victim", [1, 2], ids=["on the shared host", "on the separate host"])
def test_a_killed_device_is_named_and_the_others_rebuild(
    processes: tuple[Running, list[Running]], connect: Connect, await_event: Callable[..., Any], victim: int
) -> None:
    coordinator, devices = processes
    with connect(coordinator.address) as cluster:
        comm = cluster.communicator(3)
        comm.all_reduce(vectors(1000))
        devices[victim - 1].kill()
        with pytest.raises(PeerError, match=rf"device {victim}\b"):
            comm.all_reduce(vectors(1000))
        await_event(coordinator.address, "device_dead", device=victim)
        comm.rebuild()
        remaining = vectors(1000)[:2]
        for rank, found in enumerate(comm.all_reduce(remaining)):
            np.testing.assert_array_equal(found, sum(remaining), err_msg=f"rank {rank}")
