"""The transport between threads of one process: the contract in its simplest form.

One table holds the state of all endpoints of the process, by address; a link is a queue. ``send`` copies the message,
so no message is ever pending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from hoop.errors import CollectiveMismatch, HoopError, InvalidArgument, LinkCorrupted, PeerLost
from hoop.topology import Address
from hoop.transport.base import Endpoint, PendingSend, Transport, remaining
from hoop.transport.call_check import Call, length_mismatch_error, mismatch_error

_Key = tuple[Address, int, int]
"""Identifies an endpoint: address, communicator, generation."""


class _Switchboard:
    """The state of every inproc endpoint of this process, and the lock they share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[tuple[_Key, int], deque[bytes]] = {}
        """By receiver and sending rank."""
        self.closed: set[_Key] = set()
        self.calls: dict[_Key, tuple[int, Call]] = {}
        """The current collective of each endpoint, with its sequence number."""
        self.mismatches: dict[_Key, tuple[int, CollectiveMismatch]] = {}
        """The error that ends each endpoint, and the first collective to which it applies."""
        self.next_port = 1


_BOARD = _Switchboard()


class InprocTransport(Transport):
    """The data plane of a thread that acts as a device."""

    scheme = "inproc"

    def __init__(self, address: Address) -> None:
        with _BOARD.changed:
            if address.port == 0:
                address = Address(address.host, _BOARD.next_port)
                _BOARD.next_port += 1
        self.address = address
        self._endpoints: dict[tuple[int, int, int], InprocEndpoint] = {}

    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        key = (communicator, generation, rank)
        if key in self._endpoints and not self._endpoints[key].closed:
            raise InvalidArgument(
                f"communicator {communicator}, generation {generation}: rank {rank} has an endpoint already"
            )
        endpoint = self._endpoints[key] = InprocEndpoint(communicator, generation, rank, peers)
        return endpoint

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        with _BOARD.changed:
            # The entries of ``closed`` stay: addresses are never used again.
            for queue_key in [key for key in _BOARD.queues if key[0][0] == self.address]:
                del _BOARD.queues[queue_key]
            for mismatch_key in [key for key in _BOARD.mismatches if key[0] == self.address]:
                del _BOARD.mismatches[mismatch_key]


class InprocEndpoint(Endpoint):
    """One rank's queues."""

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._error: HoopError | None = None
        self._woken = False
        self._collectives = 0
        """How many collectives have begun."""

    @property
    def closed(self) -> bool:
        return self._key(self.rank) in _BOARD.closed

    def _key(self, rank: int) -> _Key:
        return self.peers[rank], self.communicator, self.generation

    # ---- sending and receiving

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a rank cannot send a message to itself")
        with _BOARD.changed:
            if self._error is not None:
                raise self._error
            if self._key(peer) in _BOARD.closed:
                raise PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its links", rank=peer)
            _BOARD.queues.setdefault((self._key(peer), self.rank), deque()).append(bytes(data))
            _BOARD.changed.notify_all()
        self.messages_sent += 1
        self.bytes_sent += data.nbytes
        return None

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        with _BOARD.changed:
            queue = _BOARD.queues.setdefault((self._key(self.rank), peer), deque())
            _BOARD.changed.wait_for(
                lambda: queue or self._current_error() or self._key(peer) in _BOARD.closed, remaining(deadline)
            )
            if (error := self._current_error()) is not None:
                raise error
            if not queue:
                if self._key(peer) in _BOARD.closed:
                    raise PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its links", rank=peer)
                raise self.deadline_exceeded(peer, "waiting for")
            message = queue.popleft()
            current = _BOARD.calls.get(self._key(self.rank))
        if len(message) != into.nbytes:
            if current is not None:
                raise length_mismatch_error(current[1], self.rank, peer, into.nbytes, str(len(message)))
            raise LinkCorrupted(
                f"rank {self.rank}: {self.describe(peer)} sent {len(message)} bytes, expected {into.nbytes}"
            )
        if message:
            into.cast("B")[:] = message

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error

    # ---- waiting

    def wait_readable(self, peers: Sequence[int], deadline: float) -> list[int]:
        def ready() -> list[int]:
            queues = _BOARD.queues
            return [
                peer for peer in peers if queues.get((self._key(self.rank), peer)) or self._key(peer) in _BOARD.closed
            ]

        with _BOARD.changed:
            _BOARD.changed.wait_for(lambda: ready() or self._woken or self._error, remaining(deadline))
            self._woken = False
            if self._error is not None:
                raise self._error
            return ready()

    def wake(self) -> None:
        with _BOARD.changed:
            self._woken = True
            _BOARD.changed.notify_all()

    # ---- collectives

    def begin_collective(self, call: Call, deadline: float, resumed: bool = False) -> None:
        """Compares the call with those of the peers that have begun; a rank that finds a mismatch aborts all ranks."""
        with _BOARD.changed:
            self._collectives += not resumed
            _BOARD.calls[self._key(self.rank)] = self._collectives, call
            begun = [(rank, _BOARD.calls.get(self._key(rank))) for rank in range(self.size)]
            same_sequence = [(rank, one[1]) for rank, one in begun if one and one[0] == self._collectives]
            if any(other.fingerprint != call.fingerprint for _, other in same_sequence):
                self._abort_all(mismatch_error((rank, other.short_text) for rank, other in same_sequence))
            if (error := self._current_error()) is not None:
                raise error

    def end_collective(self) -> None:
        with _BOARD.changed:
            _BOARD.calls.pop(self._key(self.rank), None)

    def broadcast_mismatch(self, error: CollectiveMismatch) -> None:
        with _BOARD.changed:
            self._abort_all(error)

    def _abort_all(self, error: CollectiveMismatch) -> None:
        """Makes this collective fail at every rank. The caller holds the board's lock."""
        for rank in range(self.size):
            _BOARD.mismatches.setdefault(self._key(rank), (self._collectives, error))
        _BOARD.changed.notify_all()

    def _current_error(self) -> HoopError | None:
        """The error that this endpoint raises, if any. The caller holds the board's lock."""
        if self._error is None and (found := _BOARD.mismatches.get(self._key(self.rank))):
            self._error = found[1] if found[0] <= self._collectives else None
        return self._error

    # ---- closing

    def raise_failure(self) -> None:
        with _BOARD.changed:
            if (error := self._current_error()) is not None:
                raise error
            for peer in range(self.size):
                if self._key(peer) in _BOARD.closed:
                    raise PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its links", rank=peer)

    def abort(self, error: HoopError) -> None:
        with _BOARD.changed:
            self._error = self._error or error
            _BOARD.changed.notify_all()

    def close(self) -> None:
        with _BOARD.changed:
            self._error = self._error or PeerLost(f"rank {self.rank}: this endpoint is closed")
            _BOARD.closed.add(self._key(self.rank))
            _BOARD.calls.pop(self._key(self.rank), None)
            _BOARD.mismatches.pop(self._key(self.rank), None)
            _BOARD.changed.notify_all()
