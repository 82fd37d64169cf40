"""The transport between processes of one host: shared memory, handed over through a local socket.

    rank r ── HELLO, token, descriptors of its memory ──▶ rank p     (1) r dials everybody when it starts
    rank r ◀── one byte: opened ──────────────────────── rank p     (2) when all have, nothing of it has a name
    … the socket stays open and silent: its end is the death of the peer, noticed at once (3)

Descriptors are passed, never paths. The socket's name follows from the address, so the same address serves
TCP and shared memory; only processes of the same user are let in.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import FailedPrecondition, InvalidArgument, LinkCorrupted
from hoop.memory import Arena, dtype
from hoop.topology import Address
from hoop.transport.base import Endpoint, Transport
from hoop.transport.handshake import (
    ABSTRACT,
    Guest,
    Seat,
    check_memory,
    check_user,
    host_identity,
    listen,
    listen_to,
    name_of,
    offer,
    send_away,
)
from hoop.transport.mailbox import Bytes, map_bytes, size_for
from hoop.transport.shm_links import ShmEndpoint
from hoop.wire.frames import Header, Kind

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
        self._endpoints: dict[Seat, ShmEndpoint] = {}
        self._lobby: list[Guest] = []
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
            endpoint = _Tracked(self, communicator, generation, rank, peers, memory)
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
        hello = Header(
            Kind.HELLO, endpoint.communicator, endpoint.generation, endpoint.rank, peer, len(words)
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

    def _seat_guest(self, guest: Guest, endpoint: ShmEndpoint) -> None:
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


class _Tracked(ShmEndpoint):
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
