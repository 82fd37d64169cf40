"""Client sessions: the coordinator frees a client's communicators and staging buffers when the client is gone.

client ── KeepSession ──▶ coordinator    a stream that is open while the client lives; the client reopens a broken one
                          coordinator    GRACE_S after the last stream ended: destroys the client's communicators, and
                          coordinator ── Free ──▶ each device: frees the client's staging buffers
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator

from hoop.errors import HoopError, InvalidArgument, PeerLost
from hoop.membership import events as m
from hoop.servers.coordinator import Coordinator
from hoop.wire.channels import STAGING_PREFIX
from hoop.wire.generated import hoop_pb2 as pb

log = logging.getLogger("hoop.servers")
GRACE_S = 2.0
FREE_S = 2.0


def check_session(session: str) -> None:
    """Raises if this is not a valid session name."""
    if not re.fullmatch(r"[0-9a-f]{16}", session):
        raise InvalidArgument(f"session: {session[:40]!r} is not 16 hexadecimal digits")


class ClientSessions:
    """All open sessions."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._streams: defaultdict[str, int] = defaultdict(int)
        """Number of open KeepSession streams of each session."""
        self._communicators: defaultdict[str, set[int]] = defaultdict(set)

    async def keep(self, session: str) -> AsyncIterator[pb.KeepSessionAnswer]:
        """Keeps a session open until the client ends the stream."""
        check_session(session)
        self._streams[session] += 1
        try:
            yield pb.KeepSessionAnswer()  # confirms that the session is open
            await asyncio.Event().wait()  # until the client ends the stream
        finally:
            self._streams[session] -= 1
            self._coordinator.in_background(self._end(session))

    def add_communicator(self, session: str, communicator_id: int) -> None:
        """Ties a communicator to an open session. Without an open session the client must destroy it itself."""
        if session in self._streams:  # it may be opened again at this moment
            self._communicators[session].add(communicator_id)

    async def _end(self, session: str) -> None:
        await asyncio.sleep(GRACE_S)
        if self._streams[session]:
            return
        del self._streams[session]
        for communicator_id in self._communicators.pop(session, set()) & set(self._coordinator.state.communicators):
            await self._coordinator.apply_with_retry(m.Destroyed(communicator_id))
        state = self._coordinator.state
        usable = [device_id for device_id, member in state.members.items() if member.usable]
        await asyncio.gather(*(self._free(key, f"{STAGING_PREFIX}{session}.") for key in usable))

    async def _free(self, device_id: int, prefix: str) -> None:
        call = self._coordinator.call
        try:
            known = await call(device_id, lambda device: device.ListBuffers, pb.ListBuffersRequest(), FREE_S)
            for buffer in known.buffers:
                if buffer.name.startswith(prefix):
                    request = pb.FreeRequest(name=buffer.name)
                    await call(device_id, lambda device: device.Free, request, FREE_S)
        except PeerLost as error:  # the failure detector deals with unreachable devices
            log.debug("staging memory of an ended client: %s", error)
        except HoopError as error:
            text = f"device {device_id}: the staging memory of a client that ended is not freed: {error}"
            log.warning(text)
            self._coordinator.events.publish("staging_not_freed", text, device=device_id)
