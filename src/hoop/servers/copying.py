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
from hoop.wire.rpc import said_by, translate, unreachable

_copy_ids = itertools.count(1 << 62)
"""A copy is a communicator of two that lives for one message; its ids are far from the others'."""


def _reachable(coordinator: Coordinator, device_id: int) -> None:
    member = coordinator.state.member(device_id)
    if not member.usable:
        raise FailedPrecondition(f"{member.info} is {member.health}: {member.reason}")


def _failed(coordinator: Coordinator, device_id: int, error: grpc.RpcError) -> HoopError:
    if unreachable(error):
        info = coordinator.state.member(device_id).info
        return PeerLost(f"{info} was lost during a copy: {said_by(error)}")
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
    work = Work(pb.Operation(collective="send", dtype="uint8", count=request.bytes, peer=last), operands)
    one = CommunicatorState(next(_copy_ids), members)
    work.check(coordinator.state, one)
    timeout = coordinator.config.timeout_s
    access = coordinator.order.accept(f"Copy of {request.bytes} bytes", work.spans(one))

    async def run() -> None:
        try:
            await access.turn(timeout)
            await launch(coordinator, one, [work], timeout, release=True)
        finally:
            coordinator.order.end(access)

    await asyncio.shield(coordinator.in_background(run()))
