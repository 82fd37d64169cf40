"""One operation with every rank's place in memory, and whether it can be done at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hoop.collectives.registry import Operation
from hoop.errors import InvalidArgument, OutOfRange
from hoop.membership.state import CommunicatorState, State
from hoop.memory import dtype
from hoop.servers.memory_order import MemoryRange
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb

DRIVERS = ("devices", "stepped", "relay")
"""Who moves the data: the devices by themselves; or, to compare with, the coordinator round by round
(``stepped``), or through itself, as in the papers' naive version (``relay``)."""


def operation_from(message: pb.Operation) -> Operation:
    """The operation that a message describes, checked."""
    return Operation(
        message.collective,
        message.count,
        dtype(message.dtype or "float32"),
        message.op or "sum",
        message.algorithm,
        message.root,
        message.peer,
        message.chunk_bytes,
        message.compression,
    )


@dataclass(frozen=True)
class OperationRequest:
    """One operation for a whole communicator."""

    message: pb.Operation
    operands: Mapping[int, pb.Operand]
    driver: str = "devices"

    @property
    def operation(self) -> Operation:
        return operation_from(self.message)

    def check(self, state: State, one: CommunicatorState) -> None:
        """Raises what can be known to be wrong without asking the devices."""
        operation, size = self.operation, len(one.members)
        operation.check(size)
        if self.driver not in DRIVERS:
            raise InvalidArgument(f"driver: {self.driver!r} is unknown; known: {', '.join(DRIVERS)}")
        if self.driver != "devices" and operation.compression:
            raise InvalidArgument(
                f"driver: {self.driver} cannot compress; leave it, or {operation.compression}, out"
            )
        if self.driver == "relay" and operation.collective != "all_reduce":
            raise InvalidArgument(f"driver: relay does all_reduce only, not {operation.collective}")
        if self.driver == "stepped" and operation.default in ("chunked_ring", "flat", "staged", "direct"):
            raise InvalidArgument(f"driver: {operation.default} has no rounds that can be stepped; use ring")
        strangers = sorted(rank for rank in self.operands if rank >= size)
        if strangers:
            raise InvalidArgument(f"operands: ranks {strangers} are not in 0..{size - 1}")
        for rank, device_id in enumerate(one.members):
            self._check_operand(state.member(device_id).info, rank, operation, size)

    def spans(self, one: CommunicatorState) -> Iterator[MemoryRange]:
        """The bytes that it touches, on every member."""
        operation, size = self.operation, len(one.members)
        for rank, device_id in enumerate(one.members):
            operand = self.operands.get(rank, pb.Operand())
            places = operand_places(operand)
            counts = operation.extents(size, rank)
            for place, count, writes in zip(places, counts, (False, True), strict=True):
                start = place.offset + place.address  # a buffer's address is not known here, and 0
                stop = start + count * operation.dtype.itemsize
                yield MemoryRange(device_id, start, stop, writes, place.buffer)

    def _check_operand(self, info: DeviceInfo, rank: int, operation: Operation, size: int) -> None:
        wanted = dict(zip(("source", "destination"), operation.extents(size, rank), strict=True))
        operand = self.operands.get(rank, pb.Operand())
        in_place = {name: operand.HasField(name) for name in ("source", "destination")}
        for name, count in wanted.items():
            if count and not any(in_place.values()):
                raise InvalidArgument(f"operands: rank {rank} has no place in memory; {operation} needs one")
            place: pb.Location = getattr(operand, name)
            if in_place[name] and place.WhichOneof("base") == "address":
                _check_range(info, rank, place.address + place.offset, count, operation)


def operand_places(operand: pb.Operand) -> tuple[pb.Location, pb.Location]:
    """Source and destination; where one is absent, the operation is in place."""
    destination = operand.destination if operand.HasField("destination") else operand.source
    return operand.source if operand.HasField("source") else destination, destination


def _check_range(info: DeviceInfo, rank: int, address: int, count: int, operation: Operation) -> None:
    size = count * operation.dtype.itemsize
    if not info.min_address <= address <= address + size <= info.max_address:
        raise OutOfRange(
            f"rank {rank}: [{address:#x}, {address + size:#x}) of {operation} is outside device {info.device_id}'s "
            f"memory [{info.min_address:#x}, {info.max_address:#x})"
        )
    if count and address % operation.dtype.itemsize:
        raise InvalidArgument(
            f"rank {rank}: address {address:#x} is not aligned to the {operation.dtype.itemsize} bytes of "
            f"{operation.dtype.name}"
        )
