"""Bars that need no training: many join at once, a client is killed, a connection is reset."""

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

MANY, PATIENCE_S = 200, 60.0
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
    """Until the last of them is in; each has a connection of its own, and leaves with a word."""
    with tempfile.TemporaryDirectory() as scratch, ClusterProcesses(Path(scratch), 0, 1 << 20) as fleet:
        return asyncio.run(_all_join(fleet.address))


async def _all_join(address: Address) -> float:
    open_to_all = Credentials(Role.DEVICE)
    crowd = [HeartbeatClient(address, lambda: pb.DeviceMemory(capacity=4096), open_to_all) for _ in range(MANY)]
    here = [Address("127.0.0.1", 1 + number) for number in range(MANY)]
    infos = [DeviceInfo(0, at, at, 0x1000, 0x2000, "here", at.port, f"{at.port:016x}") for at in here]
    began = time.monotonic()
    await asyncio.gather(*(one.join(info, PATIENCE_S) for one, info in zip(crowd, infos, strict=True)))
    seconds = time.monotonic() - began
    await asyncio.gather(*(one.leave() for one in crowd))
    return seconds


def client_killed() -> float:
    """Until its communicator is gone and no device has anything of its staging."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        ClusterProcesses(Path(scratch), 2, 64 << 20) as fleet,
        connect(fleet.address) as cluster,
    ):
        cluster.wait_for_devices(2, PATIENCE_S)
        command = [sys.executable, "-c", CLIENT, str(fleet.address)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            try:
                assert client.stdout is not None, "its output is a pipe"
                theirs = int(client.stdout.readline())
                while not _staged(cluster):
                    assert client.poll() is None, "it works until it is killed"
            finally:
                client.kill()
                killed = time.monotonic()
        while _staged(cluster) or any(one.id == theirs for one in cluster.status().communicators):
            if time.monotonic() > killed + PATIENCE_S:
                raise TimeoutError(f"what the client had was there for {PATIENCE_S:g} s")
        return time.monotonic() - killed


def _staged(cluster: Cluster) -> bool:
    ids = [one.device.device_id for one in cluster.status().devices]
    return any(name.startswith("hoop.staging.") for key in ids for name in cluster.device(key).buffers())


def connection_reset() -> float:
    """An all-reduce of two ranks over TCP; a connection is reset half-way through a piece of it."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")

    def add_up(one: Communicator) -> None:
        total = np.zeros(COUNT, np.float32)
        try:
            one.run(operation, np.ones(COUNT, np.float32), total, PATIENCE_S)
        except HoopError:
            one.close()  # so that nobody waits for it
        else:
            assert (total == 2).all(), "what was sent again was added once"

    links = FaultyLinks()
    with ExitStack() as opened:
        opened.callback(links.install())
        transports = [opened.enter_context(open_transport("tcp://127.0.0.1:0")) for _ in range(2)]
        peers = [one.address for one in transports]
        ranks = [Communicator(one.endpoint(1, 1, rank, peers)) for rank, one in enumerate(transports)]
        for one in ranks:
            opened.callback(one.close)
        pool = opened.enter_context(ThreadPoolExecutor(2))
        list(pool.map(add_up, ranks, timeout=PATIENCE_S))  # links are dialled by the first
        links.drops = 1
        began = time.monotonic()
        list(pool.map(add_up, ranks, timeout=PATIENCE_S))
        seconds = time.monotonic() - began
    assert links.injected == 1, "the connection was reset"
    return seconds
