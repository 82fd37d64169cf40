"""A device's part in collectives: its seats in communicators, and the launches it runs.

coordinator ── Seat ────▶ (1) remembered: rank, generation, who the others are
coordinator ── Reserve ─▶     remembered: which bytes work will touch that was accepted and comes later
coordinator ── Launch ──▶ (2) every operand is checked, then all operations run on a thread of
                          their own, chunks going device to device; one answer at the end
coordinator ── Abort ───▶ (3) the links of that generation close, the thread comes back at once
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hoop.collectives.communicator import Communicator, Report
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.errors import (
    FailedPrecondition,
    HoopError,
    InvalidArgument,
    MembershipChanged,
    PeerLost,
    ResourceExhausted,
)
from hoop.memory import Arena
from hoop.servers.memory_order import Access, MemoryOrder, MemoryRange
from hoop.servers.operation_request import operand_places, operation_from
from hoop.texts import printable
from hoop.topology import DeviceInfo
from hoop.transport import Endpoint, Transport
from hoop.transport.hybrid import endpoint_for
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import device_info

MAX_TIMEOUT_S = 3600.0
MAX_OPERATIONS = 1024
MAX_MEMBERS = 4096
MAX_RESERVATIONS = 4096
"""Launches that were announced to a device and have not ended."""


@dataclass
class RankAssignment:
    """This device's rank in a communicator, at one generation."""

    generation: int
    rank: int
    members: tuple[DeviceInfo, ...]
    communicator: Communicator | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """By rank, the machine."""
        return tuple(one.shared_address.host if one.shared_address else one.host for one in self.members)

    @property
    def incarnations(self) -> list[str]:
        return [member.incarnation for member in self.members]


@dataclass(frozen=True)
class _LocalOperation:
    operation: Operation
    source: Array
    destination: Array
    round: int | None
    spans: tuple[MemoryRange, ...]
    """The bytes of this device that it reads and writes."""


class OperationRunner:
    """Runs what the coordinator launches."""

    def __init__(self, arena: Arena, links: Transport, shared: Transport | None) -> None:
        self._arena = arena
        self._links = links
        self._shared = shared
        self._seats: dict[int, RankAssignment] = {}
        self._running, self._announced = MemoryOrder(), MemoryOrder()
        """Launches that run here; and those that the coordinator has announced, by their reservations."""
        self._reservations: dict[int, Access] = {}
        # A thread a communicator that is at work: one that waits for its peers must not hold up another.
        self._threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="hoop-launch")

    # ---- (1)

    def seat(self, message: pb.Seat) -> RankAssignment:
        known = self._seats.get(message.communicator_id)
        who = [member.incarnation for member in message.members]
        # A coordinator that was restarted without a journal gives the same name to something else.
        if known is not None and (known.generation, known.rank, known.incarnations) == (
            message.generation,
            message.rank,
            who,
        ):
            return known
        if known is not None and known.generation > message.generation:
            raise MembershipChanged(
                f"communicator {message.communicator_id} is at generation {known.generation} here, "
                f"{message.generation} is over"
            )
        if len(message.members) > MAX_MEMBERS:
            raise InvalidArgument(f"seat: {len(message.members)} members are more than {MAX_MEMBERS}")
        if not message.communicator_id or message.rank >= len(message.members):
            raise InvalidArgument(f"seat: rank {message.rank} of {len(message.members)} members is no seat")
        seat = RankAssignment(message.generation, message.rank, tuple(map(device_info, message.members)))
        self._vacate(message.communicator_id)
        self._seats[message.communicator_id] = seat
        return seat

    def _vacate(self, communicator_id: int) -> None:
        old = self._seats.pop(communicator_id, None)
        if old is not None and old.communicator is not None:
            old.communicator.close()

    def member(self, rank: int, communicator_id: int = 0) -> DeviceInfo:
        """Who has this rank, in that communicator or in this device's newest."""
        if communicator_id and communicator_id not in self._seats:
            raise FailedPrecondition(f"commId: this device is not in communicator {communicator_id}")
        if not self._seats:
            raise FailedPrecondition(
                "this device is in no communicator yet, so ranks mean nothing: call CommInit"
            )
        seat = self._seats[communicator_id] if communicator_id else list(self._seats.values())[-1]
        if rank >= len(seat.members):
            raise InvalidArgument(f"rank: {rank} is not in 0..{len(seat.members) - 1}")
        return seat.members[rank]

    def device_at(self, rank: int) -> int:
        """The device of this rank in the newest communicator that has one, or 0."""
        for seat in reversed(list(self._seats.values())):
            if rank < len(seat.members):
                return seat.members[rank].device_id
        return 0

    # ---- (2)

    async def launch(self, request: pb.LaunchRequest) -> list[Report]:
        if not 0 < request.timeout_s <= MAX_TIMEOUT_S:  # also refuses NaN
            raise InvalidArgument(f"timeout_s: {request.timeout_s} is not in (0, {MAX_TIMEOUT_S:g}]")
        if len(request.operations) > MAX_OPERATIONS:
            raise InvalidArgument(f"operations: {len(request.operations)} is more than {MAX_OPERATIONS}")
        seat, communicator = self.take(request.seat)
        total = len(request.operations)
        jobs = []
        for index, message in enumerate(request.operations, start=1):
            with_name = f"operation {index} of {total}" if total > 1 else ""
            try:
                job = self._job(message, communicator)
                communicator.check(job.operation, job.source, job.destination)
            except HoopError as error:
                raise _in(with_name, error) from error
            jobs.append(job)
        loop = asyncio.get_running_loop()
        what = f"a launch of communicator {request.seat.communicator_id} ({', '.join(_names(jobs))})"
        access = self._running.accept(what, (span for job in jobs for span in job.spans))
        access.patience = request.timeout_s
        thread = loop.run_in_executor(self._threads, _run_all, communicator, jobs, request.timeout_s)

        def ended(done: asyncio.Future[list[Report]]) -> None:
            self._running.end(access)
            self.release_reservation(request.reservation_id)
            if not done.cancelled():
                done.exception()  # where the caller went away nobody else asks for it

        thread.add_done_callback(ended)
        try:
            reports = await asyncio.shield(
                thread
            )  # a caller that goes away does not end what the thread writes
        except HoopError:
            # The links may hold half a message: whoever is at the other end must not wait for the rest.
            self._leave(request.seat.communicator_id, seat)
            raise
        if request.release:
            self._leave(request.seat.communicator_id, seat)
        return reports

    def _endpoint(self, communicator_id: int, seat: RankAssignment) -> Endpoint:
        """Shared memory where all members have it in common, links where no two have, else both."""
        peers = [member.data_address for member in seat.members]
        shared = [member.shared_address for member in seat.members]
        place = (communicator_id, seat.generation, seat.rank)
        return endpoint_for(self._links, self._shared, *place, peers, shared)

    def take(self, message: pb.Seat) -> tuple[RankAssignment, Communicator]:
        """A seat with its links, for somebody who uses them until ``release``."""
        seat = self.seat(message)
        seat.communicator = seat.communicator or Communicator(self._endpoint(message.communicator_id, seat))
        return seat, seat.communicator

    def group(self, communicator_id: int, seat: RankAssignment, ranks: tuple[int, ...]) -> Communicator:
        """Links among some of a seat's ranks."""
        members = tuple(seat.members[rank] for rank in ranks)
        some = RankAssignment(seat.generation, ranks.index(seat.rank), members)
        return Communicator(self._endpoint(communicator_id, some))

    def leave_open(self, communicator_id: int, seat: RankAssignment) -> None:
        """Makes room for the next generation's seat; whoever uses this one closes its links."""
        if self._seats.get(communicator_id) is seat:
            del self._seats[communicator_id]

    def release(self, communicator_id: int, seat: RankAssignment) -> None:
        """Closes a seat's links, if it is still this one."""
        self._leave(communicator_id, seat)

    def _leave(self, communicator_id: int, seat: RankAssignment) -> None:
        if self._seats.get(communicator_id) is seat:
            self._vacate(communicator_id)

    def _job(self, message: pb.LaunchOperation, communicator: Communicator) -> _LocalOperation:
        operation = operation_from(message.operation)
        size, rank = communicator.size, communicator.rank
        operation.check(size)
        wanted = operation.extents(size, rank)
        places = operand_places(message.operand)
        (at, source), (to, into) = (
            self._locate(place, operation, count) for place, count in zip(places, wanted, strict=True)
        )
        spans = MemoryRange(0, at, at + source.nbytes, False), MemoryRange(0, to, to + into.nbytes, True)
        round_index = message.round if message.HasField("round") else None
        rounds = len(operation.plan(size, rank).rounds)
        if round_index is not None and round_index >= rounds:
            raise InvalidArgument(f"round: {round_index} is not in 0..{rounds - 1}")
        return _LocalOperation(operation, source, into, round_index, spans)

    def _locate(self, place: pb.Location, operation: Operation, count: int) -> tuple[int, Array]:
        """The address of these elements, and the elements."""
        address = self._arena.min_address
        if count or place.WhichOneof("base"):
            address = locate(self._arena, place, count * operation.dtype.itemsize)
        return address, self._arena.array(address, operation.dtype, count)

    # ---- work that was accepted and is not here yet

    def reserve(self, request: pb.ReserveRequest) -> None:
        """The coordinator has accepted work on these bytes; it ends by its launch, Release, or its time-out."""
        if not 0 < request.timeout_s <= MAX_TIMEOUT_S:  # also refuses NaN
            raise InvalidArgument(f"timeout_s: {request.timeout_s} is not in (0, {MAX_TIMEOUT_S:g}]")
        if not request.reservation_id or len(request.ranges) > 2 * MAX_OPERATIONS:
            raise InvalidArgument(
                f"reservation_id, ranges: {request.reservation_id} with {len(request.ranges)} ranges; use an id other "
                f"than 0 and at most {2 * MAX_OPERATIONS} ranges"
            )
        now = time.monotonic()
        self._reservations = {key: one for key, one in self._reservations.items() if not one.expired(now)}
        if len(self._reservations) >= MAX_RESERVATIONS:
            raise ResourceExhausted(f"{MAX_RESERVATIONS} reservations are open here; wait for some to end")
        spans = []
        for one in request.ranges:
            start = locate(self._arena, one.location, one.bytes)
            spans.append(MemoryRange(0, start, start + one.bytes, one.writes))
        self.release_reservation(request.reservation_id)
        access = self._announced.accept(printable(request.what, 200), spans, now + request.timeout_s)
        self._reservations[request.reservation_id] = access

    def release_reservation(self, reservation_id: int) -> None:
        access = self._reservations.pop(reservation_id, None)
        if access is not None:
            self._announced.end(access)

    def behind(self, what: str, address: int, size: int, writes: bool, ordered: bool = False) -> Access:
        """A read or write of these bytes, which must wait for all work on them that was accepted before.

        ``ordered``: the coordinator has put it in its order. It must not wait for what was announced, which may be
        waiting for it.
        """
        spans = [MemoryRange(0, address, address + size, writes)]
        access = self._running.behind(what, spans)
        if not ordered:
            access.earlier += self._announced.behind(what, spans).earlier
        return access

    # ---- (3)

    def abort(self, communicator_id: int, generation: int, error: HoopError) -> None:
        seat = self._seats.get(communicator_id)
        if seat is None or seat.generation > generation:  # an older one has not moved yet, and never will
            return
        if seat.communicator is not None:
            seat.communicator.endpoint.abort(error)
        self._leave(communicator_id, seat)

    def close(self) -> None:
        for communicator_id in list(self._seats):
            self._vacate(communicator_id)
        self._threads.shutdown(wait=True)


def locate(arena: Arena, place: pb.Location, size: int) -> int:
    """The absolute address of ``size`` bytes at a place, checked."""
    match place.WhichOneof("base"):
        case "address":
            address = place.address + place.offset
            arena.check(address, size)
            return address
        case "buffer":
            return arena.resolve(place.buffer, place.offset, size)
        case _:
            raise InvalidArgument("location: neither an address nor a buffer")


def _run_all(communicator: Communicator, jobs: list[_LocalOperation], timeout: float) -> list[Report]:
    reports = []
    for index, job in enumerate(jobs, start=1):
        try:
            reports.append(communicator.run(job.operation, job.source, job.destination, timeout, job.round))
        except HoopError as error:
            raise _in(f"operation {index} of {len(jobs)}" if len(jobs) > 1 else "", error) from error
        except (OSError, UnicodeError) as error:  # no descriptor left; a name that no resolver takes
            raise PeerLost(
                f"rank {communicator.rank}: no link could be made for {job.operation}: {error}"
            ) from error
    return reports


def _names(jobs: list[_LocalOperation]) -> list[str]:
    """The operations, for people; of many the first few."""
    names = [str(job.operation) for job in jobs[:3]]
    return [*names, f"{len(jobs) - 3} more"] if len(jobs) > 3 else names


def _in(where: str, error: HoopError) -> HoopError:
    return type(error)(f"{where}: {error}") if where else error
