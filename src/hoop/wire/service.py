"""Between Hoop's values and the messages that carry them.

gRPC from the .proto files alone: servers and stubs are made from the services' descriptors.

So there is no generated gRPC code to keep in step with a gRPC version, and one place through which
every call of every service passes. There, on the way in, bytes that are no message become
INVALID_ARGUMENT; on the way out, a Hoop error becomes its status with its sentence, and anything else
INTERNAL without a stack trace.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from hoop.errors import HoopError, InternalError, InvalidArgument, PeerLost, named
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


log = logging.getLogger("hoop")
MARK = "hoop-error"
"""The trailing metadata that names an error's class."""
_ON_THE_WAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)
_NO_HOOP_SERVERS = (*_ON_THE_WAY[2:], grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
_LONGEST = 1500
"""Characters of a sentence. It travels in a header, percent-encoded, and a client takes 8 KiB of headers."""


_CALLER: ContextVar[str] = ContextVar("hoop-caller", default="")


def calling_host() -> str:
    """The machine whose call is being answered, without its port; empty where none is."""
    return _CALLER.get().rpartition(":")[0]


class Stub:
    """A service's methods on a channel (``grpc`` or ``grpc.aio``), by their names in the .proto file."""

    def __init__(self, channel: Any, service: Any, metadata: Sequence[tuple[str, str]] = ()) -> None:
        """``metadata`` goes with every call: what the caller proves itself with."""
        for method in service.methods:
            kind = f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}"
            call = getattr(channel, kind)(
                _path(method),
                request_serializer=_message(method.input_type).SerializeToString,
                response_deserializer=_message(method.output_type).FromString,
            )
            setattr(self, method.name, _Presenting(call, metadata) if metadata else call)

    def __getattr__(self, name: str) -> Any:  # only for names that the service does not have
        raise AttributeError(f"the service has no method {name}")


class _Presenting:
    """A method that is always called with the same metadata."""

    def __init__(self, call: Any, metadata: Sequence[tuple[str, str]]) -> None:
        self._call, self._metadata = call, tuple(metadata)

    def __call__(self, request: Any, **options: Any) -> Any:
        return self._call(request, metadata=self._metadata, **options)

    def future(self, request: Any, **options: Any) -> Any:
        return self._call.future(request, metadata=self._metadata, **options)


def handlers(service: Any, servicer: object) -> Any:
    """The service, answered by ``servicer``: ``CommInit`` by ``await servicer.comm_init(request)``.

    A streaming request arrives as an async iterator; a streaming response is an async generator.
    """
    table = {
        method.name: _handler(method, getattr(servicer, _snake(method.name))) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, table)


def status_of(error: grpc.RpcError) -> str:
    """What came back with a failed call, or its status; printable, whatever the peer sent."""
    return printable(error.details() or error.code().name, _LONGEST)


def translate(error: grpc.RpcError, whom: str = "") -> HoopError:
    """The Hoop error that a failed call stands for."""
    details = error.details() or "no reason given"
    message = f"{whom}: {details}" if whom else details
    if not _mark(error) and error.code() in _NO_HOOP_SERVERS:
        return PeerLost(f"{message} (no answer of a Hoop server: {error.code().name})")
    if not _mark(error) and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own limit
        message += "; a server's is raised with --max-message"
    return named(_mark(error) or error.code().name, message)


def unreachable(error: grpc.RpcError) -> bool:
    """Whether the call failed on its way, not by the other side's word."""
    return not _mark(error) and error.code() in _ON_THE_WAY


def _mark(error: grpc.RpcError) -> str:
    """The class of the Hoop error behind a status, where Hoop sent it."""
    metadata: Any = error.trailing_metadata() or ()
    return next((str(value) for key, value in metadata if key == MARK), "")


def _handler(method: Any, answer: Callable[..., Any]) -> Any:
    kind = _message(method.input_type)

    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise InvalidArgument(
                f"{method.name}: the request is not a valid {method.input_type.name}"
            ) from None

    async def parse_all(stream: Any) -> AsyncIterator[Any]:
        async with aclosing(aiter(stream)) as messages:  # left open in the middle, it would keep the last one
            async for data in messages:
                message = parse(data)
                del data  # while the message is worked on it need not be here twice
                yield message

    async def unary(request: Any, context: Any) -> Any:
        _CALLER.set(context.peer())
        try:
            return await answer(parse_all(request) if method.client_streaming else parse(request))
        except Exception as error:
            ending = context.abort(*_ending(method, error))
        # The context keeps what abort raises, and so the frames it passes through: without this the request, and
        # whatever the error's own frames hold, would stay until Python looks for cycles.
        del request, context
        return await ending

    async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in answer(parse_all(request) if method.client_streaming else parse(request)):
                yield response
            return
        except Exception as error:
            ending = context.abort(*_ending(method, error))
        del request, context
        await ending

    make = getattr(
        grpc, f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}_rpc_method_handler"
    )
    # No deserializer: gRPC answers a malformed message with a stack trace in the log and INTERNAL.
    return make(
        streaming if method.server_streaming else unary,
        request_deserializer=None,
        response_serializer=_message(method.output_type).SerializeToString,
    )


def _ending(method: Any, error: Exception) -> tuple[grpc.StatusCode, str, Any]:
    """The status, the sentence and the metadata with which a call ends."""
    if isinstance(error, HoopError):
        code, text = grpc.StatusCode[error.code], str(error)
    elif isinstance(error, grpc.RpcError | asyncio.IncompleteReadError):
        code, text = grpc.StatusCode.CANCELLED, f"{method.name}: the caller went away"
    elif type(error).__name__ in ("AbortError", "UsageError"):  # gRPC's own: already answered
        raise error
    else:
        log.exception("%s failed: a bug in Hoop", method.full_name)
        code, text = (
            grpc.StatusCode.INTERNAL,
            f"{method.name} failed, a bug in Hoop: {type(error).__name__}: {error}",
        )
    text = printable(text)
    half = _LONGEST // (2 if text.isascii() else 6)
    if len(text) > 2 * half:
        text = f"{text[:half]} ... {text[-half:]}"
    kind = type(error) if isinstance(error, HoopError) else InternalError
    return code, text, ((MARK, kind.__name__),)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _path(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _message(descriptor: Any) -> Any:
    return descriptor._concrete_class


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
