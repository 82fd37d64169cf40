"""Messages between ranks that share memory: streams of blocks, and one place where a rank waits for several.

A rank that waits for one peer, with nothing left to hand over, sleeps at that link's own bell. Otherwise it sleeps at
its door, which is rung after every bell of its links, when a peer comes or goes, and by ``wake``; then it looks.

One rank's shared memory with the others of its host: what it makes and opens, and meetings.

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
import time
from collections.abc import Callable, Iterable, Sequence

from hoop.errors import CollectiveMismatch, HoopError, InvalidArgument, PeerLost, WrongLength
from hoop.topology import Address
from hoop.transport.base import PendingBuffers, PendingSend, SharedEndpoint, remaining
from hoop.transport.calls import Call, mismatch
from hoop.transport.semaphore import Semaphore, spins_for
from hoop.transport.shm_ring import RingReader, RingWriter
from hoop.transport.shm_segment import Bytes, ShmSegment, bells_for, levels_for, new_memory, size_for

_LENGTH = struct.Struct("<Q")


class ShmMessages(SharedEndpoint):
    """The links of an endpoint in shared memory; who makes and opens them is the next class's business."""

    _door: Semaphore
    _outgoing: dict[int, RingWriter]

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._incoming: dict[int, RingReader] = {}
        self._pending: dict[int, RingWriter] = {}
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

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        if peer not in self._incoming:
            self._await_peer(peer, deadline)
        if self._error is not None or peer in self._gone:
            raise self._error or self._departed(peer)
        link = self._outgoing[peer]
        payload = data.cast("B") if data.nbytes else data
        parts = [memoryview(_LENGTH.pack(payload.nbytes))]
        parcel = PendingBuffers([*parts, payload] if payload.nbytes else parts)
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

    def _fill(self, peer: int, link: RingReader, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            if link.waiting:
                self._await(peer, link.filled, deadline)
                if not link.opened():
                    continue
            view = link.read(view)

    def _await(self, peer: int, filled: Semaphore, deadline: float) -> None:
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

    def _flush_one(self, peer: int, link: RingWriter, deadline: float) -> None:
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


_TEXTS_S = 5.0
"""How long a rank waits for the others' calls when theirs do not match; all of them are on the way."""


class ShmEndpoint(ShmMessages):
    """One rank's shared memory with the others."""

    def __init__(
        self, communicator: int, generation: int, rank: int, peers: Sequence[Address], arena: Bytes | None
    ) -> None:
        super().__init__(communicator, generation, rank, peers)
        self.token = f"{os.getpid():08x}{os.urandom(12).hex()}"
        self.descriptor = new_memory(size_for(self.size))
        self.mailboxes = [ShmSegment(self.descriptor, self.size)] * self.size
        self.arenas = [arena] * self.size
        self._levels = levels_for(self.size)
        mine = self.mailboxes[rank]
        self._own = [
            Semaphore.create(mine.bell(index), bell_name(self.token, index))
            for index in range(bells_for(self.size))
        ]
        self._mine = [self._own[: self._levels], self._own[self._levels : 2 * self._levels]]
        self._theirs: list[dict[int, Semaphore]] = [{}, {}]
        self._steps: list[list[tuple[int, Callable[[], None], Callable[[bool], bool], Semaphore]]] = [[], []]
        """For each turn, level by level: how to ring, how to take a post, and the bell to wait for; worked out when
        everybody is there."""
        self._door = self._own[-1]
        self._outgoing = {
            peer: RingWriter(self.mailboxes[rank].blocks(peer), self._door, *self._link_bells(peer))
            for peer in range(self.size)
            if peer != rank
        }
        self._words = self._call_words()
        """For each turn: the words of all ranks' calls."""
        self._said: list[Call | None] = [None, None]
        """For each turn: the call whose word this rank has put there."""
        self._here = self.mailboxes[rank].arrived
        self._arrivals = [self._here] * self.size
        self._ready = self.size == 1
        self.meetings = 0
        self._rung = 0
        """In how many levels of a meeting it has rung that it gave up waiting in."""
        self.publications = 0

    def _link_bells(self, peer: int) -> list[Semaphore]:
        """``free`` and ``filled`` of the link to a peer."""
        first = 2 * self._levels + 2 * peer
        return self._own[first : first + 2]

    # ---- from the transport's thread

    def open(self, peer: int, token: str, descriptor: int, arena: Bytes | None) -> Callable[[], None]:
        """Opens a peer's memory and bells; what it returns puts them to use.

        The peer must be told in between: whoever uses them may have all it needs, and go, at once.
        """
        mailbox = ShmSegment(descriptor, self.size)
        mine = 2 * self._levels + 2 * self.rank
        last = 2 * self._levels + 2 * self.size

        def bell(index: int) -> Semaphore:
            return Semaphore.open(mailbox.bell(index), bell_name(token, index))

        free, filled, door = (bell(index) for index in (mine, mine + 1, last))
        levels = [level for level in range(self._levels) if (self.rank + (1 << level)) % self.size == peer]
        theirs = [{level: bell(turn * self._levels + level) for level in levels} for turn in (0, 1)]

        def use() -> None:
            with self._arrived:
                self.mailboxes[peer] = mailbox
                self.arenas[peer] = arena
                self._arrivals[peer] = mailbox.arrived
                for turn in (0, 1):
                    self._theirs[turn].update(theirs[turn])
                self._outgoing[peer].their_door = door
                self._incoming[peer] = RingReader(mailbox.blocks(self.rank), self._door, free, filled, door)
                self._arrived.notify_all()
            self._door.ring()

        return use

    def confirmed(self, peer: int) -> None:
        """A peer has opened what this rank made; when all have, the names go (where bells have names)."""
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
            for bell in (*self._mine[0], *self._mine[1], *links, self._door):
                bell.ring()
            self._arrived.notify_all()

    # ---- meeting

    def gather(self, deadline: float) -> None:
        """Waits until every peer's memory is there, and every peer has this one's: then this rank may go; once."""
        if self._ready:
            return
        with self._arrived:
            self._arrived.wait_for(
                lambda: not self._missing() or self._missing() & self._gone.keys() or self._error,
                remaining(deadline),
            )
            missing = self._missing()
        if self._error is not None:
            raise self._error
        if missing:
            gone = next((peer for peer in self._gone if peer in missing), None)
            raise self._departed(gone) if gone is not None else self.overdue(min(missing), "waiting for")
        self._steps = [
            [
                (level, self._theirs[turn][level].ring, bell.take, bell)
                for level, bell in enumerate(self._mine[turn])
            ]
            for turn in (0, 1)
        ]
        self._words = self._call_words()
        self._ready = True

    def _call_words(self) -> list[memoryview]:
        return [calls.cast("Q") for calls in self.mailboxes[0].calls]

    def _missing(self) -> set[int]:
        return {peer for peer in self._outgoing if peer not in self._incoming or peer in self._unconfirmed}

    def meet(self, deadline: float, call: Call | None = None) -> None:  # (1)
        """Returns when every rank has come; what they wrote before is there to read afterwards.

        Called again after a time-out, it goes on with the same meeting. With a call, every rank compares the words
        of all: a mismatch is found by all of them in the same meeting.
        """
        if not self._ready:
            self.gather(deadline)
        if self._troubled:
            raise self._error or self._departed(next(iter(self._gone)))
        if self._rung:
            self._take_missed(deadline)
            steps, self._rung = self._steps[self.meetings & 1][self._rung :], 0
            words = self._words[self.meetings & 1]
        else:
            self.meetings = self._here[0] = number = self.meetings + 1
            turn = number & 1
            steps, words = self._steps[turn], self._words[turn]
            if call is not None and self._said[turn] is not call:
                # An operation that is run again and again finds its word here, and no cache line changes hands.
                self._said[turn], words[self.rank] = call, call.word
        for level, ring, take, bell in steps:
            ring()
            if not take(False) and not bell.wait(deadline, self._spins):
                self._rung = level + 1
                raise self.overdue(self._absent() or 0, "waiting for")
            if self._troubled:
                self._check_all_came()
        if call is not None and words != call.words:
            raise self._mismatched(call)

    def _take_missed(self, deadline: float) -> None:
        """The post that the last call of ``meet`` gave up waiting for."""
        _, _, take, bell = self._steps[self.meetings & 1][self._rung - 1]
        if not take(False) and not bell.wait(deadline, self._spins):
            raise self.overdue(self._absent() or 0, "waiting for")
        if self._troubled:
            self._check_all_came()

    def _mismatched(self, call: Call) -> CollectiveMismatch:
        """Every rank is here, having found the same words: they tell each other their calls, and give up."""
        self.mailboxes[self.rank].call_text = call.short
        self.meet(time.monotonic() + _TEXTS_S)
        error = mismatch((self.names[rank], box.call_text) for rank, box in enumerate(self.mailboxes))
        self.abort(error)
        return error

    # ---- collectives by messages

    def begin(self, call: Call, deadline: float, resumed: bool = False) -> None:
        if not resumed:
            self.meet(deadline, call)

    def end(self) -> None:
        """Nothing: who has met runs the same."""

    def tell(self, error: CollectiveMismatch) -> None:
        """Nothing: all have found it in the same meeting."""

    def _absent(self) -> int | None:
        late = [peer for peer in range(self.size) if int(self._arrivals[peer][0]) < self.meetings]
        return late[0] if late else None

    def _check_all_came(self) -> None:
        absent = self._absent()
        if absent is not None:
            raise self._error or self._departed(absent if absent in self._gone else next(iter(self._gone)))

    # ---- ending

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._troubled = True
        self._wake(range(self.size))

    def close(self) -> None:
        self.abort(PeerLost(f"rank {self.names[self.rank]}: this endpoint is closed"))
        self._forget_names()
        with self._arrived:  # once, whoever closes: the number may be another file's by then
            descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _forget_names(self) -> None:
        own, self._own = self._own, []
        for bell in own:
            with contextlib.suppress(OSError):
                bell.unlink()


def bell_name(token: str, index: int) -> str:
    return f"/hoop-{token}-{index}"
