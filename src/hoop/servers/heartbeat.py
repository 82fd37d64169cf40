"""A device's standing with its coordinator: it joins, sends heartbeats, and joins again when it must.

The coordinator may be away: the device works on and knocks until it is back. Only the first joining
has a deadline, because whoever started the device wants to know.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from hoop.errors import HoopError
from hoop.topology import Address, Addresses, DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.channels import Backoff, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.service import Stub, describe, status_of, translate, unreachable

log = logging.getLogger("hoop")
SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
CALL_S = 5.0
HAND_OVER_S = 15.0
LEAVE_S = 3.0
"""How long a goodbye may take. A coordinator that is busy still gets it: else the device counts as lost."""
STALLED = 1 / 3
"""Of a lease: how long a task waits for others without a byte before the coordinator is asked to look into it."""
RETURN_S = 0.2
"""How long at most a member waits before it knocks again: a restarted coordinator gives it one lease."""


class HeartbeatClient:
    """Keeps a device a member."""

    def __init__(
        self,
        coordinator: Address | Addresses,
        memory: Callable[[], pb.DeviceMemory],
        credentials: Credentials,
        stalls: Callable[[float], list[pb.Stall]] = lambda patience: [],
    ) -> None:
        self.coordinator = coordinator
        self._memory, self._stalls = memory, stalls
        self._channel = credentials.aio_channel(coordinator, Role.COORDINATOR, channel_options())
        self._stub = Stub(self._channel, SERVICE, credentials.metadata)
        self._heartbeat_s, self._patience_s = 0.1, 0.5
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self.info: DeviceInfo | None = None

    async def join(self, info: DeviceInfo, patience_s: float) -> DeviceInfo:
        """Joins, knocking until a deadline; the info comes back with the id it has there."""
        knocking = Backoff("the coordinator", self.coordinator, patience_s)
        for pause in knocking.pauses():
            try:
                answer = await self._stub.Join(pb.JoinRequest(device=describe(info)), timeout=CALL_S)
            except grpc.RpcError as error:
                if not unreachable(error):
                    raise translate(error, f"the coordinator at {self.coordinator}") from None
                knocking.heard(status_of(error))
                await asyncio.sleep(pause)
                continue
            self._heartbeat_s, self._patience_s = answer.heartbeat_s, STALLED * answer.lease_s
            self.info = dataclasses.replace(info, device_id=answer.device_id)
            return self.info
        raise knocking.failure()

    def attend(self) -> None:
        """Starts the heartbeats."""
        self._task = asyncio.ensure_future(self._attend())

    async def _attend(self) -> None:
        assert self.info is not None, "a device joins before it attends"
        pause = Backoff.FIRST_S
        while not self._leaving:
            try:
                async for answer in self._stub.Attend(self._beats(self.info)):
                    pause = Backoff.FIRST_S
                    if not answer.known:
                        break
                if self._leaving:
                    return
                self.info = await self.join(self.info, patience_s=CALL_S)
            except (grpc.RpcError, HoopError) as error:
                log.debug("the coordinator is away: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETURN_S)

    async def _beats(self, info: DeviceInfo) -> AsyncIterator[pb.Heartbeat]:
        while True:
            stalls = self._stalls(self._patience_s)
            yield pb.Heartbeat(
                device_id=info.device_id, incarnation=info.incarnation, memory=self._memory(), stalls=stalls
            )
            await asyncio.sleep(self._heartbeat_s)

    async def hand_over(self) -> None:
        """Asks for others to take over what this device does; returns when they have, or could not."""
        if self.info is not None:
            request = pb.LeaveRequest(
                device_id=self.info.device_id, incarnation=self.info.incarnation, planned=True
            )
            try:
                await self._stub.Leave(request, timeout=HAND_OVER_S)
            except grpc.RpcError as error:
                log.debug("nobody to hand over to: %s", error.details())

    async def leave(self) -> None:
        """Says goodbye, if there is anybody to say it to."""
        self._leaving = True
        if self.info is not None:
            request = pb.LeaveRequest(device_id=self.info.device_id, incarnation=self.info.incarnation)
            try:
                await self._stub.Leave(request, timeout=LEAVE_S)
            except grpc.RpcError as error:
                log.debug("nobody to say goodbye to: %s", error.details())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)
