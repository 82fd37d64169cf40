"""One rank's TCP links: sending and receiving frames, waiting, and retransmitting damaged frames.

A link carries frames one way, from the rank that dialled it:

    rank r                                   rank p
    outgoing[p] ── HELLO, DATA, DATA … ──▶   incoming[r]        (1) dialled on the first send
    incoming[p] ◀── HELLO, DATA, DATA … ──   outgoing[r]        (2) attached when p dials

A large message is sent and received in pieces, so that both directions flow at the same time. Parts of it may travel
over lanes, additional sockets of the link with threads of their own (``tcp_lanes``).

The sockets of links are non-blocking, and ``_poll`` is the only place that sleeps. It polls the links that the rank
waits for, every link with unsent bytes, and a wakeup socket. ``wake``, ``abort``, ``close``, a new incoming link and
the threads of lanes write to that.

With checksums, a frame that arrives damaged is sent again:

    rank r   outgoing[p] ── CHECKED 5, 6, 7 ──▶ incoming[r]   rank p     (3) the sender stores copies
                         ◀── ACK 6 ────────────                          (4) 5 arrived intact: the sender drops its copy
                         ◀── RETRANSMIT 6 ─────                          (5) 6 has a wrong checksum
             outgoing[p] ── HELLO, CHECKED 6, 7 ──▶ incoming[r]          (6) on a new connection

The receiver ignores everything that follows on the old connection: after a damaged header it does not know where the
next one begins. Acknowledgements wake no thread: a rank that waits for its links reads them from time to time, and the
listener's thread reads them for a rank that computes. Before an endpoint closes it waits for outstanding ones.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from hoop.errors import CollectiveMismatch, HoopError, InvalidArgument, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.auth_handshake import greet
from hoop.transport.base import Endpoint, LinkStats, PendingBuffers, PendingSend, remaining
from hoop.transport.call_check import Call
from hoop.transport.semaphore import spins_before_yield
from hoop.transport.tcp_call_check import CallCheck
from hoop.transport.tcp_lanes import EndpointCall, Lanes, StripedMessage, default_sockets
from hoop.transport.tcp_link import (
    CHECKED_BYTES,
    GAVE_UP,
    PIECE_BYTES,
    CheckedFrame,
    CheckedMessage,
    IncomingLink,
    OutgoingLink,
    RetransmitBuffer,
    closing_frame,
    connect,
)
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind, pack_header

log = logging.getLogger("hoop.transport")
MAX_RETRANSMITS = 3
"""How often a frame is sent again before its link fails."""
REPLY_POLL_S = 0.05
"""Interval at which a waiting thread reads acknowledgements and retransmit requests."""
LINGER_S = 0.5
"""How long a closing endpoint waits for its peers to acknowledge its frames."""
_READ_REPLIES_FROM = 8
"""With this many unacknowledged frames on a link, the sender reads acknowledgements before it adds another."""
_REDIAL_TIMEOUT_S = 5.0
_SPINS = 100
"""How often a rank with a core of its own polls before it sleeps; this takes about as long as waking up."""
_LANE_POLL_S = 1.0
"""Interval at which a rank that waits for lanes checks whether they were accepted."""
_CLOSING_FRAME_S = 0.5
"""How long a rank whose lane failed waits for the peer's closing frame on the link itself."""
_DIAL_AFTER_S = 0.05
"""How long a rank waits for a peer to dial before it dials itself, to find out whether the peer is alive."""
_AT_ONCE_BYTES = 4 << 20
"""A message up to this size is pushed as far as the socket accepts it, so that it is under way if this rank computes
next. Of a larger one only the first piece is pushed, because the bytes under way should fit into the caches."""


class Damaged(Exception):
    """A frame arrived with a wrong checksum, and the sender may send it again."""


@dataclass
class _PollResult:
    """What happened while a rank waited for its links."""

    happened: bool = False
    sent: bool = False
    """Whether a pending message made progress."""
    ready: list[int] = field(default_factory=list)
    """Peers whose descriptor is readable, or broken."""
    broken: dict[int, OSError] = field(default_factory=dict)
    """Peers whose link accepts no more bytes."""


@functools.lru_cache(maxsize=64)
def _data_header(size: int) -> FrameHeader:
    """The fields that a receiver uses of an expected message's header; cached, because to create a header object takes
    longer than to compare the header's bytes."""
    return FrameHeader(FrameKind.DATA, communicator=0, generation=0, source=0, sequence=0, length=size)


@dataclass(frozen=True)
class LinkOptions:
    """How the links of a transport are made; the same for all its endpoints."""

    checksum: Callable[[memoryview], int] | None = None
    """Of a payload; None: frames carry no checksum and are not retransmitted."""
    key: bytes = b""
    """Both ends of a link prove that they have it; empty: no authentication."""
    sockets_per_link: int | None = None
    """Over how many sockets large messages are sent; None: as this host's cores allow."""


class TcpEndpoint(Endpoint):
    """One rank's TCP links."""

    def __init__(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        options: LinkOptions,
        on_damage: Callable[[str], None],
        on_close: Callable[[TcpEndpoint], None],
    ) -> None:
        """``on_damage``: called with a text for every damaged frame. ``on_close``: called by ``close`` before it closes
        the links."""
        super().__init__(communicator, generation, rank, peers)
        self._checksum, self._key = options.checksum, options.key
        self._on_damage = on_damage
        self._on_close = on_close
        self._outgoing: dict[int, OutgoingLink] = {}
        self._incoming: dict[int, IncomingLink] = {}
        self._pending: dict[int, OutgoingLink] = {}
        """Outgoing links with unsent bytes."""
        self._lock = threading.Lock()
        """Guards ``_outgoing`` and ``_incoming`` between the rank's thread and the listener's."""
        self._busy = threading.RLock()
        """Held by the thread that uses the sockets, so that ``close`` does not close them meanwhile."""
        self._background = threading.Lock()
        """Held by the listener's thread while it handles replies; ``close`` waits for it."""
        self._closing = False
        self._error: HoopError | None = None
        self._woken = False
        self._link_announced: set[int] = set()
        """Peers that closed and said that they sent messages: their own link is still on its way to this rank."""
        self._retransmit_requests: dict[int, tuple[int, int]] = {}
        """For each peer: the frame that was last requested again, and how often."""
        self._abandoned: dict[int, socket.socket] = {}
        """Incoming connections that delivered damaged frames; closed when the sender's new connection arrives."""
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        same_host = [address for address in self.peers if address.host == self.peers[rank].host]
        self._spins = _SPINS if spins_before_yield(len(same_host)) else 0
        sockets = 1 if options.checksum else options.sockets_per_link or default_sockets(len(same_host))
        identity = FrameHeader(FrameKind.STRIPED, communicator, generation, rank, sequence=0, length=0)
        self._lanes = Lanes(sockets, identity, self._connect_lane, self._lost_by_lane, on_change=self._interrupt_poll)
        # With one socket there is no lane to pause, and a plain lock takes less time.
        self._call = EndpointCall(self._busy, self._lanes) if sockets > 1 else self._busy
        self.link_stats = LinkStats(self._byte_counts)
        self.call_check = CallCheck(
            communicator, generation, rank, peers=self.peers, key=options.key, wakeup=self._wakeup, abort=self.abort
        )

    def _byte_counts(self, peer: int) -> tuple[int, int]:
        outgoing, incoming = self._outgoing.get(peer), self._incoming.get(peer)
        sent, received = self._lanes.byte_counts(peer)
        return (
            sent + (outgoing.bytes_sent if outgoing is not None else 0),
            received + (incoming.bytes_received if incoming is not None else 0),
        )

    # ---- collectives

    def begin_collective(self, call: Call, deadline: float, resumed: bool = False) -> None:
        self.call_check.begin_collective(call, resumed)
        if self._error is not None:
            raise self._error

    def end_collective(self) -> None:
        self.call_check.end_collective()

    def broadcast_mismatch(self, error: CollectiveMismatch) -> None:
        self.call_check.broadcast_mismatch(error)
        self.abort(error)

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        with self._call:
            return self._send(peer, data, deadline)

    def _send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if self._error is not None:
            raise self._error
        link = self._outgoing.get(peer) or self._dial(peer, deadline)
        payload = data.cast("B") if data.nbytes else data
        message: PendingBuffers | StripedMessage
        if self._lanes.prepare(peer, payload.nbytes, deadline):
            message = self._lanes.send(peer, payload, link.sequence, self.call_check.stamp)
            link.sequence += 1
            link.queue.append(message.first)
        else:
            message = self._checked_message(link, payload) if self._checksum else self._plain_message(link, payload)
            link.queue.append(message)
        self._push(peer, link, PIECE_BYTES if payload.nbytes > _AT_ONCE_BYTES else None)
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        return None if message.done else message

    def _plain_message(self, link: OutgoingLink, payload: memoryview) -> PendingBuffers:
        header = pack_header(
            FrameKind.DATA,
            self.communicator,
            self.generation,
            self.rank,
            link.sequence,
            payload.nbytes,
            0,
            self.call_check.stamp,
        )
        link.sequence += 1
        return PendingBuffers([memoryview(header), payload][: 2 if payload.nbytes else 1])

    def _checked_message(self, link: OutgoingLink, payload: memoryview) -> CheckedMessage:
        """A message of frames with checksums, which are stored until the receiver acknowledges them."""
        return CheckedMessage(payload, partial(self._make_frame, link, self.call_check.stamp), self._busy)

    def _make_frame(  # (3)
        self, link: OutgoingLink, stamp: int, payload: memoryview, more: bool
    ) -> CheckedFrame:
        assert self._checksum is not None, "only with checksums"
        assert link.retransmit_buffer is not None, "only with checksums"
        buffer = link.retransmit_buffer
        if len(buffer) >= _READ_REPLIES_FROM:
            link.read_replies()
        copy = buffer.copy(payload)
        header = FrameHeader(
            kind=FrameKind.PART if more else FrameKind.CHECKED,
            communicator=self.communicator,
            generation=self.generation,
            source=self.rank,
            sequence=link.sequence,
            length=len(copy),
            checksum=self._checksum(memoryview(copy)),
            call=stamp,
        )
        link.sequence += 1
        return buffer.add(CheckedFrame(link.sequence - 1, header.pack(), copy))

    def _dial(self, peer: int, deadline: float) -> OutgoingLink:  # (1)
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a rank cannot send a message to itself")
        hello = FrameHeader(FrameKind.HELLO, self.communicator, self.generation, self.rank, sequence=peer, length=0)
        sock = self._connect(peer, hello, deadline)
        with self._lock:
            if self._error is None:
                self._outgoing[peer] = OutgoingLink(sock, RetransmitBuffer() if self._checksum else None)
                return self._outgoing[peer]
        sock.close()
        raise self._error

    def _connect(self, peer: int, hello: FrameHeader, deadline: float) -> socket.socket:
        """A connection to a peer's listener, after its greeting."""
        self.link_stats.waiting_for, self.link_stats.connecting = (peer,), True
        try:
            sock = connect(self.peers[peer], self._wakeup, deadline, lambda: self._error is not None)
            greet(sock, hello, self._key, self._wakeup, deadline, lambda: self._error is not None)
            return sock
        except InterruptedError:
            assert self._error is not None, "only an error stops it"
            raise self._error from None
        except TimeoutError:
            self.link_stats.failed_peer = peer
            raise self.deadline_exceeded(peer, "connecting to") from None
        except PeerLost as error:
            raise self._error or PeerLost(f"rank {self.rank}: {self.describe(peer)}: {error}", rank=peer) from None
        except (OSError, ValueError) as error:
            self.link_stats.failed_peer = peer
            text = f"rank {self.rank}: {self.describe(peer)} does not answer: {error}"
            raise self._error or PeerLost(text, rank=peer) from None
        finally:
            self.link_stats.waiting_for, self.link_stats.connecting = (), False

    def _connect_lane(self, peer: int, hello: FrameHeader, deadline: float) -> socket.socket:
        """``_connect``, where a failure says nothing about the peer: its link goes on without the lane."""
        failed_peer = self.link_stats.failed_peer
        try:
            return self._connect(peer, hello, deadline)
        except HoopError:
            self.link_stats.failed_peer = failed_peer
            raise

    def _push(self, peer: int, link: OutgoingLink, limit: int | None = None) -> None:
        try:
            link.push(limit)
        except OSError as error:
            if not self._redial_if_requested(peer):
                raise self._lost(peer, error) from None
            return
        if link.queue:
            self._pending[peer] = link

    def _push_pending(self) -> bool:
        """Gives every link with unsent bytes a turn; whether one accepted any."""
        moved = False
        for peer in list(self._pending):
            try:
                moved = self._push_pending_to(peer) or moved
            except OSError as error:
                if not self._redial_if_requested(peer):
                    raise self._lost(peer, error) from None
        return moved

    def _push_pending_to(self, peer: int) -> bool:
        link = self._pending[peer]
        moved = link.push(PIECE_BYTES)
        if not link.queue:
            del self._pending[peer]
        return moved

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        with self._call:
            for peer in list(self._outgoing):
                while self._outgoing[peer].queue or self._lanes.sending(peer):
                    self._wait_for_progress(peer, None, deadline, "handing over to")

    # ---- receiving

    def attach(self, peer: int, sock: socket.socket, lane: int) -> None:  # (2)
        """Adds a link that ``peer`` dialled (``lane`` is 0), or a lane of it; called by the listener's thread."""
        with self._lock:
            if attached := self._error is None and lane > 0:
                attached = self._lanes.attach(peer, lane, sock)
            elif attached := self._error is None and peer not in self._incoming:
                self._incoming[peer] = IncomingLink(sock, self._wakeup)
        if not attached:
            sock.close()
        self._interrupt_poll()

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        payload = into.cast("B") if into.nbytes else into
        with self._call:
            self._receive(peer, payload, deadline)

    def _receive(self, peer: int, payload: memoryview, deadline: float) -> None:
        """Receives the frames of the next message; a damaged frame is received once more."""
        start, kind = 0, FrameKind.PART
        while kind == FrameKind.PART:
            try:
                header = self._receive_header(peer, start, payload.nbytes, deadline)
                self._receive_payload(peer, header, payload[start : start + header.length], deadline)
            except Damaged as damage:
                self._request_retransmit(peer, damage)
                continue
            start, kind = start + header.length, FrameKind(header.kind)

    def _receive_header(self, peer: int, start: int, size: int, deadline: float) -> FrameHeader:
        """Waits for the header of the next frame and checks it.

        The frame belongs to a message of ``size`` bytes, of which ``start`` have arrived.
        """
        while (link := self._incoming.get(peer)) is None:
            self._wait_for_link(peer, deadline)
        self._resume_sequence(peer, link)
        expected = b""
        if self._checksum is None:  # packed before the wait, in which there is time for it
            expected = pack_header(
                FrameKind.DATA, self.communicator, self.generation, peer, link.sequence, size, 0, self.call_check.stamp
            )
        while link.buffered < HEADER_BYTES:
            self._read(peer, link, link.read_ahead, deadline)
        received = link.take(HEADER_BYTES)
        if received == expected:
            header = _data_header(size)
        else:
            try:
                header = FrameHeader.unpack(received)
            except LinkCorrupted as error:
                raise Damaged(f"{self._link_name(peer)}: {error}") from None
            if header.kind in (FrameKind.GOODBYE, FrameKind.MISMATCH):
                reason = bytes(link.take(header.length)).decode(errors="replace")
                if header.kind == FrameKind.MISMATCH:
                    raise self._error or CollectiveMismatch(reason)
                text = f"rank {self.rank}: {self.describe(peer)} closed its link, {reason}"
                raise self._error or PeerLost(text, rank=peer)
            self._check_header(peer, link, header)
            if header.call != self.call_check.stamp:
                raise self.call_check.stamp_mismatch(peer, deadline)
            self._check_length(peer, header, size, start)
        link.sequence += 1
        return header

    def _check_header(self, peer: int, link: IncomingLink, header: FrameHeader) -> None:
        link_name = self._link_name(peer)
        if (header.communicator, header.generation) != (self.communicator, self.generation):
            raise MembershipChanged(
                f"{link_name}: a frame of communicator {header.communicator}, generation {header.generation} "
                f"came at generation {self.generation}; refused as stale"
            )
        kinds = (FrameKind.DATA, FrameKind.CHECKED, FrameKind.PART, FrameKind.STRIPED)
        if header.kind not in kinds or header.source != peer or (header.kind == FrameKind.STRIPED) != bool(header.lane):
            raise LinkCorrupted(f"{link_name}: a frame of kind {header.kind} from rank {header.source} is out of place")
        if header.sequence != link.sequence:
            what = "duplicated" if header.sequence < link.sequence else "lost or reordered"
            raise LinkCorrupted(f"{link_name}: message {header.sequence} came where {link.sequence} was due ({what})")
        if header.kind in (FrameKind.CHECKED, FrameKind.PART) and header.length > CHECKED_BYTES:
            raise LinkCorrupted(f"{link_name}: a checked frame of {header.length} bytes is too long")

    def _check_length(self, peer: int, header: FrameHeader, expected: int, start: int) -> None:
        length, part = start + header.length, header.kind == FrameKind.PART
        if length >= expected if part else length != expected:
            if self.call_check.stamp:
                raise self.call_check.length_mismatch(peer, expected, f"{length}{' or more' * part}")
            raise LinkCorrupted(
                f"{self._link_name(peer)}: message {header.sequence} has {length}{' or more' * part} bytes, "
                f"expected {expected}; do all ranks run the same operation?"
            )

    def _link_name(self, peer: int) -> str:
        return f"link {peer} -> {self.rank} of communicator {self.communicator}"

    def _receive_payload(self, peer: int, header: FrameHeader, payload: memoryview, deadline: float) -> None:
        link = self._incoming[peer]
        if header.kind == FrameKind.STRIPED:
            with self._lanes.receive(peer, link, header, payload) as first:
                self._fill(peer, link, first, deadline)
                while self._lanes.receiving:
                    self._wait_for_lanes(peer, deadline)
        elif payload.nbytes:
            self._fill(peer, link, payload, deadline)
        if header.kind in (FrameKind.DATA, FrameKind.STRIPED):
            link.unchecked = True
        else:
            self._verify_and_acknowledge(peer, link, header, payload)

    def _fill(self, peer: int, link: IncomingLink, view: memoryview, deadline: float) -> None:
        taken = link.take(view.nbytes)
        view[: taken.nbytes] = taken
        view = view[taken.nbytes :]
        while view.nbytes:
            # While there are unsent bytes, sending and receiving take turns.
            part = view[:PIECE_BYTES] if self._pending else view
            view = view[self._read(peer, link, partial(link.sock.recv_into, part), deadline) :]

    def _read(self, peer: int, link: IncomingLink, read: Callable[[], int], deadline: float) -> int:
        """Reads at least a byte; pushes pending messages while it waits."""
        while True:
            if self._error is not None:
                raise self._error
            self._lanes.raise_failure()
            try:
                got = read()
            except (BlockingIOError, InterruptedError):
                got = -1
            except OSError as error:
                raise self._lost(peer, error) from None
            if got == 0:
                raise self._lost(peer, None)
            moved = self._push_pending() if self._pending else False
            if got > 0:
                link.bytes_read += got
                return got
            if not moved:
                self._wait_for_bytes(peer, link, deadline)

    def _verify_and_acknowledge(self, peer: int, link: IncomingLink, header: FrameHeader, payload: memoryview) -> None:
        """Raises Damaged if the checksum is wrong, else acknowledges the frame."""
        if self._checksum is not None and self._checksum(payload) != header.checksum:
            raise Damaged(
                f"{self._link_name(peer)}: message {header.sequence} of {header.length} bytes is not what was sent"
            )
        link.acknowledged = link.sequence
        with contextlib.suppress(OSError):  # (4); if this fails, the next acknowledgement covers this frame too
            link.sock.send(self._reply(FrameKind.ACK, link.sequence))

    def _reply(self, kind: FrameKind, sequence: int) -> bytes:
        return FrameHeader(kind, self.communicator, self.generation, self.rank, sequence=sequence, length=0).pack()

    # ---- waiting

    def wait_readable(self, peers: Sequence[int], deadline: float) -> list[int]:
        with self._call:
            while True:
                links = {peer: self._incoming.get(peer) or self._outgoing.get(peer) for peer in peers}
                found = [peer for peer, link in links.items() if isinstance(link, IncomingLink) and link.buffered]
                watched = {link.sock.fileno(): peer for peer, link in links.items() if link}
                at_once = bool(found) or self._woken  # polls without waiting, so that other links get a turn too
                result = self._poll_links(watched, time.monotonic() if at_once else deadline, tuple(peers))
                broken = [peer for peer in result.broken if not self._redial_if_requested(peer)]
                for peer in broken:
                    self._pending.pop(peer, None)
                    self._outgoing[peer].queue.clear()
                    self._lanes.drop(peer)
                ready = [peer for peer in result.ready if not _has_only_replies(links[peer])]
                found += [peer for peer in (*ready, *broken) if peer not in found]
                if found or result.sent or self._woken or time.monotonic() >= deadline:
                    self._woken = False
                    return found

    def wake(self) -> None:
        self._woken = True
        self._interrupt_poll()

    def _interrupt_poll(self) -> None:
        with contextlib.suppress(OSError):
            self._wakeup_writer.send(b"!")

    def _wait_for_link(self, peer: int, deadline: float) -> None:
        """Waits for ``peer`` to dial. If no link connects the two, dials it to find out whether it is alive."""
        if peer in self._outgoing:
            self._wait_for_progress(peer, None, deadline, "waiting for")
            return
        result = self._poll_links({}, min(deadline, time.monotonic() + _DIAL_AFTER_S), (peer,))
        if not result.happened and peer not in self._incoming:
            if time.monotonic() >= deadline:
                raise self.deadline_exceeded(peer, "waiting for")
            self._push(peer, self._dial(peer, deadline))

    def _wait_for_bytes(self, peer: int, link: IncomingLink, deadline: float) -> None:
        """Waits until an incoming link may be readable, or a pending message made progress."""
        if self._pending or self._lanes.failed():
            self._wait_for_progress(peer, link.sock, deadline, "waiting for")
            return
        self.link_stats.waiting_for = (peer,)
        try:
            if not self._poll(link.poll, deadline, self._spins):
                if time.monotonic() >= deadline:
                    raise self.deadline_exceeded(peer, "waiting for")
                self._compare_calls(peer, deadline)
        finally:
            self.link_stats.waiting_for = ()

    def _wait_for_lanes(self, peer: int, deadline: float) -> None:
        """Waits until anything happened on a lane that ``peer`` sends on, or on a link with unsent bytes."""
        result = self._poll_links({}, min(deadline, time.monotonic() + _LANE_POLL_S), (peer,))
        for other, error in result.broken.items():
            raise self._lost_by_lane(other, error)
        self._lanes.raise_failure()
        if time.monotonic() >= deadline and self._lanes.receiving:
            raise self.deadline_exceeded(peer, "waiting for")

    def _wait_for_progress(self, peer: int, readable: socket.socket | None, deadline: float, action: str) -> None:
        """Waits for ``peer`` until anything happened on its link or on a link with unsent bytes.

        ``readable``: the socket of its incoming link; None: there is none, or this rank waits to send.
        """
        # A peer that refused this rank, or died before it dialled, shows on this rank's own link to it.
        link = self._outgoing.get(peer)
        sock = readable or (link.sock if link and peer not in self._link_announced else None)
        result = self._poll_links({sock.fileno(): peer} if sock else {}, deadline, (peer,))
        if readable is None and result.ready and link is not None:
            frame, unsent = link.closing_frame(), bool(link.queue) or self._lanes.sending(peer)
            if _has_only_replies(link):
                return
            if frame is None or frame[0].kind != FrameKind.GOODBYE or not frame[0].sequence or unsent:
                raise self._lost(peer, None)
            self._link_announced.add(peer)  # it has sent messages: its own link is on the way
        for other, error in result.broken.items():
            if not self._redial_if_requested(other):
                raise self._lost_by_lane(other, error) from None
        if not result.happened:
            if time.monotonic() >= deadline:
                raise self.deadline_exceeded(peer, action)
            self._compare_calls(peer, deadline)

    def _compare_calls(self, peer: int, deadline: float) -> None:
        """Called when a peer was silent for a while: it may run a different collective."""
        error = self.call_check.query_peer(peer, deadline)
        if error is not None:
            raise self._error or error

    def _poll_links(self, watched: dict[int, int], deadline: float, peers: tuple[int, ...]) -> _PollResult:
        """Waits for ``peers``: polls descriptors for input, and pushes pending messages.

        ``watched``: descriptor to peer.
        """
        if self._error is not None:
            raise self._error
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        unsent = {link.sock.fileno(): peer for peer, link in self._pending.items()}
        for descriptor in watched.keys() | unsent.keys():
            reads, writes = descriptor in watched, descriptor in unsent
            poll.register(descriptor, select.POLLIN * reads | select.POLLOUT * writes)
        result = _PollResult(broken=self._lanes.failed())
        self.link_stats.waiting_for = peers
        try:
            happened = self._poll(poll, time.monotonic() if result.broken else deadline)
        finally:
            self.link_stats.waiting_for = ()
        result.sent = self._lanes.take_sent()
        for descriptor, events in happened:
            result.happened = True
            if descriptor in watched and events & ~select.POLLOUT:
                result.ready.append(watched[descriptor])
            elif descriptor in unsent:
                peer = unsent[descriptor]
                try:
                    result.sent = self._push_pending_to(peer) or result.sent
                except OSError as error:
                    result.broken[peer] = error
        return result

    def _poll(self, poll: select.poll, deadline: float, spins: int = 0) -> list[tuple[int, int]]:
        """The descriptors with events, including the wakeup socket; empty after a timeout."""
        happened: list[tuple[int, int]] = []
        while spins and not happened:
            happened = poll.poll(0)
            spins -= 1
        happened = happened or poll.poll(
            min(remaining(deadline), self._handle_replies(), self.call_check.query_interval) * 1000
        )
        if any(descriptor == self._wakeup.fileno() for descriptor, _ in happened):
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(64)
        if self._error is not None:
            raise self._error
        return happened

    # ---- recovery: the sender

    def _handle_replies(self) -> float:
        """Reads the replies on all links and retransmits where requested.

        Returns how many seconds the thread may sleep before it calls this again.
        """
        interval = inf
        for peer, link in list(self._outgoing.items()):
            if link.retransmit_buffer:
                interval = REPLY_POLL_S
                link.read_replies()
                if link.retransmit_requested:
                    self._retransmit(peer, link)
        return interval

    def handle_replies_in_background(self) -> None:
        """Called by the listener's thread from time to time, because this rank may compute for long."""
        if not any(link.retransmit_buffer for link in list(self._outgoing.values())):
            return
        with self._background:
            if self._closing or not self._busy.acquire(blocking=False):
                return  # ``close`` or the rank's thread handles them
            try:
                self._handle_replies()
                while self._pending and self._push_pending():
                    pass
            except HoopError as error:
                self.abort(error)
            finally:
                self._busy.release()

    def _redial_if_requested(self, peer: int) -> bool:
        """Replaces a link that accepts no more bytes, if its receiver requested a retransmit; whether it did."""
        link = self._outgoing.get(peer)
        if link is None or not link.retransmit_buffer:
            return False
        link.read_replies()
        if link.retransmit_requested:
            self._retransmit(peer, link)
        return link.retransmit_requested

    def _retransmit(self, peer: int, link: OutgoingLink) -> None:  # (6)
        """Redials, and queues every unacknowledged frame and unsent message again."""
        assert link.retransmit_buffer is not None, "a retransmit was requested without stored frames"
        link.retransmit_buffer.retransmits += 1
        if link.retransmit_buffer.retransmits > MAX_RETRANSMITS:
            self.link_stats.failed_peer = peer
            raise LinkCorrupted(
                f"link {self.rank} -> {peer} of communicator {self.communicator}: a message to "
                f"{self.describe(peer)} was damaged {link.retransmit_buffer.retransmits} times"
            )
        link.sock.close()
        self._pending.pop(peer, None)
        del self._outgoing[peer]
        fresh = self._dial(peer, time.monotonic() + _REDIAL_TIMEOUT_S)
        fresh.sequence, fresh.retransmit_buffer = link.sequence, link.retransmit_buffer
        fresh.queue += link.retransmit_buffer.rewind_all()
        fresh.queue += [
            message for message in link.queue if isinstance(message, CheckedMessage) and message.drop_current_frame()
        ]
        self._pending[peer] = fresh
        self.messages_retransmitted += 1

    # ---- recovery: the receiver

    def _request_retransmit(self, peer: int, damage: Damaged) -> None:  # (5)
        link = self._incoming[peer]
        expected = link.acknowledged
        requested, tries = self._retransmit_requests.get(peer, (-1, 0))
        tries = tries + 1 if requested == expected else 1
        self._retransmit_requests[peer] = expected, tries
        self.messages_corrupted += 1
        self._on_damage(f"{damage} ({self.describe(peer)} sends it)")
        if self._checksum is None or link.unchecked or tries > MAX_RETRANSMITS:
            self.link_stats.failed_peer = peer
            raise LinkCorrupted(f"{damage}, {tries} times" if tries > 1 else str(damage))
        with self._lock:
            del self._incoming[peer]
        self._abandoned[peer] = link.sock
        with contextlib.suppress(OSError):  # three copies, because one of them may be damaged too
            link.sock.send(3 * self._reply(FrameKind.RETRANSMIT, expected))

    def _resume_sequence(self, peer: int, link: IncomingLink) -> None:
        """Makes a connection that replaces an abandoned one continue at the first damaged frame."""
        if peer in self._abandoned:
            self._abandoned.pop(peer).close()
            link.sequence = link.acknowledged = self._retransmit_requests[peer][0]

    # ---- closing

    def _lost(self, peer: int, error: OSError | None) -> HoopError:
        """Why the links to ``peer`` are gone: from its closing frame if there is one, else from the socket's error."""
        log.debug(
            "communicator %d: rank %d lost its link to %s: %s", self.communicator, self.rank, self.describe(peer), error
        )
        if self._error is not None:
            return self._error
        link = self._outgoing.get(peer)
        frame = link.closing_frame() if link is not None else None
        if frame is not None and frame[0].kind == FrameKind.REFUSAL:
            return MembershipChanged(f"rank {self.rank}: {self.describe(peer)} refused the link: {frame[1]}")
        if frame is not None and frame[0].kind == FrameKind.MISMATCH:
            return CollectiveMismatch(frame[1])
        if frame is None and (found := self.call_check.mismatch_that_closed(peer)) is not None:
            return self._error or found
        if frame is None and error is not None:
            self.link_stats.failed_peer = peer
        gave_up = frame is not None and frame[1].startswith(GAVE_UP)
        reason = f", {frame[1]}" if frame and gave_up else f" ({error.strerror})" if error else ""
        where = f"communicator {self.communicator}, generation {self.generation}"
        return PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its link{reason} ({where})", rank=peer)

    def _lost_by_lane(self, peer: int, error: OSError | None) -> HoopError:
        """``_lost``, where the closing frame may come a little later: it travels over another connection."""
        if (link := self._outgoing.get(peer)) is not None:
            link.wait_for_reply(_CLOSING_FRAME_S)
        return self._lost(peer, error)

    def raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
        with self._busy:
            for peer, outgoing in list(self._outgoing.items()):
                outgoing.read_replies()
                if outgoing.closed_by_peer and not outgoing.retransmit_requested:
                    raise self._lost(peer, None)
            for peer, incoming in list(self._incoming.items()):
                if incoming.at_end():
                    raise self._lost(peer, None)

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._lanes.stop()
        self._interrupt_poll()

    def close(self) -> None:
        self._on_close(self)
        with self._background:
            self._closing = True
        if self._error is None and self._busy.acquire(blocking=False):  # else the rank's thread waits, and raises
            with contextlib.suppress(HoopError):
                self._wait_for_acknowledgements()
            self._busy.release()
        text = f"{GAVE_UP}{self._error}" if self._error is not None else "it closed its links"
        kind = FrameKind.GOODBYE
        if isinstance(self._error, CollectiveMismatch):
            kind, text = FrameKind.MISMATCH, str(self._error)
        gave_up = self._error is not None
        self.abort(PeerLost(f"rank {self.rank}: this endpoint is closed"))
        with self._busy, self._lock:
            for peer, incoming in self._incoming.items():
                sent = self._outgoing[peer].sequence if peer in self._outgoing else 0
                with contextlib.suppress(OSError):
                    incoming.sock.send(closing_frame(kind, text, sent))
            for link in self._outgoing.values():
                if gave_up and not link.queue:
                    with contextlib.suppress(OSError):
                        link.sock.send(closing_frame(kind, text))
            socks = [link.sock for links in (self._outgoing, self._incoming) for link in links.values()]
            socks += self._abandoned.values()
            self._incoming.clear()
            self._outgoing.clear()
            self._abandoned.clear()
        for sock in socks:
            sock.close()
        self._lanes.close()
        self._wakeup_writer.close()
        self._wakeup.close()

    def _wait_for_acknowledgements(self) -> None:
        """Waits up to ``LINGER_S`` seconds, because a last message may have to be sent again."""
        deadline = time.monotonic() + LINGER_S
        while open_links := [
            link for link in self._outgoing.values() if link.retransmit_buffer and not link.closed_by_peer
        ]:
            poll = select.poll()
            for link in open_links:
                poll.register(link.sock, select.POLLIN | (select.POLLOUT if link.queue else 0))
            if not poll.poll(remaining(deadline) * 1000):
                return
            self._push_pending()
            self._handle_replies()


def _has_only_replies(link: OutgoingLink | IncomingLink | None) -> bool:
    """Whether an outgoing link is readable only because of acknowledgements or retransmit requests, not its end."""
    if not isinstance(link, OutgoingLink):
        return False
    link.read_replies()
    return link.retransmit_requested or not link.closed_by_peer
