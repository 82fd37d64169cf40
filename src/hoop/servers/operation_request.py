"""One operation for a whole communicator: its operands by rank, and the checks before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hoop.collectives.registry import Operation
from hoop.errors import InvalidArgument, OutOfRange
from hoop.membership.state import CommunicatorState, State
from hoop.memory import dtype
from hoop.servers.access_order import MemoryRange
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb

DRIVERS = ("devices", "stepped", "relay")
"""Processes that may drive the data movement. ``devices``: the devices alone. The other two are baselines: the
coordinator starts every round (``stepped``), or all data passes through it, as in the papers' naive version
(``relay``)."""


def operation_from(message: pb.Operation) -> Operation:
    """The operation that a message describes. Raises if a field is invalid."""
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
    """One operation, with the memory locations of every rank and the driver that runs it."""

    message: pb.Operation
    operands: Mapping[int, pb.Operand]
    driver: str = "devices"

    @property
    def operation(self) -> Operation:
        return operation_from(self.message)

    def check(self, state: State, one: CommunicatorState) -> None:
        """Raises for every error that can be found without asking the devices."""
        operation, size = self.operation, len(one.members)
        operation.check(size)
        if self.driver not in DRIVERS:
            raise InvalidArgument(f"driver: {self.driver!r} is unknown; known: {', '.join(DRIVERS)}")
        if self.driver != "devices" and operation.compression:
            raise InvalidArgument(f"driver: {self.driver} cannot compress; leave it, or {operation.compression}, out")
        if self.driver == "relay" and operation.collective != "all_reduce":
            raise InvalidArgument(f"driver: relay does all_reduce only, not {operation.collective}")
        if self.driver == "stepped" and operation.default_algorithm in ("chunked_ring", "flat", "staged", "direct"):
            raise InvalidArgument(f"driver: {operation.default_algorithm} has no rounds that can be stepped; use ring")
        unknown = sorted(rank for rank in self.operands if rank >= size)
        if unknown:
            raise InvalidArgument(f"operands: ranks {unknown} are not in 0..{size - 1}")
        for rank, device_id in enumerate(one.members):
            self._check_operand(state.member(device_id).info, rank, operation, size)

    def memory_ranges(self, one: CommunicatorState) -> Iterator[MemoryRange]:
        """The bytes that the operation touches on every member."""
        operation, size = self.operation, len(one.members)
        for rank, device_id in enumerate(one.members):
            operand = self.operands.get(rank, pb.Operand())
            locations = operand_locations(operand)
            counts = operation.extents(size, rank)
            for location, count, writes in zip(locations, counts, (False, True), strict=True):
                start = location.offset + location.address  # the address of a named buffer is unknown here, and 0
                stop = start + count * operation.dtype.itemsize
                yield MemoryRange(device_id, start, stop, writes, location.buffer)

    def _check_operand(self, info: DeviceInfo, rank: int, operation: Operation, size: int) -> None:
        wanted = dict(zip(("source", "destination"), operation.extents(size, rank), strict=True))
        operand = self.operands.get(rank, pb.Operand())
        given = {name: operand.HasField(name) for name in ("source", "destination")}
        for name, count in wanted.items():
            if count and not any(given.values()):
                raise InvalidArgument(f"operands: rank {rank} has no place in memory; {operation} needs one")
            location: pb.Location = getattr(operand, name)
            if given[name] and location.WhichOneof("base") == "address":
                _check_range(info, rank, location.address + location.offset, count, operation)


def operand_locations(operand: pb.Operand) -> tuple[pb.Location, pb.Location]:
    """Source and destination of an operand. If one is absent, the operation is in place."""
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
