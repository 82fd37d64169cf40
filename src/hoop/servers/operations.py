"""Groups: operations between GroupStart and GroupEnd, queued to run in order as one launch.

One launch: every member runs the same operations, and all succeed or the failure is named.

coordinator ── Launch ──▶ each member      (1) its rank and who the others are are in it
             device ◀── chunks ──▶ device      by themselves
coordinator ◀── report ── each member      (2) all answered, or the first failure aborts the rest

Bytes between a caller and a device, and from device to device.

The two ways in which a coordinator can move the data itself: what Hoop is compared with.

``stepped``: it steps every round of the plan, as the public lab implementations do. ``relay``: it gathers every
vector, reduces here and sends the result back, as the papers' naive version does.

Gives communicators their work: in order on each, side by side on different ones.

Work of different communicators that touches the same memory runs in the order in which it was accepted.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    OutOfRange,
    PeerLost,
    ResourceExhausted,
    UserError,
)
from hoop.membership import events as m
from hoop.membership.state import CommunicatorState
from hoop.servers.coordinator import Coordinator
from hoop.servers.memory_order import Access
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operation_runner import MAX_OPERATIONS, MAX_TIMEOUT_S
from hoop.servers.reservation import Reservation
from hoop.wire.channels import STREAM_CHUNK_BYTES
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import calling_host, describe, status_of, translate, unreachable


class OperationGroups:
    """The open groups, at most one a communicator."""

    def __init__(self) -> None:
        self._open: dict[int, list[OperationRequest]] = {}

    def start(self, communicator_id: int) -> None:
        if communicator_id in self._open:
            raise FailedPrecondition(f"communicator {communicator_id} has an open group: call GroupEnd first")
        self._open[communicator_id] = []

    def is_open(self, communicator_id: int) -> bool:
        return communicator_id in self._open

    def queue(self, communicator_id: int, work: OperationRequest) -> None:
        works = self._open[communicator_id]
        if len(works) >= MAX_OPERATIONS:
            raise ResourceExhausted(f"the group holds {MAX_OPERATIONS} operations already: call GroupEnd")
        works.append(work)

    def end(self, communicator_id: int) -> list[OperationRequest]:
        if communicator_id not in self._open:
            raise FailedPrecondition(
                f"communicator {communicator_id} has no open group: call GroupStart first"
            )
        return self._open.pop(communicator_id)

    def forget(self, communicator_id: int) -> None:
        self._open.pop(communicator_id, None)


GRACE_S = 1.0
"""How long members may take to come back after an abort."""


def assign_ranks(coordinator: Coordinator, one: CommunicatorState, rank: int) -> pb.Seat:
    """A rank's place among the others."""
    members = [describe(coordinator.state.member(device_id).info) for device_id in one.members]
    return pb.Seat(communicator_id=one.id, generation=one.generation, rank=rank, members=members)


async def fan_out(
    coordinator: Coordinator,
    one: CommunicatorState,
    works: Sequence[OperationRequest],
    timeout: float,
    round_index: int | None = None,
    release: bool = False,
    reservation_id: int = 0,
) -> list[pb.OperationReport]:
    """Runs the works as one launch; ``round_index`` runs that round of their plans alone.

    ``reservation_id``: these works are all that was reserved under it; each device ends it with its launch.
    """

    def request(rank: int) -> pb.LaunchRequest:
        operations = [
            pb.LaunchOperation(operation=work.message, operand=work.operands.get(rank), round=round_index)
            for work in works
        ]
        place = assign_ranks(coordinator, one, rank)
        return pb.LaunchRequest(
            seat=place,
            operations=operations,
            timeout_s=timeout,
            release=release,
            reservation_id=reservation_id,
        )

    stopped = coordinator.stops.setdefault((one.id, one.generation), asyncio.Event())
    stop = asyncio.ensure_future(stopped.wait())
    calls = [
        asyncio.ensure_future(coordinator.call(device_id, "Launch", request(rank), timeout + 2 * GRACE_S))
        for rank, device_id in enumerate(one.members)
    ]  # (1)
    try:
        pending: set[asyncio.Future[Any]] = {*calls, stop}
        while not stop.done() and not _failures(calls) and not all(call.done() for call in calls):
            _, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
        if not all(call.done() for call in calls):  # (2)
            reason = str(_worst(coordinator, one, calls))
            await coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))
            usable = {device_id: coordinator.state.member(device_id).usable for device_id in one.members}
            alive = [call for device_id, call in zip(one.members, calls, strict=True) if usable[device_id]]
            if alive:  # the dead do not come back
                await asyncio.wait(alive, timeout=GRACE_S)
        if stop.done() or _failures(calls):
            raise _worst(coordinator, one, calls)
    finally:
        for task in (*calls, stop):
            task.cancel()
        await asyncio.gather(*calls, stop, return_exceptions=True)
        coordinator.stops.pop((one.id, one.generation), None)
    answers = [call.result() for call in calls]
    for device_id, answer in zip(one.members, answers, strict=True):
        if len(answer.reports) != len(works):
            raise PeerLost(f"device {device_id} reports {len(answer.reports)} operations of {len(works)}")
    return [_summary([answer.reports[index] for answer in answers]) for index in range(len(works))]


def _failures(calls: Sequence[asyncio.Future[pb.LaunchResponse]]) -> list[BaseException]:
    done = [call for call in calls if call.done() and not call.cancelled()]
    return [error for call in done if (error := call.exception()) is not None]


def _worst(
    coordinator: Coordinator, one: CommunicatorState, calls: Sequence[asyncio.Future[pb.LaunchResponse]]
) -> BaseException:
    """The failure that explains the others: a device's death or mistake before its neighbours' complaints."""
    current = coordinator.state.communicators.get(one.id)
    if current is not None and current.broken_by and current.generation == one.generation:
        return PeerLost(current.reason)

    def weight(error: BaseException) -> int:
        if not isinstance(error, HoopError) or isinstance(error, UserError):
            return 0
        if isinstance(error, PeerLost) and " was lost during " in str(error):
            return 1
        return 2 if isinstance(error, LinkCorrupted) else 3 if isinstance(error, DeadlineExceeded) else 4

    failures = sorted(_failures(calls), key=weight)
    return failures[0] if failures else PeerLost(f"communicator {one.id} was stopped")


def _summary(reports: Sequence[pb.OperationReport]) -> pb.OperationReport:
    """The slowest rank's time, and what all of them sent."""
    return pb.OperationReport(
        seconds=max(report.seconds for report in reports),
        messages_sent=sum(report.messages_sent for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        algorithm=reports[0].algorithm,
    )


_copy_ids = itertools.count(1 << 62)
"""A copy is a communicator of two that lives for one message; its ids are far from the others'."""


def _reachable(coordinator: Coordinator, device_id: int) -> None:
    member = coordinator.state.member(device_id)
    if not member.usable:
        raise FailedPrecondition(f"{member.info} is {member.health}: {member.reason}")


def _failed(coordinator: Coordinator, device_id: int, error: grpc.RpcError) -> HoopError:
    if unreachable(error):
        info = coordinator.state.member(device_id).info
        return PeerLost(f"{info} was lost during a copy: {status_of(error)}")
    return translate(error, f"device {device_id}")


def check_range(coordinator: Coordinator, device_id: int, place: pb.Location, size: int) -> None:
    """Raises if the device cannot be used, or has no such range: no part is copied of what does not fit."""
    _reachable(coordinator, device_id)
    info = coordinator.state.member(device_id).info
    start = place.address + place.offset
    if place.WhichOneof("base") == "address" and not (
        info.min_address <= start <= start + size <= info.max_address
    ):
        raise OutOfRange(
            f"[{start:#x}, {start + size:#x}) is outside device {device_id}'s memory "
            f"[{info.min_address:#x}, {info.max_address:#x})"
        )


async def write(
    coordinator: Coordinator, device_id: int, place: pb.Location, data: bytes, timeout: float
) -> None:
    """Host to device, for work that has its turn in the coordinator's order."""
    check_range(coordinator, device_id, place, len(data))

    def chunks() -> Iterator[pb.WriteRequest]:
        yield pb.WriteRequest(location=place, data=data[:STREAM_CHUNK_BYTES], ordered=True)
        for at in range(STREAM_CHUNK_BYTES, len(data), STREAM_CHUNK_BYTES):
            yield pb.WriteRequest(data=data[at : at + STREAM_CHUNK_BYTES])

    try:
        await coordinator.device(device_id).Write(chunks(), timeout=timeout)
    except grpc.RpcError as error:
        raise _failed(coordinator, device_id, error) from None


async def read(
    coordinator: Coordinator, device_id: int, place: pb.Location, size: int, timeout: float
) -> bytes:
    """Device to host, for work that has its turn in the coordinator's order.

    ``size`` is bounded by what the device's memory can hold.
    """
    _reachable(coordinator, device_id)
    info = coordinator.state.member(device_id).info
    if size > info.capacity:
        size = info.capacity + 1  # the device says what is wrong with it; nothing is allocated here first
    data = bytearray()
    try:
        request = pb.ReadRequest(location=place, bytes=size, ordered=True)
        call = coordinator.device(device_id).Read(request, timeout=timeout)
        async for answer in call:
            data += answer.data
    except grpc.RpcError as error:
        raise _failed(coordinator, device_id, error) from None
    return bytes(data)


def check_fits(size: int, limit: int) -> None:
    """Whether an answer of ``size`` bytes fits one message."""
    if size > limit - 1024:
        raise ResourceExhausted(
            f"numBytes: {size} does not fit a message of {limit} bytes; read it in parts, or with hoop.v1.Device/Read"
        )


async def copy(coordinator: Coordinator, request: pb.CopyRequest) -> None:
    """Device to device, over the data plane."""
    ids = (request.source_device, request.destination_device)
    for device_id in ids:
        _reachable(coordinator, device_id)
    members = ids if ids[0] != ids[1] else ids[:1]
    last = len(members) - 1
    operands = {0: pb.Operand(source=request.source), last: pb.Operand(destination=request.destination)}
    if not last:
        operands = {0: pb.Operand(source=request.source, destination=request.destination)}
    work = OperationRequest(
        pb.Operation(collective="send", dtype="uint8", count=request.bytes, peer=last), operands
    )
    one = CommunicatorState(next(_copy_ids), members)
    work.check(coordinator.state, one)
    timeout = coordinator.config.timeout_s
    access = coordinator.order.accept(f"Copy of {request.bytes} bytes", work.spans(one))

    async def run() -> None:
        try:
            await access.turn(timeout)
            await fan_out(coordinator, one, [work], timeout, release=True)
        finally:
            coordinator.order.end(access)

    await asyncio.shield(coordinator.in_background(run()))


async def stepped(
    coordinator: Coordinator, one: CommunicatorState, work: OperationRequest, timeout: float
) -> pb.OperationReport:
    """A call a device a round: n · rounds calls where the devices alone need n."""
    size = len(one.members)
    rounds = len(work.operation.plan(size, 0).rounds)
    total = pb.OperationReport(algorithm=f"{work.operation.default}, stepped")
    for index in range(rounds):
        (report,) = await fan_out(coordinator, one, [work], timeout, round_index=index)
        total.seconds += report.seconds
        total.messages_sent += report.messages_sent
        total.bytes_sent += report.bytes_sent
    return total


async def relay(
    coordinator: Coordinator, one: CommunicatorState, work: OperationRequest, timeout: float
) -> pb.OperationReport:
    """2n messages of S, all of them through the coordinator."""
    operation = work.operation
    size = operation.count * operation.dtype.itemsize
    report = pb.OperationReport(algorithm="naive, relayed")
    if not size:
        return report
    started = asyncio.get_running_loop().time()
    operands = [work.operands[rank] for rank in range(len(one.members))]
    vectors = await asyncio.gather(
        *(
            read(coordinator, device_id, _source(operand), size, timeout)
            for device_id, operand in zip(one.members, operands, strict=True)
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
            for device_id, operand in zip(one.members, operands, strict=True)
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


SEAT_S = 5.0
Reports = list[pb.OperationReport]


class OperationQueue:
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
                device_id, "Seat", pb.SeatRequest(seat=assign_ranks(self._coordinator, one, rank)), SEAT_S
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

    def check(self, communicator_id: int, works: Sequence[OperationRequest], timeout: float = 0.0) -> None:
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

    async def run(
        self, communicator_id: int, works: Sequence[OperationRequest], timeout: float = 0.0
    ) -> Reports:
        """Runs the works in order; they go on even if nobody waits for them any more."""
        self.check(communicator_id, works, timeout)
        return await asyncio.shield(self.begin(communicator_id, works, timeout))

    def begin(
        self, communicator_id: int, works: Sequence[OperationRequest], timeout: float = 0.0
    ) -> asyncio.Task[Reports]:
        """Queues checked work: the communicator is in progress when this returns.

        From here on whatever the coordinator accepts and touches the same memory waits for this work.
        """
        return self._begin(communicator_id, works, timeout)[0]

    async def begin_announced(
        self, communicator_id: int, works: Sequence[OperationRequest]
    ) -> asyncio.Task[Reports]:
        """``begin``, for a caller that will not wait for the end.

        When this returns, the devices know of the work too: what a client asks them for directly waits for it.
        """
        task, reservation = self._begin(communicator_id, works, 0.0, announce=True)
        if reservation is not None:
            await asyncio.shield(reservation.announced)
        return task

    def _begin(
        self, communicator_id: int, works: Sequence[OperationRequest], timeout: float, announce: bool = False
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
        works: Sequence[OperationRequest],
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
        self,
        one: CommunicatorState,
        driver: str,
        works: list[OperationRequest],
        timeout: float,
        reservation_id: int,
    ) -> Reports:
        if driver == "devices":
            return await fan_out(self._coordinator, one, works, timeout, reservation_id=reservation_id)
        drive = {"stepped": stepped, "relay": relay}[driver]
        return [await drive(self._coordinator, one, work, timeout) for work in works]


def _names(works: Sequence[OperationRequest]) -> list[str]:
    """The operations, for people; of many the first few."""
    names = [str(work.operation) for work in works[:3]]
    return [*names, f"{len(works) - 3} more"] if len(works) > 3 else names
