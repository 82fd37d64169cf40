"""Bytes between a caller and a device, and from device to device."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import grpc

from hoop.errors import FailedPrecondition, HoopError, OutOfRange, PeerLost, ResourceExhausted
from hoop.membership.state import CommunicatorState
from hoop.servers.coordinator import Coordinator
from hoop.servers.launching import launch
from hoop.servers.work import Work
from hoop.wire.channels import STREAM_CHUNK_BYTES
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.rpc import translate, unreachable

_copy_ids = itertools.count(1 << 62)
"""A copy is a communicator of two that lives for one message; its ids are far from the others'."""


def _reachable(coordinator: Coordinator, device_id: int) -> None:
    member = coordinator.state.member(device_id)
    if not member.usable:
        raise FailedPrecondition(f"{member.info} is {member.health}: {member.reason}")


def _failed(coordinator: Coordinator, device_id: int, error: grpc.RpcError) -> HoopError:
    if unreachable(error):
        info = coordinator.state.member(device_id).info
        return PeerLost(f"{info} was lost during a copy: {error.details() or error.code().name}")
    return translate(error, f"device {device_id}")


async def write(
    coordinator: Coordinator, device_id: int, place: pb.Location, data: bytes, timeout: float
) -> None:
    """Host to device. The whole range is checked here: no part is written of what does not fit."""
    _reachable(coordinator, device_id)
    info = coordinator.state.member(device_id).info
    start = place.address + place.offset
    if place.WhichOneof("base") == "address" and not (
        info.min_address <= start <= start + len(data) <= info.max_address
    ):
        raise OutOfRange(
            f"[{start:#x}, {start + len(data):#x}) is outside device {device_id}'s memory "
            f"[{info.min_address:#x}, {info.max_address:#x})"
        )

    def chunks() -> Iterator[pb.WriteRequest]:
        yield pb.WriteRequest(location=place, data=data[:STREAM_CHUNK_BYTES])
        for at in range(STREAM_CHUNK_BYTES, len(data), STREAM_CHUNK_BYTES):
            yield pb.WriteRequest(data=data[at : at + STREAM_CHUNK_BYTES])

    try:
        await coordinator.device(device_id).Write(chunks(), timeout=timeout)
    except grpc.RpcError as error:
        raise _failed(coordinator, device_id, error) from None


async def read(
    coordinator: Coordinator, device_id: int, place: pb.Location, size: int, timeout: float
) -> bytes:
    """Device to host; ``size`` is bounded by what the device's memory can hold."""
    _reachable(coordinator, device_id)
    info = coordinator.state.member(device_id).info
    if size > info.capacity:
        size = info.capacity + 1  # the device says what is wrong with it; nothing is allocated here first
    data = bytearray()
    try:
        call = coordinator.device(device_id).Read(pb.ReadRequest(location=place, bytes=size), timeout=timeout)
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
    work = Work(pb.Operation(collective="send", dtype="uint8", count=request.bytes, peer=last), operands)
    one = CommunicatorState(next(_copy_ids), members)
    work.check(coordinator.state, one)
    await asyncio.shield(launch(coordinator, one, [work], coordinator.config.timeout_s, release=True))
