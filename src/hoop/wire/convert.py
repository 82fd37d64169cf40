"""Between Hoop's values and the messages that carry them."""

from __future__ import annotations

from hoop.errors import InvalidArgument
from hoop.events import Event
from hoop.texts import printable
from hoop.topology import Address, DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb


def describe(info: DeviceInfo) -> pb.DeviceDescription:
    return pb.DeviceDescription(
        device_id=info.device_id,
        address=str(info.address),
        data_address=str(info.data_address),
        min_address=info.min_address,
        max_address=info.max_address,
        host=printable(info.host, 256),
        pid=info.pid,
        incarnation=info.incarnation,
        shared_address=str(info.shared_address or ""),
        keeps_memory=info.keeps_memory,
    )


def device_info(message: pb.DeviceDescription) -> DeviceInfo:
    """Checked: what a device says of itself decides where others connect to."""
    if not 0 < message.min_address <= message.max_address < 2**63:
        raise InvalidArgument(
            f"device {message.device_id}: its memory [{message.min_address:#x}, {message.max_address:#x}) is no range"
        )
    texts = {"incarnation": (message.incarnation, 1, 64), "host": (message.host, 0, 256)}
    for name, (text, least, most) in texts.items():
        if not least <= len(text) <= most or not text.isprintable():
            raise InvalidArgument(
                f"device {message.device_id}: {name}: {text[:40]!r} has {len(text)} characters; {least} to {most} are "
                "allowed, all of them printable"
            )
    return DeviceInfo(
        device_id=message.device_id,
        address=Address.parse(message.address, "device.address"),
        data_address=Address.parse(message.data_address, "device.data_address"),
        min_address=message.min_address,
        max_address=message.max_address,
        host=message.host,
        pid=message.pid,
        incarnation=message.incarnation,
        shared_address=Address.parse(message.shared_address, "device.shared_address")
        if message.shared_address
        else None,
        keeps_memory=message.keeps_memory,
    )


def event_message(event: Event) -> pb.Event:
    return pb.Event(
        sequence=event.sequence, time=event.time, kind=event.kind, text=event.text, fields=event.fields
    )
