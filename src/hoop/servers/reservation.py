"""Reservations: announce accepted operations to their devices, so that direct requests of clients do not overtake them.

client ── GroupEnd ──▶ coordinator ── Reserve ──▶ each member     the byte ranges; then the client gets its answer
client ── Read, Write, BeginSend, BeginReceive ──▶ a member       waits
                       coordinator ── Launch ───▶ each member     the reservation ends with the launch
                       coordinator ── Release ──▶ each member     … or with this, if several launches make the work
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from typing import Any

from hoop.membership.state import CommunicatorState
from hoop.servers.access_order import MemoryRange
from hoop.servers.coordinator import Coordinator
from hoop.wire.generated import hoop_pb2 as pb

RELEASE_S = 5.0


class Reservation:
    """The reservation of one batch of accepted operations, on all of its devices."""

    def __init__(
        self,
        coordinator: Coordinator,
        communicator: CommunicatorState,
        ranges: Iterable[MemoryRange],
        description: str,
        timeout: float,
    ) -> None:
        """``timeout``: seconds until a device drops a reservation that is never ended (the coordinator was killed)."""
        self.id = secrets.randbits(63) + 1
        self._coordinator, self._communicator, self._timeout = coordinator, communicator, timeout
        self._description = description
        self.announced = coordinator.in_background(self._announce(ranges))
        """Future that is done when every member has the reservation or cannot be reached; it never fails."""

    async def _announce(self, ranges: Iterable[MemoryRange]) -> None:
        requests = {
            device_id: pb.ReserveRequest(reservation_id=self.id, timeout_s=self._timeout, what=self._description)
            for device_id in self._communicator.members
        }
        for one in ranges:
            location = pb.Location(address=one.start)
            if one.buffer:
                location = pb.Location(buffer=one.buffer, offset=one.start)
            requests[one.device_id].ranges.add(location=location, bytes=one.stop - one.start, writes=one.writes)
        calls = [
            asyncio.ensure_future(
                self._coordinator.call(device_id, lambda device: device.Reserve, request, self._timeout)
            )
            for device_id, request in requests.items()
        ]
        # A lost member breaks the communicator. Do not wait for the other members then: the operations fail anyway.
        key = self._communicator.id, self._communicator.generation
        stop = asyncio.ensure_future(self._coordinator.stop_events.setdefault(key, asyncio.Event()).wait())
        try:
            pending: set[asyncio.Future[Any]] = {*calls, stop}
            while not stop.done() and not all(call.done() for call in calls):
                _, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
        finally:
            for task in (*calls, stop):
                task.cancel()
            await asyncio.gather(*calls, stop, return_exceptions=True)

    def release(self) -> None:
        """Ends the reservation: the operations have ended, whatever their outcome."""
        self._coordinator.in_background(self._release())

    async def _release(self) -> None:
        request = pb.ReleaseRequest(reservation_id=self.id)
        state = self._coordinator.state
        usable = [key for key in self._communicator.members if key in state.members and state.members[key].usable]
        calls = (self._coordinator.device(key).Release(request, timeout=RELEASE_S) for key in usable)
        # Where Release does not arrive, the reservation lapses by its timeout.
        await asyncio.gather(*calls, return_exceptions=True)
