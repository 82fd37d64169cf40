"""A gRPC stub built from a service descriptor, for tests that call methods by name."""

from __future__ import annotations

from typing import Any


class Stub:
    """A service's methods on a channel (``grpc`` or ``grpc.aio``), by their names in the .proto file."""

    def __init__(self, channel: Any, service: Any) -> None:
        for method in service.methods:
            kind = f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}"
            call = getattr(channel, kind)(
                _path(method),
                request_serializer=_message(method.input_type).SerializeToString,
                response_deserializer=_message(method.output_type).FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:  # called only for names that the service does not have
        raise AttributeError(f"the service has no method {name}")


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _path(method: Any) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _message(descriptor: Any) -> Any:
    return descriptor._concrete_class
