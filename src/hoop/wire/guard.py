"""The door of a server: who calls is known, and may call this, or the call ends before its message is read.

With a token the caller presents its own in the metadata ``authorization: Bearer …``; with certificates the connection
has shown whose it is. Deny by default: a method that stands in no table is nobody's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from hoop.errors import HoopError, PermissionDenied, Unauthenticated
from hoop.wire.roles import ALLOWED, Role
from hoop.wire.rpc import MARK
from hoop.wire.tokens import Token

_HOW = (
    "give the cluster's with --token-file FILE or HOOP_TOKEN; other programs send the metadata "
    "'authorization: Bearer TOKEN' with what `hoop token FILE --role client` wrote (SECURITY.md)"
)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Checks every call of a server against the table of roles."""

    def __init__(self, token: Token | None) -> None:
        """None: callers show a certificate."""
        self._token = token

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if self._token is None:
            return _with_certificate(details.method, await continuation(details))
        try:
            check(details.method, self._caller(self._token, details))
        except HoopError as error:
            return _refusal(error)
        return await continuation(details)

    def _caller(self, token: Token, details: grpc.HandlerCallDetails) -> Role:
        found = [value for key, value in details.invocation_metadata or () if key == "authorization"]
        if not found:
            raise Unauthenticated(f"{details.method}: no token came with this call; {_HOW}")
        scheme, _, presented = str(found[0]).partition(" ")
        role = token.recognised(presented.strip()) if scheme == "Bearer" else None
        if role is None:
            raise Unauthenticated(f"{details.method}: this token is not of this cluster; {_HOW}")
        return role


def check(method: str, role: Role) -> None:
    """Raises unless this role may call this method."""
    allowed = ALLOWED.get(method, frozenset())
    if role not in allowed:
        who = " or ".join(f"a {one}" for one in sorted(allowed)) or "nobody"
        raise PermissionDenied(f"{method}: a {role} may not call this, {who} may")


def _refusal(error: HoopError) -> Any:
    async def refuse(_: Any, context: Any) -> None:
        await _end(context, error)

    # Of this kind no message is read before the answer, whatever the caller sends.
    return grpc.stream_stream_rpc_method_handler(refuse)


async def _end(context: Any, error: HoopError) -> None:
    await context.abort(grpc.StatusCode[error.code], str(error), ((MARK, type(error).__name__),))


def _with_certificate(method: str, handler: Any) -> Any:
    """The handler, for callers whose certificate names a role that may call it."""
    if handler is None:
        return None

    async def allowed(context: Any) -> None:
        names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())]
        try:
            if len(names) != 1 or names[0] not in list(Role):
                raise Unauthenticated(f"{method}: the certificate of {names} names no role of Hoop's")
            check(method, Role(names[0]))
        except HoopError as error:
            await _end(context, error)

    kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
    inner = getattr(handler, kind)

    async def unary(request: Any, context: Any) -> Any:
        await allowed(context)
        return await inner(request, context)

    async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
        await allowed(context)
        async for response in inner(request, context):
            yield response

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        streaming if handler.response_streaming else unary,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
