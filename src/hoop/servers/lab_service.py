"""The lab's streams: Begin* queue a transfer, StreamSend carries it, GetStreamStatus tells.

    client ── BeginSend ─────▶ source        (1) an id, and a task that dials the destination
    client ── BeginReceive ──▶ destination   (2) where the bytes are to go
    source ── StreamSend ────▶ destination   (3) the bytes

(2) and (3) may come in either order: each waits for the other, up to a deadline.

gpu_sim.GPUCoordinator: the lab's coordinator, over Hoop's communicators.

gpu_sim.GPUDevice: the lab's device, over Hoop's memory and streams.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import grpc

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
from hoop.membership.state import OperationOutcome
from hoop.memory import Arena
from hoop.servers.coordinator import Coordinator
from hoop.servers.memory_order import Access, MemoryRange
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operation_runner import MAX_TIMEOUT_S, OperationRunner
from hoop.servers.operations import OperationGroups, OperationQueue, check_fits, check_range, read, write
from hoop.texts import printable
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.channels import STREAM_CHUNK_BYTES, channel_options
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.service import Stub, translate

MAX_OPEN = 4096
MAX_REMEMBERED = 16384
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""How much data may be here before its BeginReceive, unless it is one message. A device sends none before."""
MATCH_SECONDS = 30.0
"""How long one half of a transfer waits for the other."""


@dataclass
class Stream:
    """One side of one transfer."""

    id: int
    size: int
    peer_device: int = 0
    status: int = lab.IN_PROGRESS
    reason: str = ""
    address: int = 0
    claimed: bool = False
    """A receive whose sender has come."""
    behind: Access | None = None
    """Work on these bytes that was accepted before: the transfer touches them when it has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self) -> None:
        """Returns when no work that was accepted before the transfer uses its bytes; raises if that takes too long."""
        if self.behind is not None:
            await self.behind.turn(MAX_TIMEOUT_S)

    def end(self, reason: str = "") -> None:
        if not self.ended.is_set():
            self.status, self.reason = (lab.FAILED if reason else lab.SUCCESS), printable(reason)
            self.ended.set()


Behind = Callable[[str, int, int, bool], Access]
"""A transfer (its name, address, size, whether it writes), put behind the work that was accepted before it."""


class StreamTable:
    """Every transfer that this device takes part in."""

    def __init__(self, arena: Arena, behind: Behind, most: int = MAX_OPEN) -> None:
        self._arena = arena
        self._behind = behind
        self._most = most
        self._sends: OrderedDict[int, Stream] = OrderedDict()
        self._receives: OrderedDict[int, Stream] = OrderedDict()
        self._arrived = asyncio.Condition()
        self._arriving = 0
        """Senders that have not met their BeginReceive yet."""
        self._waiting_bytes = 0

    @property
    def open(self) -> int:
        both = (*self._sends.values(), *self._receives.values())
        return self._arriving + sum(stream.status == lab.IN_PROGRESS for stream in both)

    def begin_send(self, address: int, size: int, peer_device: int) -> tuple[Stream, memoryview]:
        """(1)"""
        view = self._arena.view(address, size)
        turn = self._behind("BeginSend", address, size, False)
        stream = Stream(secrets.randbits(62) + 1, size, peer_device, behind=turn)
        self._remember(self._sends, stream)
        return stream, view

    async def begin_receive(self, stream_id: int, address: int, size: int, peer_device: int) -> None:
        """(2)"""
        if not stream_id:
            raise InvalidArgument("streamId: 0 is no stream; use the id that BeginSend returned")
        if stream_id in self._receives:
            raise FailedPrecondition(f"streamId: stream {stream_id} has been begun here already")
        self._arena.check(address, size)
        turn = self._behind("BeginReceive", address, size, True)
        stream = Stream(stream_id, size, peer_device, address=address, behind=turn)
        self._remember(self._receives, stream)
        async with self._arrived:
            self._arrived.notify_all()

    async def expire(self, stream: Stream) -> None:
        """Fails a receive for which nobody came."""
        try:
            await asyncio.wait_for(stream.ended.wait(), MATCH_SECONDS)
        except TimeoutError:
            if not stream.claimed:
                stream.end(f"nobody sent stream {stream.id} within {MATCH_SECONDS:g} s")

    def receive(self, stream_id: int) -> Stream:
        return self._receives[stream_id]

    def status(self, stream_id: int) -> Stream:
        stream = self._receives.get(stream_id) or self._sends.get(stream_id)
        if stream is None:
            raise NotFound(f"streamId: stream {stream_id} is unknown to this device")
        return stream

    async def accept(self, chunks: AsyncIterator[lab.DataChunk]) -> None:
        """(3), until the last byte: what StreamSend does."""
        self._check_room()
        self._arriving += 1
        try:
            first, stream = await self._meet(chunks)
        finally:
            self._arriving -= 1
        try:
            await self._fill(stream, first, chunks)
            stream.end()
        except HoopError as error:
            stream.end(str(error))
            raise
        except (Exception, asyncio.CancelledError) as error:
            stream.end(f"the sender vanished: {error or type(error).__name__}")
            raise

    async def _meet(self, chunks: AsyncIterator[lab.DataChunk]) -> tuple[lab.DataChunk, Stream]:
        """A sender's first chunk, and the receive that it is for."""
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
            return first, await self._match(first.streamId.value)
        finally:
            self._waiting_bytes -= size

    async def _match(self, stream_id: int) -> Stream:
        """The receive that these bytes are for, waiting for its BeginReceive."""

        def found() -> Stream | None:
            if stream_id:
                return self._receives.get(stream_id)
            waiting = (one for one in self._receives.values() if not one.claimed and not one.ended.is_set())
            return next(waiting, None)

        try:
            async with self._arrived:
                stream = await asyncio.wait_for(self._arrived.wait_for(found), MATCH_SECONDS)
        except TimeoutError:
            raise FailedPrecondition(
                f"StreamSend: no BeginReceive for stream {stream_id or 'any'} within {MATCH_SECONDS:g} s"
            ) from None
        assert stream is not None, "the condition is that there is one"
        if stream.claimed:
            raise FailedPrecondition(f"StreamSend: stream {stream.id} has a sender already")
        stream.claimed = True
        return stream

    async def _fill(self, stream: Stream, first: lab.DataChunk, chunks: AsyncIterator[lab.DataChunk]) -> None:
        await stream.turn()
        got = 0
        chunk: lab.DataChunk | None = first
        while chunk is not None:
            if stream.ended.is_set():
                raise PeerLost(f"stream {stream.id}: {stream.reason}")
            if got + len(chunk.data) > stream.size:
                raise LinkCorrupted(
                    f"stream {stream.id}: the sender sent more than the {stream.size} bytes agreed"
                )
            self._arena.write(stream.address + got, chunk.data)
            got += len(chunk.data)
            chunk = await anext(aiter(chunks), None)
        if got < stream.size:
            raise LinkCorrupted(f"stream {stream.id}: it ended after {got} of {stream.size} bytes")

    def lose(self, device_id: int, reason: str) -> None:
        """A device is gone: what was to come from it, or go to it, fails now."""
        for stream in (*self._sends.values(), *self._receives.values()):
            if stream.peer_device == device_id:
                stream.end(reason)

    def _check_room(self) -> None:
        if self.open >= self._most:
            raise ResourceExhausted(
                f"{self._most} streams are open here; wait for some to end, or raise the device's --max-streams"
            )

    def _remember(self, table: OrderedDict[int, Stream], stream: Stream) -> None:
        self._check_room()
        table[stream.id] = stream
        if len(table) > MAX_REMEMBERED:
            ended = next(key for key, one in table.items() if one.ended.is_set())
            del table[ended]


COORDINATOR_SERVICE = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]
_FLOAT64_BYTES = 8
_STATUS = {
    OperationOutcome.IN_PROGRESS: lab.IN_PROGRESS,
    OperationOutcome.SUCCESS: lab.SUCCESS,
    OperationOutcome.FAILED: lab.FAILED,
}
_OPS = {lab.SUM: "sum", lab.PROD: "prod", lab.MIN: "min", lab.MAX: "max", lab.AVG: "avg"}

_AllReduce = lab.AllReduceRingRequest | lab.NaiveAllReduceRequest


class LabCoordinator:
    """Answers the lab's calls to a coordinator."""

    def __init__(self, coordinator: Coordinator, conductor: OperationQueue, groups: OperationGroups) -> None:
        self._coordinator = coordinator
        self._conductor = conductor
        self._groups = groups

    async def comm_init(self, request: lab.CommInitRequest) -> lab.CommInitResponse:
        if not request.numDevices:
            raise InvalidArgument("numDevices: 0 devices make no communicator; at least 1")
        one = await self._conductor.create((), request.numDevices)
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

    async def get_comm_status(self, request: lab.GetCommStatusRequest) -> lab.GetCommStatusResponse:
        one = self._coordinator.state.communicator(request.commId)
        return lab.GetCommStatusResponse(status=_STATUS[one.outcome], reason=one.reason)

    async def group_start(self, request: lab.GroupStartRequest) -> lab.GroupStartResponse:
        self._conductor.check(request.commId, ())
        self._groups.start(request.commId)
        return lab.GroupStartResponse(success=True)

    async def group_end(self, request: lab.GroupEndRequest) -> lab.GroupEndResponse:
        self._coordinator.state.communicator(request.commId)
        works = self._groups.end(request.commId)
        self._conductor.check(request.commId, works)
        task = await self._conductor.begin_announced(request.commId, works)
        # Its outcome is the communicator's status; nobody awaits it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return lab.GroupEndResponse(success=True)

    async def all_reduce_ring(self, request: lab.AllReduceRingRequest) -> lab.AllReduceRingResponse:
        await self._reduce(request, "devices")
        return lab.AllReduceRingResponse(success=True)

    async def naive_all_reduce(self, request: lab.NaiveAllReduceRequest) -> lab.NaiveAllReduceResponse:
        await self._reduce(request, "relay")
        return lab.NaiveAllReduceResponse(success=True)

    async def _reduce(self, request: _AllReduce, driver: str) -> None:
        work = OperationRequest(self._operation(request), _operands(request), driver)
        self._conductor.check(request.commId, (work,))
        if self._groups.is_open(request.commId):
            self._groups.queue(request.commId, work)
        else:
            await self._conductor.run(request.commId, (work,))

    def _operation(self, request: _AllReduce) -> pb.Operation:
        self._coordinator.state.communicator(request.commId)
        if request.op not in _OPS:
            raise InvalidArgument(f"op: {request.op} is unknown; known: SUM=0 PROD=1 MIN=2 MAX=3 AVG=4")
        count = request.count
        if self._coordinator.config.count_unit == "bytes":
            if count % _FLOAT64_BYTES:
                raise InvalidArgument(
                    f"count: {count} bytes are not whole float64 elements; this coordinator counts bytes "
                    "(hoop coordinator --count-unit elements counts elements)"
                )
            count //= _FLOAT64_BYTES
        return pb.Operation(
            collective="all_reduce", algorithm="ring", dtype="float64", op=_OPS[request.op], count=count
        )

    async def memcpy(self, request: lab.MemcpyRequest) -> lab.MemcpyResponse:
        """Waits for the work on the same bytes that was accepted before it, up to the time-out."""
        match request.WhichOneof("either"):
            case "hostToDevice":
                to = request.hostToDevice
                await self._to_device(to.dstDeviceId.value, to.dstMemAddr.value, to.hostSrcData)
                return lab.MemcpyResponse(hostToDevice=lab.MemcpyHostToDeviceResponse(success=True))
            case "deviceToHost":
                by = request.deviceToHost
                data = await self._to_host(by.srcDeviceId.value, by.srcMemAddr.value, by.numBytes)
                return lab.MemcpyResponse(deviceToHost=lab.MemcpyDeviceToHostResponse(dstData=data))
            case _:
                raise InvalidArgument("either: neither hostToDevice nor deviceToHost is set")

    async def _to_device(self, device_id: int, address: int, data: bytes) -> None:
        place, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        check_range(self._coordinator, device_id, place, len(data))
        span = MemoryRange(device_id, address, address + len(data), writes=True)
        async with self._coordinator.order.turn(f"Memcpy to {span}", [span], timeout):
            await write(self._coordinator, device_id, place, data, timeout)

    async def _to_host(self, device_id: int, address: int, size: int) -> bytes:
        place, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        self._coordinator.state.member(device_id)
        check_fits(size, self._coordinator.config.max_message)
        check_range(self._coordinator, device_id, place, size)
        span = MemoryRange(device_id, address, address + size, writes=False)
        async with self._coordinator.order.turn(f"Memcpy from {span}", [span], timeout):
            return await read(self._coordinator, device_id, place, size, timeout)

    async def comm_finalize(self, request: lab.CommFinalizeRequest) -> lab.CommFinalizeResponse:
        self._groups.forget(request.commId)
        await self._conductor.finalize(request.commId)
        return lab.CommFinalizeResponse(success=True)

    async def comm_destroy(self, request: lab.CommDestroyRequest) -> lab.CommDestroyResponse:
        self._groups.forget(request.commId)
        await self._conductor.destroy(request.commId)
        return lab.CommDestroyResponse(success=True)


def _operands(request: _AllReduce) -> dict[int, pb.Operand]:
    return {
        rank: pb.Operand(source=pb.Location(address=address.value))
        for rank, address in request.memAddrs.items()
    }


DEVICE_SERVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]


class LabDevice:
    """Answers the lab's calls to a device."""

    def __init__(
        self, arena: Arena, runner: OperationRunner, streams: StreamTable, credentials: Credentials
    ) -> None:
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
        member = self._runner.member(request.dstRank.value, request.commId)
        stream, view = self._streams.begin_send(
            request.sendBuffAddr.value, request.numBytes, member.device_id
        )
        self._in_background(self._send(stream, view, member.address))
        return lab.BeginSendResponse(initiated=True, streamId=lab.StreamId(value=stream.id))

    async def begin_receive(self, request: lab.BeginReceiveRequest) -> lab.BeginReceiveResponse:
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
        """Carries a stream to its destination, whatever becomes of it."""

        def chunks() -> Iterator[lab.DataChunk]:
            # The name alone: the bytes wait here, not there, for their BeginReceive.
            yield lab.DataChunk(streamId=lab.StreamId(value=stream.id))
            for at in range(0, stream.size, STREAM_CHUNK_BYTES):
                yield lab.DataChunk(data=bytes(view[at : at + STREAM_CHUNK_BYTES]))

        try:
            await stream.turn()
            async with self._credentials.aio_channel(to, Role.DEVICE, channel_options()) as channel:
                call = Stub(channel, DEVICE_SERVICE, self._credentials.metadata).StreamSend(chunks())
                sending = asyncio.ensure_future(_outcome(call))
                lost = asyncio.ensure_future(stream.ended.wait())
                try:
                    await asyncio.wait({sending, lost}, return_when="FIRST_COMPLETED")
                    if stream.ended.is_set():
                        call.cancel()
                    await sending
                finally:
                    lost.cancel()
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


async def _outcome(call: object) -> None:
    await call  # type: ignore[misc]
