"""The transport between processes and hosts: plain TCP, one listener per process.

A new connection sends a HELLO that names the dialling rank, the communicator and the generation. The listener's thread
attaches it to that endpoint. The endpoint may not exist yet, because a peer's launch came first: then the connection
waits in the list of pending connections. A connection that becomes a lane of a link (``tcp_lanes``) sends LANE instead,
and is handled in the same way; the listener answers with LANE once it is attached or pending. The listener refuses a
superseded generation with a text. The number of pending connections and the time to send a HELLO are limited, so that
no client can exhaust this process.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from crc32c import crc32c

from hoop.errors import InvalidArgument, LinkCorrupted
from hoop.topology import Address
from hoop.transport.accepting import AcceptingSocket, OutOfDescriptors, pending_limit
from hoop.transport.auth_handshake import Greeting
from hoop.transport.base import Endpoint, Transport
from hoop.transport.tcp_call_check import MismatchFrame, no_collective_answer
from hoop.transport.tcp_endpoint import REPLY_POLL_S, LinkOptions, TcpEndpoint
from hoop.transport.tcp_lanes import sockets_of_environment
from hoop.transport.tcp_link import HELLO_DAMAGED, closing_frame
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

log = logging.getLogger("hoop.transport")
HELLO_TIMEOUT_S = 5.0
PENDING_TIMEOUT_S = 60.0
MAX_PENDING = 1024
_BACKLOG = 512

EndpointKey = tuple[int, int, int]
"""Identifies an endpoint: communicator, generation, rank."""


@dataclass
class _PendingConnection:
    """A connection that is not attached to its endpoint yet."""

    sock: socket.socket
    until: float
    """Deadline: for its HELLO, then for its endpoint to be created."""
    greeting: Greeting
    report: MismatchFrame | None = None
    """Follows the greeting if the dialling rank reports a mismatch."""

    @property
    def missing(self) -> int:
        """How many bytes to read next."""
        return self.greeting.missing if self.report is None else self.report.missing

    def feed(self, data: bytes) -> bytes:
        """Adds received bytes and returns the answer to send; raises LinkCorrupted if this is no peer."""
        if self.report is not None:
            self.report.feed(data)
            return b""
        answer = self.greeting.feed(data)
        if self.hello is not None and self.hello.kind == FrameKind.MISMATCH:
            self.report = MismatchFrame()
        return answer

    @property
    def complete(self) -> bool:
        """Whether everything has arrived that the listener reads: the greeting, and the report if one follows."""
        return self.hello is not None and (self.report is None or self.report.complete)

    @property
    def hello(self) -> FrameHeader | None:
        return self.greeting.hello


class TcpTransport(Transport):
    """A listener and the endpoints behind it."""

    scheme = "tcp"

    def __init__(self, address: Address, checksums: bool = False, key: bytes = b"") -> None:
        """``checksums``: every frame carries a CRC-32C, and damaged frames are sent again (``tcp_endpoint``).
        ``key``: both ends of a link prove that they have it; empty: no authentication."""
        self.options = LinkOptions(crc32c if checksums else None, key, sockets_of_environment())
        self.on_damage: Callable[[str], None] = lambda _: None
        """Called with a text for every frame that arrived damaged."""
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
        self._closed_bytes = (0, 0)
        """Bytes sent and received by endpoints that are closed."""
        self._newest: dict[int, int] = {}
        """The newest generation of each communicator."""
        self._closed: OrderedDict[EndpointKey, bytes] = OrderedDict()
        """Closed endpoints, with the answer for a peer that dials one of them late."""
        self._early_reports: OrderedDict[EndpointKey, MismatchFrame] = OrderedDict()
        """Mismatches reported to endpoints that do not exist yet, and delivered when they are created: the reporting
        rank may have exited by then."""
        self._pending: list[_PendingConnection] = []
        """Connections that have sent a HELLO for an endpoint that does not exist yet."""
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._accepting = AcceptingSocket(self._listener, self._selector)
        self._max_greeting = pending_limit(MAX_PENDING)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="hoop-tcp-listener", daemon=True)
        self._thread.start()

    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        key = (communicator, generation, rank)
        with self._lock:
            if key in self._endpoints:
                raise InvalidArgument(
                    f"communicator {communicator}, generation {generation}: rank {rank} has an endpoint already"
                )
            endpoint = self._endpoints[key] = TcpEndpoint(
                communicator,
                generation,
                rank,
                peers,
                self.options,
                on_damage=lambda text: self.on_damage(text),
                on_close=self._forget,
            )
            if generation > 1:  # no generation is older than the first
                self._newest[communicator] = max(generation, self._newest.get(communicator, 0))
            waiting = [one for one in self._pending if _endpoint_key(one.hello) == key]
            stale = [one for one in self._pending if _is_older(one.hello, communicator, generation)]
            self._pending = [one for one in self._pending if one not in waiting + stale]
            early_report = self._early_reports.pop(key, None)
        if early_report is not None and early_report.header is not None:
            endpoint.call_check.receive_report(early_report.header.call, early_report.text)
        if self.options.checksum:  # makes the listener's thread start to read acknowledgements
            self._wakeup_writer.send(b"!")
        for connection in waiting:
            self._attach(connection)
        for connection in stale:
            assert connection.hello is not None, "a pending connection has sent its HELLO"
            self._refuse(connection, _superseded(connection.hello, generation))
        return endpoint

    def _forget(self, endpoint: TcpEndpoint) -> None:
        """Called by an endpoint that closes."""
        key = (endpoint.communicator, endpoint.generation, endpoint.rank)
        with self._lock:
            if self._endpoints.pop(key, None) is not None:
                self._closed_bytes = _add_counts(self._closed_bytes, endpoint)
                self._closed[key] = endpoint.call_check.answer_query()
                while len(self._closed) > MAX_PENDING:
                    self._closed.popitem(last=False)

    def byte_counts(self) -> tuple[int, int]:
        with self._lock:
            found, endpoints = self._closed_bytes, list(self._endpoints.values())
        for one in endpoints:
            found = _add_counts(found, one)
        return found

    # ---- the listener's thread

    def _serve(self) -> None:
        greeting: list[_PendingConnection] = []  # those that have not sent a complete greeting yet
        while not self._closing:
            ready = self._selector.select(self._accepting.timeout(self._select_timeout(bool(greeting))))
            self._accepting.resume_if_due()
            for key, _ in ready:
                if key.fileobj is self._listener:
                    self._accept(greeting)
                elif key.fileobj is self._wakeup:
                    self._wakeup.recv(64)
                elif isinstance(key.data, _PendingConnection) and key.data in greeting and self._greet(key.data):
                    greeting.remove(key.data)
            self._refuse_expired(greeting)
            for endpoint in list(self._endpoints.values()) if self.options.checksum else ():
                endpoint.handle_replies_in_background()
        for connection in greeting:
            connection.sock.close()

    def _select_timeout(self, any_greeting: bool) -> float | None:
        if self.options.checksum and self._endpoints:
            return REPLY_POLL_S
        return 1.0 if any_greeting or self._pending else None

    def _accept(self, greeting: list[_PendingConnection]) -> None:
        """Accepts a connection. Too many that say nothing cannot keep others out: the oldest makes room."""
        try:
            sock = self._accepting.accept()
        except OutOfDescriptors:
            if greeting:
                self._drop_oldest(greeting)
            else:
                self._accepting.pause()
            return
        if sock is None:
            return
        if len(greeting) >= self._max_greeting:
            self._drop_oldest(greeting)
        sock.setblocking(False)
        connection = _PendingConnection(sock, time.monotonic() + HELLO_TIMEOUT_S, Greeting(self.options.key))
        greeting.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _drop_oldest(self, greeting: list[_PendingConnection]) -> None:
        oldest = greeting.pop(0)
        self._selector.unregister(oldest.sock)
        oldest.sock.close()

    def _greet(self, connection: _PendingConnection) -> bool:
        """``_read_greeting``; whatever it raises ends this connection, and not the listener."""
        try:
            return self._read_greeting(connection)
        except Exception:
            log.exception("closing a connection after its greeting: a bug in Hoop")
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.sock)
            connection.sock.close()
            return True

    def _read_greeting(self, connection: _PendingConnection) -> bool:
        """Reads the next bytes of a greeting; true when it is complete, or the connection has ended."""
        try:
            # Exactly the greeting: the endpoint reads the following bytes straight into memory.
            data = connection.sock.recv(connection.missing)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        refusal = ""
        try:
            if data and (answer := connection.feed(data)):
                connection.sock.send(answer)  # small enough that a new socket accepts it at once
        except LinkCorrupted as error:
            refusal = str(error)
        except OSError:
            data = b""
        if data and not refusal and not connection.complete:
            return False
        self._selector.unregister(connection.sock)
        if refusal:
            self._refuse(connection, refusal, messages=0 if connection.greeting.parsed else HELLO_DAMAGED)
            return True
        if not data:
            connection.sock.close()
            return True
        if connection.hello is not None and connection.hello.kind in (FrameKind.HELLO, FrameKind.LANE):
            self._route(connection)
        else:
            self._answer(connection)
        return True

    def _answer(self, connection: _PendingConnection) -> None:
        """Answers a query about a rank's collective, or a report of a mismatch in it."""
        hello, report = connection.hello, connection.report
        assert hello is not None, "an answered connection has sent its first frame"
        with self._lock:
            key = (hello.communicator, hello.generation, hello.sequence)
            endpoint = self._endpoints.get(key)
            answer = self._closed.get(key, no_collective_answer())
            if endpoint is None and report is not None and key not in self._closed:
                self._early_reports[key] = report
                while len(self._early_reports) > MAX_PENDING:
                    self._early_reports.popitem(last=False)
        if endpoint is not None and report is not None and report.header is not None:
            answer = endpoint.call_check.receive_report(report.header.call, report.text)
        elif endpoint is not None:
            answer = endpoint.call_check.answer_query()
        with contextlib.suppress(OSError):
            connection.sock.send(answer)
        connection.sock.close()

    def _route(self, connection: _PendingConnection) -> None:
        """Attaches a connection to its endpoint, refuses it, or adds it to the pending ones."""
        hello = connection.hello
        assert hello is not None, "a routed connection has sent its HELLO"
        refusal = ""
        with self._lock:
            newest = self._newest.get(hello.communicator, 0)
            known = _endpoint_key(hello) in self._endpoints
            closed = self._closed.get((hello.communicator, hello.generation, hello.sequence), b"")
            if not known and hello.generation < newest:
                refusal = _superseded(hello, newest)
            elif closed:
                refusal = f"rank {hello.sequence} of communicator {hello.communicator} has closed its links"
            elif not known and len(self._pending) >= MAX_PENDING:
                refusal = f"{MAX_PENDING} links wait here already"
            elif not known:
                connection.until = time.monotonic() + PENDING_TIMEOUT_S
                self._pending.append(connection)
        if closed and not known and FrameHeader.unpack(closed[:HEADER_BYTES]).kind == FrameKind.MISMATCH:
            with contextlib.suppress(OSError):
                connection.sock.send(closed)
            connection.sock.close()
        elif refusal:
            self._refuse(connection, refusal, FrameKind.GOODBYE if closed else FrameKind.REFUSAL)
        elif known:
            self._attach(connection)
        if hello.kind == FrameKind.LANE:  # if it was refused, its socket is closed
            with contextlib.suppress(OSError):
                connection.sock.send(replace(hello, source=hello.sequence, sequence=hello.source, length=0).pack())

    def _attach(self, connection: _PendingConnection) -> None:
        hello = connection.hello
        assert hello is not None, "an attached connection has sent its HELLO"
        with self._lock:
            endpoint = self._endpoints.get((hello.communicator, hello.generation, hello.sequence))
        if endpoint is None or hello.source >= endpoint.size:
            self._refuse(connection, f"rank {hello.source} is not in communicator {hello.communicator}")
            return
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        endpoint.attach(hello.source, connection.sock, hello.lane)

    def _refuse(
        self, connection: _PendingConnection, reason: str, kind: FrameKind = FrameKind.REFUSAL, messages: int = 0
    ) -> None:
        with contextlib.suppress(OSError):
            connection.sock.send(closing_frame(kind, reason, messages))
        connection.sock.close()

    def _refuse_expired(self, greeting: list[_PendingConnection]) -> None:
        now = time.monotonic()
        for connection in [one for one in greeting if one.until < now]:
            greeting.remove(connection)
            self._selector.unregister(connection.sock)
            self._refuse(connection, f"no HELLO within {HELLO_TIMEOUT_S:g} s")
        with self._lock:
            expired = [one for one in self._pending if one.until < now]
            self._pending = [one for one in self._pending if one.until >= now]
        for connection in expired:
            self._refuse(connection, f"no endpoint for this link within {PENDING_TIMEOUT_S:g} s")

    # ---- closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._wakeup_writer.send(b"!")
        self._thread.join()
        with self._lock:
            endpoints, self._endpoints = list(self._endpoints.values()), {}
            pending, self._pending = self._pending, []
        for endpoint in endpoints:
            endpoint.close()
        for sock in (*(one.sock for one in pending), self._listener, self._wakeup, self._wakeup_writer):
            sock.close()
        self._selector.close()


def _superseded(hello: FrameHeader, newest: int) -> str:
    return f"generation {hello.generation} is over, communicator {hello.communicator} is at {newest}"


def _is_older(hello: FrameHeader | None, communicator: int, generation: int) -> bool:
    return hello is not None and hello.communicator == communicator and hello.generation < generation


def _endpoint_key(hello: FrameHeader | None) -> EndpointKey | None:
    return (hello.communicator, hello.generation, hello.sequence) if hello else None


def _add_counts(counts: tuple[int, int], endpoint: TcpEndpoint) -> tuple[int, int]:
    """``counts`` and the bytes that the endpoint's links have sent and received."""
    links = [endpoint.link_stats.byte_counts(peer) for peer in range(endpoint.size)]
    return counts[0] + sum(max(0, one) for one, _ in links), counts[1] + sum(one for _, one in links)
