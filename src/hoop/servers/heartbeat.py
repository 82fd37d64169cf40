"""The heartbeat client: a device joins its coordinator, sends heartbeats, and joins again when it is forgotten.

While the coordinator does not answer, the device works on and retries without end. Only the first join has a deadline,
so that a device that cannot join fails at its start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from typing import cast

import grpc

from hoop.errors import HoopError
from hoop.texts import printable
from hoop.topology import Address, Addresses, DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.channels import NO_COORDINATOR, Backoff, channel_options, default_lease_s
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.roles import Role
from hoop.wire.service import device_message, status_of, translate, unreachable

log = logging.getLogger("hoop.servers")
CALL_S = 5.0
HAND_OVER_S = 15.0
LEAVE_S = 10.0
"""Timeout of the leave call in seconds. It suffices for a busy coordinator: without the call the device counts as
lost."""
STALLED = 1 / 3
"""Time that a task waits for a peer without a byte before it reports a stall (``link_checks``), as a fraction of a
lease."""
MAX_STALL_S = 5.0
"""Longest time that a task waits for a peer without a byte before it reports a stall, however long the lease."""
MAX_RETRY_S = 0.2
"""Maximum seconds before a member tries to reconnect: a restarted coordinator gives it one lease."""


class HeartbeatClient:
    """Keeps a device a member of the cluster."""

    def __init__(
        self,
        coordinator: Address | Addresses,
        memory: Callable[[], pb.DeviceMemory],
        credentials: Credentials,
        stalls: Callable[[float], list[pb.Stall]] = lambda timeout: [],
        activities: Callable[[], list[pb.TaskActivity]] = list,
    ) -> None:
        """``memory``, ``stalls`` and ``activities`` supply the contents of each heartbeat."""
        self.coordinator = coordinator
        self._memory, self._stalls, self._activities = memory, stalls, activities
        self._credentials = credentials
        self._heartbeat_s = 0.1
        self._open(default_lease_s(coordinator))
        self._task: asyncio.Task[None] | None = None
        self._leaving = False
        self.dismissed = asyncio.Event()
        """Set when the coordinator asks this device to leave: its work was moved to other devices."""
        self.exit_code = 0
        """Exit code for this process, if a scheduler started it; valid when ``dismissed`` is set."""
        self.failures = 0
        """Number of times that the coordinator could not be reached, or did not answer."""
        self.info: DeviceInfo | None = None

    def _open(self, lease_s: float) -> None:
        """Opens the channel to the coordinator, with the time limits of a cluster with this lease."""
        self._lease_s, self._stall_s = lease_s, min(STALLED * lease_s, MAX_STALL_S)
        self._channel = self._credentials.aio_channel(self.coordinator, Role.COORDINATOR, channel_options(lease_s))
        self._stub = cast("pb_grpc.CoordinatorAsyncStub", pb_grpc.CoordinatorStub(self._channel))

    async def join(self, info: DeviceInfo, timeout_s: float) -> DeviceInfo:
        """Joins, with retries for ``timeout_s`` seconds. Returns the info with its device id."""
        backoff = Backoff("the coordinator", self.coordinator, timeout_s, NO_COORDINATOR)
        for delay in backoff.delays():
            try:
                answer = await self._stub.Join(pb.JoinRequest(device=device_message(info)), timeout=CALL_S)
            except grpc.RpcError as error:
                if not unreachable(error):
                    raise translate(error, f"the coordinator at {self.coordinator}") from None
                await asyncio.to_thread(self._credentials.check_coordinator, self.coordinator)
                backoff.record_failure(status_of(error))
                await asyncio.sleep(delay)
                continue
            self._heartbeat_s = answer.heartbeat_s
            if answer.lease_s != self._lease_s:
                old = self._channel
                self._open(answer.lease_s)
                await old.close(None)
            self.info = dataclasses.replace(info, device_id=answer.device_id)
            return self.info
        raise backoff.timeout_error()

    def start(self) -> None:
        """Starts the heartbeats."""
        self._task = asyncio.ensure_future(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        assert self.info is not None, "a device joins before it sends heartbeats"
        pause = Backoff.INITIAL_S
        while not self._leaving:
            try:
                async for answer in self._stub.SendHeartbeats(self._heartbeats(self.info)):
                    pause = Backoff.INITIAL_S
                    if not answer.known:
                        break
                    if answer.leave:
                        self.exit_code = answer.exit_code
                        self.dismissed.set()
                if self._leaving:
                    return
                self.info = await self.join(self.info, timeout_s=CALL_S)
            except (grpc.RpcError, HoopError) as error:
                self.failures += 1
                log.debug("the coordinator does not answer: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_S)

    async def _heartbeats(self, info: DeviceInfo) -> AsyncIterator[pb.Heartbeat]:
        while True:
            stalls = self._stalls(self._stall_s)
            yield pb.Heartbeat(
                device_id=info.device_id,
                incarnation=info.incarnation,
                memory=self._memory(),
                stalls=stalls,
                activities=self._activities(),
            )
            await asyncio.sleep(self._heartbeat_s)

    async def hand_over(self, report: Callable[[str], None] = lambda _: None) -> None:
        """Asks for the jobs of this device to continue without it. Returns when they do, or cannot.

        While a job waits for a device that is loading it, this waits too. ``report`` is called with a text about that.
        """
        waits = self.info is not None
        while waits and self.info is not None:
            request = pb.LeaveRequest(device_id=self.info.device_id, incarnation=self.info.incarnation, planned=True)
            try:
                answer = await self._stub.Leave(request, timeout=HAND_OVER_S)
            except grpc.RpcError as error:
                log.debug("cannot hand over, the coordinator does not answer: %s", error.details())
                return
            if waits := bool(answer.waits_for):
                report(printable(answer.waits_for))

    async def dismiss(self, exit_code: int) -> None:
        """Leaves the cluster, and asks this device's process to end."""
        await self.leave()
        self.exit_code = exit_code
        self.dismissed.set()

    async def leave(self) -> None:
        """Leaves the cluster, and stops the heartbeats. Only the first call does something."""
        if self._leaving:
            return
        self._leaving = True
        if self.info is not None:
            request = pb.LeaveRequest(device_id=self.info.device_id, incarnation=self.info.incarnation)
            try:
                await self._stub.Leave(request, timeout=LEAVE_S)
            except grpc.RpcError as error:
                log.debug("cannot leave, the coordinator does not answer: %s", error.details())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)
