"""Devices on several hosts: shared memory inside one, links between them.

A device that advertises where its links are reached (as one behind a proxy does) shares its memory with nobody: to the
others it is on a host of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoop
from hoop.errors import InvalidArgument, PeerError

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def devices(start: Start) -> tuple[Running, list[Running]]:
    """A coordinator; two devices that share a host and one that does not, in this order: 1 and 3, 2 apart."""
    coordinator = start("coordinator")
    joined = []
    for apart in (False, True, False):
        port = free_port()
        place = ("--data-port", port, "--advertise-data", f"127.0.0.1:{port}") if apart else ()
        joined.append(start("device", "--join", coordinator.address, "--memory", "64MiB", *place))
        assert joined[-1].id == len(joined)
    return coordinator, joined


def vectors(count: int) -> list[Any]:
    return [np.arange(count, dtype="float32") % 7 + rank for rank in range(3)]


def test_hierarchical_runs_where_some_share_a_host(devices: tuple[Running, list[Running]], connect: Connect) -> None:
    with connect(devices[0].address) as cluster:
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


@pytest.mark.parametrize("victim", [1, 2], ids=["on the shared host", "apart"])
def test_a_killed_device_is_named_and_the_rest_goes_on(
    devices: tuple[Running, list[Running]], connect: Connect, await_event: Callable[..., Any], victim: int
) -> None:
    coordinator, joined = devices
    with connect(coordinator.address) as cluster:
        comm = cluster.communicator(3)
        comm.all_reduce(vectors(1000))
        joined[victim - 1].kill()
        with pytest.raises(PeerError, match=rf"device {victim}\b"):
            comm.all_reduce(vectors(1000))
        await_event(coordinator.address, "device_dead", device=victim)
        comm.rebuild()
        left = vectors(1000)[:2]
        for rank, found in enumerate(comm.all_reduce(left)):
            np.testing.assert_array_equal(found, sum(left), err_msg=f"rank {rank}")
