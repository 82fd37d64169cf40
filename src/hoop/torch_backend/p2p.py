"""Point-to-point messages between the ranks of a process group, and detection of dead peers.

    send ─▶ submit ─▶ engine thread ─▶ envelope, contents ─▶ peer's engine thread
    recv ─▶ submit ─▶ engine thread ─▶ matched with an unexpected message, or posted until one arrives

One thread for each group owns the links, so a receive that waits never blocks a send. The thread also watches every
peer: a link that ends without a goodbye means that the peer's process died, and the group learns of it at once.

A rank that learns of a death tells every peer before its own operations fail and it may leave. So a peer reads of the
death before it reads this rank's goodbye, on the same link, and names the rank that died first.

``TagMatcher`` matches messages with receives as MPI does: by sender and tag, in the order in which messages were sent
and receives were posted. It moves no bytes and never waits, so it can be tested without links.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from hoop.errors import DeadlineExceeded, HoopError, InternalError, InvalidArgument, PeerError, PeerLost
from hoop.torch_backend.tensor_views import Array, empty_array
from hoop.transport import Endpoint, PendingSend

UNEXPECTED_BYTES = 64 * 1024 * 1024
"""Maximum bytes of unexpected messages that are buffered for each peer; beyond them the peer is not read, so it must
wait."""

OnComplete = Callable[[HoopError | None, int], None]
"""Callback when a request completes, called once with its error or None, and the sender's rank (-1 where there is
none)."""


class MessageKind(IntEnum):
    """The kind of a message, sent in its envelope."""

    HELLO = 0
    MESSAGE = 1
    BARRIER = 2
    """Message of a monitored barrier; its tags are separate from those of MESSAGE."""
    GOODBYE = 3
    DEVICE = 4
    """Address of a message in GPU memory (``device_messages``)."""
    DELIVERED = 5
    """Answer to DEVICE."""
    DEVICE_DATA = 6
    """Bytes of a message in GPU memory that its receiver cannot map."""
    DEATH = 7
    """A rank died; its number is the tag."""


@dataclass(eq=False)
class P2PRequest:
    """A send or a receive. ``peer`` is None for a receive from any rank."""

    is_send: bool
    peer: int | None
    kind: MessageKind
    tag: int
    data: Array
    owner: object
    """Owner of the memory of ``data``; the request keeps it alive."""
    deadline: float
    on_complete: OnComplete
    pending: list[PendingSend] | None = None
    """Parts of a send that the link has not taken yet; None before it is sent, and for a receive."""

    def __str__(self) -> str:
        action = "sending to" if self.is_send else "waiting for a message from"
        peer = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{action} {peer} (tag {self.tag}, {self.data.nbytes} bytes)"


@dataclass(eq=False)
class P2PMessage:
    """A received message."""

    peer: int
    kind: MessageKind
    tag: int
    data: Array


class TagMatcher:
    """Posted receives, and unexpected messages: those that arrived before their receive was posted."""

    def __init__(self) -> None:
        self.posted: list[P2PRequest] = []
        self._unexpected: list[P2PMessage] = []

    def post_receive(self, request: P2PRequest) -> bool:
        """Completes a receive with an unexpected message and returns True, or posts it and returns False."""
        for message in self._unexpected:
            if _matches(request, message.peer, message.kind, message.tag):
                self._unexpected.remove(message)
                deliver(request, message)
                return True
        self.posted.append(request)
        return False

    def match(self, peer: int, kind: MessageKind, tag: int) -> P2PRequest | None:
        """Removes and returns the first posted receive that matches a message; None if there is none."""
        for request in self.posted:
            if _matches(request, peer, kind, tag):
                self.posted.remove(request)
                return request
        return None

    def add_unexpected(self, message: P2PMessage) -> None:
        self._unexpected.append(message)

    def readable_peers(self, peers: Iterable[int]) -> Iterator[int]:
        """The peers to read from: those below UNEXPECTED_BYTES, and those that a posted receive waits for."""
        buffered: dict[int, int] = {}
        for message in self._unexpected:
            buffered[message.peer] = buffered.get(message.peer, 0) + message.data.nbytes
        wanted = {request.peer for request in self.posted}
        for peer in peers:
            if buffered.get(peer, 0) < UNEXPECTED_BYTES or peer in wanted or None in wanted:
                yield peer


def _matches(request: P2PRequest, peer: int, kind: MessageKind, tag: int) -> bool:
    return request.peer in (None, peer) and request.kind is kind and request.tag == tag


def deliver(request: P2PRequest, message: P2PMessage) -> None:
    """Completes a receive with a message; with an error if their sizes differ."""
    if request.data.nbytes != message.data.nbytes:
        error = InvalidArgument(
            f"rank {message.peer} sent {message.data.nbytes} bytes with tag {message.tag}, "
            f"the tensor to receive them has {request.data.nbytes}"
        )
        request.on_complete(error, message.peer)
        return
    if request.data is not message.data:
        request.data[:] = message.data
    request.on_complete(None, message.peer)


_ENVELOPE = struct.Struct("<QqQ")  # kind, tag, bytes of contents
_CLOSING_SECONDS = 5.0
_SLICE_SECONDS = 0.25
"""Longest part of a wait to leave. A gap counts as one part: a process that was frozen meanwhile has its time left."""
_SUSPECT_SECONDS = 1.0
"""Seconds for which a peer whose link refuses a send is still read: it may have left, with its goodbye under way."""
_IDLE_SECONDS = 3600.0
_DIED = "is gone: its process ended without leaving the group"
_LEFT = "has left the group"
_DESTROYED = "this process group is destroyed"


class P2PEngine:
    """Sends and receives one rank's point-to-point messages in one group, on a thread of its own."""

    def __init__(self, endpoint: Endpoint, name: str, timeout: float) -> None:
        """``name``: prefix of the thread's name. ``timeout``: seconds for the rest of a message that has begun."""
        self._endpoint = endpoint
        self._timeout = timeout
        self._dead: list[int] = []
        """Peers that died, in the order in which this rank learned of it: from their own link, or from another peer."""
        self._departed: dict[int, str] = {}
        """Peers that died or left, with the reason (_DIED or _LEFT), in the order of detection."""
        self._greeted: set[int] = set()
        """Peers from which a message has arrived: their link to this rank is attached."""
        self._suspects: dict[int, float] = {}
        """Peers whose link refused a send, with the time at which each counts as dead."""
        self.on_peer_death: Callable[[int, str], None] = lambda peer, reason: None
        self.rank_label: Callable[[int], str] = lambda peer: f"rank {peer}"
        self._peers_changed = threading.Condition()
        self._submitted: deque[P2PRequest] = deque()
        self._matcher = TagMatcher()
        self._sending: list[P2PRequest] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{name}-p2p", daemon=True)

    def start(self) -> None:
        """Starts the thread, which greets every peer so that each can watch the other."""
        self._thread.start()

    # ---- called from any thread

    def submit(self, request: P2PRequest) -> None:
        """Starts a send or a receive; it completes on the engine's thread."""
        if self._closing:
            raise PeerLost(_DESTROYED)
        self._submitted.append(request)
        self._endpoint.wake()

    def first_departed(self, peer: int | None, seconds: float) -> tuple[int, str] | None:
        """The rank that died first, or else ``peer`` if it has left, with the reason; None if neither is known.

        ``peer``: the rank whose link failed; None: not known, then any. Waits up to ``seconds`` for the engine's thread
        to learn of it, which it does unless only that one link failed.
        """
        with self._peers_changed:
            self._peers_changed.wait_for(lambda: self._dead or self._left(peer) is not None or self._closing, seconds)
            if self._dead:
                return self._dead[0], _DIED
            left = self._left(peer)
            return None if left is None else (left, _LEFT)

    def _left(self, peer: int | None) -> int | None:
        """``peer`` if it has departed; without a ``peer`` the one that departed first."""
        return next((rank for rank in list(self._departed) if peer in (None, rank)), None)

    def pending(self) -> list[P2PRequest]:
        """The receives and sends that are not finished."""
        return [*self._matcher.posted, *self._sending]

    def close(self) -> None:
        """Sends a goodbye to every peer, stops the thread and closes the links."""
        self._closing = True
        self._endpoint.wake()
        if threading.current_thread() is not self._thread:
            for _ in range(round(2 * _CLOSING_SECONDS / _SLICE_SECONDS)):
                self._thread.join(_SLICE_SECONDS)
        self._endpoint.close()

    # ---- the engine's thread

    def _run(self) -> None:
        error: HoopError = PeerLost(_DESTROYED)
        try:
            self._send_to_all(MessageKind.HELLO, time.monotonic() + self._timeout)
            while not self._closing:
                self._start_submitted()
                for peer in self._endpoint.wait_readable(self._readable_peers(), self._next_deadline()):
                    self._receive_from(peer)
                self._complete_sends()
                self._expire()
            self._await_greetings()
            until = time.monotonic() + _CLOSING_SECONDS
            self._send_to_all(MessageKind.GOODBYE, until)
            self._endpoint.flush(until)
        except HoopError as raised:
            error = raised
        except Exception as raised:
            error = InternalError(f"the P2P engine of this group stopped: {raised!r}")
            raise
        finally:
            self._closing = True
            for queue in (self._matcher.posted, self._sending, self._submitted):
                while queue:
                    queue.pop().on_complete(error, -1)
            with self._peers_changed:
                self._peers_changed.notify_all()

    def _await_greetings(self) -> None:
        """Waits for every live peer's HELLO before this rank leaves, ``_CLOSING_SECONDS`` in which this process runs.

        A rank that leaves before a peer's link to it is attached cannot announce its own link on it: the peer would
        take the end of that link for this rank's death.
        """
        left_s = _CLOSING_SECONDS
        while left_s > 0 and (silent := [one for one in self._live_peers() if one not in self._greeted]):
            began = time.monotonic()
            for peer in self._endpoint.wait_readable(silent, min([began + _SLICE_SECONDS, *self._suspects.values()])):
                self._receive_from(peer)
            self._expire()
            left_s -= min(time.monotonic() - began, _SLICE_SECONDS)

    def _send_to_all(self, kind: MessageKind, until: float, tag: int = 0) -> None:
        """Sends a message without contents to every peer that has not departed; one about a peer not to that peer."""
        envelope = memoryview(_ENVELOPE.pack(kind, tag, 0))
        for peer in self._live_peers():
            if kind is MessageKind.DEATH and peer == tag:
                continue
            try:
                self._endpoint.send(peer, envelope, until)
            except PeerError:
                self._suspect(peer)

    def _live_peers(self) -> list[int]:
        """Peers not known to have died or left."""
        return [
            peer for peer in range(self._endpoint.size) if peer != self._endpoint.rank and peer not in self._departed
        ]

    def _readable_peers(self) -> list[int]:
        return list(self._matcher.readable_peers(self._live_peers()))

    def _next_deadline(self) -> float:
        deadlines = [request.deadline for request in (*self._matcher.posted, *self._sending)]
        return min([*deadlines, *self._suspects.values()], default=time.monotonic() + _IDLE_SECONDS)

    def _start_submitted(self) -> None:
        while self._submitted:
            request = self._submitted.popleft()
            if request.is_send:
                self._send(request)
            elif not self._matcher.post_receive(request):
                self._fail_unreachable()

    def _send(self, request: P2PRequest) -> None:
        peer, contents = request.peer, request.data
        assert peer is not None, "a send has a destination"
        if peer == self._endpoint.rank:
            self._deliver_to_self(P2PMessage(peer, request.kind, request.tag, contents.copy()))
            request.on_complete(None, peer)
            return
        self._sending.append(request)
        if peer not in self._departed:
            parts = [memoryview(_ENVELOPE.pack(request.kind, request.tag, contents.nbytes))]
            parts += [contents.data] if contents.nbytes else []
            try:
                sent = [self._endpoint.send(peer, part, request.deadline) for part in parts]
                request.pending = [pending for pending in sent if pending is not None]
            except PeerError:
                self._suspect(peer)
        self._fail_unreachable()

    def _deliver_to_self(self, message: P2PMessage) -> None:
        request = self._matcher.match(message.peer, message.kind, message.tag)
        if request is None:
            self._matcher.add_unexpected(message)
        else:
            deliver(request, message)

    def _receive_from(self, peer: int) -> None:
        """Receives one message, directly into the memory of the posted receive that it matches."""
        until = time.monotonic() + self._timeout
        if peer in self._suspects:  # it still sends: its time starts again
            self._suspects[peer] = time.monotonic() + _SUSPECT_SECONDS
        envelope = bytearray(_ENVELOPE.size)
        request = None
        try:
            self._endpoint.recv_into(peer, memoryview(envelope), until)
            number, tag, size = _ENVELOPE.unpack(envelope)
            kind = MessageKind(number)
            self._greeted.add(peer)
            request = self._matcher.match(peer, kind, tag)
            into = request.data if request is not None and request.data.nbytes == size else empty_array(size)
            if size:
                self._endpoint.recv_into(peer, into.data, until)
        except PeerError:
            if request is not None:
                self._matcher.posted.append(request)
            self._mark_dead(peer)
            return
        if kind is MessageKind.GOODBYE:
            self._suspects.pop(peer, None)
            with self._peers_changed:
                self._departed[peer] = _LEFT
                self._peers_changed.notify_all()
            self._fail_unreachable()
        elif kind is MessageKind.DEATH:
            self._report_death(tag)
            self._fail_unreachable()
        elif request is not None:
            deliver(request, P2PMessage(peer, kind, tag, into))
        elif kind is not MessageKind.HELLO:
            self._matcher.add_unexpected(P2PMessage(peer, kind, tag, into))

    def _complete_sends(self) -> None:
        """Completes the sends whose message the link has taken whole."""
        for request in [one for one in self._sending if one.pending is not None]:
            if all(pending.done for pending in request.pending or ()):
                self._sending.remove(request)
                request.on_complete(None, -1)

    def _expire(self) -> None:
        """Declares overdue suspects dead and fails requests past their deadline."""
        now = time.monotonic()
        for peer in [peer for peer, until in self._suspects.items() if until <= now]:
            self._mark_dead(peer)
        for queue in (self._matcher.posted, self._sending):
            for request in [one for one in queue if one.deadline <= now]:
                queue.remove(request)
                request.on_complete(DeadlineExceeded(str(request)), -1)

    # ---- dead peers

    def _suspect(self, peer: int) -> None:
        """A send to a peer failed: the peer has left, and its goodbye will be read, or it is dead."""
        self._suspects.setdefault(peer, time.monotonic() + _SUSPECT_SECONDS)

    def _mark_dead(self, peer: int) -> None:
        """A peer's link ended; without a goodbye before, the peer died."""
        self._suspects.pop(peer, None)
        if peer not in self._departed:
            self._report_death(peer)
            self._departed[peer] = _DIED
        self._fail_unreachable()

    def _report_death(self, peer: int) -> None:
        """Tells all peers of a death, then this rank's group; does nothing if it is known or the peer has left."""
        if peer in self._dead or peer in self._departed or not 0 <= peer < self._endpoint.size:
            return
        if peer == self._endpoint.rank:  # a peer's link to this rank failed; that peer gives up the group
            return
        self._send_to_all(MessageKind.DEATH, time.monotonic() + _CLOSING_SECONDS, peer)
        with self._peers_changed:
            self._dead.append(peer)
            self._peers_changed.notify_all()
        self.on_peer_death(peer, _DIED)

    def _fail_unreachable(self) -> None:
        """Fails the requests whose peer has departed. A receive from any rank fails as soon as one rank has died."""
        self._complete_sends()
        alone = self._endpoint.size > 1 and not self._live_peers()
        anyone = f"{self.rank_label(self._dead[0])} {_DIED}" if self._dead else f"every other rank {_LEFT}"
        for queue in (self._matcher.posted, self._sending):
            for request in list(queue):
                if request.peer in self._departed:
                    reason = f"{self.rank_label(request.peer)} {self._departed[request.peer]}"
                elif request.peer is None and (self._dead or alone):
                    reason = anyone
                else:
                    continue
                queue.remove(request)
                request.on_complete(PeerLost(f"{request}: {reason}"), -1)
