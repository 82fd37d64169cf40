"""The client's view of one device: its memory, by address and by buffer name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from hoop.client.handle import call
from hoop.topology import DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.channels import STREAM_CHUNK_BYTES, Repeatable, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.roles import Role
from hoop.wire.service import translate


def location(place: int | str, offset: int = 0) -> pb.Location:
    """The message for an absolute address or a buffer name, plus an offset in bytes."""
    if isinstance(place, str):
        return pb.Location(buffer=place, offset=offset)
    return pb.Location(address=place, offset=offset)


class Device:
    """A device of the cluster. Data goes directly to the device, not through the coordinator."""

    def __init__(self, info: DeviceInfo, timeout: float, credentials: Credentials) -> None:
        self.info = info
        self._timeout = timeout
        self._channel = credentials.channel(info.address, Role.DEVICE, channel_options())
        self._stub = pb_grpc.DeviceStub(self._channel)

    @property
    def id(self) -> int:
        return self.info.device_id

    def allocate(self, name: str, size: int, reuse: bool = False) -> int:
        """Allocate a named buffer of ``size`` bytes; returns its address."""
        request = pb.AllocateRequest(name=name, bytes=size, reuse=reuse)
        answer = self._call(self._stub.Allocate, request)
        return int(answer.buffer.address)

    def free(self, name: str) -> None:
        self._call(self._stub.Free, pb.FreeRequest(name=name))

    def buffers(self) -> dict[str, tuple[int, int]]:
        """Address and size in bytes of every named buffer."""
        answer = self._call(self._stub.ListBuffers, pb.ListBuffersRequest())
        return {buffer.name: (buffer.address, buffer.bytes) for buffer in answer.buffers}

    def write(self, place: int | str, data: bytes | memoryview, offset: int = 0) -> None:
        """Copy ``data``, of any length, to an address or into a named buffer of the device."""
        view = memoryview(data)

        def chunks() -> Iterator[pb.WriteRequest]:
            yield pb.WriteRequest(location=location(place, offset), data=bytes(view[:STREAM_CHUNK_BYTES]))
            for at in range(STREAM_CHUNK_BYTES, len(view), STREAM_CHUNK_BYTES):
                yield pb.WriteRequest(data=bytes(view[at : at + STREAM_CHUNK_BYTES]))

        self._call(self._stub.Write, Repeatable(chunks))

    def read(self, place: int | str, size: int, offset: int = 0) -> bytes:
        """Copy ``size`` bytes, of any length, from the device."""
        request = pb.ReadRequest(location=location(place, offset), bytes=size)
        try:
            answers = self._stub.Read(request, timeout=self._timeout)
            return b"".join(answer.data for answer in answers)
        except grpc.RpcError as error:
            raise translate(error, str(self.info)) from None

    def _call(self, method: Any, request: Any) -> Any:
        return call(method, request, self._timeout, str(self.info))

    def close(self) -> None:
        self._channel.close()
