"""The door of a server: who calls is known, and may call this, or the call ends before its message is read.

With a token the caller presents its own in the metadata ``authorization: Bearer …``; with certificates the connection
has shown whose it is. Deny by default: a method that stands in no table is nobody's.

What a process proves itself with, and asks of others: nothing, a token, or certificates.

Every channel between Hoop's processes and every server port is opened here, so there is no other way in or out.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import HoopError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from hoop.topology import Address, Addresses
from hoop.wire.channels import Options
from hoop.wire.roles import ALLOWED, Role
from hoop.wire.service import MARK
from hoop.wire.tls import Certificates, name_of
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


HEADER = "authorization"
_HANDSHAKE_MS = 2000


@dataclass(frozen=True)
class Credentials:
    """A process's role and its proof of it; with neither token nor certificates it asks for none either."""

    role: Role
    token: Token | None = None
    certificates: Certificates | None = field(default=None, repr=False)

    @property
    def asked(self) -> bool:
        """Whether callers have to prove themselves."""
        return self.token is not None or self.certificates is not None

    @property
    def link_key(self) -> bytes:
        """What data links are authenticated with; empty: they are not."""
        source = self.certificates or self.token
        return source.links if source is not None else b""

    # ---- as a caller

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        if self.token is None or self.certificates is not None:
            return ()
        return ((HEADER, f"Bearer {self.token.presented(self.role)}"),)

    def channel(self, address: Address | Addresses, to: Role, options: Options) -> grpc.Channel:
        opened: grpc.Channel = self._open(grpc, address, to, options)
        return opened

    def aio_channel(self, address: Address | Addresses, to: Role, options: Options) -> grpc.aio.Channel:
        opened: grpc.aio.Channel = self._open(grpc.aio, address, to, options)
        return opened

    def _open(self, library: Any, address: Address | Addresses, to: Role, options: Options) -> Any:
        if self.certificates is None:
            return library.insecure_channel(_target(address), options=options)
        held = self.certificates
        secure = grpc.ssl_channel_credentials(held.authority, held.key, held.certificate)
        patience = "grpc.min_reconnect_backoff_ms"  # how long a connection may take: a handshake takes longer
        named: list[tuple[str, Any]] = [one for one in options if one[0] != patience]
        named += [(patience, _HANDSHAKE_MS), ("grpc.ssl_target_name_override", name_of(to))]
        return library.secure_channel(_target(address), secure, options=named)

    # ---- as a server

    def interceptors(self) -> tuple[Guard, ...]:
        """What every call to this process passes first."""
        if self.certificates is not None:
            return (Guard(None),)
        return () if self.token is None else (Guard(self.token),)

    def listen(self, server: grpc.aio.Server, address: Address) -> int:
        """Opens a port, for calls that are encrypted where there are certificates."""
        if self.certificates is None:
            return int(server.add_insecure_port(str(address)))
        held = self.certificates
        secure = grpc.ssl_server_credentials(
            [(held.key, held.certificate)], held.authority, require_client_auth=True
        )
        return int(server.add_secure_port(str(address), secure))


def _target(address: Address | Addresses) -> str:
    """In gRPC's words; of several places it takes the first that lets it in, and looks again when that is gone."""
    each = address.each if isinstance(address, Addresses) else (address,)
    if len(each) == 1:
        return str(each[0])
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):  # a list is of one of them
        try:
            found = [
                Address(str(place[0]), int(place[1]))
                for one in each
                for *_, place in socket.getaddrinfo(one.host, one.port, family, socket.SOCK_STREAM)
            ]
        except OSError as error:
            reason = error.strerror
            continue
        return f"{scheme}:{','.join(map(str, found))}"
    raise NotFound(f"{address}: neither IPv4 nor IPv6 leads to all of them: {reason}; name them alike")


def find(
    role: Role, token: str | None = None, token_file: Path | None = None, tls: Path | None = None
) -> Credentials:
    """The credentials that were given, else those in the environment: HOOP_TLS, HOOP_TOKEN, HOOP_TOKEN_FILE."""
    given = [name for name, one in (("token", token), ("token file", token_file), ("tls", tls)) if one]
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)}: give one of them")
    if not given:
        tls = Path(os.environ["HOOP_TLS"]) if os.environ.get("HOOP_TLS") else None
        token = None if tls else os.environ.get("HOOP_TOKEN")
        if not tls and not token and os.environ.get("HOOP_TOKEN_FILE"):
            token_file = Path(os.environ["HOOP_TOKEN_FILE"])
    if tls:
        return Credentials(role, certificates=Certificates.load(tls, role))
    if token_file:
        return checked(Credentials(role, Token.read(token_file)))
    return checked(Credentials(role, Token.parse(token, "HOOP_TOKEN") if token else None))


def checked(credentials: Credentials) -> Credentials:
    """The same, if its token is good for its role."""
    if credentials.token is not None:
        credentials.token.presented(credentials.role)
    return credentials
