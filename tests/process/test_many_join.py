"""Two hundred devices join one coordinator at the same time."""

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

DEVICES = 200
TIMEOUT_S = 120.0


def device_info(number: int) -> DeviceInfo:
    """A device that no other process connects to."""
    address = Address("127.0.0.1", 1 + number)
    return DeviceInfo(0, address, address, 0x1000, 0x2000, "here", 1 + number, f"{number:016x}")


async def join_and_leave(address: Address, check: Callable[[], None]) -> list[int]:
    """Join over one connection per device, send heartbeats, call ``check`` meanwhile, leave; return the device ids."""
    credentials = Credentials(Role.DEVICE, local=True)
    clients = [HeartbeatClient(address, lambda: pb.DeviceMemory(capacity=4096), credentials) for _ in range(DEVICES)]

    async def join(number: int, client: HeartbeatClient) -> int:
        info = await client.join(device_info(number), TIMEOUT_S)
        client.start()  # as a device does, without waiting for the other joins
        return info.device_id

    ids = await asyncio.gather(*(join(number, client) for number, client in enumerate(clients)))
    await asyncio.to_thread(check)
    await asyncio.gather(*(client.leave() for client in clients))
    return list(ids)


def test_two_hundred_devices_join_at_once(start: Start, connect: Callable[..., hoop.Cluster]) -> None:
    """Each device gets its own id, none is suspected, and an existing communicator is not disturbed."""
    # One process sends the heartbeats of all devices: on a busy machine they come late. How late is not tested here.
    coordinator = start("coordinator", "--lease", f"{TIMEOUT_S:g}s")
    start("device", "--join", coordinator.address, "--memory", "1MiB", "--id", 1).first_line  # noqa: B018 - it starts
    cluster = connect(coordinator.address)
    comm = cluster.communicator([1])

    def check() -> None:
        events = list(cluster.events())
        # A device whose call is answered late repeats it: it joins again, under its id.
        assert {int(one.fields["device"]) for one in events if one.kind == "device_joined"} == set(
            range(1, DEVICES + 2)
        )
        assert not {"device_suspect", "device_dead", "communicator_rebuilt"} & {one.kind for one in events}

    ids = asyncio.run(join_and_leave(Address.parse(coordinator.address), check))
    assert sorted(ids) == list(range(2, DEVICES + 2))
    # A coordinator that is slow to answer finds the process of a device gone before it reads that the device leaves.
    gone = [event.fields["device"] for event in cluster.events() if event.kind in ("device_left", "device_dead")]
    assert sorted(map(int, gone)) == sorted(ids)
    assert comm.status().generation == 1
    comm.barrier()
