"""One rank's shared memory with the others of its host: messages in blocks, and meetings.

    meet: in level k rank r rings for r + 2^k and waits for r - 2^k; after log2 n levels    (1)
    everybody has heard, through others, of everybody. Each level has two bells a rank, used
    in turn: a fast rank may ring for the next meeting while a slow one is still in this one.

When a peer goes, the transport's thread says so (``lost``) and rings this rank's bells, so that whoever waits wakes
at once; what the peer had finished before it went still counts.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterable, Sequence

from hoop.errors import HoopError, InvalidArgument, LinkCorrupted, PeerLost
from hoop.topology import Address
from hoop.transport.base import Pending, SharedEndpoint, remaining
from hoop.transport.bell import Bell, spins_for
from hoop.transport.blocks import Incoming, Outgoing
from hoop.transport.mailbox import Bytes, Mailbox, new_memory, size_for
from hoop.transport.parcel import Parcel

_LENGTH = struct.Struct("<Q")
_POLL_S = 0.001
"""How often a rank that waits looks whether it can go on sending, while it has something to send."""


class ShmEndpoint(SharedEndpoint):
    """One rank's shared memory with the others."""

    def __init__(
        self, communicator: int, generation: int, rank: int, peers: Sequence[Address], arena: Bytes | None
    ) -> None:
        super().__init__(communicator, generation, rank, peers)
        self.token = f"{os.getpid():08x}{os.urandom(12).hex()}"
        self.descriptor = new_memory(size_for(self.size))
        self.mailboxes = [Mailbox(self.descriptor, self.size)] * self.size
        self.arenas = [arena] * self.size
        self._levels = (self.size - 1).bit_length()
        bells = 2 * self._levels + 2 * self.size
        self._own = [Bell.create(bell_name(self.token, index)) for index in range(bells)]
        self._mine = [self._own[: self._levels], self._own[self._levels : 2 * self._levels]]
        self._theirs: list[dict[int, Bell]] = [{}, {}]
        self._outgoing = {
            peer: Outgoing(self.mailboxes[rank].blocks(peer), *self._link_bells(peer))
            for peer in range(self.size)
            if peer != rank
        }
        self._incoming: dict[int, Incoming] = {}
        self._arrivals = [self.mailboxes[rank].arrived] * self.size
        self._arrived = threading.Condition()
        self._gone: dict[int, str] = {}
        self._troubled = False
        """Whether anybody is gone, or an error was told: all that the usual way looks at."""
        self._error: HoopError | None = None
        self._unconfirmed = set(range(self.size)) - {rank}
        self._spins = spins_for(self.size)
        self._ready = self.size == 1
        self.meetings = 0
        self.publications = 0

    def _link_bells(self, peer: int) -> list[Bell]:
        """``free`` and ``filled`` of the link to a peer."""
        first = 2 * self._levels + 2 * peer
        return self._own[first : first + 2]

    # ---- from the transport's thread

    def attach(self, peer: int, token: str, descriptor: int, arena: Bytes | None) -> None:
        """A peer's memory and bells."""
        mailbox = Mailbox(descriptor, self.size)
        mine = 2 * self._levels + 2 * self.rank
        free, filled = (Bell.open(bell_name(token, index)) for index in (mine, mine + 1))
        levels = [level for level in range(self._levels) if (self.rank + (1 << level)) % self.size == peer]
        theirs = [
            {level: Bell.open(bell_name(token, turn * self._levels + level)) for level in levels}
            for turn in (0, 1)
        ]
        with self._arrived:
            self.mailboxes[peer] = mailbox
            self.arenas[peer] = arena
            self._arrivals[peer] = mailbox.arrived
            for turn in (0, 1):
                self._theirs[turn].update(theirs[turn])
            self._incoming[peer] = Incoming(mailbox.blocks(self.rank), free, filled)
            self._arrived.notify_all()

    def confirmed(self, peer: int) -> None:
        """A peer has opened what this rank made; when all have, the names go."""
        with self._arrived:
            self._unconfirmed.discard(peer)
            self._arrived.notify_all()
        if not self._unconfirmed:
            self._forget_names()

    def lost(self, peer: int, why: str) -> None:
        self._gone.setdefault(peer, why)
        self._troubled = True
        self._wake([peer])

    def _wake(self, peers: Iterable[int]) -> None:
        """Posts that nobody made, for whoever waits for these peers: it looks why, and finds an error."""
        with self._arrived:
            links = [self._incoming[peer].filled for peer in peers if peer in self._incoming]
            links += [self._outgoing[peer].free for peer in peers if peer in self._outgoing]
            for bell in (*self._mine[0], *self._mine[1], *links):
                bell.ring()
            self._arrived.notify_all()

    # ---- meeting

    def gather(self, deadline: float) -> None:
        """Waits until every peer's memory is there; once."""
        if self._ready:
            return
        with self._arrived:
            self._arrived.wait_for(
                lambda: len(self._incoming) == self.size - 1 or self._gone or self._error, remaining(deadline)
            )
            missing = [peer for peer in range(self.size) if peer != self.rank and peer not in self._incoming]
        if self._error is not None:
            raise self._error
        if missing:
            gone = next((peer for peer in missing if peer in self._gone), None)
            raise self._departed(gone) if gone is not None else self.overdue(missing[0], "waiting for")
        self._ready = True

    def meet(self, deadline: float) -> None:  # (1)
        """Returns when every rank has come; what they wrote before is there to read afterwards."""
        if not self._ready:
            self.gather(deadline)
        if self._troubled:
            raise self._error or self._departed(next(iter(self._gone)))
        self.meetings = meetings = self.meetings + 1
        turn = meetings & 1
        self._arrivals[self.rank][0] = meetings
        theirs, spins = self._theirs[turn], self._spins
        for level, bell in enumerate(self._mine[turn]):
            theirs[level].ring()
            if not bell.take(False) and not bell.wait(deadline, spins):
                raise self.overdue(self._absent() or 0, "waiting for")
            if self._troubled:
                self._check_all_came()
        if self._troubled:
            self._check_all_came()

    def _absent(self) -> int | None:
        late = [peer for peer in range(self.size) if int(self._arrivals[peer][0]) < self.meetings]
        return late[0] if late else None

    def _check_all_came(self) -> None:
        absent = self._absent()
        if absent is not None:
            raise self._error or self._departed(absent if absent in self._gone else next(iter(self._gone)))

    def _departed(self, peer: int) -> PeerLost:
        return PeerLost(
            f"rank {self.rank}: {self.describe(peer)} {self._gone[peer]} "
            f"(communicator {self.communicator}, generation {self.generation})"
        )

    # ---- messages

    def send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        self.gather(deadline)
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
        return None if parcel.done else parcel

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        self.gather(deadline)
        link = self._incoming[peer]
        length = bytearray(_LENGTH.size)
        self._fill(peer, link, memoryview(length), deadline)
        if (got := _LENGTH.unpack(length)[0]) != into.nbytes:
            raise LinkCorrupted(
                f"link {peer} -> {self.rank} of communicator {self.communicator}: a message of {got} bytes came, "
                f"expected {into.nbytes}; do all ranks run the same operation?"
            )
        if into.nbytes:
            self._fill(peer, link, into.cast("B"), deadline)

    def _fill(self, peer: int, link: Incoming, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            if link.waiting:
                self._await(peer, link.filled, deadline, "waiting for")
                if not link.opened():
                    if self._error is not None or peer in self._gone:
                        raise self._error or self._departed(peer)
                    continue
            view = link.read(view)

    def _await(self, peer: int, bell: Bell, deadline: float, doing: str) -> None:
        """Takes a post of ``bell``, handing over pending messages meanwhile."""
        while True:
            sending = False
            for link in self._outgoing.values():
                if link.queue:
                    link.push()
                    sending = sending or bool(link.queue)
            if self._error is not None:
                raise self._error
            until = min(deadline, deadline - remaining(deadline) + _POLL_S) if sending else deadline
            if bell.take(False) or bell.wait(until, self._spins):
                return
            if until == deadline:
                raise self.overdue(peer, doing)

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        for peer, link in self._outgoing.items():
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

    # ---- ending

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._troubled = True
        self._wake(range(self.size))

    def close(self) -> None:
        self.abort(PeerLost(f"rank {self.rank}: this endpoint is closed"))
        self._forget_names()
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _forget_names(self) -> None:
        own, self._own = self._own, []
        for bell in own:
            with contextlib.suppress(OSError):
                bell.unlink()


def bell_name(token: str, index: int) -> str:
    return f"/hoop-{token}-{index}"
