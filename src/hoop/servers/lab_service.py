"""The lab's protocol (gpu_sim): ``LabCoordinator`` and ``LabDevice`` serve it over Hoop's communicators and memory.

``StreamTable`` holds the transfers of a device. BeginSend and BeginReceive announce a transfer, StreamSend carries it,
GetStreamStatus returns its status.

    client ── BeginSend ─────▶ source        (1) returns an id, and starts a task that connects to the destination
    client ── BeginReceive ──▶ destination   (2) the address for the bytes
    source ── StreamSend ────▶ destination   (3) the bytes

(2) and (3) may come in either order: each waits for the other, up to a deadline.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    NotFound,
    PeerLost,
    ResourceExhausted,
)
from hoop.membership.state import CommunicatorState, OperationOutcome
from hoop.memory import Arena
from hoop.servers.client_reports import ClientReports
from hoop.servers.coordinator import Coordinator
from hoop.servers.lab_counts import FLOAT64_BYTES, CopyLengths, find_unit
from hoop.servers.memory_order import Access, MemoryRange
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operation_runner import MAX_TIMEOUT_S, OperationRunner
from hoop.servers.operations import OperationGroups, OperationQueue, check_fits, check_range, read, write
from hoop.texts import printable
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.channels import STREAM_CHUNK_BYTES, channel_options
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import gpu_sim_pb2_grpc as lab_grpc
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.service import translate, with_metadata

MAX_OPEN = 4096
MAX_REMEMBERED = 16384
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Received bytes that may wait for their BeginReceive; a single message may exceed it. Hoop's devices send none."""
MATCH_SECONDS = 30.0
"""How long a sender waits for its BeginReceive, and a receive for its sender."""


@dataclass
class Stream:
    """One end of one transfer."""

    id: int
    size: int
    peer_device: int = 0
    status: int = lab.IN_PROGRESS
    reason: str = ""
    address: int = 0
    has_sender: bool = False
    """A receive whose sender has connected."""
    access: Access | None = None
    """The transfer's place in the memory order: it waits for earlier operations on the same bytes."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_turn(self) -> None:
        """Returns when all earlier operations on the same bytes have ended. Raises after ``MAX_TIMEOUT_S``."""
        if self.access is not None:
            await self.access.wait_turn(MAX_TIMEOUT_S)

    def end(self, reason: str = "") -> None:
        """Ends the transfer; ``reason``: why it failed, empty if it succeeded. Only the first call counts."""
        if not self.ended.is_set():
            self.status, self.reason = (lab.FAILED if reason else lab.SUCCESS), printable(reason)
            self.ended.set()


OrderAccess = Callable[[str, int, int, bool], Access]
"""``OperationRunner.order_access``: description, address, size in bytes, whether it writes."""


class StreamTable:
    """The transfers of this device, and the limits on them."""

    def __init__(self, arena: Arena, order_access: OrderAccess, max_open: int = MAX_OPEN) -> None:
        self._arena = arena
        self._order_access = order_access
        self._max_open = max_open
        self._sends: OrderedDict[int, Stream] = OrderedDict()
        self._receives: OrderedDict[int, Stream] = OrderedDict()
        self._receive_begun = asyncio.Condition()
        self._unmatched_senders = 0
        """Senders that wait for their BeginReceive."""
        self._waiting_bytes = 0

    @property
    def open(self) -> int:
        both = (*self._sends.values(), *self._receives.values())
        return self._unmatched_senders + sum(stream.status == lab.IN_PROGRESS for stream in both)

    def begin_send(self, address: int, size: int, peer_device: int) -> tuple[Stream, memoryview]:
        """(1): adds a send; returns it with a view of its bytes."""
        view = self._arena.view(address, size)
        access = self._order_access("BeginSend", address, size, False)
        stream = Stream(secrets.randbits(62) + 1, size, peer_device, access=access)
        self._add(self._sends, stream)
        return stream, view

    async def begin_receive(self, stream_id: int, address: int, size: int, peer_device: int) -> None:
        """(2): adds a receive, and wakes a sender that waits for it."""
        if not stream_id:
            raise InvalidArgument("streamId: 0 is no stream; use the id that BeginSend returned")
        if stream_id in self._receives:
            raise FailedPrecondition(f"streamId: stream {stream_id} has been begun here already")
        self._arena.check(address, size)
        access = self._order_access("BeginReceive", address, size, True)
        stream = Stream(stream_id, size, peer_device, address=address, access=access)
        self._add(self._receives, stream)
        async with self._receive_begun:
            self._receive_begun.notify_all()

    async def expire(self, stream: Stream) -> None:
        """Fails a receive if no sender connects in time."""
        try:
            await asyncio.wait_for(stream.ended.wait(), MATCH_SECONDS)
        except TimeoutError:
            if not stream.has_sender:
                stream.end(f"no sender of stream {stream.id} came within {MATCH_SECONDS:g} s")

    def receive(self, stream_id: int) -> Stream:
        return self._receives[stream_id]

    def status(self, stream_id: int) -> Stream:
        stream = self._receives.get(stream_id) or self._sends.get(stream_id)
        if stream is None:
            raise NotFound(f"streamId: stream {stream_id} is unknown to this device")
        return stream

    async def accept(self, chunks: AsyncIterator[lab.DataChunk]) -> None:
        """(3): receives the bytes of one StreamSend, to the last."""
        self._check_limit()
        self._unmatched_senders += 1
        try:
            first, stream = await self._match_sender(chunks)
        finally:
            self._unmatched_senders -= 1
        try:
            await self._write_chunks(stream, first, chunks)
            stream.end()
        except HoopError as error:
            stream.end(str(error))
            raise
        except (Exception, asyncio.CancelledError) as error:
            stream.end(f"the sender vanished: {error or type(error).__name__}")
            raise

    async def _match_sender(self, chunks: AsyncIterator[lab.DataChunk]) -> tuple[lab.DataChunk, Stream]:
        """The first chunk of a sender, and the receive that it belongs to."""
        try:
            first = await asyncio.wait_for(anext(aiter(chunks), None), MATCH_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(f"StreamSend: no chunk came within {MATCH_SECONDS:g} s") from None
        if first is None:
            raise InvalidArgument("StreamSend: the stream ended before its first chunk")
        size = len(first.data)
        if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise ResourceExhausted(
                f"StreamSend: {self._waiting_bytes} bytes wait for their BeginReceive here, {size} more are too many"
            )
        self._waiting_bytes += size
        try:
            return first, await self._wait_receive(first.streamId.value)
        finally:
            self._waiting_bytes -= size

    async def _wait_receive(self, stream_id: int) -> Stream:
        """The receive with this id (0: any free one); waits for its BeginReceive."""

        def found() -> Stream | None:
            if stream_id:
                return self._receives.get(stream_id)
            waiting = (one for one in self._receives.values() if not one.has_sender and not one.ended.is_set())
            return next(waiting, None)

        try:
            async with self._receive_begun:
                stream = await asyncio.wait_for(self._receive_begun.wait_for(found), MATCH_SECONDS)
        except TimeoutError:
            raise FailedPrecondition(
                f"StreamSend: no BeginReceive for stream {stream_id or 'any'} within {MATCH_SECONDS:g} s"
            ) from None
        assert stream is not None, "the condition is that there is one"
        if stream.has_sender:
            raise FailedPrecondition(f"StreamSend: stream {stream.id} has a sender already")
        stream.has_sender = True
        return stream

    async def _write_chunks(self, stream: Stream, first: lab.DataChunk, chunks: AsyncIterator[lab.DataChunk]) -> None:
        await stream.wait_turn()
        received = 0
        chunk: lab.DataChunk | None = first
        while chunk is not None:
            if stream.ended.is_set():
                raise PeerLost(f"stream {stream.id}: {stream.reason}")
            if received + len(chunk.data) > stream.size:
                raise LinkCorrupted(f"stream {stream.id}: the sender sent more than the {stream.size} bytes agreed")
            self._arena.write(stream.address + received, chunk.data)
            received += len(chunk.data)
            chunk = await anext(aiter(chunks), None)
        if received < stream.size:
            raise LinkCorrupted(f"stream {stream.id}: it ended after {received} of {stream.size} bytes")

    def fail_peer(self, device_id: int, reason: str) -> None:
        """A device is lost: fails all transfers from it and to it."""
        for stream in (*self._sends.values(), *self._receives.values()):
            if stream.peer_device == device_id:
                stream.end(reason)

    def _check_limit(self) -> None:
        if self.open >= self._max_open:
            raise ResourceExhausted(
                f"{self._max_open} streams are open here; wait for some to end, or raise the device's --max-streams"
            )

    def _add(self, table: OrderedDict[int, Stream], stream: Stream) -> None:
        self._check_limit()
        table[stream.id] = stream
        if len(table) > MAX_REMEMBERED:
            ended = next(key for key, one in table.items() if one.ended.is_set())
            del table[ended]


COORDINATOR_SERVICE = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]
_STATUS = {
    OperationOutcome.IN_PROGRESS: lab.IN_PROGRESS,
    OperationOutcome.SUCCESS: lab.SUCCESS,
    OperationOutcome.FAILED: lab.FAILED,
}
_OPS = {lab.SUM: "sum", lab.PROD: "prod", lab.MIN: "min", lab.MAX: "max", lab.AVG: "avg"}

_AllReduce = lab.AllReduceRingRequest | lab.NaiveAllReduceRequest


class LabCoordinator:
    """The lab's coordinator service. Each public method is the RPC of the same name."""

    def __init__(
        self, coordinator: Coordinator, operations: OperationQueue, groups: OperationGroups, reports: ClientReports
    ) -> None:
        self._coordinator = coordinator
        self._operations = operations
        self._groups = groups
        self._reports = reports
        self._copies = CopyLengths()
        self._units: dict[int, str] = {}
        """With ``--count-unit auto``: by communicator, the unit of the last count that showed it."""

    async def comm_init(self, request: lab.CommInitRequest) -> lab.CommInitResponse:
        if not request.numDevices:
            raise InvalidArgument("numDevices: 0 devices make no communicator; at least 1")
        one = await self._operations.create((), request.numDevices, lab=True)
        self._units = {key: unit for key, unit in self._units.items() if key in self._coordinator.state.communicators}
        devices = []
        for device_id in one.members:
            info = self._coordinator.state.member(device_id).info
            devices.append(
                lab.DeviceMetadata(
                    deviceId=lab.DeviceId(value=info.device_id),
                    minMemAddr=lab.MemAddr(value=info.min_address),
                    maxMemAddr=lab.MemAddr(value=info.max_address),
                )
            )
        return lab.CommInitResponse(success=True, commId=one.id, devices=devices)

    def _communicator(self, communicator_id: int) -> CommunicatorState:
        """The communicator that a client named, which has used it by that. Raises if there is none."""
        self._operations.mark_used(communicator_id)
        return self._coordinator.state.communicator(communicator_id)

    async def get_comm_status(self, request: lab.GetCommStatusRequest) -> lab.GetCommStatusResponse:
        one = self._communicator(request.commId)
        return lab.GetCommStatusResponse(status=_STATUS[one.outcome], reason=one.reason)

    async def group_start(self, request: lab.GroupStartRequest) -> lab.GroupStartResponse:
        self._communicator(request.commId)
        self._operations.check(request.commId, ())
        self._groups.start(request.commId)
        return lab.GroupStartResponse(success=True)

    async def group_end(self, request: lab.GroupEndRequest) -> lab.GroupEndResponse:
        self._communicator(request.commId)
        requests = self._groups.end(request.commId)
        self._operations.check(request.commId, requests)
        task = await self._operations.enqueue_reserved(request.commId, requests)
        # Its outcome is the communicator's status. Retrieve the exception, as no code awaits the task.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return lab.GroupEndResponse(success=True)

    async def all_reduce_ring(self, request: lab.AllReduceRingRequest) -> lab.AllReduceRingResponse:
        await self._reduce(request, "devices")
        return lab.AllReduceRingResponse(success=True)

    async def naive_all_reduce(self, request: lab.NaiveAllReduceRequest) -> lab.NaiveAllReduceResponse:
        await self._reduce(request, "relay")
        return lab.NaiveAllReduceResponse(success=True)

    async def _reduce(self, request: _AllReduce, driver: str) -> None:
        one = self._communicator(request.commId)
        _check_known(request, request.count, "count")
        addresses = _addresses(request, one)
        operation = OperationRequest(self._operation(request, one, addresses), _operands(addresses), driver)
        self._operations.check(request.commId, (operation,))
        if self._groups.is_open(request.commId):
            self._groups.add(request.commId, operation)
        else:
            await self._operations.run(request.commId, (operation,))

    def _operation(self, request: _AllReduce, one: CommunicatorState, addresses: Mapping[int, int]) -> pb.Operation:
        if request.op not in _OPS:
            raise InvalidArgument(f"op: {request.op} is unknown; known: SUM=0 PROD=1 MIN=2 MAX=3 AVG=4")
        count = self._elements(request.count, one, addresses)
        return pb.Operation(
            collective="all_reduce", algorithm="ring", dtype="float64", op=_OPS[request.op], count=count
        )

    def _elements(self, count: int, one: CommunicatorState, addresses: Mapping[int, int]) -> int:
        """The number of float64 elements that a client's ``count`` means."""
        if not count:
            return 0
        unit, command = self._coordinator.config.count_unit, self._coordinator.config.command
        copied = self._copies.of((one.members[rank], address) for rank, address in addresses.items())
        shown = find_unit(count, copied)
        if unit == "auto":
            unit = shown or self._units.get(one.id, "")
            if not unit:
                lengths = ", ".join(map(str, sorted(set(copied)))) or "no copy is known"
                raise InvalidArgument(
                    f"count: {count} may be bytes or float64 elements, and the copies to these addresses do not show "
                    f"which (their lengths in bytes: {lengths}); copy whole vectors to memAddrs first, or start "
                    f"{command} with --count-unit bytes or --count-unit elements"
                )
            self._units[one.id] = unit
        elif shown not in ("", unit):
            self._reports.add(
                f"AllReduce on communicator {one.id}: count {count} is taken as {unit}, but {shown} would fit what was "
                f"copied to these addresses; if the result is wrong, start {command} with --count-unit auto"
            )
        if unit == "elements":
            return count
        if count % FLOAT64_BYTES:
            raise InvalidArgument(
                f"count: {count} bytes are not whole float64 elements; this coordinator counts bytes "
                f"({command} --count-unit elements counts elements, --count-unit auto finds out)"
            )
        return count // FLOAT64_BYTES

    async def memcpy(self, request: lab.MemcpyRequest) -> lab.MemcpyResponse:
        """Waits for earlier operations on the same bytes, up to the coordinator's timeout."""
        match request.WhichOneof("either"):
            case "hostToDevice":
                write_request = request.hostToDevice
                _check_known(write_request, len(write_request.hostSrcData), "hostSrcData")
                await self._to_device(
                    write_request.dstDeviceId.value, write_request.dstMemAddr.value, write_request.hostSrcData
                )
                return lab.MemcpyResponse(hostToDevice=lab.MemcpyHostToDeviceResponse(success=True))
            case "deviceToHost":
                read_request = request.deviceToHost
                _check_known(read_request, read_request.numBytes, "numBytes")
                data = await self._to_host(
                    read_request.srcDeviceId.value, read_request.srcMemAddr.value, read_request.numBytes
                )
                return lab.MemcpyResponse(deviceToHost=lab.MemcpyDeviceToHostResponse(dstData=data))
            case _:
                raise InvalidArgument("either: neither hostToDevice nor deviceToHost is set")

    async def _to_device(self, device_id: int, address: int, data: bytes) -> None:
        location, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        check_range(self._coordinator, device_id, location, len(data))
        memory_range = MemoryRange(device_id, address, address + len(data), writes=True)
        async with self._coordinator.memory_order.in_turn(f"Memcpy to {memory_range}", [memory_range], timeout):
            await write(self._coordinator, device_id, location, data, timeout)
        self._copies.record(device_id, address, len(data))

    async def _to_host(self, device_id: int, address: int, size: int) -> bytes:
        location, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        self._coordinator.state.member(device_id)
        check_fits(size, self._coordinator.config.max_message)
        check_range(self._coordinator, device_id, location, size)
        memory_range = MemoryRange(device_id, address, address + size, writes=False)
        async with self._coordinator.memory_order.in_turn(f"Memcpy from {memory_range}", [memory_range], timeout):
            return await read(self._coordinator, device_id, location, size, timeout)

    async def comm_finalize(self, request: lab.CommFinalizeRequest) -> lab.CommFinalizeResponse:
        self._groups.discard(request.commId)
        await self._operations.finalize(request.commId)
        return lab.CommFinalizeResponse(success=True)

    async def comm_destroy(self, request: lab.CommDestroyRequest) -> lab.CommDestroyResponse:
        self._groups.discard(request.commId)
        await self._operations.destroy(request.commId)
        return lab.CommDestroyResponse(success=True)


def _addresses(request: _AllReduce, one: CommunicatorState) -> dict[int, int]:
    """The address of every rank's vector."""
    size = len(one.members)
    if unknown := sorted(rank for rank in request.memAddrs if rank >= size):
        raise InvalidArgument(f"memAddrs: ranks {unknown} are not in 0..{size - 1}")
    if missing := [rank for rank in range(size) if rank not in request.memAddrs]:
        what = "it is missing" if len(missing) == size else f"rank {missing[0]} has no address"
        raise InvalidArgument(
            f"memAddrs: {what}; it must map each of the {size} ranks of communicator {one.id} to its vector's address"
        )
    return {rank: request.memAddrs[rank].value for rank in range(size)}


def _operands(addresses: Mapping[int, int]) -> dict[int, pb.Operand]:
    return {rank: pb.Operand(source=pb.Location(address=address)) for rank, address in addresses.items()}


def _check_known(request: Message, size: int, field: str) -> None:
    """Raises if a request asks for nothing but has unknown fields: its sender has another version of the protocol."""
    fields = UnknownFieldSet(request)
    unknown = sorted({fields[at].field_number for at in range(len(fields))})
    if unknown and not size:
        raise InvalidArgument(
            f"{field}: it is 0 or missing, and the message has unknown fields ({', '.join(map(str, unknown))}): does "
            f"the client's gpu_sim.proto have {field} at number {request.DESCRIPTOR.fields_by_name[field].number} of "
            f"{request.DESCRIPTOR.name}?"
        )


DEVICE_SERVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]


class LabDevice:
    """The lab's device service. Each public method is the RPC of the same name."""

    def __init__(self, arena: Arena, runner: OperationRunner, streams: StreamTable, credentials: Credentials) -> None:
        self._credentials = credentials
        self._arena = arena
        self._runner = runner
        self._streams = streams
        self._tasks: set[asyncio.Task[None]] = set()
        self.device_id = 0

    async def get_device_metadata(self, _: lab.GetDeviceMetadataRequest) -> lab.GetDeviceMetadataResponse:
        return lab.GetDeviceMetadataResponse(
            metadata=lab.DeviceMetadata(
                deviceId=lab.DeviceId(value=self.device_id),
                minMemAddr=lab.MemAddr(value=self._arena.min_address),
                maxMemAddr=lab.MemAddr(value=self._arena.max_address),
            )
        )

    async def begin_send(self, request: lab.BeginSendRequest) -> lab.BeginSendResponse:
        _check_known(request, request.numBytes, "numBytes")
        member = self._runner.member(request.dstRank.value, request.commId)
        stream, view = self._streams.begin_send(request.sendBuffAddr.value, request.numBytes, member.device_id)
        self._in_background(self._send(stream, view, member.address))
        return lab.BeginSendResponse(initiated=True, streamId=lab.StreamId(value=stream.id))

    async def begin_receive(self, request: lab.BeginReceiveRequest) -> lab.BeginReceiveResponse:
        _check_known(request, request.numBytes, "numBytes")
        peer = self._runner.device_at(request.srcRank.value)
        stream_id = request.streamId.value
        await self._streams.begin_receive(stream_id, request.recvBuffAddr.value, request.numBytes, peer)
        self._in_background(self._streams.expire(self._streams.receive(stream_id)))
        return lab.BeginReceiveResponse(initiated=True)

    async def stream_send(self, chunks: AsyncIterator[lab.DataChunk]) -> lab.StreamSendResponse:
        await self._streams.accept(chunks)
        return lab.StreamSendResponse(success=True)

    async def get_stream_status(self, request: lab.GetStreamStatusRequest) -> lab.GetStreamStatusResponse:
        if not request.HasField("streamId"):
            raise InvalidArgument("streamId: missing")
        stream = self._streams.status(request.streamId.value)
        return lab.GetStreamStatusResponse(status=stream.status, reason=stream.reason)  # type: ignore[arg-type]

    async def _send(self, stream: Stream, view: memoryview, to: Address) -> None:
        """Sends a stream to its destination, and records its outcome; never raises."""

        def chunks() -> Iterator[lab.DataChunk]:
            # The id alone: the bytes wait on this side for their BeginReceive.
            yield lab.DataChunk(streamId=lab.StreamId(value=stream.id))
            for at in range(0, stream.size, STREAM_CHUNK_BYTES):
                yield lab.DataChunk(data=bytes(view[at : at + STREAM_CHUNK_BYTES]))

        try:
            await stream.wait_turn()
            async with self._credentials.aio_channel(to, Role.DEVICE, channel_options()) as channel:
                stub = with_metadata(lab_grpc.GPUDeviceStub(channel), self._credentials.metadata)
                call = cast("lab_grpc.GPUDeviceAsyncStub", stub).StreamSend(chunks())
                sending = asyncio.ensure_future(_wait_call(call))
                ended = asyncio.ensure_future(stream.ended.wait())
                try:
                    await asyncio.wait({sending, ended}, return_when="FIRST_COMPLETED")
                    if stream.ended.is_set():
                        call.cancel()
                    await sending
                finally:
                    ended.cancel()
                    sending.cancel()
            stream.end()
        except grpc.RpcError as error:
            stream.end(str(translate(error, f"StreamSend to {to}")))
        except HoopError as error:
            stream.end(str(error))
        except asyncio.CancelledError:
            stream.end("this device stopped")

    def _in_background(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_call(call: object) -> None:
    await call  # type: ignore[misc]
