"""Recovery targets that need no training: many devices join at once, a client is killed, a connection is reset."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from hoop.client.cluster import Cluster, connect
from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import HoopError
from hoop.lab.chaos.processes import ClusterProcesses
from hoop.servers.heartbeat import HeartbeatClient
from hoop.topology import Address, DeviceInfo
from hoop.transport import open_transport
from hoop.transport.fault_injection import FaultyLinks
from hoop.wire.auth import Credentials
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role

DEVICES, TIMEOUT_S = 200, 60.0
COUNT = 1_000_000
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


def many_join() -> float:
    """Seconds until the last of 200 devices has joined, each with a connection of its own."""
    with tempfile.TemporaryDirectory() as scratch, ClusterProcesses(Path(scratch), 0, 1 << 20) as fleet:
        return asyncio.run(_all_join(fleet.address))


async def _all_join(address: Address) -> float:
    credentials = Credentials(Role.DEVICE, local=True)
    clients = [HeartbeatClient(address, lambda: pb.DeviceMemory(capacity=4096), credentials) for _ in range(DEVICES)]
    addresses = [Address("127.0.0.1", 1 + number) for number in range(DEVICES)]
    infos = [DeviceInfo(0, at, at, 0x1000, 0x2000, "here", at.port, f"{at.port:016x}") for at in addresses]
    started = time.monotonic()
    await asyncio.gather(*(one.join(info, TIMEOUT_S) for one, info in zip(clients, infos, strict=True)))
    seconds = time.monotonic() - started
    await asyncio.gather(*(one.leave() for one in clients))
    return seconds


def client_killed() -> float:
    """Seconds until a killed client's communicator is gone and no device holds its staging buffers."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        ClusterProcesses(Path(scratch), 2, 64 << 20) as fleet,
        connect(fleet.address) as cluster,
    ):
        cluster.wait_for_devices(2, TIMEOUT_S)
        command = [sys.executable, "-c", CLIENT, str(fleet.address)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                assert client.stdout is not None, "stdout is a pipe"
                communicator_id = int(client.stdout.readline())
                while not _staged(cluster):
                    assert client.poll() is None, "the client runs until it is killed"
            finally:
                client.kill()
                killed = time.monotonic()
        while _staged(cluster) or any(one.id == communicator_id for one in cluster.status().communicators):
            if time.monotonic() > killed + TIMEOUT_S:
                raise TimeoutError(f"what the client had was there for {TIMEOUT_S:g} s")
        return time.monotonic() - killed


def _staged(cluster: Cluster) -> bool:
    ids = [one.device.device_id for one in cluster.status().devices]
    return any(name.startswith("hoop.staging.") for key in ids for name in cluster.device(key).buffers())


def connection_reset() -> float:
    """Seconds of an all-reduce of two ranks over TCP in which a connection is reset in the middle of a chunk."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")

    def all_reduce(one: Communicator) -> None:
        total = np.zeros(COUNT, np.float32)
        try:
            one.run(operation, np.ones(COUNT, np.float32), total, TIMEOUT_S)
        except HoopError:
            one.close()  # so that the peer does not wait for it
        else:
            assert (total == 2).all(), "retransmitted data is added once"

    links = FaultyLinks()
    with ExitStack() as stack:
        stack.callback(links.install())
        transports = [stack.enter_context(open_transport("tcp://127.0.0.1:0")) for _ in range(2)]
        peers = [one.address for one in transports]
        ranks = [Communicator(one.endpoint(1, 1, rank, peers)) for rank, one in enumerate(transports)]
        for one in ranks:
            stack.callback(one.close)
        pool = stack.enter_context(ThreadPoolExecutor(2))
        list(pool.map(all_reduce, ranks, timeout=TIMEOUT_S))  # the first run opens the links
        links.drops = 1
        started = time.monotonic()
        list(pool.map(all_reduce, ranks, timeout=TIMEOUT_S))
        seconds = time.monotonic() - started
    assert links.injected == 1, "the connection was reset"
    return seconds
