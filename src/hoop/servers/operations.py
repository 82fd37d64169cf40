"""Operations of the coordinator: an operation queue per communicator, launches on devices, and copies.

A client's request takes this way through the file:

    OperationGroups    collects the operations between GroupStart and GroupEnd, to run them as one batch
    OperationQueue     creates communicators; checks operations, and runs them in order on each communicator
    fan_out            one launch: every member runs the same operations; the usual driver, ``devices``
    stepped, relay     the baselines: the coordinator drives every round, or relays all data itself
    write, read, copy  bytes between a caller and a device, and from device to device

Different communicators run side by side. Operations that touch the same memory run in the order in which the
coordinator accepted them (``access_order``).

One launch:

    coordinator ── Launch ──▶ each member      (1) with its rank and the addresses of all members
                 device ◀── chunks ──▶ device      without the coordinator
    coordinator ◀── report ── each member      (2) all members report, or the first failure aborts the launch
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import grpc
import numpy as np

from hoop.collectives.reduction import Reduction
from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    MembershipChanged,
    OutOfRange,
    PeerCause,
    PeerLost,
    ResourceExhausted,
    UserError,
)
from hoop.membership import events as m
from hoop.membership.reachability import left_out
from hoop.membership.state import CommunicatorState, OperationOutcome
from hoop.servers.access_order import Access
from hoop.servers.coordinator import Coordinator
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operation_runner import MAX_OPERATIONS, MAX_TIMEOUT_S
from hoop.servers.reservation import Reservation
from hoop.wire.channels import STREAM_CHUNK_BYTES
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import calling_host, device_message, status_of, translate, unreachable

ASSIGN_S = 5.0
"""Seconds that a device may take to store its rank, or a lease where that is longer."""
GRACE_S = 1.0
"""Seconds that members may take to return after an abort."""
Reports = list[pb.OperationReport]


# ---- groups


class OperationGroups:
    """Open groups: operations between GroupStart and GroupEnd. A communicator has one open group at most."""

    def __init__(self) -> None:
        self._open: dict[int, list[OperationRequest]] = {}

    def start(self, communicator_id: int) -> None:
        if communicator_id in self._open:
            raise FailedPrecondition(f"communicator {communicator_id} has an open group: call GroupEnd first")
        self._open[communicator_id] = []

    def is_open(self, communicator_id: int) -> bool:
        return communicator_id in self._open

    def add(self, communicator_id: int, request: OperationRequest) -> None:
        requests = self._open[communicator_id]
        if len(requests) >= MAX_OPERATIONS:
            raise ResourceExhausted(f"the group holds {MAX_OPERATIONS} operations already: call GroupEnd")
        requests.append(request)

    def end(self, communicator_id: int) -> list[OperationRequest]:
        """Closes the group and returns its operations."""
        if communicator_id not in self._open:
            raise FailedPrecondition(f"communicator {communicator_id} has no open group: call GroupStart first")
        return self._open.pop(communicator_id)

    def renumber(self, communicator_id: int, old: Sequence[int], new: Sequence[int]) -> None:
        """Renumbers the operands of an open group from the ranks of ``old`` to those of ``new``; others are dropped."""
        ranks = {old.index(device_id): rank for rank, device_id in enumerate(new)}
        if communicator_id in self._open:
            self._open[communicator_id] = [
                replace(one, operands={ranks[rank]: place for rank, place in one.operands.items() if rank in ranks})
                for one in self._open[communicator_id]
            ]

    def discard(self, communicator_id: int) -> None:
        self._open.pop(communicator_id, None)


# ---- the queue


class OperationQueue:
    """Creates communicators, and runs operations on them."""

    def __init__(self, coordinator: Coordinator, groups: OperationGroups) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by communicator; each is held while a batch of that communicator's operations runs."""
        self._unfinished: defaultdict[int, set[asyncio.Task[Reports]]] = defaultdict(set)
        """Batches of each communicator that were accepted and have not ended."""
        self._clients: dict[int, str] = {}
        """Host of the client that created each communicator."""
        self._lab_communicators: dict[int, None] = {}
        """Communicators of the lab's clients, which often never destroy them; the least recently used first."""

    @property
    def in_flight(self) -> int:
        """Batches of operations that were accepted and have not ended. Any thread may ask."""
        return sum(map(len, list(self._unfinished.values())))

    # -- communicators

    async def create(self, device_ids: Sequence[int], count: int = 0, lab: bool = False) -> CommunicatorState:
        """Creates a communicator of exactly these devices, or of ``count`` usable ones; of those that reach each other
        first.

        ``lab``: at a limit of communicators it may be dropped to make room for another one of the same client.
        """
        if not device_ids:
            usable = self._coordinator.state.usable()
            if count > len(usable):
                raise FailedPrecondition(
                    f"devices: {count} were asked for, {len(usable)} are alive; "
                    f"start more with: hoop device --join {self._coordinator.address}"
                )
            out = left_out(self._coordinator.state, usable)
            device_ids = sorted(sorted(usable, key=lambda key: key in out)[:count])
        client = self._make_room()
        state = await self._coordinator.apply_with_retry(
            m.Created(tuple(device_ids), self._coordinator.config.max_communicators)
        )
        communicator = state.communicator(state.next_communicator - 1)
        self._clients[communicator.id] = client
        try:
            await self._send_assignments(communicator)
        except BaseException:  # the caller never learns its id, so nothing else would destroy it
            await self._coordinator.apply_with_retry(m.Destroyed(communicator.id))
            raise
        if lab:
            self._lab_communicators[communicator.id] = None
        return communicator

    def _make_room(self) -> str:
        """The host of the calling client. At a limit of communicators, drops its least recently used idle lab one.

        Raises if the client is at its limit and has none that is idle.
        """
        existing = self._coordinator.state.communicators
        self._clients = {key: host for key, host in self._clients.items() if key in existing}
        self._lab_communicators = {key: None for key in self._lab_communicators if key in existing}
        client, config = calling_host(), self._coordinator.config
        own = sum(host == client for host in self._clients.values()) if client else 0
        if own < config.communicators_per_client and len(existing) < config.max_communicators:
            return client
        idle = (key for key in self._lab_communicators if self._clients.get(key) == client and self.is_idle(key))
        oldest = next(idle, None)
        if oldest is not None:
            self._drop(oldest, client)
        elif own >= config.communicators_per_client:
            raise ResourceExhausted(
                f"the client at {client} has {own} communicators, its limit, and no idle one of the lab's protocol; "
                f"destroy some (CommDestroy), or raise the limit with {config.command} --communicators-per-client"
            )
        return client

    def _drop(self, communicator_id: int, client: str) -> None:
        """Destroys an idle communicator that its client has left behind."""
        self._coordinator.apply(m.Destroyed(communicator_id))
        self._locks.pop(communicator_id, None)
        self._coordinator.events.publish(
            "communicator_dropped",
            f"communicator {communicator_id} was dropped: the client at {client} is at the limit of communicators and "
            "has used this one least recently; it should call CommDestroy",
            communicator=communicator_id,
        )

    def is_idle(self, communicator_id: int) -> bool:
        """Whether no operation runs or waits on a communicator, and no group is open."""
        return not self._unfinished.get(communicator_id) and not self._groups.is_open(communicator_id)

    def mark_used(self, communicator_id: int) -> None:
        """A lab client has called with this communicator: others are dropped before it."""
        if communicator_id in self._lab_communicators:
            self._lab_communicators[communicator_id] = self._lab_communicators.pop(communicator_id)

    async def rebuild(
        self, communicator_id: int, joining: Sequence[int] = (), leaving: Sequence[int] = ()
    ) -> CommunicatorState:
        """Begins the next generation: the usable members, plus ``joining``, minus ``leaving``."""
        state = await self._coordinator.apply_with_retry(m.Rebuilt(communicator_id, tuple(joining), tuple(leaving)))
        return await self._send_assignments(state.communicator(communicator_id))

    async def remove_device(self, communicator_id: int, device_id: int) -> None:
        """Goes on without a device, once the accepted operations have ended. Operations of an open group stay in it.

        The outcome of the latest operation stays if it was a success.
        """
        while unfinished := self._unfinished.get(communicator_id):
            await asyncio.wait(unfinished)
        # No other task runs up to the next await: none can queue an operation for the ranks of before.
        old = self._coordinator.state.communicator(communicator_id)
        one = self._coordinator.apply(m.Rebuilt(communicator_id, leaving=(device_id,))).communicator(communicator_id)
        if old.outcome == OperationOutcome.SUCCESS:
            self._coordinator.apply(m.Finished(communicator_id, one.generation))
        self._groups.renumber(communicator_id, old.members, one.members)
        await self._send_assignments(one)

    async def _send_assignments(self, communicator: CommunicatorState) -> CommunicatorState:
        """Sends every member its rank assignment."""
        calls = [
            self._coordinator.call(
                device_id,
                lambda device: device.AssignRank,
                pb.AssignRankRequest(assignment=rank_assignment_message(self._coordinator, communicator, rank)),
                max(ASSIGN_S, self._coordinator.config.detector.lease_s),
            )
            for rank, device_id in enumerate(communicator.members)
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return communicator

    async def finalize(self, communicator_id: int) -> None:
        """Refuses further operations. Returns when the queued ones have ended."""
        await self._coordinator.apply_with_retry(m.Finalized(communicator_id))
        async with self._locks[communicator_id]:
            pass

    async def destroy(self, communicator_id: int) -> None:
        await self.finalize(communicator_id)
        await self._coordinator.apply_with_retry(m.Destroyed(communicator_id))
        self._locks.pop(communicator_id, None)

    # -- operations

    def check(self, communicator_id: int, requests: Sequence[OperationRequest], timeout: float = 0.0) -> None:
        """Raises for an invalid request, naming the operation, before any data moves."""
        communicator = self._coordinator.state.communicator(communicator_id)
        if communicator.finalized:
            raise FailedPrecondition(f"communicator {communicator_id} is finalized: it takes no more work")
        if communicator.broken_by:
            raise FailedPrecondition(f"communicator {communicator_id}: {communicator.reason}")
        if len(requests) > MAX_OPERATIONS:
            raise InvalidArgument(f"operations: {len(requests)} is more than {MAX_OPERATIONS}")
        if not 0 <= timeout <= MAX_TIMEOUT_S:  # also refuses NaN
            raise InvalidArgument(f"timeout_s: {timeout} is not in 0..{MAX_TIMEOUT_S:g}")
        for index, request in enumerate(requests, start=1):
            try:
                request.check(self._coordinator.state, communicator)
            except HoopError as error:
                position = f"operation {index} of {len(requests)}: " if len(requests) > 1 else ""
                raise type(error)(f"{position}{error}") from None

    async def run(self, communicator_id: int, requests: Sequence[OperationRequest], timeout: float = 0.0) -> Reports:
        """Runs the operations in order. They go on even if the caller is cancelled."""
        self.check(communicator_id, requests, timeout)
        return await asyncio.shield(self.enqueue(communicator_id, requests, timeout))

    def enqueue(
        self, communicator_id: int, requests: Sequence[OperationRequest], timeout: float = 0.0
    ) -> asyncio.Task[Reports]:
        """Queues checked operations. When this returns, the communicator is in progress.

        Every later request that the coordinator accepts waits for them, if it touches the same memory.
        """
        return self._enqueue(communicator_id, requests, timeout)[0]

    async def enqueue_reserved(
        self, communicator_id: int, requests: Sequence[OperationRequest]
    ) -> asyncio.Task[Reports]:
        """``enqueue``, for a caller that does not wait for the end.

        When this returns, the devices hold a reservation: direct requests of clients wait for these operations too.
        """
        task, reservation = self._enqueue(communicator_id, requests, 0.0, reserve=True)
        if reservation is not None:
            await asyncio.shield(reservation.announced)
        return task

    def _enqueue(
        self, communicator_id: int, requests: Sequence[OperationRequest], timeout: float, reserve: bool = False
    ) -> tuple[asyncio.Task[Reports], Reservation | None]:
        coordinator, timeout = self._coordinator, timeout or self._coordinator.config.timeout_s
        communicator = coordinator.apply(m.Started(communicator_id)).communicator(communicator_id)
        description = f"{', '.join(_names(requests))} of communicator {communicator_id}"
        ranges = {one for request in requests for one in request.memory_ranges(communicator) if one.start < one.stop}
        access = coordinator.access_order.accept(description, ranges)
        reservation = (
            Reservation(coordinator, communicator, ranges, description, timeout) if reserve and requests else None
        )
        task = coordinator.in_background(self._run_in_turn(communicator, requests, timeout, access, reservation))
        self._unfinished[communicator_id].add(task)

        def ended(_: asyncio.Task[Reports]) -> None:
            self._unfinished[communicator_id].discard(task)
            if not self._unfinished[communicator_id]:
                del self._unfinished[communicator_id]
            coordinator.access_order.end(access)
            if reservation is not None:
                reservation.release()

        task.add_done_callback(ended)
        return task, reservation

    async def _run_in_turn(
        self,
        accepted: CommunicatorState,
        requests: Sequence[OperationRequest],
        timeout: float,
        access: Access,
        reservation: Reservation | None,
    ) -> Reports:
        """Waits for the communicator and for the memory, runs the operations, and records the outcome.

        ``accepted``: the communicator when it accepted them. Operands are by its ranks: if it has other members when
        their turn comes, they are refused.
        """
        async with self._locks[accepted.id]:
            members = self._coordinator.state.communicator(accepted.id).members
            if members != accepted.members:
                what = ", ".join(_names(requests))
                raise MembershipChanged(
                    f"communicator {accepted.id} was rebuilt of devices {list(members)} while {what} waited, with "
                    f"operands by the ranks of devices {list(accepted.members)}; send it again"
                )
            communicator = self._coordinator.apply(m.Started(accepted.id)).communicator(accepted.id)
            reports: Reports = []
            try:
                await access.wait_turn(timeout)
                if reservation is not None:
                    await reservation.announced  # a launch must not end before its reservation arrives
                batches = [
                    (driver, list(batch)) for driver, batch in groupby(requests, key=lambda request: request.driver)
                ]
                # Devices end the reservation with the launch, if one launch is all of it.
                whole = reservation.id if reservation is not None and len(batches) == 1 else 0
                for driver, batch in batches:
                    reports += await self._run_batch(communicator, driver, batch, timeout, whole)
            except HoopError as error:
                await self._coordinator.apply_with_retry(
                    m.Finished(communicator.id, communicator.generation, str(error))
                )
                raise
            self._coordinator.apply(m.Finished(communicator.id, communicator.generation))
            return reports

    async def _run_batch(
        self,
        communicator: CommunicatorState,
        driver: str,
        requests: list[OperationRequest],
        timeout: float,
        reservation_id: int,
    ) -> Reports:
        if driver == "devices":
            return await fan_out(self._coordinator, communicator, requests, timeout, reservation_id=reservation_id)
        drive = {"stepped": stepped, "relay": relay}[driver]
        return [await drive(self._coordinator, communicator, request, timeout) for request in requests]


def _names(requests: Sequence[OperationRequest]) -> list[str]:
    """The operations for an error message: the first three, and the number of the rest."""
    names = [str(request.operation) for request in requests[:3]]
    return [*names, f"{len(requests) - 3} more"] if len(requests) > 3 else names


# ---- one launch


def rank_assignment_message(coordinator: Coordinator, communicator: CommunicatorState, rank: int) -> pb.RankAssignment:
    """The assignment of one rank: generation, rank, and all members in rank order."""
    members = [device_message(coordinator.state.member(device_id).info) for device_id in communicator.members]
    return pb.RankAssignment(
        communicator_id=communicator.id, generation=communicator.generation, rank=rank, members=members
    )


async def fan_out(
    coordinator: Coordinator,
    communicator: CommunicatorState,
    requests: Sequence[OperationRequest],
    timeout: float,
    round_index: int | None = None,
    release: bool = False,
    reservation_id: int = 0,
) -> list[pb.OperationReport]:
    """Runs the operations as one launch on all members. All succeed, or the root cause is raised.

    ``round_index``: run only this round of their plans. ``release``: members close their links afterwards.
    ``reservation_id``: members end this reservation with the launch, which is all of the reserved operations.
    """

    def launch_request(rank: int) -> pb.LaunchRequest:
        operations = [
            pb.LaunchOperation(operation=request.message, operand=request.operands.get(rank), round=round_index)
            for request in requests
        ]
        assignment = rank_assignment_message(coordinator, communicator, rank)
        return pb.LaunchRequest(
            assignment=assignment,
            operations=operations,
            timeout_s=timeout,
            release=release,
            reservation_id=reservation_id,
        )

    stopped = coordinator.stop_events.setdefault((communicator.id, communicator.generation), asyncio.Event())
    stop = asyncio.ensure_future(stopped.wait())
    calls = [
        asyncio.ensure_future(
            coordinator.call(device_id, lambda device: device.Launch, launch_request(rank), timeout + 2 * GRACE_S)
        )
        for rank, device_id in enumerate(communicator.members)
    ]  # (1)
    try:
        pending: set[asyncio.Future[Any]] = {*calls, stop}
        while not stop.done() and not _failures(calls) and not all(call.done() for call in calls):
            _, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
        if not all(call.done() for call in calls):  # (2)
            reason = str(_root_cause(coordinator, communicator, calls))
            await coordinator.abort(m.Stop(communicator.id, communicator.generation, reason, communicator.members))
            usable = {device_id: coordinator.state.member(device_id).usable for device_id in communicator.members}
            alive = [call for device_id, call in zip(communicator.members, calls, strict=True) if usable[device_id]]
            if alive:  # calls to lost devices do not return
                await asyncio.wait(alive, timeout=GRACE_S)
        if stop.done() or _failures(calls):
            raise _root_cause(coordinator, communicator, calls)
    finally:
        for task in (*calls, stop):
            task.cancel()
        await asyncio.gather(*calls, stop, return_exceptions=True)
        coordinator.stop_events.pop((communicator.id, communicator.generation), None)
    answers = [call.result() for call in calls]
    for device_id, answer in zip(communicator.members, answers, strict=True):
        if len(answer.reports) != len(requests):
            raise PeerLost(f"device {device_id} reports {len(answer.reports)} operations of {len(requests)}")
    return [_summary([answer.reports[index] for answer in answers]) for index in range(len(requests))]


def _failures(calls: Sequence[asyncio.Future[pb.LaunchResponse]]) -> list[BaseException]:
    done = [call for call in calls if call.done() and not call.cancelled()]
    return [error for call in done if (error := call.exception()) is not None]


def _root_cause(
    coordinator: Coordinator, communicator: CommunicatorState, calls: Sequence[asyncio.Future[pb.LaunchResponse]]
) -> BaseException:
    """The failure that explains the rest: a lost device or a user error comes before errors of its neighbours."""
    current = coordinator.state.communicators.get(communicator.id)
    if current is not None and current.broken_by and current.generation == communicator.generation:
        return PeerLost(current.reason)

    def weight(error: BaseException) -> int:
        if not isinstance(error, HoopError) or isinstance(error, UserError):
            return 0
        if isinstance(error, PeerLost) and error.cause is PeerCause.DEVICE_LOST:
            return 1
        return 2 if isinstance(error, LinkCorrupted) else 3 if isinstance(error, DeadlineExceeded) else 4

    failures = sorted(_failures(calls), key=weight)
    return failures[0] if failures else PeerLost(f"communicator {communicator.id} was stopped")


def _summary(reports: Sequence[pb.OperationReport]) -> pb.OperationReport:
    """The time of the slowest rank, and the messages and bytes of all ranks."""
    return pb.OperationReport(
        seconds=max(report.seconds for report in reports),
        messages_sent=sum(report.messages_sent for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        algorithm=reports[0].algorithm,
    )


# ---- baselines: the coordinator drives


async def stepped(
    coordinator: Coordinator, communicator: CommunicatorState, request: OperationRequest, timeout: float
) -> pb.OperationReport:
    """Starts every round of the plan itself, as the public lab implementations do.

    One call a device a round: n · rounds calls, where ``fan_out`` needs n.
    """
    size = len(communicator.members)
    rounds = len(request.operation.plan(size, 0).rounds)
    total = pb.OperationReport(algorithm=f"{request.operation.default_algorithm}, stepped")
    for index in range(rounds):
        (report,) = await fan_out(coordinator, communicator, [request], timeout, round_index=index)
        total.seconds += report.seconds
        total.messages_sent += report.messages_sent
        total.bytes_sent += report.bytes_sent
    return total


async def relay(
    coordinator: Coordinator, communicator: CommunicatorState, request: OperationRequest, timeout: float
) -> pb.OperationReport:
    """Gathers every vector, reduces here, and sends the result back, as the papers' naive version does.

    2n messages of the whole vector pass through the coordinator.
    """
    operation = request.operation
    size = operation.count * operation.dtype.itemsize
    report = pb.OperationReport(algorithm="naive, relayed")
    if not size:
        return report
    started = asyncio.get_running_loop().time()
    operands = [request.operands[rank] for rank in range(len(communicator.members))]
    vectors = await asyncio.gather(
        *(
            read(coordinator, device_id, _source(operand), size, timeout)
            for device_id, operand in zip(communicator.members, operands, strict=True)
        )
    )
    reduction = Reduction(operation.op, operation.dtype)
    total = np.frombuffer(vectors[0], operation.dtype.numpy).copy()
    for vector in vectors[1:]:
        reduction.combine(total, np.frombuffer(vector, operation.dtype.numpy))
    reduction.finish(total, len(vectors))
    result = total.tobytes()
    await asyncio.gather(
        *(
            write(coordinator, device_id, _destination(operand), result, timeout)
            for device_id, operand in zip(communicator.members, operands, strict=True)
        )
    )
    report.seconds = asyncio.get_running_loop().time() - started
    report.messages_sent = 2 * len(operands)
    report.bytes_sent = 2 * len(operands) * size
    return report


def _source(operand: pb.Operand) -> pb.Location:
    return operand.source if operand.HasField("source") else operand.destination


def _destination(operand: pb.Operand) -> pb.Location:
    return operand.destination if operand.HasField("destination") else operand.source


# ---- copies


async def write(coordinator: Coordinator, device_id: int, location: pb.Location, data: bytes, timeout: float) -> None:
    """Copies host to device. The caller has its turn in the coordinator's access order."""
    check_range(coordinator, device_id, location, len(data))

    def chunks() -> Iterator[pb.WriteRequest]:
        yield pb.WriteRequest(location=location, data=data[:STREAM_CHUNK_BYTES], ordered=True)
        for at in range(STREAM_CHUNK_BYTES, len(data), STREAM_CHUNK_BYTES):
            yield pb.WriteRequest(data=data[at : at + STREAM_CHUNK_BYTES])

    try:
        await coordinator.device(device_id).Write(chunks(), timeout=timeout)
    except grpc.RpcError as error:
        raise _copy_error(coordinator, device_id, error) from None


async def read(coordinator: Coordinator, device_id: int, location: pb.Location, size: int, timeout: float) -> bytes:
    """Copies ``size`` bytes device to host. The caller has its turn in the coordinator's access order."""
    _check_usable(coordinator, device_id)
    info = coordinator.state.member(device_id).info
    if size > info.capacity:
        size = info.capacity + 1  # the device refuses this with a good error; allocate nothing here
    data = bytearray()
    try:
        request = pb.ReadRequest(location=location, bytes=size, ordered=True)
        call = coordinator.device(device_id).Read(request, timeout=timeout)
        async for answer in call:
            data += answer.data
    except grpc.RpcError as error:
        raise _copy_error(coordinator, device_id, error) from None
    return bytes(data)


_copy_ids = itertools.count(1 << 62)
"""Ids of copies. A copy is a communicator of two members that lives for one message; its id is none of another
one's."""


async def copy(coordinator: Coordinator, request: pb.CopyRequest) -> None:
    """Copies device to device, over the data plane."""
    ids = (request.source_device, request.destination_device)
    for device_id in ids:
        _check_usable(coordinator, device_id)
    members = ids if ids[0] != ids[1] else ids[:1]
    last = len(members) - 1
    operands = {0: pb.Operand(source=request.source), last: pb.Operand(destination=request.destination)}
    if not last:
        operands = {0: pb.Operand(source=request.source, destination=request.destination)}
    send = OperationRequest(pb.Operation(collective="send", dtype="uint8", count=request.bytes, peer=last), operands)
    communicator = CommunicatorState(next(_copy_ids), members)
    send.check(coordinator.state, communicator)
    timeout = coordinator.config.timeout_s
    access = coordinator.access_order.accept(f"Copy of {request.bytes} bytes", send.memory_ranges(communicator))

    async def run() -> None:
        try:
            await access.wait_turn(timeout)
            await fan_out(coordinator, communicator, [send], timeout, release=True)
        finally:
            coordinator.access_order.end(access)

    await asyncio.shield(coordinator.in_background(run()))


def check_range(coordinator: Coordinator, device_id: int, location: pb.Location, size: int) -> None:
    """Raises if the device is not usable or has no such range, so that no part of an invalid copy is written."""
    _check_usable(coordinator, device_id)
    info = coordinator.state.member(device_id).info
    start = location.address + location.offset
    if location.WhichOneof("base") == "address" and not (info.min_address <= start <= start + size <= info.max_address):
        raise OutOfRange(
            f"[{start:#x}, {start + size:#x}) is outside device {device_id}'s memory "
            f"[{info.min_address:#x}, {info.max_address:#x})"
        )


def check_fits(size: int, limit: int) -> None:
    """Raises if an answer of ``size`` bytes does not fit one message of ``limit`` bytes."""
    if size > limit - 1024:
        raise ResourceExhausted(
            f"numBytes: {size} does not fit a message of {limit} bytes; read it in parts, or with hoop.v1.Device/Read"
        )


def _check_usable(coordinator: Coordinator, device_id: int) -> None:
    member = coordinator.state.member(device_id)
    if not member.usable:
        raise FailedPrecondition(f"{member.info} is {member.health}: {member.reason}")


def _copy_error(coordinator: Coordinator, device_id: int, error: grpc.RpcError) -> HoopError:
    if unreachable(error):
        info = coordinator.state.member(device_id).info
        return PeerLost(f"{info} was lost during a copy: {status_of(error)}", cause=PeerCause.DEVICE_LOST)
    return translate(error, f"device {device_id}")
