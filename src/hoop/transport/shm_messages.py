"""Messages between ranks that share memory: streams of blocks, and one place where a rank waits for several.

A rank that waits for one peer, with nothing left to hand over, sleeps at that link's own bell. Otherwise it sleeps at
its door, which is rung after every bell of its links, when a peer comes or goes, and by ``wake``; then it looks.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

from hoop.errors import HoopError, InvalidArgument, PeerLost, WrongLength
from hoop.topology import Address
from hoop.transport.base import Pending, SharedEndpoint, remaining
from hoop.transport.bell import Bell, spins_for
from hoop.transport.blocks import Incoming, Outgoing
from hoop.transport.parcel import Parcel

_LENGTH = struct.Struct("<Q")


class ShmMessages(SharedEndpoint):
    """The links of an endpoint in shared memory; who makes and opens them is the next class's business."""

    _door: Bell
    _outgoing: dict[int, Outgoing]

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._incoming: dict[int, Incoming] = {}
        self._pending: dict[int, Outgoing] = {}
        """Links with something still to hand over."""
        self._arrived = threading.Condition()
        """Peers that come, confirm or go."""
        self._unconfirmed = set(range(self.size)) - {rank}
        self._gone: dict[int, str] = {}
        self._error: HoopError | None = None
        self._troubled = False
        """Whether anybody is gone, or an error was told: all that the usual way looks at."""
        self._woken = False
        self._spins = spins_for(self.size)

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        if peer not in self._incoming:
            self._await_peer(peer, deadline)
        if self._error is not None or peer in self._gone:
            raise self._error or self._departed(peer)
        link = self._outgoing[peer]
        payload = data.cast("B") if data.nbytes else data
        parts = [memoryview(_LENGTH.pack(payload.nbytes))]
        parcel = Parcel([*parts, payload] if payload.nbytes else parts)
        link.queue.append(parcel)
        link.push()
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        if parcel.done:
            return None
        self._pending[peer] = link
        return parcel

    def _await_peer(self, peer: int, deadline: float) -> None:
        """Messages need no more than the memory of the two ranks that they go between."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: peer in self._incoming or peer in self._gone or self._error, remaining(deadline)
            )
        if peer not in self._incoming:
            if self._error is not None or peer in self._gone:
                raise self._error or self._departed(peer)
            raise self.overdue(peer, "waiting for")

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        if peer not in self._incoming:
            self._await_peer(peer, deadline)
        link = self._incoming[peer]
        length = bytearray(_LENGTH.size)
        self._fill(peer, link, memoryview(length), deadline)
        if (got := _LENGTH.unpack(length)[0]) != into.nbytes:
            error = WrongLength(
                f"link {self.names[peer]} -> {self.names[self.rank]} of communicator {self.communicator}: "
                f"a message of {got} bytes came, expected {into.nbytes}; do all ranks run the same operation?"
            )
            error.came = got
            raise error
        if into.nbytes:
            self._fill(peer, link, into.cast("B"), deadline)

    def _fill(self, peer: int, link: Incoming, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            if link.waiting:
                self._await(peer, link.filled, deadline)
                if not link.opened():
                    continue
            view = link.read(view)

    def _await(self, peer: int, filled: Bell, deadline: float) -> None:
        """Takes a post of ``filled``, handing over pending messages meanwhile."""
        while True:
            if self._pending:
                self._hand_over()
            gone = peer in self._gone  # before the last look: what it posted, it posted before it went
            if self._error is not None:
                raise self._error
            if filled.take(False):
                return
            if gone:
                raise self._departed(peer)
            if not self._pending and filled.wait(deadline, self._spins):
                return
            if not self._pending or not self._door.wait(deadline, self._spins):
                raise self.overdue(peer, "waiting for")

    def _hand_over(self) -> bool:
        """Whether any pending message moved on."""
        moved = False
        for peer, link in list(self._pending.items()):
            moved = link.push() or moved
            if not link.queue:
                del self._pending[peer]
        return moved

    def senders(self, peers: Sequence[int], deadline: float) -> list[int]:
        while True:
            moved = self._hand_over()
            if self._error is not None:
                raise self._error
            ready = [peer for peer in peers if self._delivered(peer)]
            for peer in [peer for peer in self._pending if peer in self._gone]:  # they take no more
                self._pending.pop(peer).queue.clear()
                ready += [peer] if peer not in ready else []
            if self._woken or moved or ready:
                self._woken = False
                return ready
            if not self._door.wait(deadline, self._spins):
                return []

    def _delivered(self, peer: int) -> bool:
        gone = peer in self._gone
        link = self._incoming.get(peer)
        return (link is not None and link.look()) or gone

    def wake(self) -> None:
        self._woken = True
        self._door.ring()

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        failed: HoopError | None = None
        for peer, link in self._outgoing.items():
            try:
                self._flush_one(peer, link, deadline)
            except HoopError as error:  # the others are to have theirs
                failed = failed or error
        if failed is not None:
            raise failed

    def _flush_one(self, peer: int, link: Outgoing, deadline: float) -> None:
        if link.used and peer in self._unconfirmed:
            self._await_confirmation(peer, deadline)
        while link.queue:
            link.push()
            if link.queue:
                if self._error is not None or peer in self._gone:
                    raise self._error or self._departed(peer)
                if not link.free.wait(deadline, self._spins):
                    raise self.overdue(peer, "handing over to")
                link.free.ring()  # it was only looked at; push takes it

    def _await_confirmation(self, peer: int, deadline: float) -> None:
        """What was sent is only safe when the receiver has hold of the memory that it is in."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: peer not in self._unconfirmed or peer in self._gone or self._error,
                remaining(deadline),
            )
        if peer in self._unconfirmed:
            if self._error is not None or peer in self._gone:
                raise self._error or self._departed(peer)
            raise self.overdue(peer, "handing over to")

    def _departed(self, peer: int) -> PeerLost:
        return PeerLost(
            f"rank {self.names[self.rank]}: {self.describe(peer)} {self._gone[peer]} "
            f"(communicator {self.communicator}, generation {self.generation})"
        )
