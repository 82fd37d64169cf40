"""Runs collectives on a device: its rank assignments in communicators, and the launches of the coordinator.

coordinator ── AssignRank ─▶ (1) stores the assignment: generation, rank, members
coordinator ── Reserve ────▶     stores the byte ranges of accepted operations that will be launched later
coordinator ── Launch ─────▶ (2) checks every operand, then runs all operations on a thread of their own; devices
                                 exchange chunks directly; one answer at the end
coordinator ── Abort ──────▶ (3) closes the links of that generation, so the thread returns at once
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from hoop.collectives.communicator import Communicator, Report
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, MembershipChanged, PeerLost, ResourceExhausted
from hoop.memory import CHECKS, READS, WRITES, DeviceMemory
from hoop.servers.access_order import Access, AccessOrder, MemoryRange
from hoop.servers.operation_request import operand_locations, operation_from
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
"""Maximum number of reservations that a device holds at once."""


@dataclass
class RankAssignment:
    """This device's rank in a communicator, at one generation."""

    generation: int
    rank: int
    members: tuple[DeviceInfo, ...]
    communicator: Communicator | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(one.shared_address.host if one.shared_address else one.host for one in self.members)

    @property
    def local_rank_and_size(self) -> tuple[int, int]:
        """This rank's index among the ranks on the same host, and their number."""
        same = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        return same.index(self.rank), len(same)

    @property
    def incarnations(self) -> list[str]:
        return [member.incarnation for member in self.members]


@dataclass(frozen=True)
class _LocalOperation:
    operation: Operation
    source: MemoryRange
    destination: MemoryRange
    round: int | None

    @property
    def ranges(self) -> tuple[MemoryRange, MemoryRange]:
        """The bytes of this device that it reads and writes."""
        return self.source, self.destination

    @contextmanager
    def operands(self, memory: DeviceMemory, check: bool = False) -> Iterator[tuple[Array, Array]]:
        """Source and destination as arrays in host memory: overlapping if they overlap on the device.

        Memory on a GPU is copied, from there when the block begins, and back at its end. ``check``: nothing is copied.
        """
        kind, low = self.operation.dtype.numpy, min(one.start for one in self.ranges)
        size = max(one.stop for one in self.ranges) - low
        with ExitStack() as views:
            if size < sum(one.stop - one.start for one in self.ranges):
                whole = views.enter_context(memory.host_view(low, size, CHECKS if check else WRITES))
                source, destination = (whole[one.start - low : one.stop - low] for one in self.ranges)
            else:
                source, destination = (
                    views.enter_context(memory.host_view(one.start, one.stop - one.start, CHECKS if check else access))
                    for one, access in zip(self.ranges, (READS, WRITES), strict=True)
                )
            yield source.view(kind), destination.view(kind)


class OperationRunner:
    """Runs the operations that the coordinator launches on this device."""

    def __init__(self, memory: DeviceMemory, links: Transport, shared: Transport | None) -> None:
        """``links``: the TCP transport. ``shared``: the shared-memory transport; None: this device has none."""
        self._memory = memory
        self._links = links
        self._shared = shared
        self._assignments: dict[int, RankAssignment] = {}
        self.assignments_stored = 0
        """Number of ranks that this device was given."""
        self._running = AccessOrder()
        """Order of the launches that run on this device."""
        self._announced = AccessOrder()
        """Order of the launches that the coordinator has announced by a reservation."""
        self._reservations: dict[int, Access] = {}
        # One thread for each communicator that runs: a launch that waits for its peers must not block another.
        self._threads = ThreadPoolExecutor(max_workers=1024, thread_name_prefix="hoop-launch")

    # ---- (1) rank assignments

    def assign(self, message: pb.RankAssignment) -> RankAssignment:
        """Stores an assignment and closes the links of an older one. Raises for an outdated generation."""
        known = self._assignments.get(message.communicator_id)
        incarnations = [member.incarnation for member in message.members]
        # A coordinator that was restarted without a journal may use the same id and generation for other devices.
        if known is not None and (known.generation, known.rank, known.incarnations) == (
            message.generation,
            message.rank,
            incarnations,
        ):
            return known
        if known is not None and known.generation > message.generation:
            raise MembershipChanged(
                f"communicator {message.communicator_id} is at generation {known.generation} here, "
                f"{message.generation} is over"
            )
        if len(message.members) > MAX_MEMBERS:
            raise InvalidArgument(f"assignment: {len(message.members)} members are more than {MAX_MEMBERS}")
        if not message.communicator_id or message.rank >= len(message.members):
            raise InvalidArgument(
                f"assignment: rank {message.rank} of {len(message.members)} members in communicator "
                f"{message.communicator_id} is not valid"
            )
        assignment = RankAssignment(message.generation, message.rank, tuple(map(device_info, message.members)))
        self._close_assignment(message.communicator_id)
        self._assignments[message.communicator_id] = assignment
        self.assignments_stored += 1
        return assignment

    def _close_assignment(self, communicator_id: int) -> None:
        old = self._assignments.pop(communicator_id, None)
        if old is not None and old.communicator is not None:
            old.communicator.close()

    def member(self, rank: int, communicator_id: int = 0) -> DeviceInfo:
        """The device with this rank in a communicator; 0: in the newest communicator of this device."""
        if communicator_id and communicator_id not in self._assignments:
            raise FailedPrecondition(f"commId: this device is not in communicator {communicator_id}")
        if not self._assignments:
            raise FailedPrecondition("this device is in no communicator yet, so ranks mean nothing: call CommInit")
        assignment = self._assignments[communicator_id] if communicator_id else list(self._assignments.values())[-1]
        if rank >= len(assignment.members):
            raise InvalidArgument(f"rank: {rank} is not in 0..{len(assignment.members) - 1}")
        return assignment.members[rank]

    def device_at(self, rank: int) -> int:
        """The id of the device with this rank in the newest communicator that has such a rank; 0: there is none yet.

        Raises InvalidArgument if no communicator of this device has such a rank.
        """
        for assignment in reversed(list(self._assignments.values())):
            if rank < len(assignment.members):
                return assignment.members[rank].device_id
        if self._assignments:
            most = max(len(assignment.members) for assignment in self._assignments.values())
            raise InvalidArgument(f"srcRank: {rank} is not in 0..{most - 1}, the ranks of this device's communicators")
        return 0

    # ---- links of an assignment; also used by tasks

    def connect(self, message: pb.RankAssignment) -> tuple[RankAssignment, Communicator]:
        """Stores an assignment and opens its links. The caller ends them with ``release``."""
        assignment = self.assign(message)
        assignment.communicator = assignment.communicator or Communicator(
            self._endpoint(message.communicator_id, assignment)
        )
        return assignment, assignment.communicator

    def connect_group(self, communicator_id: int, assignment: RankAssignment, ranks: tuple[int, ...]) -> Communicator:
        """Opens links among some ranks of an assignment."""
        members = tuple(assignment.members[rank] for rank in ranks)
        group = RankAssignment(assignment.generation, ranks.index(assignment.rank), members)
        return Communicator(self._endpoint(communicator_id, group))

    def _endpoint(self, communicator_id: int, assignment: RankAssignment) -> Endpoint:
        """Shared memory if all members share one host, TCP links if no two do, else both."""
        peers = [member.data_address for member in assignment.members]
        shared = [member.shared_address for member in assignment.members]
        return endpoint_for(
            self._links, self._shared, communicator_id, assignment.generation, assignment.rank, peers, shared
        )

    def detach(self, communicator_id: int, assignment: RankAssignment) -> None:
        """Forgets an assignment but leaves its links open, until the task that uses them closes them."""
        if self._assignments.get(communicator_id) is assignment:
            del self._assignments[communicator_id]

    def release(self, communicator_id: int, assignment: RankAssignment) -> None:
        """Closes the links of an assignment, unless a newer one has replaced it."""
        if self._assignments.get(communicator_id) is assignment:
            self._close_assignment(communicator_id)

    # ---- (2) launches

    async def launch(self, request: pb.LaunchRequest) -> list[Report]:
        """Runs the operations of a launch in order. Returns one report for each."""
        if not 0 < request.timeout_s <= MAX_TIMEOUT_S:  # also refuses NaN
            raise InvalidArgument(f"timeout_s: {request.timeout_s} is not in (0, {MAX_TIMEOUT_S:g}]")
        if len(request.operations) > MAX_OPERATIONS:
            raise InvalidArgument(f"operations: {len(request.operations)} is more than {MAX_OPERATIONS}")
        assignment, communicator = self.connect(request.assignment)
        total = len(request.operations)
        operations = []
        for index, message in enumerate(request.operations, start=1):
            position = f"operation {index} of {total}" if total > 1 else ""
            try:
                operation = self._local_operation(message, communicator)
                with operation.operands(self._memory, check=True) as (source, destination):
                    communicator.check(operation.operation, source, destination)
            except HoopError as error:
                raise _with_position(position, error) from error
            operations.append(operation)
        loop = asyncio.get_running_loop()
        description = f"a launch of communicator {request.assignment.communicator_id} ({', '.join(_names(operations))})"
        access = self._running.accept(description, (one for operation in operations for one in operation.ranges))
        access.max_wait_s = request.timeout_s
        thread = loop.run_in_executor(
            self._threads, _run_all, communicator, self._memory, operations, request.timeout_s
        )

        def ended(done: asyncio.Future[list[Report]]) -> None:
            self._running.end(access)
            self.release_reservation(request.reservation_id)
            if not done.cancelled():
                done.exception()  # mark it as retrieved: the caller may have gone away

        thread.add_done_callback(ended)
        try:
            # Shielded: the thread goes on writing when the caller goes away, and must stay registered.
            reports = await asyncio.shield(thread)
        except HoopError:
            # The links may hold half a message: close them, so that no peer waits for the rest.
            self.release(request.assignment.communicator_id, assignment)
            raise
        if request.release:
            self.release(request.assignment.communicator_id, assignment)
        return reports

    def _local_operation(self, message: pb.LaunchOperation, communicator: Communicator) -> _LocalOperation:
        operation = operation_from(message.operation)
        size, rank = communicator.size, communicator.rank
        operation.check(size)
        counts = operation.extents(size, rank)
        locations = operand_locations(message.operand)
        source, destination = (
            self._locate(location, operation, count, writes)
            for location, count, writes in zip(locations, counts, (False, True), strict=True)
        )
        round_index = message.round if message.HasField("round") else None
        rounds = len(operation.plan(size, rank).rounds)
        if round_index is not None and round_index >= rounds:
            raise InvalidArgument(f"round: {round_index} is not in 0..{rounds - 1}")
        return _LocalOperation(operation, source, destination, round_index)

    def _locate(self, location: pb.Location, operation: Operation, count: int, writes: bool) -> MemoryRange:
        """The bytes of ``count`` elements at a location."""
        address, size = self._memory.min_address, count * operation.dtype.itemsize
        if count or location.WhichOneof("base"):
            address = locate(self._memory, location, size)
        if address % operation.dtype.itemsize:
            raise InvalidArgument(
                f"address {address:#x} is not aligned for elements of {operation.dtype.itemsize} bytes; use a multiple "
                f"of {operation.dtype.itemsize}"
            )
        return MemoryRange(0, address, address + size, writes)

    # ---- reservations

    def reserve(self, request: pb.ReserveRequest) -> None:
        """Registers accepted operations on these bytes until their launch, Release, or the timeout."""
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
        ranges = []
        for one in request.ranges:
            start = locate(self._memory, one.location, one.bytes)
            ranges.append(MemoryRange(0, start, start + one.bytes, one.writes))
        self.release_reservation(request.reservation_id)
        access = self._announced.accept(printable(request.what, 200), ranges, now + request.timeout_s)
        self._reservations[request.reservation_id] = access

    def release_reservation(self, reservation_id: int) -> None:
        access = self._reservations.pop(reservation_id, None)
        if access is not None:
            self._announced.end(access)

    def order_access(self, description: str, address: int, size: int, writes: bool, ordered: bool = False) -> Access:
        """A direct read or write of ``size`` bytes, which waits for all earlier operations on them.

        ``ordered``: the coordinator has ordered it already. It must not wait for announced operations then, which may
        wait for it.
        """
        ranges = [MemoryRange(0, address, address + size, writes)]
        access = self._running.wait_only(description, ranges)
        if not ordered:
            access.predecessors += self._announced.wait_only(description, ranges).predecessors
        return access

    # ---- (3) abort

    def abort(self, communicator_id: int, generation: int, error: HoopError) -> None:
        """Fails the operations of this generation, and of older ones that have not moved, with ``error``."""
        assignment = self._assignments.get(communicator_id)
        if assignment is None or assignment.generation > generation:
            return
        if assignment.communicator is not None:
            assignment.communicator.endpoint.abort(error)
        self.release(communicator_id, assignment)

    def close(self) -> None:
        for communicator_id in list(self._assignments):
            self._close_assignment(communicator_id)
        self._threads.shutdown(wait=True)


def locate(memory: DeviceMemory, location: pb.Location, size: int) -> int:
    """The absolute address of ``size`` bytes at a location. Raises if they are not in the device's memory."""
    match location.WhichOneof("base"):
        case "address":
            address = location.address + location.offset
            memory.check(address, size)
            return address
        case "buffer":
            return memory.resolve(location.buffer, location.offset, size)
        case _:
            raise InvalidArgument("location: neither an address nor a buffer")


def _run_all(
    communicator: Communicator, memory: DeviceMemory, operations: list[_LocalOperation], timeout: float
) -> list[Report]:
    reports = []
    for index, one in enumerate(operations, start=1):
        try:
            with one.operands(memory) as (source, destination):
                reports.append(communicator.run(one.operation, source, destination, timeout, one.round))
        except HoopError as error:
            raise _with_position(
                f"operation {index} of {len(operations)}" if len(operations) > 1 else "", error
            ) from error
        except (OSError, UnicodeError) as error:  # no descriptor left; a host name that no resolver accepts
            raise PeerLost(f"rank {communicator.rank}: no link could be made for {one.operation}: {error}") from error
    return reports


def _names(operations: list[_LocalOperation]) -> list[str]:
    """The operations for an error message: the first three, and the number of the rest."""
    names = [str(one.operation) for one in operations[:3]]
    return [*names, f"{len(operations) - 3} more"] if len(operations) > 3 else names


def _with_position(position: str, error: HoopError) -> HoopError:
    return type(error)(f"{position}: {error}") if position else error
