"""How processes of one host hand each other their memory: a local socket, a HELLO, descriptors.

Descriptors are passed, never paths. The socket's name follows from an address; only processes of the same user are
let in.

The transport between processes of one host: shared memory, handed over through a local socket.

    rank r ── HELLO, token, descriptors of its memory ──▶ rank p     (1) r dials everybody when it starts
    rank r ◀── one byte: opened ──────────────────────── rank p     (2) when all have, nothing of it has a name
    … the socket stays open and silent: its end is the death of the peer, noticed at once (3)

Descriptors are passed, never paths. The socket's name follows from the address, so the same address serves
TCP and shared memory; only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from hoop.transport.base import Endpoint, Transport
from hoop.transport.shm_endpoint import ShmEndpoint
from hoop.transport.shm_segment import Bytes, map_bytes, size_for
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

_OFFER = struct.Struct("<32sQQ")  # token, where the arena's bytes start in its file, how many they are
_HELLO_BYTES = HEADER_BYTES + _OFFER.size
_TRIES = 100
_HELLO_S = 1.0

EndpointKey = tuple[int, int, int]
"""Which endpoint: communicator, generation, rank."""


@dataclass
class PendingConnection:
    """A peer that dialled."""

    sock: socket.socket
    seat: EndpointKey
    source: int
    token: str
    descriptors: list[int]
    span: tuple[int, int]


ABSTRACT = sys.platform == "linux"
"""Linux has socket names that are no files and end with the process; elsewhere it is a file."""


def name_of(address: Address) -> str:
    name = f"hoop-{os.getuid()}-{address.port}"
    return f"\0{name}" if ABSTRACT else str(Path(tempfile.gettempdir()) / name)


def listen(address: Address) -> tuple[socket.socket, Address]:
    for _ in range(_TRIES):
        chosen = address if address.port else Address(address.host, random.randrange(1024, 65536))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(name_of(chosen))
            if not ABSTRACT:
                os.chmod(name_of(chosen), 0o600)  # before anybody can connect
            sock.listen(512)
            return sock, chosen
        except OSError:
            sock.close()
            if address.port:
                break
    raise FailedPrecondition(f"shared memory at {address}: another process of this user has that name")


def listen_to(sock: socket.socket) -> PendingConnection:
    """A peer's HELLO, with the descriptors of its memory."""
    sock.settimeout(_HELLO_S)
    check_user(sock)
    until = time.monotonic() + _HELLO_S
    data, descriptors, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 2)
    try:
        while 0 < len(data) < _HELLO_BYTES:
            more = sock.recv(_HELLO_BYTES - len(data))
            if not more or time.monotonic() > until:  # it hung up in the middle, or takes all day
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
    seat = (header.communicator, header.generation, header.sequence)
    return PendingConnection(sock, seat, header.source, token.decode(), list(descriptors), (start, size))


def check_user(sock: socket.socket) -> None:
    """Raises unless the process at the other end is this user's: anybody can take, or dial, a name that is no file."""
    if ABSTRACT:
        _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise LinkCorrupted(f"user {user} may not share memory with this one")


def check_memory(descriptor: int, start: int, size: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or found.st_size < start + size:
        raise ValueError(f"{found.st_size} bytes of user {found.st_uid} where {start + size} are needed")


def send_away(guest: PendingConnection) -> None:
    guest.sock.close()
    for descriptor in guest.descriptors:
        os.close(descriptor)


def host_identity() -> str:
    """The same for all processes that can share memory, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/ipc").st_ino, os.stat("/proc/self/ns/net").st_ino
        identity = f"{boot} {namespace} {os.getuid()}"
    except OSError:
        identity = f"{socket.gethostname()} {os.getuid()}"
    return "shm-" + hashlib.sha256(identity.encode()).hexdigest()[:12]


def offer(token: str, start: int, size: int) -> bytes:
    """What follows a HELLO: the name of one's bells, and where in its file an arena's bytes are."""
    return _OFFER.pack(token.encode(), start, size)


_LOBBY_LIMIT = 1024


@dataclass(frozen=True)
class _Watched:
    """A socket whose end is a peer's."""

    sock: socket.socket
    endpoint: ShmEndpoint
    peer: int
    dialled: bool


class ShmTransport(Transport):
    """A local socket, and the endpoints that meet through it."""

    scheme = "shm"

    def __init__(self, address: Address, arena: Arena | None = None) -> None:
        self._listener, self.address = listen(address)
        self._arena = arena
        self._lock = threading.Lock()
        self._endpoints: dict[EndpointKey, ShmEndpoint] = {}
        self._lobby: list[PendingConnection] = []
        self._watched: list[_Watched] = []
        self._bell, self._ringer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="hoop-shm-listener", daemon=True)
        self._thread.start()

    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        seat = (communicator, generation, rank)
        arena = self._arena
        memory = None if arena is None else arena.array(arena.min_address, dtype("uint8"), arena.capacity)
        with self._lock:
            if seat in self._endpoints:
                raise InvalidArgument(
                    f"communicator {communicator}, generation {generation}: rank {rank} has an endpoint already"
                )
            endpoint = _RegisteredEndpoint(self, communicator, generation, rank, peers, memory)
            self._endpoints[seat] = endpoint
            waiting = [guest for guest in self._lobby if guest.seat == seat]
            self._lobby = [guest for guest in self._lobby if guest.seat != seat]
        for guest in waiting:
            self._seat_guest(guest, endpoint)
        self._dial_all(endpoint)
        return endpoint

    def _dial_all(self, endpoint: ShmEndpoint) -> None:  # (1)
        descriptors, start, size = [endpoint.descriptor], 0, 0
        if self._arena is not None:
            descriptor, start = self._arena.share()
            descriptors.append(descriptor)
            size = self._arena.capacity
        words = offer(endpoint.token, start, size)
        for peer in range(endpoint.size):
            if peer != endpoint.rank:
                self._dial(endpoint, peer, words, descriptors)
        for descriptor in descriptors[1:]:
            os.close(descriptor)

    def _dial(self, endpoint: ShmEndpoint, peer: int, words: bytes, descriptors: list[int]) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        hello = FrameHeader(
            FrameKind.HELLO, endpoint.communicator, endpoint.generation, endpoint.rank, peer, len(words)
        )
        try:
            sock.connect(name_of(endpoint.peers[peer]))
            check_user(sock)
            socket.send_fds(sock, [hello.pack() + words], descriptors)
        except (OSError, LinkCorrupted) as error:
            sock.close()
            endpoint.lost(peer, f"does not answer: {getattr(error, 'strerror', None) or error}")
            return
        self._watch(_Watched(sock, endpoint, peer, dialled=True))

    def _watch(self, watched: _Watched) -> None:
        watched.sock.setblocking(False)
        endpoint = watched.endpoint
        with self._lock:
            # It may have closed while its peer was on the way.
            open_still = (
                self._endpoints.get((endpoint.communicator, endpoint.generation, endpoint.rank)) is endpoint
            )
            if open_still:
                self._watched.append(watched)
                self._selector.register(watched.sock, selectors.EVENT_READ, watched)
        if not open_still:
            watched.sock.close()
        self._ring()

    # ---- the listener's thread

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._bell:
                    self._bell.recv(64)
                elif isinstance(key.data, _Watched):
                    self._heard(key.data)

    def _heard(self, watched: _Watched) -> None:
        try:
            data = watched.sock.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data and watched.dialled:
            watched.endpoint.confirmed(watched.peer)  # (2)
        elif not data:
            self._drop(watched)
            self._hear_the_last_of(watched.endpoint, watched.peer)
            watched.endpoint.lost(watched.peer, "is gone")  # (3)

    def _hear_the_last_of(self, endpoint: ShmEndpoint, peer: int) -> None:
        """A peer that has what it needs may go at once: its word that it had opened everything still counts."""
        for other in [
            one for one in self._watched if one.endpoint is endpoint and one.peer == peer and one.dialled
        ]:
            with contextlib.suppress(OSError):
                if other.sock.recv(64):
                    endpoint.confirmed(peer)

    def _drop(self, watched: _Watched) -> None:
        with self._lock:
            if watched not in self._watched:
                return
            self._watched.remove(watched)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(watched.sock)
        watched.sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        try:
            guest = listen_to(sock)
        except (OSError, LinkCorrupted, ValueError, struct.error):
            sock.close()
            return
        with self._lock:
            endpoint = self._endpoints.get(guest.seat)
            if endpoint is None and len(self._lobby) < _LOBBY_LIMIT:
                self._lobby.append(guest)
                return
        if endpoint is None:
            send_away(guest)
        else:
            self._seat_guest(guest, endpoint)

    def _seat_guest(self, guest: PendingConnection, endpoint: ShmEndpoint) -> None:
        if guest.source >= endpoint.size or guest.source == endpoint.rank:
            send_away(guest)
            return
        try:
            check_memory(guest.descriptors[0], 0, size_for(endpoint.size))
            arena = None
            if len(guest.descriptors) > 1:
                check_memory(guest.descriptors[1], *guest.span)
                arena = map_bytes(guest.descriptors[1], *guest.span)
            use = endpoint.open(guest.source, guest.token, guest.descriptors[0], arena)
            guest.sock.send(b"!")
            use()
        except (OSError, ValueError) as error:
            endpoint.lost(guest.source, f"offered memory that cannot be used: {error}")
            send_away(guest)
            return
        for descriptor in guest.descriptors:
            os.close(descriptor)  # the mappings stay
        self._watch(_Watched(guest.sock, endpoint, guest.source, dialled=False))

    # ---- ending

    def forget(self, endpoint: ShmEndpoint) -> None:
        with self._lock:
            self._endpoints.pop((endpoint.communicator, endpoint.generation, endpoint.rank), None)
            mine = [watched for watched in self._watched if watched.endpoint is endpoint]
        for watched in mine:
            self._drop(watched)
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def close(self) -> None:
        if self._closing:
            return
        for endpoint in list(self._endpoints.values()):
            endpoint.close()
        self._closing = True
        self._ring()
        self._thread.join()
        for guest in self._lobby:
            send_away(guest)
        for sock in (self._listener, self._bell, self._ringer):
            sock.close()
        if not ABSTRACT:
            Path(name_of(self.address)).unlink(missing_ok=True)
        self._selector.close()


def share(address: Address, arena: Arena) -> ShmTransport | None:
    """Shared memory beside TCP at ``address``, under the host's own identity; None where that cannot be had."""
    try:
        return ShmTransport(Address(host_identity(), address.port), arena)
    except (FailedPrecondition, OSError):
        return None


class _RegisteredEndpoint(ShmEndpoint):
    """An endpoint that leaves its transport's table when it closes."""

    def __init__(
        self,
        transport: ShmTransport,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        arena: Bytes | None,
    ) -> None:
        super().__init__(communicator, generation, rank, peers, arena)
        self._transport = transport

    def close(self) -> None:
        self._transport.forget(self)
        super().close()
