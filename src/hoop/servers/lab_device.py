"""gpu_sim.GPUDevice: the lab's device, over Hoop's memory and streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc

from hoop.errors import HoopError, InvalidArgument
from hoop.memory import Arena
from hoop.servers.runner import Runner
from hoop.servers.streams import Stream, StreamTable
from hoop.topology import Address
from hoop.wire.channels import STREAM_CHUNK_BYTES, channel_options
from hoop.wire.credentials import Credentials
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.roles import Role
from hoop.wire.rpc import Stub, translate

SERVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]


class LabDevice:
    """Answers the lab's calls to a device."""

    def __init__(self, arena: Arena, runner: Runner, streams: StreamTable, credentials: Credentials) -> None:
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
                call = Stub(channel, SERVICE, self._credentials.metadata).StreamSend(chunks())
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
