"""The lab's protocol (package gpu_sim) as a table, and the message classes built from it.

This file follows the protocol's page alone and imports nothing of Hoop: a client that uses these classes is as
independent of Hoop as a client in another language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ENUMS = {"Status": "IN_PROGRESS SUCCESS FAILED", "ReduceOp": "SUM PROD MIN MAX AVG"}  # numbered from 0

MESSAGES = {
    "DeviceId": "value=1 uint64",
    "MemAddr": "value=1 uint64",
    "StreamId": "value=1 uint64",
    "Rank": "value=1 uint32",
    "DeviceMetadata": "deviceId=1 DeviceId, minMemAddr=2 MemAddr, maxMemAddr=3 MemAddr",
    "DataChunk": "data=1 bytes",
    "MemcpyHostToDeviceRequest": "hostSrcData=1 bytes, dstDeviceId=2 DeviceId, dstMemAddr=3 MemAddr",
    "MemcpyHostToDeviceResponse": "success=1 bool",
    "MemcpyDeviceToHostRequest": "srcDeviceId=1 DeviceId, srcMemAddr=2 MemAddr, numBytes=3 uint64",
    "MemcpyDeviceToHostResponse": "dstData=1 bytes",
}

_REDUCE = "commId=1 uint64, count=2 uint64, op=3 ReduceOp, memAddrs=4 map MemAddr"
_COPIES = "hostToDevice=1 oneof MemcpyHostToDevice{0}, deviceToHost=2 oneof MemcpyDeviceToHost{0}"

SERVICES = {  # service -> rpc -> fields of <Rpc>Request, fields of <Rpc>Response
    "GPUDevice": {
        "GetDeviceMetadata": ("", "metadata=1 DeviceMetadata"),
        "BeginSend": (
            "sendBuffAddr=1 MemAddr, numBytes=2 uint64, dstRank=3 Rank",
            "initiated=1 bool, streamId=2 StreamId",
        ),
        "BeginReceive": (
            "streamId=1 StreamId, recvBuffAddr=2 MemAddr, numBytes=3 uint64, srcRank=4 Rank",
            "initiated=1 bool",
        ),
        "StreamSend": ("DataChunk", "success=1 bool"),  # a stream of chunks, answered once
        "GetStreamStatus": ("streamId=1 StreamId", "status=1 Status"),
    },
    "GPUCoordinator": {
        "CommInit": ("numDevices=1 uint32", "success=1 bool, commId=2 uint64, devices=3 repeated DeviceMetadata"),
        "GetCommStatus": ("commId=1 uint64", "status=1 Status"),
        "GroupStart": ("commId=1 uint64", "success=1 bool"),
        "GroupEnd": ("commId=1 uint64", "success=1 bool"),
        "AllReduceRing": (_REDUCE, "success=1 bool"),
        "NaiveAllReduce": (_REDUCE, "success=1 bool"),
        "Memcpy": (_COPIES.format("Request"), _COPIES.format("Response")),
        "CommFinalize": ("commId=1 uint64", "success=1 bool"),
        "CommDestroy": ("commId=1 uint64", "success=1 bool"),
    },
}  # fmt: skip


Table = Mapping[str, str]
Services = Mapping[str, Mapping[str, tuple[str, str]]]


class Protocol:
    """The message classes and enum values of a table, by name: ``protocol.CommInitRequest``, ``protocol.SUM`` (0)."""

    def __init__(self, enums: Table, messages: Table, services: Services) -> None:
        self._messages, self._services = messages, services
        table = dict(messages)
        for methods in services.values():
            for rpc, (request, response) in methods.items():
                table[f"{rpc}Response"] = response
                if request not in messages:
                    table[f"{rpc}Request"] = request
        file = descriptor_pb2.FileDescriptorProto(name="lab.proto", package="gpu_sim", syntax="proto3")
        for name, fields in table.items():
            _fill(file.message_type.add(name=name), fields, enums)
        for name, values in enums.items():
            enum = file.enum_type.add(name=name)
            for number, value in enumerate(values.split()):
                enum.value.add(name=value, number=number)
        pool = descriptor_pool.DescriptorPool()  # a separate pool: another gpu_sim may be loaded in this process
        pool.Add(file)
        kinds = {name: pool.FindMessageTypeByName(f"gpu_sim.{name}") for name in table}
        self._built: dict[str, Any] = {name: message_factory.GetMessageClass(kind) for name, kind in kinds.items()}
        self._built |= {value: at for values in enums.values() for at, value in enumerate(values.split())}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._built[name]
        except KeyError:
            raise AttributeError(f"the lab's protocol has no {name}") from None

    def stub(self, channel: Any, service: str) -> Stub:
        return Stub(channel, service, self)

    def calls(self, service: str) -> Iterator[tuple[str, bool, Any, Any]]:
        """The calls of a service: name, whether the request is a stream, classes of request and response."""
        for rpc, (request, _) in self._services[service].items():
            streams = request in self._messages
            yield rpc, streams, self._built[request if streams else f"{rpc}Request"], self._built[f"{rpc}Response"]


def _fill(message: Any, fields: str, enums: Table) -> None:
    """Adds the fields of one line of the table."""
    for text in filter(None, fields.split(", ")):
        name, _, rest = text.partition("=")
        number, *modifiers, kind = rest.split()
        is_repeated = modifiers in (["repeated"], ["map"])
        field = message.field.add(name=name, number=int(number), label=3 if is_repeated else 1)
        if modifiers == ["oneof"]:  # the protocol has no message with more than one
            field.oneof_index = 0
            if not message.oneof_decl:
                message.oneof_decl.add(name="either")
        if modifiers == ["map"]:  # on the wire a map is a repeated entry of key and value; the keys here are ranks
            entry = message.nested_type.add(name=f"{name[0].upper()}{name[1:]}Entry")
            entry.options.map_entry = True
            _fill(entry, f"key=1 uint32, value=2 {kind}", enums)
            kind = f"{message.name}.{entry.name}"
        scalar = f"TYPE_{kind.upper()}"
        if scalar in descriptor_pb2.FieldDescriptorProto.Type.DESCRIPTOR.values_by_name:
            field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(scalar)
        else:
            field.type_name = f".gpu_sim.{kind}"
            field.type = 14 if kind in enums else 11  # an enum, or a message


class Stub:
    """The calls of one service on a channel: ``Stub(channel, "GPUCoordinator").CommInit(request)``."""

    def __init__(self, channel: Any, service: str, protocol: Protocol | None = None) -> None:
        for rpc, streams, request, response in (protocol or _protocol).calls(service):
            connect = channel.stream_unary if streams else channel.unary_unary
            call = connect(
                f"/gpu_sim.{service}/{rpc}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )
            setattr(self, rpc, call)

    def __getattr__(self, name: str) -> Any:  # called only for names that the loop above did not set
        raise AttributeError(f"the service has no rpc {name}")


_protocol = Protocol(ENUMS, MESSAGES, SERVICES)


def __getattr__(name: str) -> Any:
    """``gpu_sim_messages.CommInitRequest``, ``gpu_sim_messages.SUM`` …"""
    return getattr(_protocol, name)
