"""The transport between processes of one host: shared memory, whose descriptors are passed through a local socket.

    rank r ── HELLO, token, descriptors of its memory ──▶ rank p     (1) r dials every peer when its endpoint is created
    rank r ◀── one byte: opened ──────────────────────── rank p     (2) after all have, r removes the semaphores' names
    … the socket stays open and silent; when the peer dies it closes, and the listener notices at once (3)

Descriptors are passed, never paths. The socket's name follows from the address, so the same address serves TCP and
shared memory. Only processes of the same user may connect.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import re
import selectors
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import FailedPrecondition, InvalidArgument, LinkCorrupted
from hoop.memory import Arena, dtype
from hoop.topology import Address
from hoop.transport.accepting import AcceptingSocket, OutOfDescriptors
from hoop.transport.base import Endpoint, Transport
from hoop.transport.shm_endpoint import ShmEndpoint, shared_memory_error
from hoop.transport.shm_segment import map_bytes, segment_bytes
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

log = logging.getLogger("hoop.transport")
ABSTRACT = sys.platform == "linux"
"""Linux has socket names that are no files and end with the process; elsewhere the name is a file."""
_OFFER = struct.Struct("<32sQQ")  # token, start and size of the arena's bytes in its file
_HELLO_BYTES = HEADER_BYTES + _OFFER.size
_LISTEN_TRIES = 100
_HELLO_TIMEOUT_S = 1.0
_MAX_PENDING = 1024

EndpointKey = tuple[int, int, int]
"""Identifies an endpoint: communicator, generation, rank."""


@dataclass
class PendingConnection:
    """A peer's connection, with its HELLO."""

    sock: socket.socket
    key: EndpointKey
    """The endpoint that the peer dials."""
    source: int
    token: str
    descriptors: list[int]
    """Of the peer's segment, and of its arena if it shares one."""
    arena_start: int
    arena_bytes: int

    def discard(self) -> None:
        self.sock.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class _PeerSocket:
    """A socket whose end means that the peer is lost."""

    sock: socket.socket
    endpoint: ShmEndpoint
    peer: int
    dialled: bool
    """Whether this process dialled; the peer's confirmation then arrives on it."""


class ShmTransport(Transport):
    """A local socket, and the endpoints that connect through it."""

    scheme = "shm"

    def __init__(self, address: Address, arena: Arena | None = None) -> None:
        self._listener, self.address = _listen(address)
        self._arena = arena
        self._lock = threading.Lock()
        self._endpoints: dict[EndpointKey, ShmEndpoint] = {}
        self._closed_bytes = 0
        """Bytes of the messages that closed endpoints have sent."""
        self._pending: list[PendingConnection] = []
        """Connections to endpoints that do not exist yet."""
        self._peer_sockets: list[_PeerSocket] = []
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._accepting = AcceptingSocket(self._listener, self._selector)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="hoop-shm-listener", daemon=True)
        self._thread.start()

    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        key = (communicator, generation, rank)
        arena = self._arena
        memory = None if arena is None else arena.array(arena.min_address, dtype("uint8"), arena.capacity)
        with self._lock:
            if key in self._endpoints:
                raise InvalidArgument(
                    f"communicator {communicator}, generation {generation}: rank {rank} has an endpoint already"
                )
            endpoint = ShmEndpoint(communicator, generation, rank, peers, arena=memory, on_close=self._forget)
            self._endpoints[key] = endpoint
            waiting = [connection for connection in self._pending if connection.key == key]
            self._pending = [connection for connection in self._pending if connection.key != key]
        for connection in waiting:
            self._attach(connection, endpoint)
        self._dial_all(endpoint)
        return endpoint

    # ---- dialling

    def _dial_all(self, endpoint: ShmEndpoint) -> None:  # (1)
        descriptors, start, size = [endpoint.descriptor], 0, 0
        if self._arena is not None:
            descriptor, start = self._arena.share()
            descriptors.append(descriptor)
            size = self._arena.capacity
        offer = pack_offer(endpoint.token, start, size)
        for peer in range(endpoint.size):
            if peer != endpoint.rank:
                self._dial(endpoint, peer, offer, descriptors)
        for descriptor in descriptors[1:]:
            os.close(descriptor)

    def _dial(self, endpoint: ShmEndpoint, peer: int, offer: bytes, descriptors: list[int]) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hello = FrameHeader(
            FrameKind.HELLO, endpoint.communicator, endpoint.generation, endpoint.rank, sequence=peer, length=len(offer)
        )
        try:
            sock.connect(socket_name(endpoint.peers[peer]))
            _check_user(sock)
            socket.send_fds(sock, [hello.pack() + offer], descriptors)
        except (OSError, LinkCorrupted) as error:
            sock.close()
            endpoint.mark_lost(peer, f"does not answer: {getattr(error, 'strerror', None) or error}")
            return
        self._watch(_PeerSocket(sock, endpoint, peer, dialled=True))

    def _watch(self, peer_socket: _PeerSocket) -> None:
        peer_socket.sock.setblocking(False)
        endpoint = peer_socket.endpoint
        with self._lock:
            # The endpoint may have closed while its peer connected.
            still_open = self._endpoints.get((endpoint.communicator, endpoint.generation, endpoint.rank)) is endpoint
            if still_open:
                self._peer_sockets.append(peer_socket)
                self._selector.register(peer_socket.sock, selectors.EVENT_READ, peer_socket)
        if not still_open:
            peer_socket.sock.close()
        self._interrupt_select()

    # ---- the listener's thread

    def _serve(self) -> None:
        while not self._closing:
            ready = self._selector.select(self._accepting.timeout(None))
            self._accepting.resume_if_due()
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._take_connection()
                elif key.fileobj is self._wakeup:
                    self._wakeup.recv(64)
                elif isinstance(key.data, _PeerSocket):
                    self._read_from(key.data)

    def _read_from(self, peer_socket: _PeerSocket) -> None:
        try:
            data = peer_socket.sock.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data and peer_socket.dialled:
            peer_socket.endpoint.confirm_opened(peer_socket.peer)  # (2)
        elif not data:
            self._drop(peer_socket)
            self._read_last_confirmation(peer_socket.endpoint, peer_socket.peer)
            peer_socket.endpoint.mark_lost(peer_socket.peer, "is gone")  # (3)

    def _read_last_confirmation(self, endpoint: ShmEndpoint, peer: int) -> None:
        """Reads a confirmation that the peer sent just before it exited: it may exit once it has all it needs."""
        for other in [
            one for one in self._peer_sockets if one.endpoint is endpoint and one.peer == peer and one.dialled
        ]:
            with contextlib.suppress(OSError):
                if other.sock.recv(64):
                    endpoint.confirm_opened(peer)

    def _drop(self, peer_socket: _PeerSocket) -> None:
        with self._lock:
            if peer_socket not in self._peer_sockets:
                return
            self._peer_sockets.remove(peer_socket)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(peer_socket.sock)
        peer_socket.sock.close()

    def _take_connection(self) -> None:
        """``_accept``; whatever it raises ends that connection, and not the listener."""
        try:
            self._accept()
        except Exception:
            log.exception("a connection was not taken: a bug in Hoop")

    def _accept(self) -> None:
        try:
            sock = self._accepting.accept()
        except OutOfDescriptors:
            self._accepting.pause()
            return
        if sock is None:
            return
        try:
            connection = _read_hello(sock)
        except (OSError, LinkCorrupted, ValueError, struct.error):
            sock.close()
            return
        except Exception:
            sock.close()
            raise
        with self._lock:
            endpoint = self._endpoints.get(connection.key)
            if endpoint is None and len(self._pending) < _MAX_PENDING:
                self._pending.append(connection)
                return
        if endpoint is None:
            connection.discard()
        else:
            self._attach(connection, endpoint)

    def _attach(self, connection: PendingConnection, endpoint: ShmEndpoint) -> None:
        """Opens the peer's memory, confirms that to the peer, and puts the memory to use."""
        if connection.source >= endpoint.size or connection.source == endpoint.rank:
            connection.discard()
            return
        try:
            _check_memory(connection.descriptors[0], 0, segment_bytes(endpoint.size))
            arena = None
            if len(connection.descriptors) > 1:
                _check_memory(connection.descriptors[1], connection.arena_start, connection.arena_bytes)
                arena = map_bytes(connection.descriptors[1], connection.arena_start, connection.arena_bytes)
            use = endpoint.open(connection.source, connection.token, connection.descriptors[0], arena)
            connection.sock.send(b"!")
            use()
        except (OSError, ValueError) as error:
            endpoint.mark_lost(connection.source, f"offered memory that cannot be used: {error}")
            connection.discard()
            return
        for descriptor in connection.descriptors:
            os.close(descriptor)  # the mappings stay
        self._watch(_PeerSocket(connection.sock, endpoint, connection.source, dialled=False))

    # ---- closing

    def _forget(self, endpoint: ShmEndpoint) -> None:
        """Called by an endpoint that closes."""
        with self._lock:
            if self._endpoints.pop((endpoint.communicator, endpoint.generation, endpoint.rank), None) is not None:
                self._closed_bytes += endpoint.bytes_sent
            sockets = [one for one in self._peer_sockets if one.endpoint is endpoint]
        for peer_socket in sockets:
            self._drop(peer_socket)
        self._interrupt_select()

    def byte_counts(self) -> tuple[int, None]:
        """Messages only: vectors that ranks read in each other's memory are not sent."""
        with self._lock:
            return self._closed_bytes + sum(one.bytes_sent for one in self._endpoints.values()), None

    def _interrupt_select(self) -> None:
        with contextlib.suppress(OSError):
            self._wakeup_writer.send(b"!")

    def close(self) -> None:
        if self._closing:
            return
        for endpoint in list(self._endpoints.values()):
            endpoint.close()
        self._closing = True
        self._interrupt_select()
        self._thread.join()
        for connection in self._pending:
            connection.discard()
        for sock in (self._listener, self._wakeup, self._wakeup_writer):
            sock.close()
        if not ABSTRACT:
            Path(socket_name(self.address)).unlink(missing_ok=True)
        self._selector.close()


def open_shm_transport(address: Address, arena: Arena) -> ShmTransport | None:
    """Shared memory beside TCP at ``address``, under the host's identity; None, with a warning, if it is not available.

    A device without it has TCP links only. Its peers know that from its description, so all choose the same links.
    """
    try:
        if error := shared_memory_error():
            raise error
        return ShmTransport(Address(host_identity(), address.port), arena)
    except (FailedPrecondition, OSError) as error:
        log.warning("no shared memory (%s): this device's links are TCP, which is slower on one machine", error)
        return None


def host_identity() -> str:
    """A text that is the same for all processes that can share memory, and different for all others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/ipc").st_ino, os.stat("/proc/self/ns/net").st_ino
        identity = f"{boot} {namespace} {os.getuid()}"
    except OSError:
        identity = f"{socket.gethostname()} {os.getuid()}"
    return "shm-" + hashlib.sha256(identity.encode()).hexdigest()[:12]


# ---- the local socket and its HELLO


def socket_name(address: Address) -> str:
    name = f"hoop-{os.getuid()}-{address.port}"
    return f"\0{name}" if ABSTRACT else str(Path(tempfile.gettempdir()) / name)


def _listen(address: Address) -> tuple[socket.socket, Address]:
    for _ in range(_LISTEN_TRIES):
        chosen = address if address.port else Address(address.host, random.randrange(1024, 65536))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(socket_name(chosen))
            if not ABSTRACT:
                os.chmod(socket_name(chosen), 0o600)  # before any process can connect
            sock.listen(512)
            return sock, chosen
        except OSError:
            sock.close()
            if address.port:
                break
    raise FailedPrecondition(f"shared memory at {address}: another process of this user has that name")


def pack_offer(token: str, start: int, size: int) -> bytes:
    """The payload of a HELLO: the token that names a rank's semaphores, and the arena's span in its file."""
    return _OFFER.pack(token.encode(), start, size)


def _read_hello(sock: socket.socket) -> PendingConnection:
    """Reads a peer's HELLO, with the descriptors of its memory."""
    sock.settimeout(_HELLO_TIMEOUT_S)
    _check_user(sock)
    until = time.monotonic() + _HELLO_TIMEOUT_S
    data, descriptors, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 2)
    try:
        while 0 < len(data) < _HELLO_BYTES:
            more = sock.recv(_HELLO_BYTES - len(data))
            if not more or time.monotonic() > until:  # it closed the connection, or sends too slowly
                raise LinkCorrupted(f"a HELLO ended after {len(data)} of {_HELLO_BYTES} bytes")
            data += more
        header = FrameHeader.unpack(data[:HEADER_BYTES])
        token, start, size = _OFFER.unpack(data[HEADER_BYTES:])
        if header.kind != FrameKind.HELLO or not descriptors or not re.fullmatch(rb"[0-9a-f]{32}", token):
            raise LinkCorrupted("not a HELLO with memory")
    except Exception:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return PendingConnection(
        sock,
        key=(header.communicator, header.generation, header.sequence),
        source=header.source,
        token=token.decode(),
        descriptors=list(descriptors),
        arena_start=start,
        arena_bytes=size,
    )


def _check_user(sock: socket.socket) -> None:
    """Raises unless the process at the other end has this user: any user can bind, or dial, a name that is no file."""
    if ABSTRACT:
        _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise LinkCorrupted(f"user {user} may not share memory with this one")


def _check_memory(descriptor: int, start: int, size: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or found.st_size < start + size:
        raise ValueError(f"{found.st_size} bytes of user {found.st_uid} where {start + size} are needed")
