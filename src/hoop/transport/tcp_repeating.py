"""A message that a link has changed is sent again.

    rank r   outgoing[p] ── CHECKED 5, 6, 7 ──▶ incoming[r]   rank p     (1) the sender keeps copies
                         ◀── RECEIVED 6 ───────                          (2) 5 has come as it was sent: forgotten
                         ◀── AGAIN 6 ──────────                          (3) 6 has not: its checksum does not hold
             outgoing[p] ── HELLO, CHECKED 6, 7 ──▶ incoming[r]          (4) on a new connection

Nothing that follows on the old connection is looked at: where a header was hit, nobody knows where the next begins.
Confirmations wake nobody: whoever waits for its links looks now and then, and the transport's thread does so
for whoever computes. Before an endpoint closes it stays until what it sent is confirmed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from hoop.errors import HoopError, LinkCorrupted
from hoop.topology import Address
from hoop.transport.base import remaining
from hoop.transport.kept import Message, Piece
from hoop.transport.tcp_sockets import Incoming, Outgoing
from hoop.transport.tcp_waiting import TcpWaiting
from hoop.wire.frames import Header, Kind

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

    def _dial(self, peer: int, deadline: float) -> Outgoing:
        raise NotImplementedError

    def _tell(self, text: str) -> None:
        """Something was damaged; the transport knows who wants to hear of it."""

    # ---- the sender

    def _checked(self, link: Outgoing, payload: memoryview) -> Message:
        """A message whose pieces have checksums, and are kept until they are confirmed."""
        return Message(payload, partial(self._cut, link, self.calls.stamp), self._busy)

    def _cut(self, link: Outgoing, stamp: int, payload: memoryview, more: bool) -> Piece:
        assert self._checksum is not None, "only with checksums"
        assert link.kept is not None, "only with checksums"
        kept = link.kept
        if len(kept) >= KEPT_PIECES:
            link.hear()
        copy = kept.copy(payload)
        place = (self.communicator, self.generation, self.rank, link.sequence)
        kind = Kind.PART if more else Kind.CHECKED
        header = Header(kind, *place, len(copy), self._checksum(memoryview(copy)), stamp).pack()
        link.sequence += 1
        return kept.keep(Piece(link.sequence - 1, header, copy))

    def _listen(self) -> float:
        sleeps = inf
        for peer, link in list(self._outgoing.items()):
            if link.kept:
                sleeps = LOOK_S
                link.hear()
                if link.again:
                    self._repeat(peer, link)
        return sleeps

    def _repeat(self, peer: int, link: Outgoing) -> None:
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
        fresh.queue += [one for one in link.queue if isinstance(one, Message) and one.leave_to()]
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

    def _verify(self, peer: int, link: Incoming, header: Header, payload: memoryview) -> None:
        """Confirms what is as it was sent."""
        if self._checksum is not None and self._checksum(payload) != header.checksum:
            raise Damaged(
                f"{self._link_from(peer)}: message {header.sequence} of {header.length} bytes is not what was sent"
            )
        link.confirmed = link.sequence
        with contextlib.suppress(OSError):  # (2), or the next one confirms this one as well
            link.sock.send(self._said(Kind.RECEIVED, link.sequence))

    def _said(self, kind: Kind, sequence: int) -> bytes:
        return Header(kind, self.communicator, self.generation, self.rank, sequence, 0).pack()

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
            link.sock.send(3 * self._said(Kind.AGAIN, due))

    def _resume(self, peer: int, link: Incoming) -> None:
        """A connection that follows one that changed something goes on where that one was right."""
        if peer in self._given_up:
            self._given_up.pop(peer).close()
            link.sequence = link.confirmed = self._asked[peer][0]
