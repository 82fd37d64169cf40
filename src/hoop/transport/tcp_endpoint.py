"""Where a rank waits for its TCP links, and what it does meanwhile: it hands over what is left to send.

All sockets are non-blocking, and ``_poll`` is the only place that sleeps. It watches the links that are awaited,
every link with bytes still to hand over, and the bell that ``wake``, ``abort``, ``close`` and the arrival of a new
incoming link ring.

A message that a link has changed is sent again.

    rank r   outgoing[p] ── CHECKED 5, 6, 7 ──▶ incoming[r]   rank p     (1) the sender keeps copies
                         ◀── RECEIVED 6 ───────                          (2) 5 has come as it was sent: forgotten
                         ◀── AGAIN 6 ──────────                          (3) 6 has not: its checksum does not hold
             outgoing[p] ── HELLO, CHECKED 6, 7 ──▶ incoming[r]          (4) on a new connection

Nothing that follows on the old connection is looked at: where a header was hit, nobody knows where the next begins.
Confirmations wake nobody: whoever waits for its links looks now and then, and the transport's thread does so
for whoever computes. Before an endpoint closes it stays until what it sent is confirmed.

One rank's TCP links: frames out, frames in.

    rank r                                   rank p
    outgoing[p] ── HELLO, DATA, DATA … ──▶   incoming[r]        (1) dialled on the first send
    incoming[p] ◀── HELLO, DATA, DATA … ──   outgoing[r]        (2) handed in by p's own dialling

A link is one way. A large message is sent and received in pieces, so that both directions flow at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from hoop.errors import (
    CollectiveMismatch,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    MembershipChanged,
    PeerLost,
)
from hoop.topology import Address
from hoop.transport.auth_handshake import prove
from hoop.transport.base import Endpoint, LinkStats, PendingBuffers, PendingSend, remaining
from hoop.transport.calls import Call
from hoop.transport.retransmit import (
    CHECKED_BYTES,
    PIECE_BYTES,
    CheckedFrame,
    CheckedMessage,
    RetransmitBuffer,
)
from hoop.transport.semaphore import spins_for
from hoop.transport.tcp_calls import CallCheck
from hoop.transport.tcp_socket import GAVE_UP, IncomingLink, OutgoingLink, connect, last_words
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind, pack_header

_LOOKS = 100
"""How often a rank looks before it sleeps, where it has a core to itself: it takes about as long as waking up."""


@dataclass
class _Slept:
    """What happened while a rank slept."""

    happened: bool = False
    handed: bool = False
    """A pending message moved on."""
    ready: list[int] = field(default_factory=list)
    """Peers whose descriptor is readable, or broken."""
    broken: dict[int, OSError] = field(default_factory=dict)
    """Peers that take no more."""


class TcpWaiting(Endpoint):
    """The links of an endpoint over TCP, and the waiting for them."""

    def __init__(
        self, communicator: int, generation: int, rank: int, peers: Sequence[Address], key: bytes = b""
    ) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._key = key
        self._outgoing: dict[int, OutgoingLink] = {}
        self._incoming: dict[int, IncomingLink] = {}
        self._pending: dict[int, OutgoingLink] = {}
        """Links with something still to hand over."""
        self._error: HoopError | None = None
        self.watch = LinkStats(self._moved)
        self._woken = False
        self._promised: set[int] = set()
        """Peers that are gone, and have said that a link of theirs is on the way."""
        self._busy = threading.RLock()
        """Held by whoever uses the sockets, so that ``close`` does not take them away under its hands."""
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        here = [address for address in self.peers if address.host == self.peers[rank].host]
        self._looks = _LOOKS if spins_for(len(here)) else 0
        place = (communicator, generation, rank)
        self.calls = CallCheck(place, self.peers, key, self._bell, self.abort)

    def _moved(self, peer: int) -> tuple[int, int]:
        out, come = self._outgoing.get(peer), self._incoming.get(peer)
        return out.taken if out is not None else 0, come.arrived if come is not None else 0

    # ---- waiting

    def _await_bytes(self, peer: int, link: IncomingLink, deadline: float) -> None:
        """Sleeps until an incoming link may have something, or a pending message moved on."""
        if self._pending:
            self._wait(peer, link.sock, deadline, "waiting for")
            return
        self.watch.waits_for = (peer,)
        try:
            if not self._poll(link.readable, deadline, self._looks):
                if time.monotonic() >= deadline:
                    raise self.overdue(peer, "waiting for")
                self._compare_calls(peer, deadline)
        finally:
            self.watch.waits_for = ()

    def _wait(self, peer: int, readable: socket.socket | None, deadline: float, doing: str) -> None:
        """Sleeps until something moved, for the sake of ``peer``."""
        # A peer that refused us, or died before it dialled, shows on our own link to it.
        link = self._outgoing.get(peer)
        sock = readable or (link.sock if link and peer not in self._promised else None)
        slept = self._sleep({sock.fileno(): peer} if sock else {}, deadline, (peer,))
        if readable is None and slept.ready and link is not None:
            words = link.last_words()
            if _only_talks(link):
                return
            if words is None or words[0].kind != FrameKind.GOODBYE or not words[0].sequence or link.queue:
                raise self._lost(peer, None)
            self._promised.add(peer)  # it has sent something: its own link is on the way
        for other, error in slept.broken.items():
            if not self._mended(other):
                raise self._lost(other, error) from None
        if not slept.happened:
            if time.monotonic() >= deadline:
                raise self.overdue(peer, doing)
            self._compare_calls(peer, deadline)

    def _compare_calls(self, peer: int, deadline: float) -> None:
        """Nothing has come of a peer for a while: in a collective it may be in another one."""
        error = self.calls.ask(peer, deadline)
        if error is not None:
            raise self._error or error

    def begin(self, call: Call, deadline: float, resumed: bool = False) -> None:
        self.calls.begin(call, resumed)
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        self.calls.end()

    def tell(self, error: CollectiveMismatch) -> None:
        self.calls.tell(error)
        self.abort(error)

    def senders(self, peers: Sequence[int], deadline: float) -> list[int]:
        with self._busy:
            while True:
                links = {peer: self._incoming.get(peer) or self._outgoing.get(peer) for peer in peers}
                found = [
                    peer for peer, link in links.items() if isinstance(link, IncomingLink) and link.ahead
                ]
                watched = {link.sock.fileno(): peer for peer, link in links.items() if link}
                at_once = bool(found) or self._woken  # but others have their turn as well
                slept = self._sleep(watched, time.monotonic() if at_once else deadline, tuple(peers))
                broken = [peer for peer in slept.broken if not self._mended(peer)]
                for peer in broken:
                    self._pending.pop(peer).queue.clear()
                ready = [peer for peer in slept.ready if not _only_talks(links[peer])]
                found += [peer for peer in (*ready, *broken) if peer not in found]
                if found or slept.handed or self._woken or time.monotonic() >= deadline:
                    self._woken = False
                    return found

    def wake(self) -> None:
        self._woken = True
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def _sleep(self, watched: dict[int, int], deadline: float, peers: tuple[int, ...]) -> _Slept:
        """For the sake of these peers: watches descriptors (each of one), and hands over pending messages."""
        if self._error is not None:
            raise self._error
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        handing = {link.sock.fileno(): peer for peer, link in self._pending.items()}
        for descriptor in watched.keys() | handing.keys():
            reads, writes = descriptor in watched, descriptor in handing
            poll.register(descriptor, select.POLLIN * reads | select.POLLOUT * writes)
        slept = _Slept()
        self.watch.waits_for = peers
        try:
            happened = self._poll(poll, deadline)
        finally:
            self.watch.waits_for = ()
        for descriptor, events in happened:
            slept.happened = True
            if descriptor in watched and events & ~select.POLLOUT:
                slept.ready.append(watched[descriptor])
            elif descriptor in handing:
                peer = handing[descriptor]
                try:
                    slept.handed = self._hand_to(peer) or slept.handed
                except OSError as error:
                    slept.broken[peer] = error
        return slept

    def _poll(self, poll: select.poll, deadline: float, looks: int = 0) -> list[tuple[int, int]]:
        """The descriptors at which something happened, the bell's too."""
        happened: list[tuple[int, int]] = []
        while looks and not happened:
            happened = poll.poll(0)
            looks -= 1
        happened = happened or poll.poll(min(remaining(deadline), self._listen(), self.calls.patience) * 1000)
        if any(descriptor == self._bell.fileno() for descriptor, _ in happened):
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(64)
        if self._error is not None:
            raise self._error
        return happened

    def _listen(self) -> float:
        """Before a rank sleeps: hears what peers say of what they were sent. How long it may sleep at most."""
        return inf

    # ---- handing over

    def _hand_over(self) -> bool:
        """Gives every pending message a turn; whether one moved on."""
        moved = False
        for peer in list(self._pending):
            try:
                moved = self._hand_to(peer) or moved
            except OSError as error:
                if not self._mended(peer):
                    raise self._lost(peer, error) from None
        return moved

    def _hand_to(self, peer: int) -> bool:
        link = self._pending[peer]
        moved = link.push(PIECE_BYTES)
        if not link.queue:
            del self._pending[peer]
        return moved

    def _mended(self, peer: int) -> bool:
        """Whether a link that takes no more was replaced."""
        return False

    def _lost(self, peer: int, error: OSError | None) -> HoopError:
        """Why the links to ``peer`` are gone: its own words where it refused, else the socket's."""
        if self._error is not None:
            return self._error
        link = self._outgoing.get(peer)
        words = link.last_words() if link is not None else None
        if words is not None and words[0].kind == FrameKind.REFUSAL:
            return MembershipChanged(f"rank {self.rank}: {self.describe(peer)} refused the link: {words[1]}")
        if words is not None and words[0].kind == FrameKind.MISMATCH:
            return CollectiveMismatch(words[1])
        if words is None and (found := self.calls.ended_by(peer)) is not None:
            return self._error or found
        if words is None and error is not None:
            self.watch.failed = peer
        gave_up = words is not None and words[1].startswith(GAVE_UP)
        why = f", {words[1]}" if words and gave_up else f" ({error.strerror})" if error else ""
        where = f"communicator {self.communicator}, generation {self.generation}"
        return PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its link{why} ({where})")


def _only_talks(link: OutgoingLink | IncomingLink | None) -> bool:
    """Whether the other end of an outgoing link has said what it received, or not; and has not gone."""
    if not isinstance(link, OutgoingLink):
        return False
    link.hear()
    return link.again or not link.over


TRIES = 3
"""How often a message is sent again before its link is given up."""
LOOK_S = 0.05
"""How often whoever sleeps looks whether something is to be sent again."""
LINGER_S = 0.5
"""How long an endpoint that closes waits for its peers to confirm what it sent."""
KEPT_PIECES = 8
"""From here on the sender looks before it keeps more."""
_REDIAL_S = 5.0


class Damaged(Exception):
    """What came is not what was sent, and may be sent again."""


class TcpRepeating(TcpWaiting):
    """The links of an endpoint over TCP, where what is damaged on the way is sent again."""

    def __init__(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        checksum: Callable[[memoryview], int] | None = None,
        key: bytes = b"",
    ) -> None:
        super().__init__(communicator, generation, rank, peers, key)
        self._checksum = checksum
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        """Held by the transport's thread while it looks."""
        self._asked: dict[int, tuple[int, int]] = {}
        """Of each peer: which message it was asked for again last, and how often."""
        self._given_up: dict[int, socket.socket] = {}
        """Connections that changed something; their ends close them."""

    def _dial(self, peer: int, deadline: float) -> OutgoingLink:
        raise NotImplementedError

    def _tell(self, text: str) -> None:
        """Something was damaged; the transport knows who wants to hear of it."""

    # ---- the sender

    def _checked(self, link: OutgoingLink, payload: memoryview) -> CheckedMessage:
        """A message whose pieces have checksums, and are kept until they are confirmed."""
        return CheckedMessage(payload, partial(self._cut, link, self.calls.stamp), self._busy)

    def _cut(self, link: OutgoingLink, stamp: int, payload: memoryview, more: bool) -> CheckedFrame:
        assert self._checksum is not None, "only with checksums"
        assert link.kept is not None, "only with checksums"
        kept = link.kept
        if len(kept) >= KEPT_PIECES:
            link.hear()
        copy = kept.copy(payload)
        place = (self.communicator, self.generation, self.rank, link.sequence)
        kind = FrameKind.PART if more else FrameKind.CHECKED
        header = FrameHeader(kind, *place, len(copy), self._checksum(memoryview(copy)), stamp).pack()
        link.sequence += 1
        return kept.keep(CheckedFrame(link.sequence - 1, header, copy))

    def _listen(self) -> float:
        sleeps = inf
        for peer, link in list(self._outgoing.items()):
            if link.kept:
                sleeps = LOOK_S
                link.hear()
                if link.again:
                    self._repeat(peer, link)
        return sleeps

    def _repeat(self, peer: int, link: OutgoingLink) -> None:
        """(4)"""
        assert link.kept is not None, "asked again for what is not kept"
        link.kept.tries += 1
        if link.kept.tries > TRIES:
            self.watch.failed = peer
            raise LinkCorrupted(
                f"link {self.rank} -> {peer} of communicator {self.communicator}: a message to "
                f"{self.describe(peer)} was damaged {link.kept.tries} times"
            )
        link.sock.close()
        self._pending.pop(peer, None)
        del self._outgoing[peer]
        fresh = self._dial(peer, time.monotonic() + _REDIAL_S)
        fresh.sequence, fresh.kept = link.sequence, link.kept
        fresh.queue += link.kept.rewound()
        fresh.queue += [one for one in link.queue if isinstance(one, CheckedMessage) and one.leave_to()]
        self._pending[peer] = fresh
        self.messages_repeated += 1

    def _mended(self, peer: int) -> bool:
        link = self._outgoing.get(peer)
        if link is None or not link.kept:
            return False
        link.hear()
        if link.again:
            self._repeat(peer, link)
        return link.again

    def look(self) -> None:
        """From the transport's thread, now and then: this rank may be busy with something else for long."""
        if not any(link.kept for link in list(self._outgoing.values())):
            return
        with self._looking:
            if self._busy.acquire(blocking=False):  # else the rank looks itself
                try:
                    self._listen()
                    while self._pending and self._hand_over():
                        pass
                except HoopError as error:
                    self.abort(error)
                finally:
                    self._busy.release()

    def _linger(self) -> None:
        """Stays until everything is confirmed, for a while: a last message may have to be sent again."""
        deadline = time.monotonic() + LINGER_S
        while open_links := [link for link in self._outgoing.values() if link.kept and not link.over]:
            poll = select.poll()
            for link in open_links:
                poll.register(link.sock, select.POLLIN | (select.POLLOUT if link.queue else 0))
            if not poll.poll(remaining(deadline) * 1000):
                return
            self._hand_over()
            self._listen()

    # ---- the receiver

    def _link_from(self, peer: int) -> str:
        return f"link {peer} -> {self.rank} of communicator {self.communicator}"

    def _verify(self, peer: int, link: IncomingLink, header: FrameHeader, payload: memoryview) -> None:
        """Confirms what is as it was sent."""
        if self._checksum is not None and self._checksum(payload) != header.checksum:
            raise Damaged(
                f"{self._link_from(peer)}: message {header.sequence} of {header.length} bytes is not what was sent"
            )
        link.confirmed = link.sequence
        with contextlib.suppress(OSError):  # (2), or the next one confirms this one as well
            link.sock.send(self._said(FrameKind.RECEIVED, link.sequence))

    def _said(self, kind: FrameKind, sequence: int) -> bytes:
        return FrameHeader(kind, self.communicator, self.generation, self.rank, sequence, 0).pack()

    def _ask_again(self, peer: int, damage: Damaged) -> None:
        """(3)"""
        link = self._incoming[peer]
        due = link.confirmed
        asked, tries = self._asked.get(peer, (-1, 0))
        tries = tries + 1 if asked == due else 1
        self._asked[peer] = due, tries
        self.messages_damaged += 1
        self._tell(f"{damage} ({self.describe(peer)} sends it)")
        if self._checksum is None or link.plain or tries > TRIES:
            self.watch.failed = peer
            raise LinkCorrupted(f"{damage}, {tries} times" if tries > 1 else str(damage))
        with self._lock:
            del self._incoming[peer]
        self._given_up[peer] = link.sock
        with contextlib.suppress(OSError):  # three times, for one of them may be hit as well
            link.sock.send(3 * self._said(FrameKind.AGAIN, due))

    def _resume(self, peer: int, link: IncomingLink) -> None:
        """A connection that follows one that changed something goes on where that one was right."""
        if peer in self._given_up:
            self._given_up.pop(peer).close()
            link.sequence = link.confirmed = self._asked[peer][0]


_PATIENCE_S = 0.05
"""How long a rank waits for a peer to dial before it dials itself, to learn whether there is anybody."""
_AT_ONCE_BYTES = 4 << 20
"""Up to here the socket gets what it takes at once, and has it should this rank compute next; of a larger message
only the beginning, because what is under way should fit into the caches."""


@functools.lru_cache(maxsize=64)
def _whole_message(size: int) -> FrameHeader:
    """What is needed of the header of an expected message; to make a new one takes longer than to compare its bytes."""
    return FrameHeader(FrameKind.DATA, 0, 0, 0, 0, size)


class TcpEndpoint(TcpRepeating):
    """One rank's TCP links."""

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        with self._busy:
            return self._send(peer, data, deadline)

    def _send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if self._error is not None:
            raise self._error
        link = self._outgoing.get(peer) or self._dial(peer, deadline)
        payload = data.cast("B") if data.nbytes else data
        parcel = self._checked(link, payload) if self._checksum else self._plain(link, payload)
        link.queue.append(parcel)
        self._push(peer, link, PIECE_BYTES if payload.nbytes > _AT_ONCE_BYTES else None)
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        return None if parcel.done else parcel

    def _plain(self, link: OutgoingLink, payload: memoryview) -> PendingBuffers:
        place = (self.communicator, self.generation, self.rank, link.sequence)
        header = pack_header(FrameKind.DATA, *place, payload.nbytes, 0, self.calls.stamp)
        link.sequence += 1
        return PendingBuffers([memoryview(header), payload][: 2 if payload.nbytes else 1])

    def _dial(self, peer: int, deadline: float) -> OutgoingLink:  # (1)
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        hello = FrameHeader(FrameKind.HELLO, self.communicator, self.generation, self.rank, peer, 0)
        self.watch.waits_for, self.watch.connecting = (peer,), True
        try:
            sock = connect(self.peers[peer], self._bell, deadline, lambda: self._error is not None)
            if self._key:
                prove(sock, hello, self._key, self._bell, deadline, lambda: self._error is not None)
        except InterruptedError:
            assert self._error is not None, "only an error stops it"
            raise self._error from None
        except TimeoutError:
            self.watch.failed = peer
            raise self.overdue(peer, "connecting to") from None
        except PeerLost as error:
            raise self._error or PeerLost(f"rank {self.rank}: {self.describe(peer)}: {error}") from None
        except (OSError, ValueError) as error:
            self.watch.failed = peer
            raise self._error or PeerLost(
                f"rank {self.rank}: {self.describe(peer)} does not answer: {error}"
            ) from None
        finally:
            self.watch.waits_for, self.watch.connecting = (), False
        link = OutgoingLink(sock, RetransmitBuffer() if self._checksum else None)
        if not self._key:
            link.queue.append(PendingBuffers([memoryview(hello.pack())]))
            link.taken = -HEADER_BYTES
        with self._lock:
            if self._error is None:
                self._outgoing[peer] = link
                return link
        sock.close()
        raise self._error

    def _push(self, peer: int, link: OutgoingLink, most: int | None = None) -> None:
        try:
            link.push(most)
        except OSError as error:
            if not self._mended(peer):
                raise self._lost(peer, error) from None
            return
        if link.queue:
            self._pending[peer] = link

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        with self._busy:
            for peer in list(self._outgoing):
                while self._outgoing[peer].queue:
                    self._wait(peer, None, deadline, "handing over to")

    # ---- receiving

    def attach(self, peer: int, sock: socket.socket) -> None:  # (2)
        """A link that ``peer`` dialled; from the transport's thread."""
        with self._lock:
            if self._error is None and peer not in self._incoming:
                self._incoming[peer] = IncomingLink(sock, self._bell)
                sock = None  # type: ignore[assignment]
        if sock is not None:
            sock.close()
        self._ring()

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        payload = into.cast("B") if into.nbytes else into

        def land(start: int, header: FrameHeader) -> None:
            self._land(peer, header, payload[start : start + header.length], deadline)

        with self._busy:
            self._receive(peer, into.nbytes, land, deadline)

    def _receive(
        self, peer: int, size: int, land: Callable[[int, FrameHeader], None], deadline: float
    ) -> None:
        """The frames of the next message, each told where it starts; a damaged one comes once more."""
        start, kind = 0, FrameKind.PART
        while kind == FrameKind.PART:
            try:
                header = self._begin(peer, start, size, deadline)
                land(start, header)
            except Damaged as damage:
                self._ask_again(peer, damage)
                continue
            start, kind = start + header.length, FrameKind(header.kind)

    def _land(self, peer: int, header: FrameHeader, payload: memoryview, deadline: float) -> None:
        link = self._incoming[peer]
        if payload.nbytes:
            self._fill(peer, link, payload, deadline)
        if header.kind == FrameKind.DATA:
            link.plain = True
        else:
            self._verify(peer, link, header, payload)

    def _begin(self, peer: int, start: int, size: int, deadline: float) -> FrameHeader:
        """Waits for the header of the next frame, and checks it."""
        while (link := self._incoming.get(peer)) is None:
            self._await_link(peer, deadline)
        self._resume(peer, link)
        expected = b""
        if self._checksum is None:  # made before the wait, in which there is time for it
            place = (self.communicator, self.generation, peer, link.sequence)
            expected = pack_header(FrameKind.DATA, *place, size, 0, self.calls.stamp)
        while link.ahead < HEADER_BYTES:
            self._read(peer, link, link.read_ahead, deadline)
        came = link.take(HEADER_BYTES)
        if came == expected:
            due = _whole_message(size)
        else:
            try:
                due = FrameHeader.unpack(came)
            except LinkCorrupted as error:
                raise Damaged(f"{self._link_from(peer)}: {error}") from None
            if due.kind in (FrameKind.GOODBYE, FrameKind.MISMATCH):
                why = bytes(link.take(due.length)).decode(errors="replace")
                if due.kind == FrameKind.MISMATCH:
                    raise self._error or CollectiveMismatch(why)
                raise self._error or PeerLost(
                    f"rank {self.rank}: {self.describe(peer)} closed its link, {why}"
                )
            self._check(peer, link, due)
            if due.call != self.calls.stamp:
                raise self.calls.conflict(peer, deadline)
            self._check_length(peer, due, size, start)
        link.sequence += 1
        return due

    def _await_link(self, peer: int, deadline: float) -> None:
        """Waits for ``peer`` to dial; where nothing links the two, dials it to see whether it is there."""
        if peer in self._outgoing:
            self._wait(peer, None, deadline, "waiting for")
            return
        slept = self._sleep({}, min(deadline, time.monotonic() + _PATIENCE_S), (peer,))
        if not slept.happened and peer not in self._incoming:
            if time.monotonic() >= deadline:
                raise self.overdue(peer, "waiting for")
            self._push(peer, self._dial(peer, deadline))

    def _fill(self, peer: int, link: IncomingLink, view: memoryview, deadline: float) -> None:
        taken = link.take(view.nbytes)
        view[: taken.nbytes] = taken
        view = view[taken.nbytes :]
        while view.nbytes:
            # Where something is to be sent as well, both ways have a turn.
            part = view[:PIECE_BYTES] if self._pending else view
            view = view[self._read(peer, link, partial(link.sock.recv_into, part), deadline) :]

    def _read(self, peer: int, link: IncomingLink, read: Callable[[], int], deadline: float) -> int:
        """Reads at least a byte, handing over pending messages meanwhile."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                got = read()
            except (BlockingIOError, InterruptedError):
                got = -1
            except OSError as error:
                raise self._lost(peer, error) from None
            if got == 0:
                raise self._lost(peer, None)
            moved = self._hand_over() if self._pending else False
            if got > 0:
                link.came += got
                return got
            if not moved:
                self._await_bytes(peer, link, deadline)

    def _check(self, peer: int, link: IncomingLink, header: FrameHeader) -> None:
        link_name = self._link_from(peer)
        if (header.communicator, header.generation) != (self.communicator, self.generation):
            raise MembershipChanged(
                f"{link_name}: a frame of communicator {header.communicator}, generation {header.generation} "
                f"came at generation {self.generation}; refused as stale"
            )
        if header.kind not in (FrameKind.DATA, FrameKind.CHECKED, FrameKind.PART) or header.source != peer:
            raise LinkCorrupted(
                f"{link_name}: a frame of kind {header.kind} from rank {header.source} is out of place"
            )
        if header.sequence != link.sequence:
            what = "duplicated" if header.sequence < link.sequence else "lost or reordered"
            raise LinkCorrupted(
                f"{link_name}: message {header.sequence} came where {link.sequence} was due ({what})"
            )
        if header.kind != FrameKind.DATA and header.length > CHECKED_BYTES:
            raise LinkCorrupted(f"{link_name}: a checked frame of {header.length} bytes is too long")

    def _check_length(self, peer: int, header: FrameHeader, expected: int, start: int) -> None:
        length, part = start + header.length, header.kind == FrameKind.PART
        if length >= expected if part else length != expected:
            if self.calls.stamp:
                raise self.calls.wrong_length(peer, expected, f"{length}{' or more' * part}")
            raise LinkCorrupted(
                f"{self._link_from(peer)}: message {header.sequence} has {length}{' or more' * part} bytes, "
                f"expected {expected}; do all ranks run the same operation?"
            )

    # ---- ending

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._ring()

    def close(self) -> None:
        if self._error is None and self._busy.acquire(
            blocking=False
        ):  # else somebody waits here, and is told
            with contextlib.suppress(HoopError):
                self._linger()
            self._busy.release()
        words = f"{GAVE_UP}{self._error}" if self._error is not None else "it closed its links"
        kind = FrameKind.GOODBYE
        if isinstance(self._error, CollectiveMismatch):
            kind, words = FrameKind.MISMATCH, str(self._error)
        gave_up = self._error is not None
        self.abort(PeerLost(f"rank {self.rank}: this endpoint is closed"))
        with self._busy, self._lock:
            for peer, incoming in self._incoming.items():
                sent = self._outgoing[peer].sequence if peer in self._outgoing else 0
                with contextlib.suppress(OSError):
                    incoming.sock.send(last_words(kind, words, sent))
            for link in self._outgoing.values():
                if gave_up and not link.queue:
                    with contextlib.suppress(OSError):
                        link.sock.send(last_words(kind, words))
            socks = [link.sock for links in (self._outgoing, self._incoming) for link in links.values()]
            socks += self._given_up.values()
            self._incoming.clear()
            self._outgoing.clear()
            self._given_up.clear()
        for sock in socks:
            sock.close()
        self._ringer.close()
        self._bell.close()
