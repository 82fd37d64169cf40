"""What a process proves itself with, and asks of others: nothing, a token, or certificates.

Every channel between Hoop's processes and every server port is opened here, so there is no other way in or out.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import InvalidArgument, NotFound
from hoop.topology import Address, Addresses
from hoop.wire.certificates import Certificates, name_of
from hoop.wire.channels import Options
from hoop.wire.guard import Guard
from hoop.wire.roles import Role
from hoop.wire.tokens import Token

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
