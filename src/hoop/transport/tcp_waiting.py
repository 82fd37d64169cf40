"""Where a rank waits for its TCP links, and what it does meanwhile: it hands over what is left to send.

All sockets are non-blocking, and ``_poll`` is the only place that sleeps. It watches the links that are awaited,
every link with bytes still to hand over, and the bell that ``wake``, ``abort``, ``close`` and the arrival of a new
incoming link ring.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from hoop.errors import CollectiveMismatch, HoopError, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.base import Endpoint, remaining
from hoop.transport.bell import spins_for
from hoop.transport.calls import Call
from hoop.transport.kept import PIECE_BYTES
from hoop.transport.tcp_calls import CallCheck
from hoop.transport.tcp_sockets import GAVE_UP, Incoming, Outgoing
from hoop.transport.watch import LinkWatch
from hoop.wire.frames import Kind

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
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._pending: dict[int, Outgoing] = {}
        """Links with something still to hand over."""
        self._error: HoopError | None = None
        self.watch = LinkWatch(self._moved)
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

    def _await_bytes(self, peer: int, link: Incoming, deadline: float) -> None:
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
            if words is None or words[0].kind != Kind.GOODBYE or not words[0].sequence or link.queue:
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
                found = [peer for peer, link in links.items() if isinstance(link, Incoming) and link.ahead]
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
        if words is not None and words[0].kind == Kind.REFUSAL:
            return MembershipChanged(f"rank {self.rank}: {self.describe(peer)} refused the link: {words[1]}")
        if words is not None and words[0].kind == Kind.MISMATCH:
            return CollectiveMismatch(words[1])
        if words is None and (found := self.calls.ended_by(peer)) is not None:
            return self._error or found
        if words is None and error is not None:
            self.watch.failed = peer
        gave_up = words is not None and words[1].startswith(GAVE_UP)
        why = f", {words[1]}" if words and gave_up else f" ({error.strerror})" if error else ""
        where = f"communicator {self.communicator}, generation {self.generation}"
        return PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its link{why} ({where})")


def _only_talks(link: Outgoing | Incoming | None) -> bool:
    """Whether the other end of an outgoing link has said what it received, or not; and has not gone."""
    if not isinstance(link, Outgoing):
        return False
    link.hear()
    return link.again or not link.over
