"""A coordinator and devices in a thread of the test's own process: real servers and sockets, no programs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from lab_cluster import channel_to

from hoop.events import Event
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.topology import DeviceInfo

WAIT_S = 120.0
POLL_S = 0.01


@dataclass(frozen=True)
class Servers:
    """The running servers and the loop that they run in."""

    coordinator: CoordinatorServer
    devices: list[DeviceServer]
    reports: list[str]
    """What the devices have reported about refused calls."""
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the servers' loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.coordinator.coordinator.events.after() if event.kind == kind]

    def info(self, rank: int) -> DeviceInfo:
        return self.devices[rank].info

    @property
    def address(self) -> str:
        return str(self.coordinator.coordinator.address)


async def end_other_tasks() -> None:
    """Cancels the tasks that are left, as ``asyncio.run`` does: calls of gRPC that a stopped server has not ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for one in others:
        one.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def lab_servers(devices: int = 2, config: CoordinatorConfig | None = None, **device_options: Any) -> Iterator[Servers]:
    """Starts a coordinator and devices of 1 MiB; the devices' ids are 1, 2, …"""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="lab-servers")
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

    async def start_coordinator() -> CoordinatorServer:
        server = CoordinatorServer(config or CoordinatorConfig())
        await server.start()
        return server

    async def start_device(device_id: int) -> DeviceServer:
        address = coordinator.coordinator.address
        options: dict[str, Any] = {"memory": 1 << 20, "device_id": device_id, **device_options}
        server = DeviceServer(DeviceConfig(coordinator=address, **options), report=reports.append)
        await server.start()
        return server

    async def hear_all() -> None:
        """Waits for each device's first heartbeat: then its connections are open, and a test cannot leave them."""
        members = coordinator.coordinator.state.members
        while any(member.heartbeats.first_heartbeat_until for member in members.values()):
            await asyncio.sleep(POLL_S)
            members = coordinator.coordinator.state.members

    reports: list[str] = []
    started: list[DeviceServer] = []
    try:
        coordinator = call(start_coordinator())
        try:
            for device_id in range(1, devices + 1):
                started.append(call(start_device(device_id)))
            call(hear_all())
            yield Servers(coordinator, started, reports, loop)
        finally:
            for device in started:
                call(device.stop())
            call(coordinator.stop())
    finally:
        call(end_other_tasks())
        call(loop.shutdown_asyncgens())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@contextlib.contextmanager
def lab_channel(servers: Servers) -> Iterator[grpc.Channel]:
    """A channel to the coordinator."""
    with channel_to(servers.address) as channel:
        yield channel
