"""Work that was accepted for later, announced to its devices: nothing that clients ask them for directly overtakes it.

client ── GroupEnd ──▶ coordinator ── Reserve ──▶ each member     which bytes; then the client gets its answer
client ── Read, Write, BeginSend, BeginReceive ──▶ a member       waits
                       coordinator ── Launch ───▶ each member     the reservation ends with it
                       coordinator ── Release ──▶ each member     … or with this, where several launches make the work
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from typing import Any

from hoop.membership.state import CommunicatorState
from hoop.servers.coordinator import Coordinator
from hoop.servers.memory_order import MemoryRange
from hoop.wire.generated import hoop_pb2 as pb

RELEASE_S = 5.0


class Reservation:
    """One piece of accepted work, at all of its devices."""

    def __init__(
        self,
        coordinator: Coordinator,
        one: CommunicatorState,
        spans: Iterable[MemoryRange],
        what: str,
        timeout: float,
    ) -> None:
        """``timeout``: how long it holds where nobody ends it, because the coordinator was killed."""
        self.id = secrets.randbits(63) + 1
        self._coordinator, self._one, self._timeout = coordinator, one, timeout
        self._what = what
        self.announced = coordinator.in_background(self._announce(spans))
        """Done when every member has it, or cannot be asked any more; it never fails."""

    async def _announce(self, spans: Iterable[MemoryRange]) -> None:
        requests = {
            device_id: pb.ReserveRequest(reservation_id=self.id, timeout_s=self._timeout, what=self._what)
            for device_id in self._one.members
        }
        for span in spans:
            place = pb.Location(address=span.start)
            if span.buffer:
                place = pb.Location(buffer=span.buffer, offset=span.start)
            requests[span.device_id].ranges.add(
                location=place, bytes=span.stop - span.start, writes=span.writes
            )
        calls = [
            asyncio.ensure_future(self._coordinator.call(device_id, "Reserve", request, self._timeout))
            for device_id, request in requests.items()
        ]
        # A member that is lost breaks the communicator: the others are not waited for then, the work fails anyway.
        key = self._one.id, self._one.generation
        stop = asyncio.ensure_future(self._coordinator.stops.setdefault(key, asyncio.Event()).wait())
        try:
            pending: set[asyncio.Future[Any]] = {*calls, stop}
            while not stop.done() and not all(call.done() for call in calls):
                _, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
        finally:
            for task in (*calls, stop):
                task.cancel()
            await asyncio.gather(*calls, stop, return_exceptions=True)

    def release(self) -> None:
        """The work has ended, however it did."""
        self._coordinator.in_background(self._release())

    async def _release(self) -> None:
        request = pb.ReleaseRequest(reservation_id=self.id)
        state = self._coordinator.state
        usable = [key for key in self._one.members if key in state.members and state.members[key].usable]
        calls = (self._coordinator.device(key).Release(request, timeout=RELEASE_S) for key in usable)
        await asyncio.gather(*calls, return_exceptions=True)  # where it does not arrive it lapses
