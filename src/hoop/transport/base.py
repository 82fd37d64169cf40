"""What can be seen of a rank's links from outside, while it waits for them.

A rank that computes for long and a link that has gone silent look alike to whoever waits. Two counters tell them apart:
bytes that a link has taken at one end, and bytes that have come out of it at the other.

The contract of every transport.

An endpoint belongs to one rank, in one communicator, at one generation, and is used by one thread at
a time (``abort`` and ``close`` may come from another). Between two ranks messages arrive in the order
in which they were sent, whole, or an error names the peer.

``send`` never waits for the receiver: what the link does not take at once is handed over later,
while this rank waits for something else. So a plan that would finish with unlimited buffers
finishes here too, whatever the sizes. The price is that the bytes must stay as they are until then;
the ``PendingSend`` that ``send`` returns tells, and ``detach`` copies what is left for whoever cannot wait.

All deadlines are values of ``time.monotonic()``.

The rest of a message that a link has not taken yet.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from hoop.errors import CollectiveMismatch, DeadlineExceeded, HoopError, PeerLost
from hoop.topology import Address
from hoop.transport.calls import Call
from hoop.transport.shm_segment import Bytes, ShmSegment


class LinkStats:
    """Of one endpoint; read from any thread. Ranks that share memory have no links, and nothing to see."""

    def __init__(self, moved: Callable[[int], tuple[int, int]] = lambda peer: (0, 0)) -> None:
        self.moved = moved
        """Bytes that the link to a peer has taken, and bytes that have come from it."""
        self.waits_for: tuple[int, ...] = ()
        """Peers of whom this rank needs something before it goes on."""
        self.connecting = False
        """Whether what it needs is that they take its connection."""
        self.failed: int | None = None
        """The peer to whom the link failed: not one who gave up for another's sake, and said so."""
        self._seen: object = None
        self._since = 0.0

    def stalled(self, now: float, patience: float) -> tuple[int, ...]:
        """Asked again and again: those whom it has been waiting for, for so long, without a byte from any of them."""
        peers = self.waits_for
        seen = peers, self.connecting, self._came(peers)
        if seen != self._seen:
            self._seen, self._since = seen, now
        return peers if now - self._since >= patience else ()

    def _came(self, peers: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.moved(peer)[1] for peer in peers)


class PendingSend(ABC):
    """A message that the link has not taken whole yet."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def detach(self) -> None:
        """Copies what is left, so that the caller may overwrite the original."""


class Endpoint(ABC):
    """One rank's links in one communicator at one generation."""

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        self.communicator = communicator
        self.generation = generation
        self.rank = rank
        self.peers = tuple(peers)
        self.names: Sequence[int] = range(len(self.peers))
        """What errors call the ranks: their numbers in the whole communicator, where this endpoint is of a part."""
        self.messages_sent = 0
        self.bytes_sent = 0
        self.messages_damaged = 0
        """Messages that did not come as they were sent; each was asked for again, or is told by an error."""
        self.messages_repeated = 0
        self.watch = LinkStats()

    @property
    def size(self) -> int:
        return len(self.peers)

    @abstractmethod
    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        """Starts a message to ``peer``; None when the link has taken all of it."""

    @abstractmethod
    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        """The next message from ``peer``, which must be exactly as long as ``into``."""

    @abstractmethod
    def senders(self, peers: Sequence[int], deadline: float) -> list[int]:
        """Waits until some of these peers have a message, or are lost, and names them: ``recv_into`` tells which.

        Whoever is lost with messages pending for it is named as well, and they are dropped. Empty when ``wake`` was
        called, a pending message moved on or the deadline passed, whichever came first.
        """

    @abstractmethod
    def wake(self) -> None:
        """Makes ``senders`` return: the one under way, or else the next; from any thread."""

    @abstractmethod
    def flush(self, deadline: float) -> None:
        """Returns when the links have taken every message."""

    @abstractmethod
    def begin(self, call: Call, deadline: float, resumed: bool = False) -> None:
        """Before the first message of a collective: from now on messages are compared as parts of this call.

        ``resumed``: it is the collective that ended last, which is run in several parts.

        CollectiveMismatch, here or in a later wait, if another rank has begun another one. Where ranks share memory
        they meet here and compare at once.
        """

    @abstractmethod
    def end(self) -> None:
        """After the last message of a collective."""

    @abstractmethod
    def tell(self, error: CollectiveMismatch) -> None:
        """Makes this error of this rank known to every rank that takes part in the same collective, or will."""

    @abstractmethod
    def abort(self, error: HoopError) -> None:
        """Makes the wait that is under way, and every later call, raise ``error``."""

    @abstractmethod
    def close(self) -> None:
        """Closes every link; peers that wait for this rank learn of it at once."""

    def describe(self, peer: int) -> str:
        return f"rank {self.names[peer]} at {self.peers[peer]}"

    def overdue(self, peer: int, doing: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"rank {self.names[self.rank]}: {doing} {self.describe(peer)} passed its deadline "
            f"(communicator {self.communicator}, generation {self.generation})"
        )


class SharedEndpoint(Endpoint):
    """Links between ranks that see each other's memory."""

    mailboxes: list[ShmSegment]
    """What each rank lays open, by rank."""
    arenas: list[Bytes | None]
    """Each rank's device memory, where it shares one."""
    publications: int
    """How many vectors have been laid open; slots and stages are used in turn."""

    @abstractmethod
    def gather(self, deadline: float) -> None:
        """Returns when every peer's memory is there."""

    @abstractmethod
    def meet(self, deadline: float, call: Call | None = None) -> None:
        """Returns when every rank has come; what they wrote before is there to read afterwards.

        With a ``call``, which all ranks must then give, CollectiveMismatch at every rank unless all gave the same.
        """


class SpanningEndpoint(Endpoint):
    """Links between ranks on several hosts, of which some share one."""

    hosts: tuple[int, ...]
    """The host of each rank, by rank."""
    local: SharedEndpoint | None
    """Among the ranks of this host, who keep their order; None where this rank is alone on it."""

    @abstractmethod
    def begin_links(self, call: Call, deadline: float) -> None:
        """``begin`` without the meeting of the ranks of this host: the caller meets them with this call itself."""

    @abstractmethod
    def explained(self, error: PeerLost) -> PeerLost:
        """The error, with what ranks of this host said of it before they went themselves."""


class Transport(ABC):
    """A process's end of the data plane."""

    scheme: str
    address: Address
    """Where peers dial."""

    @abstractmethod
    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        """This rank's links to ``peers`` (in rank order, itself included)."""

    @abstractmethod
    def close(self) -> None: ...

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
    """Some pieces of memory, handed over from the front."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        return not self.parts

    def detach(self) -> None:
        self.parts = [memoryview(bytes(part)) for part in self.parts]

    def prepare(self) -> None:
        """Its turn has come to be handed over."""

    def advance(self, taken: int) -> None:
        """The link has taken so many bytes more."""
        while self.parts and taken >= self.parts[0].nbytes:
            taken -= self.parts.pop(0).nbytes
        if taken:
            self.parts[0] = self.parts[0][taken:]
