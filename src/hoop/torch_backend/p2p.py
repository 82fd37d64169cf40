"""Which message is for whom: by sender and tag, in the order in which they were sent and asked for.

Nothing here moves bytes or waits, so it can be tested without links.

Messages between two ranks, and the watch over all of them.

    send ─▶ requests ─▶ the post's thread ─▶ envelope, contents ─▶ the peer's post
    recv ─▶ requests ─▶ the post's thread ─▶ matched with what has come, or waits

One thread a group owns these links, so a receive that waits never keeps a send from going out. It also watches every
peer: a link that ends without a goodbye is a rank that died, and the group learns of it at once.
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
from hoop.torch_backend.tensor_views import Array, sized
from hoop.transport import Endpoint, PendingSend

SHELF_BYTES = 64 * 1024 * 1024
"""Unasked messages that are kept for a peer before it has to wait."""

Ended = Callable[[HoopError | None, int], None]
"""Called once a request is over: with an error or none, and the sender's rank."""


class MessageKind(IntEnum):
    """What a message is for."""

    HELLO = 0
    MESSAGE = 1
    BARRIER = 2
    """Of a monitored barrier: its tags are its own."""
    GOODBYE = 3


@dataclass(eq=False)
class P2PRequest:
    """A message that someone sends or waits for; ``peer`` is None for any."""

    sends: bool
    peer: int | None
    kind: MessageKind
    tag: int
    data: Array
    owner: object
    """Whose memory the data is; kept for as long as the request."""
    deadline: float
    ended: Ended
    pending: list[PendingSend] | None = None
    """Of a send: what the link has not taken yet; None before it is sent."""

    def __str__(self) -> str:
        doing = "sending to" if self.sends else "waiting for a message from"
        whom = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{doing} {whom} (tag {self.tag}, {self.data.nbytes} bytes)"


@dataclass(eq=False)
class P2PMessage:
    """What a peer sent."""

    peer: int
    kind: MessageKind
    tag: int
    data: Array


class TagMatcher:
    """Requests that wait for a message, and messages that nobody has asked for yet."""

    def __init__(self) -> None:
        self.waiting: list[P2PRequest] = []
        self._shelf: list[P2PMessage] = []

    def ask(self, request: P2PRequest) -> bool:
        """Serves a request from the shelf, or lets it wait; whether it is served."""
        for message in self._shelf:
            if _fits(request, message.peer, message.kind, message.tag):
                self._shelf.remove(message)
                hand_over(request, message)
                return True
        self.waiting.append(request)
        return False

    def claim(self, peer: int, kind: MessageKind, tag: int) -> P2PRequest | None:
        """The request that a message of this sender and tag is for; it waits no longer."""
        for request in self.waiting:
            if _fits(request, peer, kind, tag):
                self.waiting.remove(request)
                return request
        return None

    def keep(self, message: P2PMessage) -> None:
        """Nobody waits for it: onto the shelf."""
        self._shelf.append(message)

    def listened(self, peers: Iterable[int]) -> Iterator[int]:
        """Those to hear: with room on their shelf, or waited for."""
        held: dict[int, int] = {}
        for message in self._shelf:
            held[message.peer] = held.get(message.peer, 0) + message.data.nbytes
        wanted = {request.peer for request in self.waiting}
        for peer in peers:
            if held.get(peer, 0) < SHELF_BYTES or peer in wanted or None in wanted:
                yield peer


def _fits(request: P2PRequest, peer: int, kind: MessageKind, tag: int) -> bool:
    return request.peer in (None, peer) and request.kind is kind and request.tag == tag


def hand_over(request: P2PRequest, message: P2PMessage) -> None:
    """Gives a message to who asked for it, unless the sizes differ."""
    if request.data.nbytes != message.data.nbytes:
        error = InvalidArgument(
            f"rank {message.peer} sent {message.data.nbytes} bytes with tag {message.tag}, "
            f"the tensor to receive them has {request.data.nbytes}"
        )
        request.ended(error, message.peer)
        return
    if request.data is not message.data:
        request.data[:] = message.data
    request.ended(None, message.peer)


_ENVELOPE = struct.Struct("<QqQ")  # kind, tag, bytes of contents
_CLOSING_SECONDS = 5.0
_DOUBT_SECONDS = 1.0
"""How long a peer that takes no messages may still be heard of: it may have left, with its goodbye under way."""
_IDLE_SECONDS = 3600.0
_DIED = "is gone: its process ended without leaving the group"
_LEFT = "has left the group"
_OVER = "this process group is destroyed"


class P2PEngine:
    """One rank's post in one group."""

    def __init__(self, endpoint: Endpoint, name: str, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout
        self._dead: list[int] = []
        self._absent: dict[int, str] = {}
        self._doubted: dict[int, float] = {}
        self.on_death: Callable[[int, str], None] = lambda peer, why: None
        self.named: Callable[[int], str] = lambda peer: f"rank {peer}"
        self._news = threading.Condition()
        self._requests: deque[P2PRequest] = deque()
        self._matching = TagMatcher()
        self._leaving: list[P2PRequest] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"{name}-post", daemon=True)

    def open(self) -> None:
        """Greets every peer, so that each can watch the other, and begins to work."""
        self._thread.start()

    # ---- from any thread

    def request(self, request: P2PRequest) -> None:
        """Starts a send or a receive; it ends on the post's thread."""
        if self._closing:
            raise PeerLost(_OVER)
        self._requests.append(request)
        self._endpoint.wake()

    def first_absent(self, seconds: float) -> tuple[int, str] | None:
        """The rank that died first, or else left first, and which of the two; waits a moment for news of a death.

        Who leaves in the middle of something may have heard of it before this rank has.
        """
        with self._news:
            self._news.wait_for(lambda: self._dead or self._closing, seconds)
            first = self._dead[0] if self._dead else next(iter(self._absent), None)
            return None if first is None else (first, self._absent[first])

    def close(self) -> None:
        """Says goodbye to every peer and ends."""
        self._closing = True
        self._endpoint.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _CLOSING_SECONDS)
        self._endpoint.close()

    # ---- the post's thread

    def _work(self) -> None:
        error: HoopError = PeerLost(_OVER)
        try:
            self._tell_all(MessageKind.HELLO)
            while not self._closing:
                self._accept_requests()
                for peer in self._endpoint.senders(self._listened(), self._next_deadline()):
                    self._hear(peer)
                self._see_off()
                self._expire()
            self._tell_all(MessageKind.GOODBYE)
            self._endpoint.flush(time.monotonic() + _CLOSING_SECONDS)
        except HoopError as raised:
            error = raised
        except Exception as raised:
            error = InternalError(f"the post of this group stopped: {raised!r}")
            raise
        finally:
            self._closing = True
            for queue in (self._matching.waiting, self._leaving, self._requests):
                while queue:
                    queue.pop().ended(error, -1)
            with self._news:
                self._news.notify_all()

    def _tell_all(self, kind: MessageKind) -> None:
        envelope = memoryview(_ENVELOPE.pack(kind, 0, 0))
        until = time.monotonic() + (_CLOSING_SECONDS if kind is MessageKind.GOODBYE else self._timeout)
        for peer in self._present():
            try:
                self._endpoint.send(peer, envelope, until)
            except PeerError:
                self._doubt(peer)

    def _present(self) -> list[int]:
        """Peers that are there, as far as is known."""
        return [
            peer
            for peer in range(self._endpoint.size)
            if peer != self._endpoint.rank and peer not in self._absent
        ]

    def _listened(self) -> list[int]:
        return list(self._matching.listened(self._present()))

    def _next_deadline(self) -> float:
        deadlines = [request.deadline for request in (*self._matching.waiting, *self._leaving)]
        return min([*deadlines, *self._doubted.values()], default=time.monotonic() + _IDLE_SECONDS)

    def _accept_requests(self) -> None:
        while self._requests:
            request = self._requests.popleft()
            if request.sends:
                self._send(request)
            elif not self._matching.ask(request):
                self._end_hopeless()

    def _send(self, request: P2PRequest) -> None:
        peer, contents = request.peer, request.data
        assert peer is not None, "a message goes to somebody"
        if peer == self._endpoint.rank:
            self._deliver(P2PMessage(peer, request.kind, request.tag, contents.copy()))
            request.ended(None, peer)
            return
        self._leaving.append(request)
        if peer not in self._absent:
            parts = [memoryview(_ENVELOPE.pack(request.kind, request.tag, contents.nbytes))]
            parts += [contents.data] if contents.nbytes else []
            try:
                sent = [self._endpoint.send(peer, part, request.deadline) for part in parts]
                request.pending = [pending for pending in sent if pending is not None]
            except PeerError:
                self._doubt(peer)
        self._end_hopeless()

    def _deliver(self, message: P2PMessage) -> None:
        request = self._matching.claim(message.peer, message.kind, message.tag)
        if request is None:
            self._matching.keep(message)
        else:
            hand_over(request, message)

    def _hear(self, peer: int) -> None:
        """Takes one message from a peer, straight into the memory of whoever waits for it."""
        until = time.monotonic() + self._timeout
        if peer in self._doubted:  # it is heard of: doubt begins anew
            self._doubted[peer] = time.monotonic() + _DOUBT_SECONDS
        envelope = bytearray(_ENVELOPE.size)
        request = None
        try:
            self._endpoint.recv_into(peer, memoryview(envelope), until)
            number, tag, size = _ENVELOPE.unpack(envelope)
            kind = MessageKind(number)
            request = self._matching.claim(peer, kind, tag)
            into = request.data if request is not None and request.data.nbytes == size else sized(size)
            if size:
                self._endpoint.recv_into(peer, into.data, until)
        except PeerError:
            if request is not None:
                self._matching.waiting.append(request)
            self._lose(peer)
            return
        if kind is MessageKind.GOODBYE:
            self._doubted.pop(peer, None)
            with self._news:
                self._absent[peer] = _LEFT
                self._news.notify_all()
            self._end_hopeless()
        elif request is not None:
            hand_over(request, P2PMessage(peer, kind, tag, into))
        elif kind is not MessageKind.HELLO:
            self._matching.keep(P2PMessage(peer, kind, tag, into))

    def _see_off(self) -> None:
        """Ends the sends whose message the link has taken."""
        for request in [one for one in self._leaving if one.pending is not None]:
            if all(pending.done for pending in request.pending or ()):
                self._leaving.remove(request)
                request.ended(None, -1)

    def _doubt(self, peer: int) -> None:
        """A peer takes no messages: it has left, and its own link will say so, or it is dead."""
        self._doubted.setdefault(peer, time.monotonic() + _DOUBT_SECONDS)

    def _expire(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer, until in self._doubted.items() if until <= now]:
            self._lose(peer)
        for queue in (self._matching.waiting, self._leaving):
            for request in [one for one in queue if one.deadline <= now]:
                queue.remove(request)
                request.ended(DeadlineExceeded(str(request)), -1)

    def _lose(self, peer: int) -> None:
        """A peer's link is gone; if it had not said goodbye, it died."""
        self._doubted.pop(peer, None)
        if peer not in self._absent:
            with self._news:
                self._absent[peer] = _DIED
                self._dead.append(peer)
                self._news.notify_all()
            self.on_death(peer, _DIED)
        self._end_hopeless()

    def _end_hopeless(self) -> None:
        """Ends the requests that nobody is left to serve; from any rank means from the dead one too."""
        self._see_off()
        alone = self._endpoint.size > 1 and not self._present()
        anyone = f"{self.named(self._dead[0])} {_DIED}" if self._dead else f"every other rank {_LEFT}"
        for queue in (self._matching.waiting, self._leaving):
            for request in list(queue):
                if request.peer in self._absent:
                    why = f"{self.named(request.peer)} {self._absent[request.peer]}"
                elif request.peer is None and (self._dead or alone):
                    why = anyone
                else:
                    continue
                queue.remove(request)
                request.ended(PeerLost(f"{request}: {why}"), -1)
