"""One rank's endpoint among the ranks of its host: shared memory, messages through it, and barriers.

Messages are byte streams through rings of blocks (``shm_ring``). A rank that waits for one peer and has no pending
messages waits for that link's own semaphore. Otherwise it waits for its activity semaphore, which is posted after every
semaphore of its links, when a peer connects or is lost, and by ``wake``; then it checks its links.

    barrier: in round k rank r posts for rank r + 2^k and waits for rank r - 2^k. After log2 n       (1)
    rounds a post from every rank has reached every rank, directly or through others. Each round has two
    semaphores per rank, used in alternation: a fast rank may post for the next barrier while a
    slow one is still in this one.

When a peer is lost, the listener's thread calls ``mark_lost``, which posts this rank's semaphores, so that a waiting
thread wakes at once. Posts that the peer made before are still acquired first. A barrier that all ranks have entered is
completed, also if it is resumed after the loss; the next one fails.

A rank that reads a peer's memory may be stopped (SIGSTOP) meanwhile, and its peers go on without it: they close their
endpoints, and change their memory. When it continues, its listener's thread may notice too late. So a rank that closes
its endpoint first says so in the segments of its peers, and a rank looks in its own after it has read: in
``verify_reads``, and before it enters a barrier.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from hoop.errors import CollectiveMismatch, HoopError, InvalidArgument, PeerLost, WrongLength
from hoop.native import library as native_library
from hoop.topology import Address
from hoop.transport.base import PendingBuffers, PendingSend, SharedEndpoint, WaitingWork, remaining
from hoop.transport.call_check import Call, mismatch_error
from hoop.transport.native_barrier import NativeBarrier
from hoop.transport.semaphore import SEMAPHORE_BYTES, Semaphore, in_segment, spins_before_yield
from hoop.transport.shm_ring import RingReader, RingWriter
from hoop.transport.shm_segment import (
    PAGE,
    Bytes,
    ShmSegment,
    barrier_rounds,
    create_shared_memory,
    map_bytes,
    segment_bytes,
    semaphore_count,
)

_LENGTH = struct.Struct("<Q")
_TEXTS_TIMEOUT_S = 5.0
"""How long a rank waits for its peers' texts after fingerprints differed; all of them are in the same barrier."""
_MAX_SLEEP_S = 0.05
"""Longest sleep in the native core, after which Python handles signals and the deadline."""


class ShmEndpoint(SharedEndpoint):
    """One rank's shared memory with the other ranks of its host.

    Its semaphores, by index: the rounds of even barriers, the rounds of odd ones, ``free`` and ``filled`` of the link
    to each peer, and its activity semaphore.
    """

    def __init__(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        arena: Bytes | None,
        on_close: Callable[[ShmEndpoint], None],
    ) -> None:
        """``arena``: this rank's device memory, if it shares it. ``on_close``: called by ``close`` before it closes."""
        super().__init__(communicator, generation, rank, peers)
        self._on_close = on_close
        self._error: HoopError | None = None
        self._lost_peers: dict[int, str] = {}
        """Lost peers, with the reason."""
        self._failed = False
        """Whether a peer is lost or this endpoint was aborted: the only check on the fast path."""
        self._peers_changed = threading.Condition()
        """Notified when a peer connects, confirms or is lost."""
        self._unconfirmed = set(range(self.size)) - {rank}
        """Peers that have not opened this rank's memory yet."""
        self._awaited: Sequence[int] = ()
        """Peers whose messages or memory this rank waits for."""
        self._woken = False
        self._spins = spins_before_yield(self.size)

        self.token = f"{os.getpid():08x}{os.urandom(12).hex()}"
        self.descriptor = create_shared_memory(segment_bytes(self.size))
        self.segments = [ShmSegment(self.descriptor, self.size)] * self.size
        self.arenas = [arena] * self.size
        self._publish_count = 0
        own_segment = self.segments[rank]
        self._library = native_library.load() if in_segment() else None
        own_segment.native_identity[0] = self._library.identity if self._library is not None else 0
        self._own_semaphores = [
            Semaphore.create(own_segment.semaphore_place(index), semaphore_name(self.token, index))
            for index in range(semaphore_count(self.size))
        ]
        self._activity = self._own_semaphores[-1]

        rounds = self._rounds = barrier_rounds(self.size)
        self._own_round_semaphores = [self._own_semaphores[:rounds], self._own_semaphores[rounds : 2 * rounds]]
        self._peer_round_semaphores: list[dict[int, Semaphore]] = [{}, {}]
        """For each turn, by round: the semaphore that this rank posts."""
        self._steps: list[list[tuple[int, Callable[[], None], Callable[[bool], bool], Semaphore]]] = [[], []]
        """For each turn, round by round: the round, the function that posts, the function that acquires, and the
        semaphore to wait for; filled in when every peer is connected."""
        self._fingerprints = self._call_fingerprints()
        """For each turn: the fingerprints of all ranks' calls."""
        self._written_calls: list[Call | None] = [None, None]
        """For each turn: the call whose fingerprint this rank wrote last."""
        self._own_barrier_count = own_segment.barrier_count
        self._barrier_counts = [self._own_barrier_count] * self.size
        """By rank: how many barriers it has entered, in its segment."""
        self._peer_left = own_segment.peer_left
        self._ready = self.size == 1
        self._barriers = 0
        """How many barriers this rank has entered."""
        self._posted_rounds = 0
        """If the last barrier timed out: in how many of its rounds this rank has posted. Else 0."""

        self._incoming: dict[int, RingReader] = {}
        self._outgoing = {peer: self._writer_to(peer) for peer in range(self.size) if peer != rank}
        self._pending: dict[int, RingWriter] = {}
        """Outgoing links with unsent bytes."""

    def _writer_to(self, peer: int) -> RingWriter:
        first = 2 * self._rounds + 2 * peer
        return RingWriter(
            self.segments[self.rank].ring_blocks(peer),
            activity=self._activity,
            free=self._own_semaphores[first],
            filled=self._own_semaphores[first + 1],
        )

    def _call_fingerprints(self) -> list[memoryview]:
        return [row.cast("Q") for row in self.segments[0].call_fingerprints]

    # ---- connecting, from the listener's thread

    def open(self, peer: int, token: str, descriptor: int, arena: Bytes | None) -> Callable[[], None]:
        """Opens a peer's memory and semaphores; returns a function that puts them to use.

        The caller must send the confirmation to the peer in between: once they are in use, this rank may finish its
        work and exit at any moment.
        """
        segment = ShmSegment(descriptor, self.size)
        link = 2 * self._rounds + 2 * self.rank
        last = 2 * self._rounds + 2 * self.size

        def semaphore(index: int) -> Semaphore:
            return Semaphore.open(segment.semaphore_place(index), semaphore_name(token, index))

        free, filled, activity = (semaphore(index) for index in (link, link + 1, last))
        rounds = [k for k in range(self._rounds) if (self.rank + (1 << k)) % self.size == peer]
        by_turn = [{k: semaphore(turn * self._rounds + k) for k in rounds} for turn in (0, 1)]

        def use() -> None:
            with self._peers_changed:
                self.segments[peer] = segment
                self.arenas[peer] = arena
                self._barrier_counts[peer] = segment.barrier_count
                for turn in (0, 1):
                    self._peer_round_semaphores[turn].update(by_turn[turn])
                self._outgoing[peer].peer_activity = activity
                self._incoming[peer] = RingReader(
                    segment.ring_blocks(self.rank), self._activity, free, filled, peer_activity=activity
                )
                self._peers_changed.notify_all()
            self._activity.post()

        return use

    def confirm_opened(self, peer: int) -> None:
        """Called when a peer has opened this rank's memory; after the last one the semaphores' names are removed."""
        with self._peers_changed:
            self._unconfirmed.discard(peer)
            self._peers_changed.notify_all()
        if not self._unconfirmed:
            self._unlink_semaphores()

    def mark_lost(self, peer: int, reason: str) -> None:
        self._lost_peers.setdefault(peer, reason)
        self._set_failed()
        self._wake_waits([peer])

    def _set_failed(self) -> None:
        self._failed = True
        if self.native is not None:
            self.native.state.failed = 1

    def _wake_waits(self, peers: Iterable[int]) -> None:
        """Posts every semaphore on which this rank may wait for these peers; a waiting thread then finds the error."""
        with self._peers_changed:
            links = [self._incoming[peer].filled for peer in peers if peer in self._incoming]
            for peer in [peer for peer in peers if peer in self._outgoing]:
                self._outgoing[peer].stopped = True
                links.append(self._outgoing[peer].free)
            for semaphore in (*self._own_round_semaphores[0], *self._own_round_semaphores[1], *links, self._activity):
                semaphore.post()
            if self.native is not None:
                self.native.wake()
            self._peers_changed.notify_all()

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a rank cannot send a message to itself")
        if peer not in self._incoming:
            self._wait_for_peer(peer, deadline)
        if self._error is not None or peer in self._lost_peers:
            raise self._error or self._peer_lost(peer)
        link = self._outgoing[peer]
        payload = data.cast("B") if data.nbytes else data
        parts = [memoryview(_LENGTH.pack(payload.nbytes))]
        message = PendingBuffers([*parts, payload] if payload.nbytes else parts)
        link.queue.append(message)
        link.push()
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        if message.done:
            return None
        self._pending[peer] = link
        return message

    def _wait_for_peer(self, peer: int, deadline: float) -> None:
        """Waits for one peer's memory only: messages need no other rank."""
        self._wait_for_change(
            [peer], lambda: peer in self._incoming or peer in self._lost_peers or self._error, deadline
        )
        if peer not in self._incoming:
            if self._error is not None or peer in self._lost_peers:
                raise self._error or self._peer_lost(peer)
            raise self.deadline_exceeded(peer, "waiting for")

    def _wait_for_change(self, peers: Sequence[int], changed: Callable[[], object], deadline: float) -> None:
        """Waits for something that peers do while they connect, until the deadline."""
        self._awaited = peers
        try:
            with self._peers_changed:
                self._peers_changed.wait_for(changed, remaining(deadline))
        finally:
            self._awaited = ()

    def _push_pending(self) -> bool:
        """Gives every link with unsent bytes a turn; whether one accepted any."""
        moved = False
        for peer, link in list(self._pending.items()):
            moved = link.push() or moved
            if not link.queue:
                del self._pending[peer]
        return moved

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        failed: HoopError | None = None
        for peer, link in self._outgoing.items():
            try:
                self._flush_link(peer, link, deadline)
            except HoopError as error:  # flushes the other links first, then raises
                failed = failed or error
        if failed is not None:
            raise failed

    def _flush_link(self, peer: int, link: RingWriter, deadline: float) -> None:
        if link.used and peer in self._unconfirmed:
            self._wait_for_confirmation(peer, deadline)
        while link.queue:
            link.push()
            if link.queue:
                if self._error is not None or peer in self._lost_peers:
                    raise self._error or self._peer_lost(peer)
                self._awaited = (peer,)
                if not link.free.wait(deadline, self._spins):
                    raise self.deadline_exceeded(peer, "handing over to")
                self._awaited = ()
                link.free.post()  # returns the post: push acquires it

    def _wait_for_confirmation(self, peer: int, deadline: float) -> None:
        """Sent bytes are only safe once the receiver has opened the memory that they are in."""
        self._wait_for_change(
            [peer], lambda: peer not in self._unconfirmed or peer in self._lost_peers or self._error, deadline
        )
        if peer in self._unconfirmed:
            if self._error is not None or peer in self._lost_peers:
                raise self._error or self._peer_lost(peer)
            raise self.deadline_exceeded(peer, "handing over to")

    # ---- receiving

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        if peer not in self._incoming:
            self._wait_for_peer(peer, deadline)
        link = self._incoming[peer]
        length = bytearray(_LENGTH.size)
        self._fill(peer, link, memoryview(length), deadline)
        if (got := _LENGTH.unpack(length)[0]) != into.nbytes:
            error = WrongLength(
                f"link {self.global_ranks[peer]} -> {self.global_ranks[self.rank]} "
                f"of communicator {self.communicator}: "
                f"a message of {got} bytes came, expected {into.nbytes}; do all ranks run the same operation?"
            )
            error.received_bytes = got
            raise error
        if into.nbytes:
            self._fill(peer, link, into.cast("B"), deadline)

    def _fill(self, peer: int, link: RingReader, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            if link.needs_block:
                self._acquire_filled(peer, link.filled, deadline)
                if not link.open_block():
                    continue
            view = link.read(view)

    def _acquire_filled(self, peer: int, filled: Semaphore, deadline: float) -> None:
        """Acquires a post of ``filled``; pushes pending messages while it waits."""
        while True:
            if self._pending:
                self._push_pending()
            lost = peer in self._lost_peers  # read before the last attempt: the peer made its posts before it was lost
            if self._error is not None:
                raise self._error
            if filled.acquire(False):
                return
            if lost:
                raise self._peer_lost(peer)
            self._awaited = (peer,)
            if not self._pending and filled.wait(deadline, self._spins):
                self._awaited = ()
                return
            if not self._pending or not self._activity.wait(deadline, self._spins):
                raise self.deadline_exceeded(peer, "waiting for")
            self._awaited = ()

    # ---- waiting

    def wait_readable(self, peers: Sequence[int], deadline: float) -> list[int]:
        while True:
            moved = self._push_pending()
            if self._error is not None:
                raise self._error
            ready = [peer for peer in peers if self._is_readable(peer)]
            for peer in [peer for peer in self._pending if peer in self._lost_peers]:  # they accept no more bytes
                self._pending.pop(peer).queue.clear()
                ready += [peer] if peer not in ready else []
            if self._woken or moved or ready:
                self._woken = False
                return ready
            self._awaited = peers
            happened = self._activity.wait(deadline, self._spins)
            self._awaited = ()
            if not happened:
                return []

    def _is_readable(self, peer: int) -> bool:
        lost = peer in self._lost_peers
        link = self._incoming.get(peer)
        return (link is not None and link.has_data()) or lost

    def wake(self) -> None:
        self._woken = True
        self._activity.post()

    def wait_for_peers(self, deadline: float) -> None:
        """Returns when this rank has opened every peer's memory and every peer has opened this rank's.

        After that this rank may exit. Later calls return at once.
        """
        if self._ready:
            return
        self._wait_for_change(
            sorted(self._missing()),
            lambda: not self._missing() or self._missing() & self._lost_peers.keys() or self._error,
            deadline,
        )
        with self._peers_changed:
            missing = self._missing()
        if self._error is not None:
            raise self._error
        if missing:
            lost = next((peer for peer in self._lost_peers if peer in missing), None)
            raise (self._peer_lost(lost) if lost is not None else self.deadline_exceeded(min(missing), "waiting for"))
        self._steps = [
            [
                (k, self._peer_round_semaphores[turn][k].post, semaphore.acquire, semaphore)
                for k, semaphore in enumerate(self._own_round_semaphores[turn])
            ]
            for turn in (0, 1)
        ]
        self._fingerprints = self._call_fingerprints()
        self._use_native()
        self._ready = True

    def _use_native(self) -> None:
        """Chooses the native core if every rank has the same: then all ranks run the same code, native or not."""
        identities = {segment.native_identity[0] for segment in self.segments}
        if self._library is None or identities != {self._library.identity}:
            return
        self.native = NativeBarrier(self._library, self.rank, self.segments, self._spins)
        self.native.state.publications = self._publish_count
        if self._failed:  # read after ``native`` is set: another thread sets one after the other
            self.native.state.failed = 1

    @property
    def publish_count(self) -> int:
        return self.native.state.publications if self.native is not None else self._publish_count

    @publish_count.setter
    def publish_count(self, count: int) -> None:
        if self.native is not None:
            self.native.state.publications = count
        else:
            self._publish_count = count

    def _missing(self) -> set[int]:
        return {peer for peer in self._outgoing if peer not in self._incoming or peer in self._unconfirmed}

    # ---- barriers and collectives

    def barrier(self, deadline: float, call: Call | None = None, work: WaitingWork | None = None) -> None:  # (1)
        """Returns when every rank has entered; memory that a rank wrote before is visible to all ranks afterwards.

        Called again after a timeout, it continues the same barrier. With a ``call``, every rank compares the
        fingerprints of all ranks, so all ranks find a mismatch in the same barrier. ``work`` is called while the
        barrier waits. The native core's barrier does not call it; ``NativeOrderedSum`` calls it itself.
        """
        if not self._ready:
            self.wait_for_peers(deadline)
        if self.native is not None:
            if code := self.native.enter(call):
                self.complete_native(code, partial(self.native.enter, call), deadline, call)
            return
        if self._posted_rounds:
            if self._failed:
                self._check_all_entered()
            self._acquire_missed_post(deadline)
            steps, self._posted_rounds = self._steps[self._barriers & 1][self._posted_rounds :], 0
            fingerprints = self._fingerprints[self._barriers & 1]
        else:
            if self._failed or (self._peer_left[0] and self._has_left_peer()):
                raise self._error or self._peer_lost(next(iter(self._lost_peers)))
            self._barriers = number = self._barriers + 1
            turn = number & 1
            steps, fingerprints = self._steps[turn], self._fingerprints[turn]
            if call is not None and self._written_calls[turn] is not call:
                # An operation that runs repeatedly finds its fingerprint written: no cache line moves between cores.
                self._written_calls[turn], fingerprints[self.rank] = call, call.fingerprint
            self._own_barrier_count[0] = number  # last: a rank that has lost a peer goes by these counts
        for k, post, acquire, semaphore in steps:
            post()
            if not acquire(False) and not semaphore.wait(deadline, self._spins, work):
                self._posted_rounds = k + 1
                raise self.deadline_exceeded(self._first_absent() or 0, "waiting for")
            if self._failed:
                self._check_all_entered()
        if call is not None and fingerprints != call.fingerprints:
            raise self._mismatch(call)

    def complete_native(
        self, code: int, resume: Callable[[int], int], deadline: float, call: Call | None = None
    ) -> None:
        while code == native_library.AGAIN:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self.deadline_exceeded(self._first_absent() or 0, "waiting for")
            code = resume(1 + int(min(left, _MAX_SLEEP_S) * 1e9))
        if code == native_library.FAILED:
            self._has_left_peer()
            absent = self._first_absent()
            lost = absent if absent in self._lost_peers else next(iter(self._lost_peers), self.rank)
            raise self._error or self._peer_lost(lost)
        if code == native_library.MISMATCH:
            assert call is not None, "only a call is compared"
            raise self._mismatch(call)

    def _acquire_missed_post(self, deadline: float) -> None:
        """Acquires the post for which the last call of ``barrier`` timed out."""
        _, _, acquire, semaphore = self._steps[self._barriers & 1][self._posted_rounds - 1]
        if not acquire(False) and not semaphore.wait(deadline, self._spins):
            raise self.deadline_exceeded(self._first_absent() or 0, "waiting for")
        if self._failed:
            self._check_all_entered()

    def verify_reads(self) -> None:
        if self._has_left_peer():
            raise self._error or self._peer_lost(next(iter(self._lost_peers)))

    def _has_left_peer(self) -> bool:
        """Whether a peer has closed its endpoint. It is lost then; the listener's thread may not know it yet."""
        if not self._peer_left[0]:
            return False
        self._lost_peers.setdefault(self._peer_left[0] - 1, "is gone")
        self._set_failed()
        return True

    def _first_absent(self) -> int | None:
        """The lowest rank that has not entered the current barrier."""
        return next(iter(self._absent(self._barriers_entered)), None)

    def _absent(self, barrier: int) -> list[int]:
        """The ranks that have not entered the barrier with this number."""
        return [peer for peer in range(self.size) if int(self._barrier_counts[peer][0]) < barrier]

    @property
    def _barriers_entered(self) -> int:
        return self.native.state.barriers if self.native is not None else self._barriers

    def current_wait(self) -> tuple[Sequence[int], Hashable]:
        barrier = self._barriers_entered
        if absent := self._absent(barrier):
            return absent, barrier
        peers = self._awaited
        written = [self._outgoing[peer].blocks_written for peer in peers if peer in self._outgoing]
        return peers, (
            *peers,
            *written,
            *(self._incoming[peer].blocks_read for peer in peers if peer in self._incoming),
        )

    def _check_all_entered(self) -> None:
        """Raises unless every rank has entered the current barrier; a peer may be lost after it entered."""
        absent = self._first_absent()
        if absent is not None:
            self._posted_rounds = 0
            raise self._error or self._peer_lost(absent if absent in self._lost_peers else next(iter(self._lost_peers)))

    def _mismatch(self, call: Call) -> CollectiveMismatch:
        """Every rank gets here, because all compare the same fingerprints: they exchange their texts and abort."""
        self.segments[self.rank].call_text = call.short_text
        self.barrier(time.monotonic() + _TEXTS_TIMEOUT_S)
        error = mismatch_error(
            (self.global_ranks[rank], segment.call_text) for rank, segment in enumerate(self.segments)
        )
        self.abort(error)
        return error

    def begin_collective(self, call: Call, deadline: float, resumed: bool = False) -> None:
        if not resumed:
            self.barrier(deadline, call)

    def end_collective(self) -> None:
        """Does nothing: the barrier has compared the calls."""

    def broadcast_mismatch(self, error: CollectiveMismatch) -> None:
        """Does nothing: all ranks have found the mismatch in the same barrier."""

    # ---- closing

    def _peer_lost(self, peer: int) -> PeerLost:
        return PeerLost(
            f"rank {self.global_ranks[self.rank]}: {self.describe(peer)} {self._lost_peers[peer]} "
            f"(communicator {self.communicator}, generation {self.generation})",
            rank=self.global_ranks[peer],
        )

    def raise_failure(self) -> None:
        if self._failed:
            raise self._error or self._peer_lost(next(iter(self._lost_peers)))

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._set_failed()
        self._wake_waits(range(self.size))

    def close(self) -> None:
        for segment in self.segments:
            segment.peer_left[0] = 1 + self.rank
        self._on_close(self)
        self.abort(PeerLost(f"rank {self.global_ranks[self.rank]}: this endpoint is closed"))
        self._unlink_semaphores()
        with self._peers_changed:  # close it once only: by the second time the number may belong to another file
            descriptor, self.descriptor = self.descriptor, -1
            # References to a closed endpoint must not keep the memory of a device that is gone.
            self.arenas = [None] * self.size
        if descriptor >= 0:
            os.close(descriptor)

    def _unlink_semaphores(self) -> None:
        semaphores, self._own_semaphores = self._own_semaphores, []
        for semaphore in semaphores:
            with contextlib.suppress(OSError):
                semaphore.unlink()


def semaphore_name(token: str, index: int) -> str:
    return f"/hoop-{token}-{index}"


def shared_memory_error() -> OSError | None:
    """Why this process cannot create shared memory with a semaphore in it; None if it can.

    Causes: no ``memfd_create`` under a seccomp profile; a full or read-only /dev/shm where semaphores have names.
    """
    try:
        descriptor = create_shared_memory(PAGE)
        try:
            place = map_bytes(descriptor, 0, PAGE)[:SEMAPHORE_BYTES]
            Semaphore.create(place, semaphore_name(f"{os.getpid():08x}{os.urandom(12).hex()}", 0)).unlink()
        finally:
            os.close(descriptor)
    except OSError as error:
        return error
    return None
