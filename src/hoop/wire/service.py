"""gRPC servers made from the service descriptors of the .proto files, errors over gRPC, and conversion of messages.

Clients use the stubs in ``wire/generated``. Every call that a server answers passes through this module. A request that
does not parse becomes INVALID_ARGUMENT. A Hoop error becomes its gRPC status with its text; any other exception becomes
INTERNAL without a stack trace.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from hoop.errors import (
    DeadlineExceeded,
    HoopError,
    InternalError,
    InvalidArgument,
    PeerLost,
    UserError,
    error_from_name,
)
from hoop.events import Event
from hoop.texts import printable
from hoop.topology import Address, DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.repeated_calls import AnswersOnce

log = logging.getLogger("hoop.wire")
MAX_RECEIVING = 4
"""Maximum number of requests that one server reads at the same time; it holds as many times the largest message."""
HURRIED_S = 2.0
"""Seconds that a request may take to arrive while others wait."""
RECEIVE_S = 60.0
"""Seconds that a request may take to arrive."""

Message = TypeVar("Message")


@dataclass(eq=False)
class _Reception:
    began: float
    limit: asyncio.Timeout
    hurried: bool = False
    """True if it ends ``HURRIED_S`` seconds after it began, because another one waits."""


class Receiving:
    """Bounds the requests that arrive at one server at the same time.

    gRPC hands a request over when all of it is there, and holds what has come until then: a call that stops in the
    middle of its request holds up to the largest message. Before a server begins to read a request, flow control lets
    only its first 64 KiB come. So few requests are read at a time, and others wait. A request that takes long makes
    room for those that wait, the oldest first. Messages of streams do not count: a stream may be idle, which
    looks the same.
    """

    def __init__(self, most: int = MAX_RECEIVING, hurried_s: float = HURRIED_S, receive_s: float = RECEIVE_S) -> None:
        self._slots = asyncio.Semaphore(most)
        self._hurried_s, self._receive_s = hurried_s, receive_s
        self._receptions: list[_Reception] = []
        """Requests that arrive now, the oldest first."""
        self._waiting = 0
        """Number of requests that wait for a slot."""
        self.answers = AnswersOnce()
        """The server's calls that may arrive again."""

    @property
    def count(self) -> int:
        """Requests that are being read."""
        return len(self._receptions)

    async def receive(self, method: str, read: Callable[[], Awaitable[Message]]) -> Message:
        """Reads a request when there is room for it. Raises DeadlineExceeded if it does not arrive in time."""
        loop = asyncio.get_running_loop()
        await self._wait_for_slot()
        try:
            began = loop.time()
            try:
                async with asyncio.timeout(self._receive_s) as limit:
                    reception = _Reception(began, limit)
                    self._receptions.append(reception)
                    self._hurry()
                    try:
                        return await read()
                    finally:
                        self._receptions.remove(reception)
            except TimeoutError:
                waiting = ", and others wait" if reception.hurried else ""
                raise DeadlineExceeded(
                    f"{method}: the request did not arrive within {loop.time() - began:.1f} s{waiting}; "
                    "send it again, or a smaller one"
                ) from None
        finally:
            self._slots.release()

    async def _wait_for_slot(self) -> None:
        waits = self._slots.locked()
        self._waiting += waits
        self._hurry()
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= waits

    def _hurry(self) -> None:
        """Makes as many of the oldest receptions hurry as others wait."""
        now = asyncio.get_running_loop().time()
        for one in self._receptions[: self._waiting]:
            if not one.hurried:
                one.hurried = True
                one.limit.reschedule(max(now, one.began + self._hurried_s))


def device_message(info: DeviceInfo) -> pb.DeviceDescription:
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
        hoop_version=info.hoop_version,
        torch_version=info.torch_version,
        python_version=info.python_version,
        gpu=printable(info.gpu, 128),
        processor=printable(info.processor, 128),
        process=printable(info.process, 128),
    )


def device_info(message: pb.DeviceDescription) -> DeviceInfo:
    """Convert and validate a description that a device sent: other processes connect to its addresses."""
    if not 0 < message.min_address <= message.max_address < 2**63:
        raise InvalidArgument(
            f"device {message.device_id}: its memory [{message.min_address:#x}, {message.max_address:#x}) is no range"
        )
    texts = {"incarnation": (message.incarnation, 1, 64), "host": (message.host, 0, 256)}
    texts |= {"processor": (message.processor, 0, 128), "process": (message.process, 0, 128)}
    texts |= {name: (getattr(message, name), 0, 64) for name in ("hoop_version", "torch_version", "python_version")}
    texts["gpu"] = message.gpu, 0, 128
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
        hoop_version=message.hoop_version,
        torch_version=message.torch_version,
        python_version=message.python_version,
        gpu=message.gpu,
        processor=message.processor,
        process=message.process,
    )


def event_message(event: Event) -> pb.Event:
    return pb.Event(sequence=event.sequence, time=event.time, kind=event.kind, text=event.text, fields=event.fields)


ERROR_CLASS_KEY = "hoop-error"
"""Key of the trailing metadata that holds the class name of a Hoop error."""
_TRANSPORT_STATUSES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
)
_NON_HOOP_STATUSES = (*_TRANSPORT_STATUSES[2:], grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
_MAX_DETAILS = 1500
"""Maximum characters of a status text. It is sent percent-encoded in a header; a client accepts 8 KiB of headers."""


_CALLER: ContextVar[str] = ContextVar("hoop-caller", default="")


def calling_host() -> str:
    """Host of the caller that the current handler serves, without the port; empty outside a handler."""
    return host_of(_CALLER.get())


def host_of(peer: str) -> str:
    return peer.rpartition(":")[0]


OnRefused = Callable[[str, str, str, str], None]
"""Callback for a call that is refused for a mistake of the caller: method, caller's host, name of the status, text."""


def handlers(service: Any, servicer: object, receiving: Receiving, on_refused: OnRefused | None = None) -> Any:
    """The generic handler of a service: ``CommInit`` calls ``await servicer.comm_init(request)``.

    A streaming request is an async iterator; a streaming response is an async generator. ``receiving``: of the server,
    for all its services. With ``on_refused``, a call that the service does not have is refused with the names of those
    that it has.
    """
    table = {
        method.name: _handler(method, getattr(servicer, _snake(method.name)), receiving, on_refused)
        for method in service.methods
    }
    if on_refused is not None:
        return _ServiceHandler(service.full_name, table, on_refused)
    return grpc.method_handlers_generic_handler(service.full_name, table)


class _ServiceHandler(grpc.ServiceRpcHandler):  # type: ignore[type-arg]
    """The handlers of one service, by method, and one that refuses all other methods."""

    def __init__(self, service: str, table: dict[str, Any], on_refused: OnRefused) -> None:
        self._service, self._table, self._on_refused = service, table, on_refused

    def service_name(self) -> str:
        return self._service

    def service(self, handler_call_details: Any) -> Any:
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service != self._service:
            return None
        return self._table.get(method) or self._refusing_handler(printable(method, 100))

    def _refusing_handler(self, method: str) -> Any:
        async def refuse(_: Any, context: Any) -> None:
            text = f"{method} is not a call of {self._service} here; it has {', '.join(sorted(self._table))}"
            self._on_refused(method, host_of(context.peer()), grpc.StatusCode.UNIMPLEMENTED.name, text)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        # A stream-stream handler reads no message before it answers, whatever the caller sends.
        return grpc.stream_stream_rpc_method_handler(refuse)


def status_of(error: grpc.RpcError) -> str:
    """The details of a failed call, else its status name, as printable text, without gRPC's preamble."""
    details = error.details() or error.code().name
    return printable(details.removeprefix("failed to connect to all addresses; last error: "), _MAX_DETAILS)


def translate(error: grpc.RpcError, peer: str = "") -> HoopError:
    """Convert a failed call to a Hoop error; ``peer`` is the prefix of its text."""
    details = error.details() or "no reason given"
    message = f"{peer}: {details}" if peer and not details.startswith(f"{peer}:") else details
    if not _error_class(error) and error.code() in _NON_HOOP_STATUSES:
        return PeerLost(f"{message} (no answer of a Hoop server: {error.code().name})")
    if not _error_class(error) and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # gRPC's own limit
        message += "; a server's is raised with --max-message"
    return error_from_name(_error_class(error) or error.code().name, message)


def unreachable(error: grpc.RpcError) -> bool:
    """Whether the transport failed, rather than the server answering with an error."""
    return not _error_class(error) and error.code() in _TRANSPORT_STATUSES


def connection_broke(error: grpc.RpcError) -> bool:
    """Whether the call may be made again: its connection broke, or was not there, and its deadline is not over."""
    return unreachable(error) and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def was_cancelled(error: grpc.RpcError) -> bool:
    """Whether gRPC cancelled the call by itself: no Hoop server answered. It happens on machines under heavy load."""
    return not _error_class(error) and error.code() == grpc.StatusCode.CANCELLED


def _error_class(error: grpc.RpcError) -> str:
    """Class name of the Hoop error that a Hoop server sent; empty if the status is not from Hoop."""
    metadata: Any = error.trailing_metadata() or ()
    return next((str(value) for key, value in metadata if key == ERROR_CLASS_KEY), "")


def _handler(method: Any, answer: Callable[..., Any], receiving: Receiving, on_refused: OnRefused | None) -> Any:
    kind = _message(method.input_type)

    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise InvalidArgument(f"{method.name}: the request is not a valid {method.input_type.name}") from None

    async def parse_all(stream: Any) -> AsyncIterator[Any]:
        async with aclosing(aiter(stream)) as messages:  # an iterator left open would keep the last message alive
            async for data in messages:
                message = parse(data)
                del data  # free the encoded bytes while the handler uses the message
                yield message

    async def parse_one(context: Any) -> Any:
        data = await receiving.receive(method.name, context.read)
        if not isinstance(data, bytes):  # the end of the stream
            raise InvalidArgument(f"{method.name}: the call ended without a {method.input_type.name}")
        return parse(data)

    async def unary(request: Any, context: Any) -> Any:
        _CALLER.set(context.peer())
        try:
            if method.client_streaming:
                return await answer(parse_all(request))
            return await receiving.answers.answer(method.full_name, await parse_one(context), answer)
        except Exception as error:
            if on_refused is not None and isinstance(error, UserError):
                on_refused(method.name, calling_host(), error.code, str(error))
            status, details, metadata = _error_status(method, error)
            aborting = context.abort(status, details, metadata)
        # The context keeps the exception of abort(), and so the frames in its traceback. Without this `del` the request
        # and the locals of the failed frames would stay alive until the garbage collector finds the cycle.
        del request, context
        return await aborting

    async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in answer(parse_all(request) if method.client_streaming else await parse_one(context)):
                yield response
            return
        except Exception as error:
            status, details, metadata = _error_status(method, error)
            aborting = context.abort(status, details, metadata)
        del request, context
        await aborting

    # For gRPC every request is a stream: a single message would be read before the handler is called. No deserializer:
    # for a malformed message gRPC would log a stack trace and answer INTERNAL.
    make = grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
    return make(
        streaming if method.server_streaming else unary,
        request_deserializer=None,
        response_serializer=_message(method.output_type).SerializeToString,
    )


def _error_status(method: Any, error: Exception) -> tuple[grpc.StatusCode, str, Any]:
    """Status code, text and trailing metadata for a handler's exception."""
    if isinstance(error, HoopError):
        code, text = grpc.StatusCode[error.code], str(error)
    elif isinstance(error, grpc.RpcError | asyncio.IncompleteReadError):
        code, text = grpc.StatusCode.CANCELLED, f"{method.name}: the caller went away"
    elif type(error).__name__ in ("AbortError", "UsageError"):  # raised by gRPC after the call was answered
        raise error
    else:
        log.exception("%s failed: a bug in Hoop", method.full_name)
        code, text = (grpc.StatusCode.INTERNAL, f"{method.name} failed, a bug in Hoop: {type(error).__name__}: {error}")
    text = printable(text)
    half = _MAX_DETAILS // (2 if text.isascii() else 6)
    if len(text) > 2 * half:
        text = f"{text[:half]} ... {text[-half:]}"
    kind = type(error) if isinstance(error, HoopError) else InternalError
    return code, text, ((ERROR_CLASS_KEY, kind.__name__),)


def _message(descriptor: Any) -> Any:
    return descriptor._concrete_class


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
