"""Two hundred devices join one coordinator at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import hoop
from hoop.servers.heartbeat import HeartbeatClient
from hoop.topology import Address, DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]

MANY = 200
PATIENCE_S = 30.0


def newcomer(number: int) -> DeviceInfo:
    """As a device describes itself; nobody will want its memory."""
    here = Address("127.0.0.1", 1 + number)
    return DeviceInfo(0, here, here, 0x1000, 0x2000, "here", 1 + number, f"{number:016x}")


async def all_join(address: Address) -> list[int]:
    """Each over a connection of its own, with heartbeats from then on; they leave with a word."""
    open_to_all = Credentials(Role.DEVICE)
    crowd = [HeartbeatClient(address, lambda: pb.DeviceMemory(capacity=4096), open_to_all) for _ in range(MANY)]
    joins = (one.join(newcomer(number), PATIENCE_S) for number, one in enumerate(crowd))
    ids = [info.device_id for info in await asyncio.gather(*joins)]
    for one in crowd:
        one.start()
    await asyncio.sleep(0)
    await asyncio.gather(*(one.leave() for one in crowd))
    return ids


def test_two_hundred_join_at_once(start: Start, connect: Callable[..., hoop.Cluster]) -> None:
    """Each has a number of its own; nobody is suspected, and who works already is not disturbed."""
    coordinator = start("coordinator")
    start("device", "--join", coordinator.address, "--memory", "1MiB", "--id", 1).first  # noqa: B018 - it is up
    cluster = connect(coordinator.address)
    alone = cluster.communicator([1])
    ids = asyncio.run(all_join(Address.parse(coordinator.address)))
    assert sorted(ids) == list(range(2, MANY + 2))
    kinds = [event.kind for event in cluster.events()]
    assert kinds.count("device_joined") == MANY + 1
    assert not {"device_suspect", "device_dead", "communicator_rebuilt"} & set(kinds)
    assert alone.status().generation == 1
    alone.barrier()
