"""Authentication of gRPC calls: the credentials of a process, and the check of every call to a server.

``Credentials`` open every channel between Hoop's processes and every server port:

    local            Unix sockets, in a folder of this user alone (``local_sockets``): the kernel proves both ends
    token, or tls    mutual TLS with certificates of roles (``certificates``): neither end talks to another cluster
    none             plaintext, for ``--insecure`` and the lab's protocol

``Guard`` checks each call before its message is read. Access is denied by default: a method that is missing from the
table of roles cannot be called.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from hoop.errors import HoopError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from hoop.topology import Address, Addresses
from hoop.wire.certificates import Certificates, certificate_name
from hoop.wire.channels import Options
from hoop.wire.local_sockets import has_socket, socket_path, socket_target
from hoop.wire.private_files import environment_value
from hoop.wire.roles import ALLOWED, Role
from hoop.wire.service import ERROR_CLASS_KEY, OnRefused, host_of
from hoop.wire.tokens import Token, token_of_user

LAB_SERVICES = frozenset({"gpu_sim.GPUCoordinator", "gpu_sim.GPUDevice"})
"""The lab's protocol, which has no tokens: ``--lab`` opens it to callers without one."""
_LOCAL_HELP = (
    "this server answers processes of its own user on this machine, at its socket; for others start it with a token "
    "(hoop token FILE, then --token-file FILE everywhere; SECURITY.md)"
)
_LAB_HELP = "; or open the lab's calls, and no others, to every caller with --lab (hoop up, coordinator, device)"
_AUTH_HELP = "give the cluster's token with --token-file FILE or HOOP_TOKEN, or its certificates with --tls DIR"
_UNIX = "unix:"
"""Beginning of gRPC's name of a peer at a Unix socket."""
_PROBE_S = 2.0


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A server interceptor that checks every call against the table of roles."""

    def __init__(self, open_services: frozenset[str] = frozenset(), on_refused: OnRefused | None = None) -> None:
        """``open_services`` need no authentication. ``on_refused`` is called for every call of the lab's that is
        refused."""
        self._open_services = open_services
        self._on_refused = on_refused

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method, service = details.method, details.method.removeprefix("/").partition("/")[0]
        handler = await continuation(details)
        if service in self._open_services:
            return handler

        async def check(context: Any) -> None:
            try:
                check_caller(method, context.peer(), context.auth_context())
            except HoopError as error:
                text = str(error)
                if service in LAB_SERVICES and isinstance(error, Unauthenticated):
                    text += _LAB_HELP
                    if self._on_refused is not None:
                        self._on_refused(method.rpartition("/")[2], host_of(context.peer()), error.code, text)
                metadata = ((ERROR_CLASS_KEY, type(error).__name__),)
                await context.abort(grpc.StatusCode[error.code], text, metadata)

        # A method that does not exist is in no table: its check refuses, and nothing follows.
        return _preceded(check, handler or grpc.stream_stream_rpc_method_handler(check))


def check_caller(method: str, peer: str, connection: Any) -> None:
    """Raise unless a caller may call ``method``: this user at a Unix socket, or the role in its certificate."""
    allowed = ALLOWED.get(method, frozenset())
    callers = " or ".join(f"a {role}" for role in sorted(allowed)) or "nobody"
    if peer.startswith(_UNIX):
        if not allowed:
            raise PermissionDenied(f"{method}: {callers} may call this")
        return
    names = [name.decode(errors="replace") for name in connection.get("x509_common_name", ())]
    if not names:
        raise Unauthenticated(f"{method}: {_LOCAL_HELP}")
    if len(names) != 1 or names[0] not in list(Role):
        raise Unauthenticated(f"{method}: the certificate of {names} names no role of Hoop's")
    if names[0] not in allowed:
        raise PermissionDenied(f"{method}: a {names[0]} may not call this, {callers} may")


def _preceded(begin: Callable[[Any], Awaitable[None]], handler: Any) -> Any:
    """A handler that calls ``begin`` with the call's context before ``handler``, which reads the message."""
    kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
    inner = getattr(handler, kind)

    async def unary(request: Any, context: Any) -> Any:
        await begin(context)
        return await inner(request, context)

    async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
        await begin(context)
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


@dataclass(frozen=True)
class Credentials:
    """The role of a process and its proof. With none its calls are plaintext, and its server accepts every caller."""

    role: Role
    token: Token | None = None
    given: Certificates | None = field(default=None, repr=False)
    """Certificates of ``--tls``."""
    local: bool = False
    """Whether the cluster is this user's on this machine, and its processes call each other at Unix sockets. With a
    token too, its TCP ports use TLS: for coordinators at several addresses, of which gRPC finds the one that answers at
    TCP ports only."""

    @classmethod
    def of_user(cls, role: Role, address: Address | Addresses) -> Credentials:
        """The credentials of a process of this user's own cluster on this machine; the coordinator's at ``address``."""
        several = len(address.addresses) > 1
        return cls(role, token_of_user() if several else None, local=True)

    def for_role(self, role: Role) -> Credentials:
        """The same for another role; only from a join token, or local."""
        return replace(self, role=role)

    @property
    def required(self) -> bool:
        """Whether this process's server authenticates its callers."""
        return self.local or self.encrypted

    @property
    def encrypted(self) -> bool:
        """Whether this process's TCP ports use TLS."""
        return self.token is not None or self.given is not None

    @cached_property
    def certificates(self) -> Certificates | None:
        return self.given or (None if self.token is None else self.token.certificates(self.role))

    @cached_property
    def link_key(self) -> bytes:
        """Key that authenticates data links; empty: links are not authenticated."""
        if self.given is not None:
            return self.given.link_key
        token = self.token or (token_of_user() if self.local else None)
        return b"" if token is None else token.link_key

    # ---- client side

    def channel(self, address: Address | Addresses, to: Role, options: Options) -> grpc.Channel:
        opened: grpc.Channel = self._open(grpc, address, to, options)
        return opened

    def aio_channel(self, address: Address | Addresses, to: Role, options: Options) -> grpc.aio.Channel:
        opened: grpc.aio.Channel = self._open(grpc.aio, address, to, options)
        return opened

    def _open(self, library: Any, address: Address | Addresses, to: Role, options: Options) -> Any:
        if self.local and len(address.addresses) == 1:
            return library.insecure_channel(socket_target(address.addresses[0].port), options=options)
        tls = self.certificates
        if tls is None:
            return library.insecure_channel(grpc_target(address), options=options)
        secure = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
        tls_options: list[tuple[str, Any]] = [*options, ("grpc.ssl_target_name_override", certificate_name(to))]
        return library.secure_channel(grpc_target(address), secure, options=tls_options)

    def check_coordinator(self, address: Address | Addresses) -> None:
        """Raise if the process at an address cannot be the coordinator that these credentials are for.

        For an address that does not answer calls. It blocks for ``_PROBE_S`` seconds at most. Silence is no evidence.
        """
        for one in address.addresses:
            if self.local and len(address.addresses) == 1 and has_socket(one):
                return  # nobody else can be there: it starts, or has ended
            where, tls = f"the coordinator at {one}", self.certificates
            try:
                _handshake(one, tls.authority if tls is not None else None)
            except ssl.SSLCertVerificationError as error:
                raise Unauthenticated(
                    f"{where} has another token or certificates, or is another process ({error.verify_message}); "
                    f"{_AUTH_HELP}"
                ) from None
            except ssl.SSLEOFError:
                continue
            except ssl.SSLError:
                if tls is not None:
                    raise Unauthenticated(
                        f"{where} has no token and no certificates, or is another program: unset HOOP_TOKEN, "
                        "HOOP_TOKEN_FILE and HOOP_TLS, or start it with yours"
                    ) from None
                if self.local and not has_socket(one):
                    raise Unauthenticated(
                        f"{where} has no socket {socket_path(one.port)}: it is another user's, or accepts every caller "
                        "(--insecure; then start this device with --insecure too)"
                    ) from None
            except (OSError, UnicodeError):
                continue
            else:
                if tls is None:
                    raise Unauthenticated(f"{where} authenticates its callers; {_AUTH_HELP}")

    # ---- server side

    def interceptors(
        self, open_services: frozenset[str] = frozenset(), on_refused: OnRefused | None = None
    ) -> tuple[Guard, ...]:
        """Interceptors for a server of this process; the parameters are those of ``Guard``."""
        return (Guard(open_services, on_refused),) if self.required else ()

    def add_port(self, server: grpc.aio.Server, address: Address) -> int:
        """Open a TCP port of a server and return its number; with a token or certificates it uses TLS."""
        tls = self.certificates
        if tls is None:
            return int(server.add_insecure_port(str(address)))
        secure = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.authority, require_client_auth=True)
        return int(server.add_secure_port(str(address), secure))


def _handshake(address: Address, authority: bytes | None) -> None:
    """Return if a coordinator answers with TLS, else raise what ``ssl`` raises; ``authority`` None: of any cluster."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if authority is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=authority.decode())
    with (
        socket.create_connection((address.host, address.port), _PROBE_S) as plain,
        context.wrap_socket(plain, server_hostname=certificate_name(Role.COORDINATOR)),
    ):
        pass


def grpc_target(address: Address | Addresses) -> str:
    """The gRPC target, with its scheme: of ``unix:77`` or ``dns:5`` gRPC would take the host for one.

    Of several addresses gRPC takes the first that accepts, and tries again when that one fails.
    """
    addresses = address.addresses
    if len(addresses) == 1:
        return _single_target(addresses[0])
    # One gRPC target holds addresses of one family only.
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        try:
            resolved = [
                Address(str(sockaddr[0]), int(sockaddr[1]))
                for one in addresses
                for *_, sockaddr in socket.getaddrinfo(one.host, one.port, family, socket.SOCK_STREAM)
            ]
        except OSError as error:
            reason = error.strerror
            continue
        return f"{scheme}:{','.join(map(_quoted, resolved))}"
    raise NotFound(f"{address}: neither IPv4 nor IPv6 leads to all of them: {reason}; name them alike")


def _single_target(address: Address) -> str:
    try:
        version = ipaddress.ip_address(address.host).version
    except ValueError:
        return f"dns:///{_quoted(address)}"
    return f"ipv{version}:{_quoted(address)}"


def _quoted(address: Address) -> str:
    """An address in a URI: the zone of an IPv6 address begins with a percent sign."""
    return quote(str(address), safe="[]:")


def find_credentials(
    role: Role, token: str | None = None, token_file: Path | None = None, tls: Path | None = None
) -> Credentials:
    """Credentials from the arguments, else from the environment: HOOP_TLS, HOOP_TOKEN, HOOP_TOKEN_FILE."""
    given = [name for name, one in (("token", token), ("token file", token_file), ("tls", tls)) if one is not None]
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)}: give one of them")
    field = "token"
    if not given:
        folder, field, file = environment_value("HOOP_TLS"), "HOOP_TOKEN", environment_value("HOOP_TOKEN_FILE")
        token = environment_value(field)
        tls = Path(folder) if folder else None
        token_file = Path(file) if file and not token else None
    if tls is not None:
        return Credentials(role, given=Certificates.load(tls, role))
    if token_file is not None:
        return _check_role(Credentials(role, Token.read(token_file)))
    return _check_role(Credentials(role, None if token is None else Token.parse(token, field)))


def _check_role(credentials: Credentials) -> Credentials:
    """Return ``credentials``; raises InvalidArgument if the token is not valid for the role."""
    if credentials.token is not None:
        credentials.token.check_role(credentials.role)
    return credentials
