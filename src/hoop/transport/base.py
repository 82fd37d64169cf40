"""The contract of every transport.

An endpoint belongs to one rank, in one communicator, at one generation. One thread at a time uses it; ``wake``,
``abort`` and ``close`` may be called from another thread. Messages between two ranks arrive whole and in sending order,
or an error names the peer.

``send`` never waits for the receiver. The endpoint sends the bytes that the link does not accept at once later, while
this rank waits for something else. So a plan that would finish with unlimited buffers finishes here too, whatever the
message sizes. The price: the caller must not change the buffer until then. ``send`` returns a ``PendingSend`` to check
for that; ``PendingSend.detach`` copies the unsent bytes for a caller that cannot wait.

All deadlines are values of ``time.monotonic()``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from hoop.errors import CollectiveMismatch, DeadlineExceeded, HoopError, PeerLost
from hoop.topology import Address
from hoop.transport.call_check import Call
from hoop.transport.native_barrier import NativeBarrier
from hoop.transport.shm_segment import Bytes, ShmSegment


class LinkStats:
    """Counters of one endpoint's links, readable from any thread while its rank waits.

    They distinguish a peer that computes for long from a link that is silent. An endpoint in shared memory has no
    links: its counters stay 0.
    """

    def __init__(self, byte_counts: Callable[[int], tuple[int, int]] = lambda peer: (0, 0)) -> None:
        self.byte_counts = byte_counts
        """Bytes sent to a peer over its link, and bytes received from it."""
        self.waiting_for: tuple[int, ...] = ()
        """Peers that this rank waits for."""
        self.connecting = False
        """Whether this rank waits for them to accept its connection."""
        self.failed_peer: int | None = None
        """The peer whose link failed; not a peer that aborted because of another rank and reported so."""
        self._last_state: object = None
        self._last_change = 0.0

    def stalled_peers(self, now: float, timeout: float) -> tuple[int, ...]:
        """The peers that this rank has waited for, without a byte from any of them, for ``timeout`` seconds.

        The caller polls this: the time counts from the first call that saw the current state.
        """
        peers = self.waiting_for
        state = peers, self.connecting, self._bytes_received(peers)
        if state != self._last_state:
            self._last_state, self._last_change = state, now
        return peers if now - self._last_change >= timeout else ()

    def _bytes_received(self, peers: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.byte_counts(peer)[1] for peer in peers)


class PendingSend(ABC):
    """A message that the link has not accepted completely yet."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def detach(self) -> None:
        """Copies the unsent bytes, so that the caller may overwrite the original."""


class Endpoint(ABC):
    """One rank's links in one communicator at one generation."""

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        self.communicator = communicator
        self.generation = generation
        self.rank = rank
        self.peers = tuple(peers)
        self.global_ranks: Sequence[int] = range(len(self.peers))
        """Each rank's number in the whole communicator, for error texts, where this endpoint spans a part of it."""
        self.messages_sent = 0
        self.bytes_sent = 0
        self.messages_corrupted = 0
        """Messages received with a wrong checksum; each was requested again, or raised an error."""
        self.messages_retransmitted = 0
        self.link_stats = LinkStats()

    @property
    def size(self) -> int:
        return len(self.peers)

    @abstractmethod
    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        """Starts a message to ``peer``; None if the link accepted all of it."""

    @abstractmethod
    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        """Receives the next message from ``peer``, which must be exactly as long as ``into``."""

    @abstractmethod
    def wait_readable(self, peers: Sequence[int], deadline: float) -> list[int]:
        """Waits until some of these peers have sent a message or are lost, and returns them.

        ``recv_into`` then receives the message or raises. A lost peer that has pending messages is returned as well,
        even if it is not in ``peers``, and its pending messages are dropped. The list is empty if ``wake`` was called,
        a pending message made progress, or the deadline passed.
        """

    @abstractmethod
    def wake(self) -> None:
        """Makes the current ``wait_readable``, or else the next one, return; callable from any thread."""

    @abstractmethod
    def flush(self, deadline: float) -> None:
        """Returns when the links have accepted every message."""

    @abstractmethod
    def begin_collective(self, call: Call, deadline: float, resumed: bool = False) -> None:
        """Called before the first message of a collective; later messages are checked to belong to this call.

        ``resumed``: this continues the previous collective, which runs in several parts.

        Raises CollectiveMismatch, here or in a later wait, if another rank has begun a different call. Ranks that
        share memory have a barrier here and compare their calls at once.
        """

    @abstractmethod
    def end_collective(self) -> None:
        """Called after the last message of a collective."""

    @abstractmethod
    def broadcast_mismatch(self, error: CollectiveMismatch) -> None:
        """Reports this rank's error to every rank that takes part in the same collective, or will."""

    @abstractmethod
    def raise_failure(self) -> None:
        """Raises the error of this endpoint if it was aborted, or if it can see that a peer is lost; does not wait.

        For a rank that waits for something else than its links. A peer that has sent a message and then closed may
        be seen only when the message is received.
        """

    def current_wait(self) -> tuple[Sequence[int], Hashable]:
        """The peers that a collective of this rank waits for, none if it does not wait, and a value that changes when
        the wait makes progress. Called from any thread, for a wait that lasts long: it may be over already."""
        peers = self.link_stats.waiting_for
        return peers, (peers, *(self.link_stats.byte_counts(peer) for peer in peers))

    def verify_reads(self) -> None:  # noqa: B027 - only some share memory
        """Raises PeerLost if a rank that shares memory with this one has closed its endpoint.

        Called after this rank has read in the memory of others, before what it has read counts. A rank that goes on
        without others closes its endpoint before it changes its memory. So if this returns, what was read is whole,
        even if this process was stopped meanwhile. Not needed where a barrier follows, which raises then, too.
        """

    @abstractmethod
    def abort(self, error: HoopError) -> None:
        """Makes the current wait, and every later call, raise ``error``."""

    @abstractmethod
    def close(self) -> None:
        """Closes every link; peers that wait for this rank raise at once."""

    def describe(self, peer: int) -> str:
        return f"rank {self.global_ranks[peer]} at {self.peers[peer]}"

    def deadline_exceeded(self, peer: int, action: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rank {self.global_ranks[self.rank]}: {action} {self.describe(peer)} passed its deadline "
            f"(communicator {self.communicator}, generation {self.generation})"
        )


class WaitingWork(Protocol):
    """Work of a rank that can be done while it waits for other ranks, in pieces."""

    seconds: float
    """Time spent in it so far."""

    def __call__(self) -> bool:
        """Does a piece, which must be short: the other ranks may have arrived meanwhile. False: nothing is left."""


class SharedEndpoint(Endpoint):
    """Links between ranks that map each other's memory."""

    segments: list[ShmSegment]
    """The shared-memory segment of each rank, by rank."""
    arenas: list[Bytes | None]
    """Each rank's device memory, where it shares one."""
    native: NativeBarrier | None = None
    """The barriers of the native core, if every rank has it; known once ``wait_for_peers`` has returned."""

    @property
    @abstractmethod
    def publish_count(self) -> int:
        """How many vectors this rank has published in its segment; slots and staging buffers alternate."""

    @publish_count.setter
    @abstractmethod
    def publish_count(self, count: int) -> None: ...

    @abstractmethod
    def wait_for_peers(self, deadline: float) -> None:
        """Returns when this rank has mapped every peer's memory."""

    @abstractmethod
    def barrier(self, deadline: float, call: Call | None = None, work: WaitingWork | None = None) -> None:
        """Returns when every rank has entered; memory that a rank wrote before is visible to all ranks afterwards.

        Raises PeerLost if a rank has closed its endpoint before this one enters (see ``verify_reads``).
        With a ``call``, which all ranks must then pass, every rank raises CollectiveMismatch if any two calls differ.
        ``work``: is done, piece by piece, while this rank waits.
        """

    @abstractmethod
    def complete_native(
        self, code: int, resume: Callable[[int], int], deadline: float, call: Call | None = None
    ) -> None:
        """Ends a call of the native core that returned ``code``: waits until the deadline, or raises its error.

        ``resume``: goes on with the call, and may sleep for the nanoseconds that it is given. ``call``: as for
        ``barrier``.
        """


class SpanningEndpoint(Endpoint):
    """Links between ranks on several hosts, where some ranks share a host."""

    hosts: tuple[int, ...]
    """The host of each rank, by rank."""
    local: SharedEndpoint | None
    """The endpoint among the ranks of this host, in rank order; None if this rank is alone on its host."""

    @abstractmethod
    def begin_collective_on_links(self, call: Call, deadline: float) -> None:
        """``begin_collective`` without the barrier among the ranks of this host, which the caller runs itself."""

    @abstractmethod
    def with_local_cause(self, error: PeerLost) -> PeerLost:
        """The error, extended by the abort reason that another rank of this host left in shared memory."""


class Transport(ABC):
    """A process's end of the data plane."""

    scheme: str
    address: Address
    """The address that peers dial."""

    @abstractmethod
    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        """This rank's links to ``peers`` (in rank order, itself included)."""

    @abstractmethod
    def close(self) -> None: ...

    def byte_counts(self) -> tuple[int | None, int | None]:
        """Bytes sent and received over all endpoints so far, closed ones included; None: not counted."""
        return None, None

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remaining(deadline: float) -> float:
    """Seconds until a deadline, never negative."""
    return max(0.0, deadline - time.monotonic())


class PendingBuffers(PendingSend):
    """Buffers that a link sends in order."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        return not self.parts

    def detach(self) -> None:
        self.parts = [memoryview(bytes(part)) for part in self.parts]

    def prepare(self) -> None:
        """Called before the link sends from this message; a subclass makes its next frame here."""

    def advance(self, sent: int) -> None:
        """Drops the first ``sent`` bytes, which the link has accepted."""
        while self.parts and sent >= self.parts[0].nbytes:
            sent -= self.parts.pop(0).nbytes
        if sent:
            self.parts[0] = self.parts[0][sent:]
