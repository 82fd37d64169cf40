"""The lanes of an endpoint: large messages are cut into stripes that travel over several sockets at the same time.

    rank r                                              rank p
    outgoing[p] ── STRIPED, stripe 0 ──────────────▶    incoming[r]     (1) the ranks' own threads, as other messages
    lane 1      ── LANE ── STRIPE, stripe 1 ───────▶    lane 1          (2) a thread at each end of each lane
    lane 2      ── LANE ── STRIPE, stripe 2 ───────▶    lane 2

One socket is driven by one core at each end, so several are faster where cores are idle (benchmarks/tcp). The sender
decides: the header of a message says over how many lanes it comes, and a small message comes over the link's socket
alone. The sender dials the lanes, and the receiver's listener has accepted each, before the header is sent; a lane is
authenticated like a link. Messages stay in order, because the receiver completes one before it reads the next header.

A stripe has a header of its own, which must be the one that the message implies. If a lane is not accepted within
``_DIAL_TIMEOUT_S``, the link uses those before it, or its own socket alone: a firewall may let the first packets of a
connection pass and drop the others. A lane that fails later is an error of its link. With checksums no lanes are used:
damaged frames are sent again on a new connection (``tcp_endpoint``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType

from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, LinkCorrupted, PeerLost
from hoop.resources import available_cores
from hoop.transport.base import PendingBuffers, PendingSend
from hoop.transport.tcp_lane import IncomingLane, OutgoingLane
from hoop.transport.tcp_link import IncomingLink
from hoop.wire.frames import MAX_LANES, FrameHeader, FrameKind

log = logging.getLogger("hoop.transport")
VARIABLE = "HOOP_SOCKETS_PER_LINK"
STRIPED_FROM_BYTES = 4 << 20
"""A smaller message is not worth the wake-ups of the other threads. Measured in benchmarks/tcp."""
MAX_SOCKETS = MAX_LANES + 1
_DEFAULT_SOCKETS = 4
"""Where there are cores for them; more gain little."""
_MIN_CORES_PER_RANK = 4
_MAX_STRIPED_LINKS = 8
"""Links of one endpoint that get lanes, each with threads of its own; others have one socket."""
_DIAL_TIMEOUT_S = 5.0
"""How long the first large message waits for its link's lanes, before the link goes on with those that it has."""
_ACCEPT_TIMEOUT_S = 10.0
"""How long a message waits for a lane that its header names. Its sender has had the answer that the lane was accepted,
so only a peer that does not keep to this gets here."""


def sockets_of_environment() -> int | None:
    """The number of sockets per link that HOOP_SOCKETS_PER_LINK demands; None without it."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_SOCKETS:
        raise InvalidArgument(
            f"{VARIABLE}={text!r}: give a whole number from 1 to {MAX_SOCKETS}, or unset it to let Hoop choose"
        )
    return int(text)


def default_sockets(ranks_on_host: int) -> int:
    """Several where each rank of this host has cores for them, else one."""
    return _DEFAULT_SOCKETS if available_cores() >= _MIN_CORES_PER_RANK * ranks_on_host else 1


def stripes_of(payload: memoryview, lanes: int) -> list[memoryview]:
    """The parts of a message: the first for the link's socket, then one for each lane.

    The first is half as large as the others: the rank's thread sends and receives, a lane's thread does one of both.
    """
    shares = 2 * lanes + 1
    ends = [payload.nbytes * (2 * index + 1) // shares for index in range(lanes + 1)]
    return [payload[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class StripedMessage(PendingSend):
    """A message that is sent over a link's socket and its lanes."""

    def __init__(self, first: PendingBuffers, others: list[PendingBuffers]) -> None:
        """``first``: the part for the link's socket. ``others``: the stripes on lanes."""
        self.first = first
        self._parts = [first, *others]

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    def detach(self) -> None:
        for part in self._parts:
            part.detach()


class Lanes:
    """All lanes of one endpoint. The rank's thread calls it, and the listener's thread ``attach``."""

    def __init__(
        self,
        sockets: int,
        identity: FrameHeader,
        connect: Callable[[int, FrameHeader, float], socket.socket],
        lost: Callable[[int, OSError | None], HoopError],
        on_change: Callable[[], None],
    ) -> None:
        """``sockets``: how many each link may use to send. ``identity``: the header of a STRIPED message of this rank,
        without the fields that differ. ``connect``: dials a peer and returns once it has accepted the lane. ``lost``:
        makes the error for a link that failed. ``on_change``: interrupts the wait of the rank's thread."""
        self._sockets, self._identity = sockets, identity
        self._connect, self._lost, self._on_change = connect, lost, on_change
        self._lock = threading.Lock()
        """Guards the two dictionaries."""
        self._outgoing: dict[int, list[OutgoingLane]] = {}
        """The lanes that this rank dialled, by peer: lane 1, lane 2 …"""
        self._incoming: dict[int, dict[int, IncomingLane]] = {}
        """The lanes that a peer dialled, by peer and number."""
        self._dialled: set[int] = set()
        """Peers to which lanes were dialled. None of them may have been accepted."""
        self._paused = self._stopped = False
        self._sent = False
        """Whether a stripe was sent since ``take_sent``."""
        self._source = 0
        """The rank that sends the current message."""
        self._receiving: list[IncomingLane] = []
        """The lanes that carry the current message."""
        self._accept_until = 0.0
        """When the listener must have accepted them."""

    def byte_counts(self, peer: int) -> tuple[int, int]:
        """Bytes sent to a peer over its lanes, and bytes received from it."""
        with self._lock:
            outgoing, incoming = self._outgoing.get(peer, []), [*self._incoming.get(peer, {}).values()]
        return sum(lane.bytes_sent for lane in outgoing), sum(lane.bytes_received for lane in incoming)

    # ---- sending

    def prepare(self, peer: int, size: int, deadline: float) -> bool:
        """Whether a message of ``size`` bytes to ``peer`` is sent over lanes too. Dials the lanes for the first one."""
        if self._sockets == 1 or size < STRIPED_FROM_BYTES:
            return False
        if peer not in self._dialled and len(self._outgoing) < _MAX_STRIPED_LINKS:
            self._dial_all(peer, deadline)
        return peer in self._outgoing

    def send(self, peer: int, payload: memoryview, sequence: int, call: int) -> StripedMessage:
        """Starts to send a message, after ``prepare``; the caller appends its first part to the link's queue."""
        lanes = len(self._outgoing[peer])
        header = replace(self._identity, sequence=sequence, length=payload.nbytes, call=call, lane=lanes)
        first, *others = stripes_of(payload, lanes)
        stripes: list[PendingBuffers] = [
            self._outgoing[peer][number - 1].send(_stripe_header(header, number, part), part)
            for number, part in enumerate(others, start=1)
        ]
        return StripedMessage(PendingBuffers([memoryview(header.pack()), first]), stripes)

    def _dial_all(self, peer: int, deadline: float) -> None:
        """Dials the lanes to ``peer``, up to the first that is not accepted: the link uses those before it."""
        deadline = min(deadline, time.monotonic() + _DIAL_TIMEOUT_S)
        for number in range(1, self._sockets):
            try:
                self._dial(peer, number, deadline)
            except (PeerLost, DeadlineExceeded) as error:
                if self._stopped:
                    raise
                text = "%s. The link uses %d of %d sockets: lane %d was not accepted"
                log.warning(text, error, number, self._sockets, number)
                break
        self._dialled.add(peer)

    def _dial(self, peer: int, number: int, deadline: float) -> None:
        sock = self._connect(peer, replace(self._identity, kind=FrameKind.LANE, sequence=peer, lane=number), deadline)
        lane = OutgoingLane(f"{self._thread_name}-to-{peer}-lane-{number}", sock, self._may_send, self._on_sent)
        with self._lock:
            self._outgoing.setdefault(peer, []).append(lane)

    @property
    def _thread_name(self) -> str:
        return f"hoop-tcp-{self._identity.communicator}-{self._identity.source}"

    def sending(self, peer: int) -> bool:
        """Whether a lane to ``peer`` has unsent bytes."""
        return any(lane.sending for lane in self._outgoing.get(peer, ()))

    def take_sent(self) -> bool:
        """Whether a stripe was sent completely since the last call."""
        sent, self._sent = self._sent, False
        return sent

    def failed(self) -> dict[int, OSError]:
        """Peers to which a lane can send no more."""
        if not self._outgoing:
            return {}
        found = ((peer, lane.error) for peer, lanes in self._outgoing.items() for lane in lanes)
        return {peer: error for peer, error in found if error is not None}

    def drop(self, peer: int) -> None:
        """Closes the lanes to ``peer``, whose pending messages are dropped."""
        self._dialled.discard(peer)
        with self._lock:
            lanes = self._outgoing.pop(peer, [])
        for lane in lanes:
            lane.shut_down()
        for lane in lanes:
            lane.close()

    def _may_send(self) -> bool:
        return not (self._paused or self._stopped)

    def _on_sent(self) -> None:
        self._sent = True
        self._on_change()

    def pause(self) -> None:
        """Sends nothing until ``resume``; once it returns, callers may overwrite what they sent."""
        self._paused = True
        self._notify_outgoing()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._notify_outgoing()

    def stop(self) -> None:
        """Like ``pause``, for good; callable from any thread."""
        self._stopped = True
        self._notify_outgoing()

    def _notify_outgoing(self) -> None:
        with self._lock:
            lanes = [lane for lanes in self._outgoing.values() for lane in lanes]
        for lane in lanes:
            lane.gate_changed()

    # ---- receiving

    def attach(self, peer: int, number: int, sock: socket.socket) -> bool:
        """Takes a lane that ``peer`` dialled; false if there is one of this number. Called by the listener's thread."""
        return self._incoming_lane(peer, number).attach(sock)

    def _incoming_lane(self, peer: int, number: int) -> IncomingLane:
        with self._lock:
            lanes = self._incoming.setdefault(peer, {})
            if number not in lanes:
                lanes[number] = IncomingLane(f"{self._thread_name}-from-{peer}-lane-{number}", self._on_change)
            return lanes[number]

    @contextlib.contextmanager
    def receive(self, peer: int, link: IncomingLink, header: FrameHeader, payload: memoryview) -> Iterator[memoryview]:
        """Receives a message; yields the memory of its first part, which comes over the link's socket.

        The caller receives that and waits while ``receiving``. When the context ends no thread writes to the memory.
        """
        first, *others = stripes_of(payload, header.lane)
        self._source, self._accept_until = peer, time.monotonic() + _ACCEPT_TIMEOUT_S
        self._receiving = [self._incoming_lane(peer, number) for number in range(1, header.lane + 1)]
        try:
            for number, (lane, part) in enumerate(zip(self._receiving, others, strict=True), start=1):
                lane.receive(_stripe_header(header, number, part), part)
            yield first
            self.raise_failure()
        except BaseException:
            link.sequence = header.sequence  # the message is lost: those that follow it are refused
            raise
        finally:
            lanes, self._receiving = self._receiving, []
            for lane in lanes:
                lane.cancel()

    @property
    def receiving(self) -> bool:
        """Whether a stripe of the current message is outstanding."""
        return any(lane.receiving for lane in self._receiving)

    def raise_failure(self) -> None:
        """Raises the error of the link if a stripe of the current message cannot be received."""
        for number, lane in enumerate(self._receiving, start=1):
            if isinstance(lane.failure, LinkCorrupted):
                link = f"link {self._source} -> {self._identity.source} of communicator {self._identity.communicator}"
                raise LinkCorrupted(f"{link}, lane {number}: {lane.failure}")
            if lane.failure is not None:
                raise self._lost(self._source, lane.failure if isinstance(lane.failure, OSError) else None)
            if lane.sock is None and time.monotonic() > self._accept_until:
                text = f"its lane {number} did not connect within {_ACCEPT_TIMEOUT_S:g} s"
                raise self._lost(self._source, TimeoutError(errno.ETIMEDOUT, text))

    # ---- closing

    def close(self) -> None:
        """Closes all lanes and waits for their threads. No other thread may be in a call of the endpoint."""
        with self._lock:
            lanes: list[OutgoingLane | IncomingLane] = [lane for lanes in self._outgoing.values() for lane in lanes]
            lanes += [lane for numbered in self._incoming.values() for lane in numbered.values()]
            self._outgoing, self._incoming = {}, {}
        for lane in lanes:
            lane.shut_down()
        for lane in lanes:
            lane.close()


class EndpointCall:
    """Entered for each call of an endpoint: holds its lock, and pauses the lanes if the call raises.

    After an error the caller may change the memory of messages that are not sent, which no lane may send then. The next
    call continues to send them, as it does with the bytes for the link's socket.
    """

    def __init__(self, busy: threading.RLock, lanes: Lanes) -> None:
        self._busy, self._lanes = busy, lanes

    def __enter__(self) -> None:
        self._busy.acquire()
        self._lanes.resume()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._lanes.pause()
        self._busy.release()


def _stripe_header(header: FrameHeader, number: int, part: memoryview) -> bytes:
    """The header of a stripe, from that of its message."""
    return replace(header, kind=FrameKind.STRIPE, length=part.nbytes, lane=number).pack()
