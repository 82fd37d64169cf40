"""Authentication of gRPC calls: the credentials of a process, and the check of every call to a server.

``Credentials`` are a token, certificates, or nothing. They open every channel between Hoop's processes and every
server port; nothing else opens one. ``Guard`` checks each call before its message is read. With a token the metadata
``authorization`` has a proof of the caller's role for this call (``proofs``); other programs send a client's token
instead, ``Bearer …``. With certificates the TLS connection identifies the caller. Access is denied by default: a method
that is missing from the table of roles cannot be called.

A certificate names a role, not a host: the common name is the role (``device``), and callers expect the server name
``device.hoop``. The files can therefore be copied to any machine, and a device's certificate is not accepted as the
coordinator's. ``hoop certs`` makes them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc

from hoop.errors import HoopError, InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from hoop.topology import Address, Addresses
from hoop.wire.channels import Options
from hoop.wire.proofs import (
    ANSWER_KEY,
    ASK_PATH,
    CHALLENGE_KEY,
    COORDINATOR_TARGET,
    HEADER,
    SCHEME,
    ProofResult,
    ProvedChannel,
    Prover,
    Verifier,
)
from hoop.wire.roles import ALLOWED, Role
from hoop.wire.service import ERROR_CLASS_KEY, PROVED_DIGEST, OnRefused, host_of
from hoop.wire.tokens import Token, environment_value, read_credential

AUTHORITY, CERTIFICATE, KEY, LINK_KEY = "ca.pem", "cert.pem", "key.pem", "links.key"
"""File names in a role's folder; only devices have ``links.key``."""
_MAX_FILE_BYTES = 1 << 20


def certificate_name(role: Role) -> str:
    """The server name that a caller expects in the certificate of a server with this role."""
    return f"{role}.hoop"


@dataclass(frozen=True)
class Certificates:
    """The TLS files of one role."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    link_key: bytes = field(default=b"", repr=False)
    """Key that authenticates data links."""

    @classmethod
    def load(cls, folder: Path, role: Role) -> Certificates:
        """Load from a role's folder, or from the output folder of ``hoop certs``, which has one folder a role."""
        folder = folder / role if (folder / role).is_dir() else folder

        def content(name: str) -> bytes:
            try:
                return read_credential(folder / name, _MAX_FILE_BYTES, private=name in (KEY, LINK_KEY))
            except OSError as error:
                raise NotFound(
                    f"--tls {folder}: {name}: {error.strerror}; make a folder a role with: hoop certs DIR"
                ) from None

        link_key = b""
        if role is Role.DEVICE:
            text = content(LINK_KEY).strip()
            if not re.fullmatch(rb"[0-9a-f]{64}", text):
                raise InvalidArgument(f"{folder / LINK_KEY}: not a key; make the certificates again: hoop certs DIR")
            link_key = bytes.fromhex(text.decode())
        return cls(content(AUTHORITY), content(CERTIFICATE), content(KEY), link_key)


_AUTH_HELP = (
    "give the cluster's with --token-file FILE or HOOP_TOKEN; other programs send the metadata "
    "'authorization: Bearer TOKEN' with what `hoop token FILE --role client` wrote (SECURITY.md)"
)
LAB_SERVICES = frozenset({"gpu_sim.GPUCoordinator", "gpu_sim.GPUDevice"})
"""The lab's protocol, which has no tokens: ``--lab`` opens it to callers without one."""
_LAB_HELP = "; or open the lab's calls, and no others, to every caller with --lab (hoop up, coordinator, device)"


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """A server interceptor that checks every call against the table of roles."""

    def __init__(
        self,
        token: Token | None,
        role: Role,
        target: Callable[[], str],
        open_services: frozenset[str] = frozenset(),
        on_refused: OnRefused | None = None,
    ) -> None:
        """``token`` None: callers are identified by their certificate. ``role`` and ``target`` are the server's.

        ``open_services`` need no token. ``on_refused`` is called for every call of the lab's that is refused.
        """
        self._token = token
        self._verifier = Verifier(token, role, target) if token is not None else None
        self._open_services = open_services
        self._on_refused = on_refused

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if self._token is None or self._verifier is None:
            return _with_certificate(details.method, await continuation(details))
        of_lab = _service(details.method) in LAB_SERVICES
        if _service(details.method) in self._open_services:
            return await continuation(details)
        found = [str(value) for key, value in details.invocation_metadata or () if key == HEADER]
        scheme, _, presented = (found or [""])[0].partition(" ")
        verdict, role = ProofResult(problem="this token is not of this cluster"), None
        if scheme == SCHEME:
            verdict = self._verifier.check(details.method, presented)
            role = Role(verdict.proof.role) if verdict.proof is not None else None
        elif scheme == "Bearer" and self._token.is_client(presented.strip()):
            role = Role.CLIENT
        try:
            if role is None:
                problem = verdict.problem if found else "no token came with this call"
                lab = _LAB_HELP if of_lab and not found else ""
                called = "" if details.method == ASK_PATH else f"{details.method}: "
                raise Unauthenticated(f"{called}{problem}; {_AUTH_HELP}{lab}")
            check_permission(details.method, role)
        except HoopError as error:
            if verdict.challenge:
                return _rejecting_handler(error, details.method, None, ((CHALLENGE_KEY, verdict.challenge),))
            return _rejecting_handler(error, details.method, self._on_refused if of_lab else None)
        PROVED_DIGEST.set(verdict.proof.digest if verdict.proof is not None else None)
        handler = await continuation(details)
        return handler if verdict.proof is None else _with_proof(verdict.answer, handler)


def _service(method: str) -> str:
    return method.removeprefix("/").partition("/")[0]


def check_permission(method: str, role: Role) -> None:
    """Raise PermissionDenied unless ``role`` may call ``method``."""
    allowed = ALLOWED.get(method, frozenset())
    if role not in allowed:
        callers = " or ".join(f"a {one}" for one in sorted(allowed)) or "nobody"
        raise PermissionDenied(f"{method}: a {role} may not call this, {callers} may")


def _rejecting_handler(
    error: HoopError, method: str, on_refused: OnRefused | None, metadata: tuple[tuple[str, str], ...] = ()
) -> Any:
    async def reject(_: Any, context: Any) -> None:
        if on_refused is not None:
            on_refused(method.rpartition("/")[2], host_of(context.peer()), error.code, str(error))
        await _abort(context, error, metadata)

    # A stream-stream handler reads no message before it answers, whatever the caller sends.
    return grpc.stream_stream_rpc_method_handler(reject)


async def _abort(context: Any, error: HoopError, metadata: tuple[tuple[str, str], ...] = ()) -> None:
    await context.abort(grpc.StatusCode[error.code], str(error), ((ERROR_CLASS_KEY, type(error).__name__), *metadata))


def _with_certificate(method: str, handler: Any) -> Any:
    """Wrap ``handler`` so that it first checks the role in the caller's certificate."""

    async def check_certificate(context: Any) -> None:
        names = [name.decode(errors="replace") for name in context.auth_context().get("x509_common_name", ())]
        try:
            if len(names) != 1 or names[0] not in list(Role):
                raise Unauthenticated(f"{method}: the certificate of {names} names no role of Hoop's")
            check_permission(method, Role(names[0]))
        except HoopError as error:
            await _abort(context, error)

    return _preceded(check_certificate, handler)


def _with_proof(answer: str, handler: Any) -> Any:
    """Wrap ``handler`` so that its answer proves this server to the caller."""

    async def prove(context: Any) -> None:
        if handler.response_streaming:
            await context.send_initial_metadata(((ANSWER_KEY, answer),))
        else:
            context.set_trailing_metadata(((ANSWER_KEY, answer),))

    return _preceded(prove, handler)


def _preceded(begin: Callable[[Any], Awaitable[None]], handler: Any) -> Any:
    """A handler that calls ``begin`` with the call's context before ``handler``; None if that is None."""
    if handler is None:
        return None
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
    """The role of a process and its proof. Without token and certificates its server accepts every caller."""

    role: Role
    token: Token | None = None
    certificates: Certificates | None = field(default=None, repr=False)

    @property
    def required(self) -> bool:
        """Whether this process's server authenticates its callers."""
        return self.token is not None or self.certificates is not None

    @property
    def link_key(self) -> bytes:
        """Key that authenticates data links; empty: links are not authenticated."""
        source = self.certificates or self.token
        return source.link_key if source is not None else b""

    # ---- client side

    def channel(self, address: Address | Addresses, to: Role, options: Options) -> grpc.Channel:
        opened: grpc.Channel = self._open(grpc, address, to, options)
        return opened

    def aio_channel(self, address: Address | Addresses, to: Role, options: Options) -> grpc.aio.Channel:
        opened: grpc.aio.Channel = self._open(grpc.aio, address, to, options)
        return opened

    def _open(self, library: Any, address: Address | Addresses, to: Role, options: Options) -> Any:
        if self.certificates is None:
            channel = library.insecure_channel(grpc_target(address), options=options)
            if self.token is None:
                return channel
            target = COORDINATOR_TARGET if to is Role.COORDINATOR else str(address)
            return ProvedChannel(channel, Prover(self.token, self.role, to, target), library is grpc.aio)
        tls = self.certificates
        secure = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
        tls_options: list[tuple[str, Any]] = [*options, ("grpc.ssl_target_name_override", certificate_name(to))]
        return library.secure_channel(grpc_target(address), secure, options=tls_options)

    # ---- server side

    def interceptors(
        self,
        target: Callable[[], str] | None = None,
        open_services: frozenset[str] = frozenset(),
        on_refused: OnRefused | None = None,
    ) -> tuple[Guard, ...]:
        """Interceptors for a server of this process; the parameters are those of ``Guard``.

        ``target``: the advertised address of a device; None for a coordinator.
        """
        if not self.required:
            return ()
        token = None if self.certificates is not None else self.token
        return (Guard(token, self.role, target or (lambda: COORDINATOR_TARGET), open_services, on_refused),)

    def add_port(self, server: grpc.aio.Server, address: Address) -> int:
        """Open a server port and return its number; with certificates the port uses TLS."""
        if self.certificates is None:
            return int(server.add_insecure_port(str(address)))
        tls = self.certificates
        secure = grpc.ssl_server_credentials([(tls.key, tls.certificate)], tls.authority, require_client_auth=True)
        return int(server.add_secure_port(str(address), secure))


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
        return Credentials(role, certificates=Certificates.load(tls, role))
    if token_file is not None:
        return _check_role(Credentials(role, Token.read(token_file)))
    return _check_role(Credentials(role, None if token is None else Token.parse(token, field)))


def _check_role(credentials: Credentials) -> Credentials:
    """Return ``credentials``; raises InvalidArgument if the token is not valid for the role."""
    if credentials.token is not None:
        credentials.token.check_role(credentials.role)
    return credentials
