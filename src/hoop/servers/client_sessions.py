"""Clients that are here, and what goes when they are not any more.

client ── Hold ──▶ coordinator     open as long as the client lives, opened again when it broke on the way
                   coordinator     GRACE_S after it broke for good: the client's communicators are destroyed, and
                   coordinator ── Free ──▶ each device: what it had staged there
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator

from hoop.errors import HoopError, InvalidArgument
from hoop.membership import events as m
from hoop.servers.coordinator import Coordinator
from hoop.wire.channels import STAGING
from hoop.wire.generated import hoop_pb2 as pb

GRACE_S = 2.0
FREE_S = 2.0


def check_session(session: str) -> None:
    """Raises unless this is a name that a client's session may have."""
    if not re.fullmatch(r"[0-9a-f]{16}", session):
        raise InvalidArgument(f"session: {session[:40]!r} is not 16 hexadecimal digits")


class ClientSessions:
    """Every client that holds one."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._open: defaultdict[str, int] = defaultdict(int)
        self._made: defaultdict[str, set[int]] = defaultdict(set)

    async def hold(self, session: str) -> AsyncIterator[pb.HoldAnswer]:
        check_session(session)
        self._open[session] += 1
        try:
            yield pb.HoldAnswer()  # it is known here from now on
            await asyncio.Event().wait()  # until the client goes
        finally:
            self._open[session] -= 1
            self._coordinator.in_background(self._end(session))

    def made(self, session: str, communicator_id: int) -> None:
        """This communicator is that client's; one that holds nothing looks after it itself."""
        if self._open.get(session):
            self._made[session].add(communicator_id)

    async def _end(self, session: str) -> None:
        await asyncio.sleep(GRACE_S)
        if self._open[session]:
            return
        del self._open[session]
        for communicator_id in self._made.pop(session, set()) & set(self._coordinator.state.communicators):
            await self._coordinator.change(m.Destroyed(communicator_id))
        state = self._coordinator.state
        usable = [device_id for device_id, member in state.members.items() if member.usable]
        await asyncio.gather(*(self._free(key, f"{STAGING}{session}.") for key in usable))

    async def _free(self, device_id: int, prefix: str) -> None:
        call = self._coordinator.call
        try:
            known = await call(device_id, "ListBuffers", pb.ListBuffersRequest(), FREE_S)
            for buffer in known.buffers:
                if buffer.name.startswith(prefix):
                    await call(device_id, "Free", pb.FreeRequest(name=buffer.name), FREE_S)
        except HoopError:
            return  # a device that cannot be asked is the detector's business
