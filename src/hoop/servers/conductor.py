"""Gives communicators their work: in order on each, side by side on different ones.

Work of different communicators that touches the same memory runs in the order in which it was accepted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, ResourceExhausted
from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState
from hoop.servers.coordinator import Coordinator
from hoop.servers.drivers import relay, stepped
from hoop.servers.launching import launch, seat
from hoop.servers.memory_order import Access
from hoop.servers.reservation import Reservation
from hoop.servers.runner import MAX_OPERATIONS, MAX_TIMEOUT_S
from hoop.servers.work import Work
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.rpc import calling_host

SEAT_S = 5.0
Reports = list[pb.OperationReport]


class Conductor:
    """Creates communicators and runs operations on them."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._clients: dict[int, str] = {}
        """Who asked for each communicator."""

    # ---- communicators

    async def create(self, device_ids: Sequence[int], count: int = 0) -> CommunicatorState:
        """A communicator of exactly these devices, or of ``count`` that are alive."""
        if not device_ids:
            usable = self._coordinator.state.usable()
            if count > len(usable):
                raise FailedPrecondition(
                    f"devices: {count} were asked for, {len(usable)} are alive; "
                    f"start more with: hoop device --join {self._coordinator.address}"
                )
            device_ids = sorted(usable[:count])
        client = self._check_quota()
        state = await self._coordinator.change(
            m.Created(tuple(device_ids), self._coordinator.config.max_communicators)
        )
        one = state.communicator(state.next_communicator - 1)
        self._clients[one.id] = client
        try:
            return await self._seat(one)
        except BaseException:  # nobody has heard of it: without this it would stay for ever
            await self._coordinator.change(m.Destroyed(one.id))
            raise

    def _check_quota(self) -> str:
        """The client that asks, if it may have one more."""
        there = self._coordinator.state.communicators
        self._clients = {key: one for key, one in self._clients.items() if key in there}
        client, most = calling_host(), self._coordinator.config.communicators_per_client
        if client and list(self._clients.values()).count(client) >= most:
            raise ResourceExhausted(
                f"the client at {client} has {most} communicators, its limit; destroy some (CommDestroy), or raise the "
                "coordinator's --communicators-per-client"
            )
        return client

    async def rebuild(
        self, communicator_id: int, joining: Sequence[int] = (), leaving: Sequence[int] = ()
    ) -> CommunicatorState:
        """The next generation: of the members that are alive and stay, and of whoever joins."""
        state = await self._coordinator.change(m.Rebuilt(communicator_id, tuple(joining), tuple(leaving)))
        return await self._seat(state.communicator(communicator_id))

    async def _seat(self, one: CommunicatorState) -> CommunicatorState:
        calls = [
            self._coordinator.call(
                device_id, "Seat", pb.SeatRequest(seat=seat(self._coordinator, one, rank)), SEAT_S
            )
            for rank, device_id in enumerate(one.members)
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return one

    async def finalize(self, communicator_id: int) -> None:
        """No more work from now on; returns when what is queued is done."""
        await self._coordinator.change(m.Finalized(communicator_id))
        async with self._turns[communicator_id]:
            pass

    async def destroy(self, communicator_id: int) -> None:
        await self.finalize(communicator_id)
        await self._coordinator.change(m.Destroyed(communicator_id))
        self._turns.pop(communicator_id, None)

    # ---- work

    def check(self, communicator_id: int, works: Sequence[Work], timeout: float = 0.0) -> None:
        """Raises what is wrong with this work, naming the operation, before anything moves."""
        one = self._coordinator.state.communicator(communicator_id)
        if one.finalized:
            raise FailedPrecondition(f"communicator {communicator_id} is finalized: it takes no more work")
        if one.broken_by:
            raise FailedPrecondition(f"communicator {communicator_id}: {one.reason}")
        if len(works) > MAX_OPERATIONS:
            raise InvalidArgument(f"operations: {len(works)} is more than {MAX_OPERATIONS}")
        if not 0 <= timeout <= MAX_TIMEOUT_S:  # also refuses NaN
            raise InvalidArgument(f"timeout_s: {timeout} is not in 0..{MAX_TIMEOUT_S:g}")
        for index, work in enumerate(works, start=1):
            try:
                work.check(self._coordinator.state, one)
            except HoopError as error:
                where = f"operation {index} of {len(works)}: " if len(works) > 1 else ""
                raise type(error)(f"{where}{error}") from None

    async def run(self, communicator_id: int, works: Sequence[Work], timeout: float = 0.0) -> Reports:
        """Runs the works in order; they go on even if nobody waits for them any more."""
        self.check(communicator_id, works, timeout)
        return await asyncio.shield(self.begin(communicator_id, works, timeout))

    def begin(
        self, communicator_id: int, works: Sequence[Work], timeout: float = 0.0
    ) -> asyncio.Task[Reports]:
        """Queues checked work: the communicator is in progress when this returns.

        From here on whatever the coordinator accepts and touches the same memory waits for this work.
        """
        return self._begin(communicator_id, works, timeout)[0]

    async def begin_announced(self, communicator_id: int, works: Sequence[Work]) -> asyncio.Task[Reports]:
        """``begin``, for a caller that will not wait for the end.

        When this returns, the devices know of the work too: what a client asks them for directly waits for it.
        """
        task, reservation = self._begin(communicator_id, works, 0.0, announce=True)
        if reservation is not None:
            await asyncio.shield(reservation.announced)
        return task

    def _begin(
        self, communicator_id: int, works: Sequence[Work], timeout: float, announce: bool = False
    ) -> tuple[asyncio.Task[Reports], Reservation | None]:
        coordinator, timeout = self._coordinator, timeout or self._coordinator.config.timeout_s
        one = coordinator.apply(m.Started(communicator_id)).communicator(communicator_id)
        what = f"{', '.join(_names(works))} of communicator {communicator_id}"
        spans = {span for work in works for span in work.spans(one) if span.start < span.stop}
        access = coordinator.order.accept(what, spans)
        reservation = Reservation(coordinator, one, spans, what, timeout) if announce and works else None
        task = coordinator.in_background(self._perform(communicator_id, works, timeout, access, reservation))

        def ended(_: asyncio.Task[Reports]) -> None:
            coordinator.order.end(access)
            if reservation is not None:
                reservation.release()

        task.add_done_callback(ended)
        return task, reservation

    async def _perform(
        self,
        communicator_id: int,
        works: Sequence[Work],
        timeout: float,
        access: Access,
        reservation: Reservation | None,
    ) -> Reports:
        async with self._turns[communicator_id]:
            one = self._coordinator.apply(m.Started(communicator_id)).communicator(communicator_id)
            reports: Reports = []
            try:
                await access.turn(timeout)
                if reservation is not None:
                    await reservation.announced  # a launch must not end before its reservation comes
                batches = [
                    (driver, list(batch)) for driver, batch in groupby(works, key=lambda work: work.driver)
                ]
                whole = reservation.id if reservation is not None and len(batches) == 1 else 0
                for driver, batch in batches:
                    reports += await self._drive(one, driver, batch, timeout, whole)
            except HoopError as error:
                await self._coordinator.change(m.Finished(one.id, one.generation, str(error)))
                raise
            self._coordinator.apply(m.Finished(one.id, one.generation))
            return reports

    async def _drive(
        self, one: CommunicatorState, driver: str, works: list[Work], timeout: float, reservation_id: int
    ) -> Reports:
        if driver == "devices":
            return await launch(self._coordinator, one, works, timeout, reservation_id=reservation_id)
        drive = {"stepped": stepped, "relay": relay}[driver]
        return [await drive(self._coordinator, one, work, timeout) for work in works]


def _names(works: Sequence[Work]) -> list[str]:
    """The operations, for people; of many the first few."""
    names = [str(work.operation) for work in works[:3]]
    return [*names, f"{len(works) - 3} more"] if len(works) > 3 else names
