"""The dialects of the lab's protocol: which numbers operations and statuses have, and what a count means.

    starter      the lab's own file. SUM is 0; a count is in bytes
    nil-first    the file of the paper dsml. NIL is 0 and SUM is 1; a count is in elements; a receive may
                 reduce into its buffer, and a device is set up by the coordinator of another program

The messages of both are in ``gpu_sim.proto``. With ``--lab-dialect auto`` the coordinator finds out the dialect of each
communicator's client (``detect``), and a device that of each call. A client copies a vector to a device before it
reduces it, so the length of the last copy to the vector's address shows the unit of a count: ``CopyLengths`` remembers
those lengths, and ``find_unit`` compares them with a count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from hoop.errors import InvalidArgument
from hoop.topology import DeviceInfo
from hoop.wire.generated import gpu_sim_pb2 as lab

AUTO = "auto"


class Dialect(StrEnum):
    """A dialect that a client speaks."""

    STARTER = "starter"
    NIL_FIRST = "nil-first"


@dataclass(frozen=True)
class Numbers:
    """The numbers and the unit of one dialect."""

    ops: Mapping[int, str]
    """Hoop's names of the operations, by the dialect's numbers."""
    statuses: Mapping[str, int]
    count_unit: str

    def describe_ops(self) -> str:
        return " ".join(f"{name.upper()}={number}" for number, name in self.ops.items())


NUMBERS = {
    Dialect.STARTER: Numbers(
        {0: "sum", 1: "prod", 2: "min", 3: "max", 4: "avg"},
        {"READY": 0, "IN_PROGRESS": 0, "SUCCESS": 1, "FAILED": 2},  # a new communicator is in progress
        "bytes",
    ),
    Dialect.NIL_FIRST: Numbers(
        {1: "sum", 2: "prod", 3: "min", 4: "max", 5: "avg"},
        {"READY": 0, "IN_PROGRESS": 1, "SUCCESS": 2, "FAILED": 3},
        "elements",
    ),
}


def detect(op: int, shown_unit: str, grouped: bool) -> Dialect | None:
    """The dialect of the client that asks for an all-reduce; None if the call does not show it.

    ``shown_unit``: what the copies to the vectors show (``find_unit``). Only starter has an operation 0, and
    counts in bytes. Clients of nil-first count elements and use no groups.
    """
    if op == 0 or shown_unit == "bytes":
        return Dialect.STARTER
    if op == 5 or (shown_unit == "elements" and not grouped):
        return Dialect.NIL_FIRST
    return None


FLOAT64_BYTES = 8
MAX_COPIES = 65536
"""Maximum number of addresses whose last copy is remembered; the oldest are forgotten first."""


class CopyLengths:
    """Length in bytes of the last copy to each address, by device and address."""

    def __init__(self, most: int = MAX_COPIES) -> None:
        self._lengths: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._most = most

    def record(self, device_id: int, address: int, length: int) -> None:
        self._lengths.pop((device_id, address), None)
        self._lengths[device_id, address] = length
        if len(self._lengths) > self._most:
            self._lengths.popitem(last=False)

    def of(self, places: Iterable[tuple[int, int]]) -> list[int]:
        """The lengths that are known for these pairs of device and address."""
        return [length for place in places if (length := self._lengths.get(place)) is not None]


def find_unit(count: int, lengths: Iterable[int]) -> str:
    """``bytes`` or ``elements``, if the lengths of the ranks' last copies show which one it is; else empty.

    A length shows the unit if it is the whole vector in that unit, or if the vector in elements would be longer.
    """
    shown = set()
    for length in lengths:
        if length == FLOAT64_BYTES * count:
            shown.add("elements")
        elif count <= length < FLOAT64_BYTES * count:
            shown.add("bytes")
    if "bytes" in shown and count % FLOAT64_BYTES:  # not whole elements, so it is neither
        return ""
    return shown.pop() if len(shown) == 1 else ""


def device_metadata(info: DeviceInfo, dialect: str, rank: int | None = None) -> lab.DeviceMetadata:
    """A device, as its clients see it; where it listens, and its rank, only in the dialect that has them."""
    found = lab.DeviceMetadata(
        deviceId=lab.DeviceId(value=info.device_id),
        minMemAddr=lab.MemAddr(value=info.min_address),
        maxMemAddr=lab.MemAddr(value=info.max_address),
    )
    if dialect != Dialect.STARTER:
        found.ip, found.port = info.address.host, info.address.port
        if rank is not None:
            found.rank.value = rank
            found.rank.SetInParent()  # also if it is 0
    return found


def unknown_fields(message: Message) -> list[int]:
    """The numbers of a message's fields that gpu_sim.proto does not have."""
    fields = UnknownFieldSet(message)
    return sorted({fields[at].field_number for at in range(len(fields))})


def check_known(request: Message, size: int, field: str) -> None:
    """Raises if a request asks for nothing but has unknown fields: its sender has another version of the protocol."""
    if not size and (unknown := unknown_fields(request)):
        raise InvalidArgument(
            f"{field}: it is 0 or missing, and the message has unknown fields ({', '.join(map(str, unknown))}): does "
            f"the client's gpu_sim.proto have {field} at number {request.DESCRIPTOR.fields_by_name[field].number} of "
            f"{request.DESCRIPTOR.name}?"
        )
