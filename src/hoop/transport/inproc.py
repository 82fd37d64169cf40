"""The transport between threads of one process: the contract in its plainest form.

Every transport of a process is entered in one table by its address; a link is a queue. Messages are
copied when they are sent, so nothing is ever pending.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from hoop.errors import HoopError, InvalidArgument, LinkCorrupted, PeerLost
from hoop.topology import Address
from hoop.transport.base import Endpoint, Pending, Transport, remaining

_Key = tuple[Address, int, int]
"""Whose endpoint: address, communicator, generation."""


class _Switchboard:
    """Every inproc endpoint of this process, and the lock they share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[tuple[_Key, int], deque[bytes]] = {}
        self.closed: set[_Key] = set()
        self.next_port = 1


_BOARD = _Switchboard()


class InprocTransport(Transport):
    """The data plane of a thread that plays a device."""

    scheme = "inproc"

    def __init__(self, address: Address) -> None:
        with _BOARD.changed:
            if address.port == 0:
                address = Address(address.host, _BOARD.next_port)
                _BOARD.next_port += 1
        self.address = address
        self._endpoints: dict[tuple[int, int, int], InprocEndpoint] = {}

    def endpoint(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> Endpoint:
        seat = (communicator, generation, rank)
        if seat in self._endpoints and not self._endpoints[seat].closed:
            raise InvalidArgument(
                f"communicator {communicator}, generation {generation}: rank {rank} has an endpoint already"
            )
        endpoint = self._endpoints[seat] = InprocEndpoint(communicator, generation, rank, peers)
        return endpoint

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()
        with _BOARD.changed:
            # That it closed stays known: addresses are never used again.
            for key in [key for key in _BOARD.queues if key[0][0] == self.address]:
                del _BOARD.queues[key]


class InprocEndpoint(Endpoint):
    """One rank's queues."""

    def __init__(self, communicator: int, generation: int, rank: int, peers: Sequence[Address]) -> None:
        super().__init__(communicator, generation, rank, peers)
        self._error: HoopError | None = None
        self._woken = False

    @property
    def closed(self) -> bool:
        return self._key(self.rank) in _BOARD.closed

    def _key(self, rank: int) -> _Key:
        return self.peers[rank], self.communicator, self.generation

    def send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        with _BOARD.changed:
            if self._error is not None:
                raise self._error
            if self._key(peer) in _BOARD.closed:
                raise PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its links")
            _BOARD.queues.setdefault((self._key(peer), self.rank), deque()).append(bytes(data))
            _BOARD.changed.notify_all()
        self.messages_sent += 1
        self.bytes_sent += data.nbytes
        return None

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        with _BOARD.changed:
            queue = _BOARD.queues.setdefault((self._key(self.rank), peer), deque())
            _BOARD.changed.wait_for(
                lambda: queue or self._error or self._key(peer) in _BOARD.closed, remaining(deadline)
            )
            if self._error is not None:
                raise self._error
            if not queue:
                if self._key(peer) in _BOARD.closed:
                    raise PeerLost(f"rank {self.rank}: {self.describe(peer)} closed its links")
                raise self.overdue(peer, "waiting for")
            message = queue.popleft()
        if len(message) != into.nbytes:
            raise LinkCorrupted(
                f"rank {self.rank}: {self.describe(peer)} sent {len(message)} bytes, expected {into.nbytes}"
            )
        if message:
            into.cast("B")[:] = message

    def senders(self, peers: Sequence[int], deadline: float) -> list[int]:
        def ready() -> list[int]:
            queues = _BOARD.queues
            return [
                peer
                for peer in peers
                if queues.get((self._key(self.rank), peer)) or self._key(peer) in _BOARD.closed
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

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error

    def abort(self, error: HoopError) -> None:
        with _BOARD.changed:
            self._error = self._error or error
            _BOARD.changed.notify_all()

    def close(self) -> None:
        with _BOARD.changed:
            self._error = self._error or PeerLost(f"rank {self.rank}: this endpoint is closed")
            _BOARD.closed.add(self._key(self.rank))
            _BOARD.changed.notify_all()
