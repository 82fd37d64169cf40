"""The transport between processes and hosts: plain TCP, one listener a process.

A connection says HELLO (who dials, for which communicator and generation) and is handed to that
endpoint. The endpoint may not be there yet, because a peer's launch came first: then the connection
waits in the lobby. A generation that has been superseded is refused with a sentence. The lobby and
the time a stranger may take to say HELLO are bounded, so that nobody can fill this process up.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument, LinkCorrupted
from hoop.topology import Address
from hoop.transport.auth_handshake import Greeting
from hoop.transport.base import Endpoint, Transport
from hoop.transport.tcp_calls import MismatchFrame, nothing_under_way
from hoop.transport.tcp_endpoint import LOOK_S, TcpEndpoint
from hoop.transport.tcp_socket import DAMAGED, last_words
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

HELLO_SECONDS = 5.0
LOBBY_SECONDS = 60.0
LOBBY_LIMIT = 1024
_BACKLOG = 512

EndpointKey = tuple[int, int, int]
"""Which endpoint: communicator, generation, rank."""


@dataclass
class _PendingConnection:
    """A connection that has not reached its endpoint yet."""

    sock: socket.socket
    until: float
    greeting: Greeting
    letter: MismatchFrame | None = None
    """What follows the greeting of a rank that has found a mismatch."""

    @property
    def missing(self) -> int:
        """Bytes that come before anything can be done."""
        return self.greeting.missing if self.letter is None else self.letter.missing

    def hear(self, data: bytes) -> bytes:
        """Takes in what came, and returns what is to be answered at once; LinkCorrupted if this is no peer."""
        if self.letter is not None:
            self.letter.hear(data)
            return b""
        answer = self.greeting.hear(data)
        if self.hello is not None and self.hello.kind == FrameKind.MISMATCH:
            self.letter = MismatchFrame()
        return answer

    @property
    def understood(self) -> bool:
        """Whether it has said all that it says before it is let in, or answered."""
        return self.hello is not None and (self.letter is None or self.letter.complete)

    @property
    def hello(self) -> FrameHeader | None:
        return self.greeting.hello


class TcpTransport(Transport):
    """A listener and the endpoints behind it."""

    scheme = "tcp"

    def __init__(self, address: Address, checksums: bool = False, key: bytes = b"") -> None:
        """With ``checksums`` every message carries one, and what a link has changed is sent again (``tcp_repeating``);
        with a ``key`` both ends of a link prove that they have it."""
        self.key = key
        self.checksum = _crc32c() if checksums else None
        self.on_damage: Callable[[str], None] = lambda _: None
        """Told of every message that did not come as it was sent."""
        try:
            self._listener = socket.create_server(
                (address.host, address.port),
                family=socket.AF_INET6 if ":" in address.host else socket.AF_INET,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise InvalidArgument(f"data address {address}: cannot listen there: {error.strerror}") from None
        self._listener.setblocking(False)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._endpoints: dict[EndpointKey, TcpEndpoint] = {}
        self._newest: dict[int, int] = {}
        self._closed: OrderedDict[EndpointKey, bytes] = OrderedDict()
        """Endpoints that were here, so that a peer that dials one late gets an answer; with that answer."""
        self._early: OrderedDict[EndpointKey, MismatchFrame] = OrderedDict()
        """Mismatches reported to endpoints that are not made yet, and delivered when they are: the rank that reported
        one may have exited by then."""
        self._lobby: list[_PendingConnection] = []
        self._bell, self._ringer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._receive_visitors, name="hoop-tcp-listener", daemon=True)
        self._thread.start()

    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        seat = (communicator, generation, rank)
        with self._lock:
            if seat in self._endpoints:
                raise InvalidArgument(
                    f"communicator {communicator}, generation {generation}: "
                    f"rank {rank} has an endpoint already"
                )
            endpoint = self._endpoints[seat] = _RegisteredEndpoint(
                self, communicator, generation, rank, peers
            )
            if generation > 1:  # nothing is older than the first
                self._newest[communicator] = max(generation, self._newest.get(communicator, 0))
            waiting = [visitor for visitor in self._lobby if _seat(visitor.hello) == seat]
            stale = [visitor for visitor in self._lobby if _is_older(visitor.hello, communicator, generation)]
            self._lobby = [visitor for visitor in self._lobby if visitor not in waiting + stale]
            early = self._early.pop(seat, None)
        if early is not None and early.header is not None:
            endpoint.calls.hear(early.header.call, early.text)
        if self.checksum:  # from now on it looks
            self._ringer.send(b"!")
        for visitor in waiting:
            self._hand_over(visitor)
        for visitor in stale:
            assert visitor.hello is not None, "who waits in the lobby has said HELLO"
            self._refuse(visitor, _over(visitor.hello, generation))
        return endpoint

    def forget(self, endpoint: TcpEndpoint) -> None:
        seat = (endpoint.communicator, endpoint.generation, endpoint.rank)
        with self._lock:
            if self._endpoints.pop(seat, None) is not None:
                self._closed[seat] = endpoint.calls.answer()
                while len(self._closed) > LOBBY_LIMIT:
                    self._closed.popitem(last=False)

    # ---- the listener's thread

    def _receive_visitors(self) -> None:
        strangers: list[_PendingConnection] = []
        while not self._closing:
            ready = self._selector.select(self._patience(bool(strangers)))
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept(strangers)
                elif key.fileobj is self._bell:
                    self._bell.recv(64)
                elif isinstance(key.data, _PendingConnection) and self._listen_to(key.data):
                    strangers.remove(key.data)
            self._send_away_the_late(strangers)
            for endpoint in list(self._endpoints.values()) if self.checksum else ():
                endpoint.look()
        for visitor in strangers:
            visitor.sock.close()

    def _patience(self, strangers: bool) -> float | None:
        if self.checksum and self._endpoints:
            return LOOK_S
        return 1.0 if strangers or self._lobby else None

    def _accept(self, strangers: list[_PendingConnection]) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            sock, _ = self._listener.accept()
            if len(strangers) >= LOBBY_LIMIT:
                sock.close()
                return
            sock.setblocking(False)
            visitor = _PendingConnection(sock, time.monotonic() + HELLO_SECONDS, Greeting(self.key))
            strangers.append(visitor)
            self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _listen_to(self, visitor: _PendingConnection) -> bool:
        """Reads a HELLO as it comes; true when this visitor is no stranger any more (or gone)."""
        try:
            # Exactly the greeting: what follows is for the endpoint, straight into memory.
            data = visitor.sock.recv(visitor.missing)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        refusal = ""
        try:
            if data and (answer := visitor.hear(data)):
                visitor.sock.send(answer)  # so little, at the beginning, that a socket takes it at once
        except LinkCorrupted as error:
            refusal = str(error)
        except OSError:
            data = b""
        if data and not refusal and not visitor.understood:
            return False
        self._selector.unregister(visitor.sock)
        if refusal:
            self._refuse(visitor, refusal, messages=0 if visitor.greeting.legible else DAMAGED)
            return True
        if not data:
            visitor.sock.close()
            return True
        if visitor.hello is not None and visitor.hello.kind == FrameKind.HELLO:
            self._welcome(visitor)
        else:
            self._answer(visitor)
        return True

    def _answer(self, visitor: _PendingConnection) -> None:
        """To a question about a rank's collective, or to a verdict on it."""
        hello, letter = visitor.hello, visitor.letter
        assert hello is not None, "who is answered has asked"
        with self._lock:
            seat = (hello.communicator, hello.generation, hello.sequence)
            endpoint = self._endpoints.get(seat)
            answer = self._closed.get(seat, nothing_under_way())
            if endpoint is None and letter is not None and seat not in self._closed:
                self._early[seat] = letter
                while len(self._early) > LOBBY_LIMIT:
                    self._early.popitem(last=False)
        if endpoint is not None and letter is not None and letter.header is not None:
            answer = endpoint.calls.hear(letter.header.call, letter.text)
        elif endpoint is not None:
            answer = endpoint.calls.answer()
        with contextlib.suppress(OSError):
            visitor.sock.send(answer)
        visitor.sock.close()

    def _welcome(self, visitor: _PendingConnection) -> None:
        hello = visitor.hello
        assert hello is not None, "a visitor is welcomed after its HELLO"
        refusal = ""
        with self._lock:
            newest = self._newest.get(hello.communicator, 0)
            known = _seat(hello) in self._endpoints
            closed = self._closed.get((hello.communicator, hello.generation, hello.sequence), b"")
            if not known and hello.generation < newest:
                refusal = _over(hello, newest)
            elif closed:
                refusal = f"rank {hello.sequence} of communicator {hello.communicator} has closed its links"
            elif not known and len(self._lobby) >= LOBBY_LIMIT:
                refusal = f"{LOBBY_LIMIT} links wait here already"
            elif not known:
                visitor.until = time.monotonic() + LOBBY_SECONDS
                self._lobby.append(visitor)
        if closed and not known and FrameHeader.unpack(closed[:HEADER_BYTES]).kind == FrameKind.MISMATCH:
            with contextlib.suppress(OSError):
                visitor.sock.send(closed)
            visitor.sock.close()
        elif refusal:
            self._refuse(visitor, refusal, FrameKind.GOODBYE if closed else FrameKind.REFUSAL)
        elif known:
            self._hand_over(visitor)

    def _hand_over(self, visitor: _PendingConnection) -> None:
        hello = visitor.hello
        assert hello is not None, "a visitor is handed over after its HELLO"
        with self._lock:
            endpoint = self._endpoints.get((hello.communicator, hello.generation, hello.sequence))
        if endpoint is None or hello.source >= endpoint.size:
            self._refuse(visitor, f"rank {hello.source} is not in communicator {hello.communicator}")
            return
        visitor.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        endpoint.attach(hello.source, visitor.sock)

    def _refuse(
        self, visitor: _PendingConnection, reason: str, kind: FrameKind = FrameKind.REFUSAL, messages: int = 0
    ) -> None:
        with contextlib.suppress(OSError):
            visitor.sock.send(last_words(kind, reason, messages))
        visitor.sock.close()

    def _send_away_the_late(self, strangers: list[_PendingConnection]) -> None:
        now = time.monotonic()
        for visitor in [visitor for visitor in strangers if visitor.until < now]:
            strangers.remove(visitor)
            self._selector.unregister(visitor.sock)
            self._refuse(visitor, f"no HELLO within {HELLO_SECONDS:g} s")
        with self._lock:
            late = [visitor for visitor in self._lobby if visitor.until < now]
            self._lobby = [visitor for visitor in self._lobby if visitor.until >= now]
        for visitor in late:
            self._refuse(visitor, f"nobody took this link within {LOBBY_SECONDS:g} s")

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._ringer.send(b"!")
        self._thread.join()
        with self._lock:
            endpoints, self._endpoints = list(self._endpoints.values()), {}
            lobby, self._lobby = self._lobby, []
        for endpoint in endpoints:
            endpoint.close()
        for sock in (*(visitor.sock for visitor in lobby), self._listener, self._bell, self._ringer):
            sock.close()
        self._selector.close()


class _RegisteredEndpoint(TcpEndpoint):
    """An endpoint that leaves its transport's table when it closes."""

    def __init__(
        self, transport: TcpTransport, communicator: int, generation: int, rank: int, peers: Sequence[Address]
    ) -> None:
        super().__init__(communicator, generation, rank, peers, transport.checksum, transport.key)
        self._transport = transport

    def _tell(self, text: str) -> None:
        self._transport.on_damage(text)

    def close(self) -> None:
        self._transport.forget(self)
        super().close()


def _crc32c() -> Callable[[memoryview], int]:
    try:
        from crc32c import crc32c
    except ImportError:
        raise InvalidArgument("checksums: crc32c is not installed; pip install crc32c") from None
    function: Callable[[memoryview], int] = crc32c
    return function


def _over(hello: FrameHeader, newest: int) -> str:
    return f"generation {hello.generation} is over, communicator {hello.communicator} is at {newest}"


def _is_older(hello: FrameHeader | None, communicator: int, generation: int) -> bool:
    return hello is not None and hello.communicator == communicator and hello.generation < generation


def _seat(hello: FrameHeader | None) -> EndpointKey | None:
    return (hello.communicator, hello.generation, hello.sequence) if hello else None
