"""The device's side of the lab's protocol (gpu_sim), over Hoop's memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import cast

import grpc

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, NotFound
from hoop.memory import DeviceMemory
from hoop.servers.lab_dialect import AUTO, NUMBERS, Dialect, check_known, device_metadata
from hoop.servers.lab_streams import Stream, StreamTable
from hoop.servers.operation_runner import MAX_MEMBERS, MAX_TIMEOUT_S, OperationRunner
from hoop.servers.operations import check_fits
from hoop.topology import Address, DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.channels import STREAM_CHUNK_BYTES, channel_options, default_lease_s
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import gpu_sim_pb2_grpc as lab_grpc
from hoop.wire.roles import Role
from hoop.wire.service import translate

DEVICE_SERVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]


@dataclass(frozen=True)
class Peers:
    """The ranks of a communicator that another program's coordinator made (SetupCommunication)."""

    addresses: tuple[Address, ...]
    rank: int
    """Rank of this device."""
    assignments_before: int
    """Number of ranks that Hoop's coordinator had given this device before: a later rank replaces these."""


class LabDevice:
    """The lab's device service. Each public method is the RPC of the same name."""

    def __init__(
        self,
        memory: DeviceMemory,
        runner: OperationRunner,
        streams: StreamTable,
        credentials: Credentials,
        dialect: str,
        max_message: int,
        lab: bool = False,
    ) -> None:
        """``lab``: the lab's calls are open to callers without a token, here and on other devices."""
        self._credentials = credentials
        self._lab = lab
        self._memory = memory
        self._runner = runner
        self._streams = streams
        self._dialect = dialect
        self._max_message = max_message
        self._peers: Peers | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.info: DeviceInfo | None = None
        """Description of the device, set when it has joined."""

    async def get_device_metadata(self, _: lab.GetDeviceMetadataRequest) -> lab.GetDeviceMetadataResponse:
        peers = self._newest_peers()
        rank = peers.rank if peers is not None else None
        return lab.GetDeviceMetadataResponse(metadata=device_metadata(self._joined(), self._dialect, rank))

    def _joined(self) -> DeviceInfo:
        if self.info is None:
            raise FailedPrecondition("this device has not joined a coordinator yet; try again")
        return self.info

    async def begin_send(self, request: lab.BeginSendRequest) -> lab.BeginSendResponse:
        check_known(request, request.numBytes, "numBytes")
        peers, rank = self._newest_peers(), request.dstRank.value
        if peers is not None and not request.commId:
            if rank >= len(peers.addresses):
                raise InvalidArgument(f"dstRank: {rank} is not in 0..{len(peers.addresses) - 1}")
            device_id, to = 0, peers.addresses[rank]
        else:
            member = self._runner.member(rank, request.commId)
            device_id, to, peers = member.device_id, member.address, None
        stream = self._streams.begin_send(request.sendBuffAddr.value, request.numBytes, device_id)
        self._in_background(self._send(stream, to, peers.rank if peers is not None else None))
        return lab.BeginSendResponse(initiated=True, streamId=lab.StreamId(value=stream.id))

    async def begin_receive(self, request: lab.BeginReceiveRequest) -> lab.BeginReceiveResponse:
        check_known(request, request.numBytes, "numBytes")
        peers, rank = self._newest_peers(), request.srcRank.value
        if peers is not None and rank >= len(peers.addresses):
            raise InvalidArgument(f"srcRank: {rank} is not in 0..{len(peers.addresses) - 1}")
        peer = self._runner.device_at(rank) if peers is None else 0
        stream_id = request.streamId.value
        op = self._receive_op(request.op)
        expected = rank if peers is not None and request.HasField("srcRank") else None
        await self._streams.begin_receive(stream_id, request.recvBuffAddr.value, request.numBytes, peer, op, expected)
        self._in_background(self._streams.expire(self._streams.receive(stream_id)))
        return lab.BeginReceiveResponse(initiated=True)

    def _receive_op(self, number: int) -> str:
        """The operation of a receive that reduces; empty: it overwrites."""
        if not number:
            return ""
        if self._dialect == Dialect.STARTER:
            raise InvalidArgument(
                f"op: {number}: BeginReceive has no op in the dialect {Dialect.STARTER}; start hoop up or hoop device "
                f"with --lab-dialect {Dialect.NIL_FIRST}"
            )
        ops = {key: name for key, name in NUMBERS[Dialect.NIL_FIRST].ops.items() if name != "avg"}
        if number not in ops:
            raise InvalidArgument(f"op: {number} is no operation of a receive; known: NIL=0 SUM=1 PROD=2 MIN=3 MAX=4")
        return ops[number]

    async def stream_send(self, chunks: AsyncIterator[lab.DataChunk]) -> lab.StreamSendResponse:
        await self._streams.accept(chunks)
        return lab.StreamSendResponse(success=True)

    async def get_stream_status(self, request: lab.GetStreamStatusRequest) -> lab.GetStreamStatusResponse:
        if not request.HasField("streamId"):
            raise InvalidArgument("streamId: missing")
        stream = self._streams.status(request.streamId.value)
        dialect = self._dialect
        if dialect == AUTO:  # only nil-first has the other field
            dialect = Dialect.NIL_FIRST if request.HasField("srcRank") else Dialect.STARTER
        status = NUMBERS[Dialect(dialect)].statuses[lab.Status.Name(stream.status)]
        return lab.GetStreamStatusResponse(status=status, reason=stream.reason)  # type: ignore[arg-type]

    # ---- calls of the dialects

    async def memcpy(self, request: lab.MemcpyRequest) -> lab.MemcpyResponse:
        """Waits for launched operations on the same bytes."""
        match request.WhichOneof("either"):
            case "hostToDevice":
                to, data = request.hostToDevice, request.hostToDevice.hostSrcData
                check_known(to, len(data), "hostSrcData")
                await self._wait_turn("dstDeviceId", to.dstDeviceId, to.dstMemAddr.value, len(data), writes=True)
                self._memory.write(to.dstMemAddr.value, data)
                return lab.MemcpyResponse(hostToDevice=lab.MemcpyHostToDeviceResponse(success=True))
            case "deviceToHost":
                source, size = request.deviceToHost, request.deviceToHost.numBytes
                check_known(source, size, "numBytes")
                check_fits(size, self._max_message)
                await self._wait_turn("srcDeviceId", source.srcDeviceId, source.srcMemAddr.value, size, writes=False)
                answer = lab.MemcpyDeviceToHostResponse(dstData=self._memory.read(source.srcMemAddr.value, size))
                return lab.MemcpyResponse(deviceToHost=answer)
            case _:
                raise InvalidArgument("either: neither hostToDevice nor deviceToHost is set")

    async def _wait_turn(self, field: str, device: lab.DeviceId, address: int, size: int, writes: bool) -> None:
        """Checks a copy to or from this device, and waits for earlier operations on its bytes."""
        own = self._joined().device_id
        if device.value not in (0, own):
            raise NotFound(f"{field}: {device.value} is not this device, which is {own}")
        self._memory.check(address, size)
        await self._runner.order_access("Memcpy", address, size, writes).wait_turn(MAX_TIMEOUT_S)

    async def setup_communication(self, request: lab.SetupCommunicationRequest) -> lab.SetupCommunicationResponse:
        """Stores the ranks of a communicator that another program's coordinator makes."""
        if self._credentials.required and not self._lab:  # it would show them to any address that a client names
            raise FailedPrecondition(
                "SetupCommunication: this cluster authenticates its members, and a device calls no others; make the "
                "communicator with CommInit at Hoop's coordinator, or start devices with --lab"
            )
        size, rank = len(request.rankToAddress), request.rank.value
        if not 0 < size <= MAX_MEMBERS or sorted(request.rankToAddress) != list(range(size)):
            raise InvalidArgument(
                f"rankToAddress: it has {size} ranks; it must map each of 0, 1, ... (at most {MAX_MEMBERS}) to the "
                "host:port of a device"
            )
        if rank >= size:
            raise InvalidArgument(f"rank: {rank} is not in 0..{size - 1}")
        texts = (request.rankToAddress[one] for one in range(size))
        addresses = tuple(Address.parse(text, f"rankToAddress[{one}]") for one, text in enumerate(texts))
        self._peers = Peers(addresses, rank, self._runner.assignments_stored)
        return lab.SetupCommunicationResponse(success=True)

    def _newest_peers(self) -> Peers | None:
        """The ranks of SetupCommunication, unless this device is in a newer communicator of Hoop's coordinator."""
        if self._peers is not None and self._peers.assignments_before == self._runner.assignments_stored:
            return self._peers
        return None

    async def reset_gpu(self, _: lab.ResetGpuRequest) -> lab.ResetGpuResponse:
        """Fails all open streams, and forgets the ranks of SetupCommunication. Memory stays."""
        self._peers = None
        self._streams.end_all("ResetGpu was called on this device")
        return lab.ResetGpuResponse(success=True)

    async def _send(self, stream: Stream, to: Address, own_rank: int | None) -> None:
        """Sends a stream to its destination, and records its outcome; never raises.

        ``own_rank``: this device's rank, where another program's coordinator gave it one.
        """

        def chunks() -> Iterator[lab.DataChunk]:
            # The id alone: the bytes wait on this side for their BeginReceive.
            stream_id = lab.StreamId(value=stream.id)
            rank = lab.Rank(value=own_rank) if own_rank is not None else None
            yield lab.DataChunk(streamId=stream_id, hoopStreamId=stream_id, srcRank=rank)
            for at in range(0, stream.size, STREAM_CHUNK_BYTES):
                yield lab.DataChunk(data=self._streams.read(stream, at, STREAM_CHUNK_BYTES))

        # An address that a client named is called without credentials, and at no socket of this user's.
        credentials = self._credentials if own_rank is None else Credentials(Role.DEVICE)
        try:
            await stream.wait_turn()
            options = channel_options(default_lease_s(to))
            async with credentials.aio_channel(to, Role.DEVICE, options) as channel:
                stub = cast("lab_grpc.GPUDeviceAsyncStub", lab_grpc.GPUDeviceStub(channel))
                sending = asyncio.ensure_future(_wait_call(stub.StreamSend(chunks())))
                ended = asyncio.ensure_future(stream.ended.wait())
                try:
                    await asyncio.wait({sending, ended}, return_when="FIRST_COMPLETED")
                    if stream.ended.is_set():
                        sending.cancel()
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
