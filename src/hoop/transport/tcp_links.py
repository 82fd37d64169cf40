"""One rank's TCP links: frames out, frames in, and one place where it waits.

    rank r                                   rank p
    outgoing[p] ── HELLO, DATA, DATA … ──▶   incoming[r]        (1) dialled on the first send
    incoming[p] ◀── HELLO, DATA, DATA … ──   outgoing[r]        (2) handed in by p's own dialling

A link is one way. All sockets are non-blocking. ``_sleep`` (3) is the only place that sleeps: it watches the
links that are awaited, every link with bytes still to hand over, and the bell that ``abort``, ``close`` and the
arrival of a new incoming link ring.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from hoop.errors import HoopError, InternalError, InvalidArgument, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.base import Endpoint, Pending, remaining
from hoop.transport.parcel import Parcel
from hoop.transport.tcp_sockets import Incoming, Outgoing, connect, last_words
from hoop.wire.frames import Header, Kind

_PATIENCE_S = 0.05
"""How long a rank waits for a peer to dial before it dials itself, to learn whether there is anybody."""


class TcpEndpoint(Endpoint):
    """One rank's TCP links."""

    def __init__(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        checksum: Callable[[memoryview], int] | None = None,
    ) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._checksum = checksum
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._error: HoopError | None = None
        self._promised: set[int] = set()
        """Peers that are gone, and have said that a link of theirs is on the way."""
        self._lock = threading.Lock()
        self._busy = threading.RLock()
        """Held by whoever uses the sockets, so that ``close`` does not take them away under its hands."""
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        with self._busy:
            return self._send(peer, data, deadline)

    def _send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        if self._error is not None:
            raise self._error
        link = self._outgoing.get(peer) or self._dial(peer, deadline)
        payload = data.cast("B") if data.nbytes else data
        place = (self.communicator, self.generation, self.rank, link.sequence)
        kind, check = (Kind.CHECKED, self._checksum(payload)) if self._checksum else (Kind.DATA, 0)
        header = Header(kind, *place, payload.nbytes, check).pack()
        link.sequence += 1
        parcel = Parcel([memoryview(header), payload][: 2 if payload.nbytes else 1])
        link.queue.append(parcel)
        self._push(peer, link)
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        return None if parcel.done else parcel

    def _dial(self, peer: int, deadline: float) -> Outgoing:  # (1)
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        try:
            sock = connect(self.peers[peer], self._bell, deadline, lambda: self._error is not None)
        except InterruptedError:
            assert self._error is not None, "only an error stops it"
            raise self._error from None
        except TimeoutError:
            raise self.overdue(peer, "connecting to") from None
        except (OSError, ValueError) as error:
            raise self._error or PeerLost(
                f"rank {self.rank}: {self.describe(peer)} does not answer: {error}"
            ) from None
        link = Outgoing(sock)
        hello = Header(Kind.HELLO, self.communicator, self.generation, self.rank, peer, 0).pack()
        link.queue.append(Parcel([memoryview(hello)]))
        with self._lock:
            if self._error is None:
                self._outgoing[peer] = link
                return link
        sock.close()
        raise self._error

    def _push(self, peer: int, link: Outgoing) -> None:
        try:
            link.push()
        except OSError as error:
            raise self._lost(peer, error) from None

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        with self._busy:
            for peer, link in list(self._outgoing.items()):
                while link.queue:
                    self._wait(peer, None, deadline, "handing over to")

    # ---- receiving

    def attach(self, peer: int, sock: socket.socket) -> None:  # (2)
        """A link that ``peer`` dialled; from the transport's thread."""
        with self._lock:
            if self._error is None and peer not in self._incoming:
                self._incoming[peer] = Incoming(sock)
                sock = None  # type: ignore[assignment]
        if sock is not None:
            sock.close()
        self._ring()

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        with self._busy:
            self._recv_into(peer, into, deadline)

    def _recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        while (link := self._incoming.get(peer)) is None:
            self._await_link(peer, deadline)
        self._fill(peer, link, memoryview(link.header), deadline)
        try:
            header = Header.unpack(link.header)
        except LinkCorrupted as error:
            raise LinkCorrupted(f"{self._link_from(peer)}: {error}") from None
        self._check(peer, link, header, into.nbytes)
        link.sequence += 1
        payload = into.cast("B") if into.nbytes else into
        if into.nbytes:
            self._fill(peer, link, payload, deadline)
        if header.kind == Kind.CHECKED and self._checksum and self._checksum(payload) != header.checksum:
            raise LinkCorrupted(
                f"{self._link_from(peer)}: message {header.sequence} of {header.length} bytes is not what was sent"
            )

    def _await_link(self, peer: int, deadline: float) -> None:
        """Waits for ``peer`` to dial; where nothing links the two, dials it to see whether it is there."""
        if peer in self._outgoing:
            self._wait(peer, None, deadline, "waiting for")
            return
        moved, _, _ = self._sleep({}, min(deadline, time.monotonic() + _PATIENCE_S))
        if not moved and peer not in self._incoming:
            if time.monotonic() >= deadline:
                raise self.overdue(peer, "waiting for")
            self._push(peer, self._dial(peer, deadline))

    def _link_from(self, peer: int) -> str:
        return f"link {peer} -> {self.rank} of communicator {self.communicator}"

    def _fill(self, peer: int, link: Incoming, view: memoryview, deadline: float) -> None:
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

    def _check(self, peer: int, link: Incoming, header: Header, expected: int) -> None:
        link_name = self._link_from(peer)
        if (header.communicator, header.generation) != (self.communicator, self.generation):
            raise MembershipChanged(
                f"{link_name}: a frame of communicator {header.communicator}, generation {header.generation} "
                f"came at generation {self.generation}; refused as stale"
            )
        if header.kind not in (Kind.DATA, Kind.CHECKED) or header.source != peer:
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

    def _wait(self, peer: int, readable: socket.socket | None, deadline: float, doing: str) -> None:
        """Sleeps until something moved, for the sake of ``peer``."""
        # A peer that refused us, or died before it dialled, shows on our own link to it.
        link = self._outgoing.get(peer)
        sock = readable or (link.sock if link and peer not in self._promised else None)
        moved, ready, broken = self._sleep({sock.fileno(): peer} if sock else {}, deadline)
        if readable is None and ready and link is not None:
            words = link.last_words()
            if words is None or words[0].kind != Kind.GOODBYE or not words[0].sequence or link.queue:
                raise self._lost(peer, None)
            self._promised.add(peer)  # it has sent something: its own link is on the way
        for other, error in broken.items():
            raise self._lost(other, error) from None
        if not moved and time.monotonic() >= deadline:
            raise self.overdue(peer, doing)

    def senders(self, peers: Sequence[int], deadline: float) -> list[int]:
        links = {peer: self._incoming.get(peer) or self._outgoing.get(peer) for peer in peers}
        watched = {link.sock.fileno(): peer for peer, link in links.items() if link}
        _, ready, broken = self._sleep(watched, deadline)
        for peer in broken:
            self._outgoing[peer].queue.clear()
        return [*ready, *(peer for peer in broken if peer not in ready)]

    def _sleep(self, watched: dict[int, int], deadline: float) -> tuple[bool, list[int], dict[int, OSError]]:
        """Hands over pending messages (3): did anything move, whose descriptor is readable, which links broke."""
        if self._error is not None:
            raise self._error
        poll = select.poll()
        try:
            poll.register(self._bell, select.POLLIN)
            handing = {link.sock.fileno(): peer for peer, link in self._outgoing.items() if link.queue}
            for descriptor in watched.keys() | handing.keys():
                reads, writes = descriptor in watched, descriptor in handing
                poll.register(descriptor, select.POLLIN * reads | select.POLLOUT * writes)
        except (ValueError, RuntimeError):  # closed by another thread in this very moment
            raise self._error or InternalError(f"rank {self.rank}: a link has no socket") from None
        ready: list[int] = []
        broken: dict[int, OSError] = {}
        happened = poll.poll(remaining(deadline) * 1000)
        for descriptor, events in happened:
            if descriptor == self._bell.fileno():
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(64)
            elif descriptor in watched and events & ~select.POLLOUT:
                ready.append(watched[descriptor])
            elif descriptor in handing:
                try:
                    self._outgoing[handing[descriptor]].push()
                except OSError as error:
                    broken[handing[descriptor]] = error
        if self._error is not None:
            raise self._error
        return bool(happened), ready, broken

    def wake(self) -> None:
        self._ring()

    def _lost(self, peer: int, error: OSError | None) -> HoopError:
        """Why the links to ``peer`` are gone: its own words where it refused, else the socket's."""
        if self._error is not None:
            return self._error
        link = self._outgoing.get(peer)
        words = link.last_words() if link is not None else None
        if words is not None and words[0].kind == Kind.REFUSAL:
            return MembershipChanged(f"rank {self.rank}: {self.describe(peer)} refused the link: {words[1]}")
        why = f" ({error.strerror})" if error else ""
        where = f"communicator {self.communicator}, generation {self.generation}"
        return PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its link{why} ({where})")

    # ---- ending

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def close(self) -> None:
        self.abort(PeerLost(f"rank {self.rank}: this endpoint is closed"))
        with self._busy, self._lock:
            for peer, incoming in self._incoming.items():
                sent = self._outgoing[peer].sequence if peer in self._outgoing else 0
                with contextlib.suppress(OSError):
                    incoming.sock.send(last_words(Kind.GOODBYE, "it closed its links", sent))
            socks = [link.sock for links in (self._outgoing, self._incoming) for link in links.values()]
            self._incoming.clear()
            self._outgoing.clear()
        for sock in socks:
            sock.close()
        self._ringer.close()
        self._bell.close()
