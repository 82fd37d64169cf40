"""Which message is for whom: by sender and tag, in the order in which they were sent and asked for.

Nothing here moves bytes or waits, so it can be tested without links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from hoop.errors import HoopError, InvalidArgument
from hoop.torch_backend.tensors import Array
from hoop.transport import Pending

SHELF_BYTES = 64 * 1024 * 1024
"""Unasked messages that are kept for a peer before it has to wait."""

Ended = Callable[[HoopError | None, int], None]
"""Called once a request is over: with an error or none, and the sender's rank."""


class Kind(IntEnum):
    """What a message is for."""

    HELLO = 0
    MESSAGE = 1
    BARRIER = 2
    """Of a monitored barrier: its tags are its own."""
    GOODBYE = 3


@dataclass(eq=False)
class Request:
    """A message that someone sends or waits for; ``peer`` is None for any."""

    sends: bool
    peer: int | None
    kind: Kind
    tag: int
    data: Array
    owner: object
    """Whose memory the data is; kept for as long as the request."""
    deadline: float
    ended: Ended
    pending: list[Pending] | None = None
    """Of a send: what the link has not taken yet; None before it is sent."""

    def __str__(self) -> str:
        doing = "sending to" if self.sends else "waiting for a message from"
        whom = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{doing} {whom} (tag {self.tag}, {self.data.nbytes} bytes)"


@dataclass(eq=False)
class Message:
    """What a peer sent."""

    peer: int
    kind: Kind
    tag: int
    data: Array


class Matching:
    """Requests that wait for a message, and messages that nobody has asked for yet."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self._shelf: list[Message] = []

    def ask(self, request: Request) -> bool:
        """Serves a request from the shelf, or lets it wait; whether it is served."""
        for message in self._shelf:
            if _fits(request, message.peer, message.kind, message.tag):
                self._shelf.remove(message)
                hand_over(request, message)
                return True
        self.waiting.append(request)
        return False

    def claim(self, peer: int, kind: Kind, tag: int) -> Request | None:
        """The request that a message of this sender and tag is for; it waits no longer."""
        for request in self.waiting:
            if _fits(request, peer, kind, tag):
                self.waiting.remove(request)
                return request
        return None

    def keep(self, message: Message) -> None:
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


def _fits(request: Request, peer: int, kind: Kind, tag: int) -> bool:
    return request.peer in (None, peer) and request.kind is kind and request.tag == tag


def hand_over(request: Request, message: Message) -> None:
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
