"""The lab's messages: those that both of its services make, and fields that gpu_sim.proto does not have."""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from hoop.errors import InvalidArgument
from hoop.servers.lab_dialect import Dialect
from hoop.topology import DeviceInfo
from hoop.wire.generated import gpu_sim_pb2 as lab


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
