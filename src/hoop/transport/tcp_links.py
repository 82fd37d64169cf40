"""One rank's TCP links: frames out, frames in, and one place where it waits.

    rank r                                   rank p
    outgoing[p] ── HELLO, DATA, DATA … ──▶   incoming[r]        (1) dialled on the first send
    incoming[p] ◀── HELLO, DATA, DATA … ──   outgoing[r]        (2) handed in by p's own dialling

A link is one way. All sockets are non-blocking. ``_wait`` (3) is the only place that sleeps: it watches the
link that is awaited, every link with bytes still to hand over, and the bell that ``abort``, ``close`` and the
arrival of a new incoming link ring.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from hoop.errors import HoopError, InvalidArgument, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.base import Endpoint, Pending, remaining
from hoop.wire.frames import HEADER_BYTES, Header, Kind

_REFUSAL_LIMIT = 4096


class _Parcel(Pending):
    """The rest of a frame that the socket has not taken."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        return not self.parts

    def detach(self) -> None:
        self.parts = [memoryview(bytes(part)) for part in self.parts]

    def advance(self, sent: int) -> None:
        while self.parts and sent >= self.parts[0].nbytes:
            sent -= self.parts.pop(0).nbytes
        if sent:
            self.parts[0] = self.parts[0][sent:]


class _Outgoing:
    """The link that this rank dialled."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sequence = 0
        self.queue: deque[_Parcel] = deque()

    def push(self) -> None:
        """Hands over what the socket takes now."""
        while self.queue:
            parcel = self.queue[0]
            if parcel.parts:
                try:
                    sent = self.sock.sendmsg(parcel.parts)
                except (BlockingIOError, InterruptedError):
                    return
                parcel.advance(sent)
            if parcel.done:
                self.queue.popleft()


class _Incoming:
    """The link that a peer dialled."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sequence = 0
        self.header = bytearray(HEADER_BYTES)


class TcpEndpoint(Endpoint):
    """One rank's TCP links."""

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._error: HoopError | None = None
        self._lock = threading.Lock()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        link = self._outgoing.get(peer) or self._dial(peer, deadline)
        if self._error is not None:
            raise self._error
        payload = data.cast("B") if data.nbytes else data
        header = Header(
            Kind.DATA, self.communicator, self.generation, self.rank, link.sequence, payload.nbytes
        ).pack()
        link.sequence += 1
        parcel = _Parcel([memoryview(header), payload] if payload.nbytes else [memoryview(header)])
        link.queue.append(parcel)
        self._push(peer, link)
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        return None if parcel.done else parcel

    def _dial(self, peer: int, deadline: float) -> _Outgoing:  # (1)
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        address = self.peers[peer]
        try:
            sock = socket.create_connection(
                (address.host, address.port), timeout=max(0.001, remaining(deadline))
            )
        except TimeoutError:
            raise self.overdue(peer, "connecting to") from None
        except OSError as error:
            raise PeerLost(f"rank {self.rank}: {self.describe(peer)} does not answer: {error}") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        link = _Outgoing(sock)
        hello = Header(Kind.HELLO, self.communicator, self.generation, self.rank, peer, 0).pack()
        link.queue.append(_Parcel([memoryview(hello)]))
        with self._lock:
            if self._error is None:
                self._outgoing[peer] = link
                return link
        sock.close()
        raise self._error

    def _push(self, peer: int, link: _Outgoing) -> None:
        try:
            link.push()
        except OSError as error:
            raise self._lost(peer, error) from None

    def flush(self, deadline: float) -> None:
        for peer, link in list(self._outgoing.items()):
            while link.queue:
                self._wait(peer, None, deadline, "handing over to")

    # ---- receiving

    def attach(self, peer: int, sock: socket.socket) -> None:  # (2)
        """A link that ``peer`` dialled; from the transport's thread."""
        with self._lock:
            if self._error is None and peer not in self._incoming:
                self._incoming[peer] = _Incoming(sock)
                sock = None  # type: ignore[assignment]
        if sock is not None:
            sock.close()
        self._ring()

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        while (link := self._incoming.get(peer)) is None:
            self._wait(peer, None, deadline, "waiting for")
        self._fill(peer, link, memoryview(link.header), deadline)
        header = Header.unpack(link.header)
        self._check(peer, link, header, into.nbytes)
        link.sequence += 1
        if into.nbytes:
            self._fill(peer, link, into.cast("B"), deadline)

    def _fill(self, peer: int, link: _Incoming, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            if self._error is not None:
                raise self._error
            try:
                got = link.sock.recv_into(view)
            except (BlockingIOError, InterruptedError):
                self._wait(peer, link.sock, deadline, "waiting for")
                continue
            except OSError as error:
                raise self._lost(peer, error) from None
            if got == 0:
                raise self._lost(peer, None)
            view = view[got:]

    def _check(self, peer: int, link: _Incoming, header: Header, expected: int) -> None:
        link_name = f"link {peer} -> {self.rank} of communicator {self.communicator}"
        if (header.communicator, header.generation) != (self.communicator, self.generation):
            raise MembershipChanged(
                f"{link_name}: a frame of communicator {header.communicator}, generation {header.generation} "
                f"came at generation {self.generation}; refused as stale"
            )
        if header.kind != Kind.DATA or header.source != peer:
            raise LinkCorrupted(
                f"{link_name}: a frame of kind {header.kind} from rank {header.source} is out of place"
            )
        if header.sequence != link.sequence:
            what = "duplicated" if header.sequence < link.sequence else "lost or reordered"
            raise LinkCorrupted(
                f"{link_name}: message {header.sequence} came where {link.sequence} was due ({what})"
            )
        if header.length != expected:
            raise LinkCorrupted(
                f"{link_name}: message {header.sequence} has {header.length} bytes, expected {expected}; "
                "do all ranks run the same operation?"
            )

    # ---- waiting

    def _wait(self, peer: int, readable: socket.socket | None, deadline: float, doing: str) -> None:  # (3)
        """Sleeps until something moved; hands over pending messages meanwhile."""
        if self._error is not None:
            raise self._error
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        if readable is not None:
            poll.register(readable, select.POLLIN)
        watched = {}
        for other, link in self._outgoing.items():
            # A peer that refused us, or died before it dialled, shows on our own link to it. Once it has
            # dialled, its link tells; others that are done may close theirs.
            refusable = other == peer and readable is None
            wanted = (select.POLLOUT if link.queue else 0) | (select.POLLIN if refusable else 0)
            if wanted:
                poll.register(link.sock, wanted)
                watched[link.sock.fileno()] = (other, link)
        ready = poll.poll(remaining(deadline) * 1000)
        for descriptor, happened in ready:
            if descriptor == self._bell.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(64)
            elif descriptor in watched:
                other, link = watched[descriptor]
                if happened & ~select.POLLOUT and other == peer and readable is None:
                    raise self._lost(other, None)
                self._push(other, link)
        if self._error is not None:
            raise self._error
        if not ready and time.monotonic() >= deadline:
            raise self.overdue(peer, doing)

    def _lost(self, peer: int, error: OSError | None) -> HoopError:
        """Why the links to ``peer`` are gone: its own words where it refused, else the socket's."""
        if self._error is not None:
            return self._error
        link = self._outgoing.get(peer)
        if link is not None and (refusal := _read_refusal(link.sock)):
            return MembershipChanged(f"rank {self.rank}: {self.describe(peer)} refused the link: {refusal}")
        return PeerLost(
            f"rank {self.rank}: {self.describe(peer)} closed its link"
            f"{f' ({error.strerror})' if error else ''} "
            f"(communicator {self.communicator}, generation {self.generation})"
        )

    # ---- ending

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def close(self) -> None:
        self.abort(PeerLost(f"rank {self.rank}: this endpoint is closed"))
        with self._lock:
            socks = [link.sock for link in self._outgoing.values()]
            socks += [link.sock for link in self._incoming.values()]
            self._incoming.clear()
            self._outgoing.clear()
        for sock in socks:
            sock.close()
        self._ringer.close()
        self._bell.close()


def _read_refusal(sock: socket.socket) -> str:
    """The sentence of a REFUSAL frame, or nothing."""
    try:
        sock.setblocking(False)
        data = sock.recv(HEADER_BYTES + _REFUSAL_LIMIT)
        header = Header.unpack(data[:HEADER_BYTES])
    except (OSError, LinkCorrupted):
        return ""
    return data[HEADER_BYTES:].decode(errors="replace") if header.kind == Kind.REFUSAL else ""
