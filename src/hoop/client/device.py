"""The client's view of a device and its memory, and buffers on every device of a communicator.

Arrays and tensors are converted to flat vectors in the storage type of a buffer, and back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from hoop.client.handle import Attempts, Ended, call
from hoop.errors import InternalError, InvalidArgument
from hoop.memory.dtypes import DType, dtype
from hoop.topology import DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.channels import STREAM_CHUNK_BYTES, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.roles import Role
from hoop.wire.service import translate

Array = npt.NDArray[Any]
DISCONNECT_MS = 2000
"""Milliseconds without a call after which the connection is closed: its keep-alive would take time from a device that
trains."""


def location(place: int | str, offset: int = 0) -> pb.Location:
    """The message for an absolute address or a buffer name, plus an offset in bytes."""
    if isinstance(place, str):
        return pb.Location(buffer=place, offset=offset)
    return pb.Location(address=place, offset=offset)


def _with_data(begin: bytes, data: memoryview) -> bytes:
    """A serialized WriteRequest: ``begin``, which is one without data, and the field ``data``."""
    head, size = bytearray(begin), len(data)
    head.append(pb.WriteRequest.DATA_FIELD_NUMBER << 3 | 2)  # the field's number, and that its length follows
    while size >= 128:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return b"".join((head, data))


class Device:
    """A device of the cluster. Data goes directly to the device, not through the coordinator."""

    def __init__(
        self, info: DeviceInfo, timeout: float, credentials: Credentials, lease_s: float, is_lost: Ended
    ) -> None:
        """``is_lost``: whether the coordinator says that the device is dead or has left."""
        self.info = info
        self._timeout = timeout
        self.is_lost = is_lost
        options = [*channel_options(lease_s), ("grpc.client_idle_timeout_ms", DISCONNECT_MS)]
        self._channel = credentials.channel(info.address, Role.DEVICE, options)
        self._stub = pb_grpc.DeviceStub(self._channel)
        # Takes requests that are serialized: protobuf would copy their bytes twice more.
        self._write = self._channel.stream_unary("/hoop.v1.Device/Write", None, pb.WriteResponse.FromString)

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

    def trace(self, job_id: int, steps: int, timeout: float) -> pb.TraceTaskResponse:
        """The instructions of the next steps of a job on this device; fewer steps if ``timeout`` is over before."""
        request = pb.TraceTaskRequest(job_id=job_id, steps=steps, timeout_s=timeout)
        answer: pb.TraceTaskResponse = call(self._stub.TraceTask, request, timeout + self._timeout, str(self.info))
        return answer

    def write(self, place: int | str, data: bytes | memoryview, offset: int = 0) -> None:
        """Copy ``data``, of any length, to an address or into a named buffer of the device."""
        view = memoryview(data)
        view = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(bytes(view))

        def chunks() -> Iterator[bytes]:
            begin = pb.WriteRequest(location=location(place, offset)).SerializeToString()
            for at in range(0, max(len(view), 1), STREAM_CHUNK_BYTES):
                yield _with_data(begin, view[at : at + STREAM_CHUNK_BYTES])
                begin = b""

        # A repeated call writes the same bytes to the same place, so it can be made again.
        attempts = Attempts(self._timeout, True, self.is_lost)
        while True:
            try:
                self._write(chunks(), timeout=attempts.left_s)
                return
            except grpc.RpcError as error:
                if not attempts.may_repeat(error):
                    raise translate(error, str(self.info)) from None

    def read(self, place: int | str, size: int, offset: int = 0) -> bytes:
        """Copy ``size`` bytes, of any length, from the device."""
        request = pb.ReadRequest(location=location(place, offset), bytes=size)
        return b"".join(self._chunks(request))

    def read_into(self, place: int | str, into: memoryview, offset: int = 0) -> None:
        """Copy as many bytes as ``into`` has from the device: a large buffer needs no second one beside it."""
        request = pb.ReadRequest(location=location(place, offset), bytes=len(into))
        at = 0
        for data in self._chunks(request):
            end = at + len(data)
            into[at:end] = data
            at = end
        if at != len(into):
            raise InternalError(f"{self.info} sent {at} bytes of {place!r}, and {len(into)} were asked for")

    def _chunks(self, request: pb.ReadRequest) -> Iterator[bytes]:
        """The bytes of a Read; after a connection that broke it goes on behind those that have come."""
        attempts = Attempts(self._timeout, True, self.is_lost)
        offset, count, read = request.location.offset, request.bytes, 0
        while True:
            request.location.offset, request.bytes = offset + read, count - read
            try:
                for answer in self._stub.Read(request, timeout=attempts.left_s):
                    data = answer.data  # each look at the field copies it
                    read += len(data)
                    yield data
                return
            except grpc.RpcError as error:
                if not attempts.may_repeat(error):
                    raise translate(error, str(self.info)) from None

    def _call(self, method: Any, request: Any) -> Any:
        return call(method, request, self._timeout, str(self.info), self.is_lost)

    def close(self) -> None:
        self._channel.close()


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a torch tensor. Does not import torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def element_type(value: Any) -> DType:
    """The element type of an array or a tensor."""
    if not hasattr(value, "dtype"):
        raise InvalidArgument(f"values: a {type(value).__name__} is neither a NumPy array nor a torch tensor")
    return dtype(str(value.dtype).removeprefix("torch."))


def flatten(value: Any, kind: DType) -> Array:
    """A contiguous vector in the storage type of ``kind``; bfloat16 tensors keep their bits."""
    if is_tensor(value):
        tensor = value.detach().cpu().contiguous()
        if element_type(value) != kind:
            raise InvalidArgument(f"a tensor of {element_type(value).name} was given, {kind.name} is wanted")
        array = tensor.view(sys.modules["torch"].int16).numpy() if kind.name == "bfloat16" else tensor.numpy()
        return np.ascontiguousarray(array).view(kind.numpy).reshape(-1)
    array = np.asarray(value)
    if array.dtype != kind.numpy:
        raise InvalidArgument(f"an array of {array.dtype} was given, {kind.name} is wanted")
    return np.ascontiguousarray(array).reshape(-1)


def restore(vector: Array, like: Any, kind: DType) -> Any:
    """Convert ``vector`` to the type of ``like`` (array or tensor), and to its shape if the sizes are equal."""
    if is_tensor(like):
        torch = sys.modules["torch"]
        bits = vector.view(np.int16) if kind.name == "bfloat16" else vector
        tensor = torch.from_numpy(bits.copy())
        tensor = tensor.view(torch.bfloat16) if kind.name == "bfloat16" else tensor
        return tensor.reshape(like.shape) if tensor.numel() == like.numel() else tensor
    like = np.asarray(like)
    return vector.reshape(like.shape) if vector.size == like.size else vector


@dataclass(frozen=True)
class Buffer:
    """``count`` elements on each device of a communicator."""

    devices: tuple[Device, ...]
    places: tuple[int | str, ...]
    """Start of the memory on each rank's device: an address, or the name of a buffer."""
    offset: int
    """Bytes between each place and the first element."""
    count: int
    dtype: DType

    @property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    def write(self, rank: int, values: Any) -> None:
        """Write an array or a tensor of exactly ``count`` elements to one rank's device."""
        vector = flatten(values, self.dtype)
        if vector.size != self.count:
            raise InvalidArgument(f"values: {vector.size} elements were given, the buffer has {self.count}")
        self.devices[rank].write(self.places[rank], vector.view(np.uint8).data, self.offset)

    def read(self, rank: int) -> Array:
        """Read the elements of one rank's device, in their storage type (bfloat16 as uint16)."""
        data = self.devices[rank].read(self.places[rank], self.bytes, self.offset)
        return np.frombuffer(data, self.dtype.numpy).copy()

    def fill(self, values: Sequence[Any]) -> Buffer:
        """Write ``values[rank]`` to the device of every rank."""
        if len(values) != len(self.devices):
            raise InvalidArgument(f"values: {len(values)} were given for {len(self.devices)} ranks")
        for rank, value in enumerate(values):
            self.write(rank, value)
        return self

    def part(self, start: int, stop: int) -> Buffer:
        """A buffer over elements ``[start, stop)`` of the same memory."""
        if not 0 <= start <= stop <= self.count:
            raise InvalidArgument(f"part: [{start}, {stop}) is not within the buffer's {self.count} elements")
        offset = self.offset + start * self.dtype.itemsize
        return Buffer(self.devices, self.places, offset, stop - start, self.dtype)

    def free(self) -> None:
        """Free the named buffer on every device."""
        for device, place in zip(self.devices, self.places, strict=True):
            if isinstance(place, str):
                device.free(place)
