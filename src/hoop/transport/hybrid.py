"""Links between ranks of which some share a host: shared memory to those, TCP to the others.

    rank 0 ── local ──▶ rank 1      one host: an endpoint in shared memory, of the ranks of this host only
      │  ╲
      links ──▶ rank 2, rank 3      other hosts: an endpoint over TCP, of all ranks

A rank waits in one of the two at a time. If messages are still to be handed over in the other, a thread of this
endpoint does that meanwhile, and has stopped before the wait returns: each of the two is used by one thread at a time.

The transport of ranks on several hosts: TCP and shared memory behind one address.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hoop.errors import CollectiveMismatch, FailedPrecondition, HoopError, InvalidArgument, PeerLost
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.base import Endpoint, PendingSend, SharedEndpoint, SpanningEndpoint, Transport
from hoop.transport.calls import Call
from hoop.transport.shm_listener import ShmTransport
from hoop.transport.tcp_endpoint import TcpWaiting
from hoop.transport.tcp_listener import TcpTransport


class _LinkSet:
    """One of the two endpoints, and what it has not handed over yet."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._unsent: list[PendingSend] = []
        self._stopping = False

    @property
    def unsent(self) -> int:
        """How many messages."""
        self._unsent = [pending for pending in self._unsent if not pending.done]
        return len(self._unsent)

    def keep(self, pending: PendingSend | None) -> None:
        if pending is not None:
            self._unsent.append(pending)

    def hand_over(self, deadline: float) -> list[int]:
        """Until it is stopped, or nothing is left; who is lost."""
        while not self._stopping and self.unsent and time.monotonic() < deadline:
            if lost := self.endpoint.senders([], deadline):
                return lost
        return []

    def senders(self, peers: Sequence[int], deadline: float, found: Callable[[], None]) -> list[int]:
        """Its senders, until it is stopped; tells when there are some, or less is left to hand over."""
        ready: list[int] = []
        left = self.unsent
        while not self._stopping and not ready and self.unsent == left and time.monotonic() < deadline:
            ready = self.endpoint.senders(peers, deadline)
        found()
        return ready

    @contextlib.contextmanager
    def meanwhile(
        self, pool: ThreadPoolExecutor, job: Callable[..., list[int]], *call: object
    ) -> Iterator[list[int]]:
        """Runs a job of this side on another thread, and stops it in the end; then there is what it came to."""
        self._stopping = False
        result: list[int] = []
        under_way = pool.submit(job, *call)
        try:
            yield result
        finally:
            self._stopping = True
            if not under_way.done():
                self.endpoint.wake()
            with contextlib.suppress(HoopError):  # an abort, which whoever waits is told as well
                result += under_way.result()


class HybridEndpoint(SpanningEndpoint):
    """One rank's links to its own host and to others."""

    def __init__(self, links: Endpoint, local: SharedEndpoint | None, hosts: Sequence[int]) -> None:
        super().__init__(links.communicator, links.generation, links.rank, links.peers)
        self.watch = links.watch
        self.hosts = tuple(hosts)
        self.local = local
        team = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self._places = {rank: place for place, rank in enumerate(team) if local is not None}
        """The ranks of this host, by their number in the whole communicator."""
        self._links = _LinkSet(links)
        self._local = None if local is None else _LinkSet(local)
        if local is not None:
            local.names = team
            if isinstance(links, TcpWaiting):
                # A rank that waits for those of its host does not hear what came over its links.
                links.calls.on_mismatch = local.abort
        self._woken = False
        self._pool = ThreadPoolExecutor(1, f"hoop-hybrid-{self.rank}")  # no thread before it is needed

    def _way(self, peer: int) -> tuple[_LinkSet, int]:
        """Which side leads to a peer, and what it is called there."""
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        place = self._places.get(peer)
        if place is None or self._local is None:
            return self._links, peer
        return self._local, place

    @contextlib.contextmanager
    def _handing_over(self, but: _LinkSet, deadline: float) -> Iterator[None]:
        """Hands over what is left on the other side."""
        other = self._links if but is self._local else self._local
        if other is None or not other.unsent:
            yield
            return

        def hand_over() -> list[int]:
            lost = other.hand_over(deadline)
            for peer in lost:
                self.abort(PeerLost(f"rank {self.rank}: {other.endpoint.describe(peer)} closed its link"))
            return lost

        with other.meanwhile(self._pool, hand_over):
            yield

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        side, there = self._way(peer)
        pending = side.endpoint.send(there, data, deadline)
        side.keep(pending)
        self.messages_sent += 1
        self.bytes_sent += data.nbytes
        return pending

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        side, there = self._way(peer)
        with self._handing_over(side, deadline):
            side.endpoint.recv_into(there, into, deadline)

    def begin(self, call: Call, deadline: float, resumed: bool = False) -> None:
        self._links.endpoint.begin(call, deadline, resumed)
        if self.local is not None and not resumed:
            self.local.meet(deadline, call.among(self.local.size))

    def begin_links(self, call: Call, deadline: float) -> None:
        self._links.endpoint.begin(call, deadline)

    def end(self) -> None:
        self._links.endpoint.end()

    def tell(self, error: CollectiveMismatch) -> None:
        self._links.endpoint.tell(error)
        if self.local is not None:
            self.local.abort(error)

    def flush(self, deadline: float) -> None:
        for side in (self._local, self._links):
            if side is not None:
                with self._handing_over(side, deadline):
                    side.endpoint.flush(deadline)

    def senders(self, peers: Sequence[int], deadline: float) -> list[int]:
        near = [self._places[peer] for peer in peers if peer in self._places]
        far = [peer for peer in peers if peer not in self._places]
        left = self._unsent
        while True:
            # The two wake each other, and may do so once too often: only what they find counts.
            ready = self._senders(near, far, deadline)
            if ready or self._woken or self._unsent < left or time.monotonic() >= deadline:
                self._woken = False
                return ready

    def _senders(self, near: list[int], far: list[int], deadline: float) -> list[int]:
        links, local = self._links.endpoint, self._local
        if local is None or not (near or local.unsent):
            return links.senders(far, deadline)
        with local.meanwhile(self._pool, local.senders, near, deadline, links.wake) as here:
            there = links.senders(far, deadline)
        return [*(local.endpoint.names[place] for place in here), *there]

    @property
    def _unsent(self) -> int:
        return sum(side.unsent for side in (self._local, self._links) if side is not None)

    def wake(self) -> None:
        self._woken = True
        self._links.endpoint.wake()

    def explained(self, error: PeerLost) -> PeerLost:
        boxes = self.local.mailboxes if self.local is not None else []
        words = [box.last_word for place, box in enumerate(boxes) if place != self._places[self.rank]]
        news = next((word for word in words if word and word not in str(error)), "")
        return PeerLost(f"{error}; {news}") if news else error

    def abort(self, error: HoopError) -> None:
        if self.local is not None:
            # For the others of this host, who will see this rank go, and want to know who went before.
            self.local.mailboxes[self.local.rank].last_word = str(error)
        for side in (self._local, self._links):
            if side is not None:
                side.endpoint.abort(error)

    def close(self) -> None:
        for side in (self._local, self._links):
            if side is not None:
                side.endpoint.close()
        self._pool.shutdown(wait=True)


def endpoint_for(
    links: Transport,
    shared: Transport | None,
    communicator: int,
    generation: int,
    rank: int,
    peers: Sequence[Address],
    shared_peers: Sequence[Address | None],
) -> Endpoint:
    """The best endpoint for these ranks: in shared memory if all have one host in common, over links if no two have,
    else both. ``shared_peers`` with the same host part share memory; None: that rank shares none."""
    hosts = number_hosts(shared_peers)
    everyone = [address for address in shared_peers if address is not None]
    if shared is not None and len(set(hosts)) == 1 and everyone:
        return shared.endpoint(communicator, generation, rank, everyone)
    if len(set(hosts)) == len(hosts):
        return links.endpoint(communicator, generation, rank, peers)
    return spanning_endpoint(links, shared, communicator, generation, rank, peers, shared_peers)


def spanning_endpoint(
    links: Transport,
    shared: Transport | None,
    communicator: int,
    generation: int,
    rank: int,
    peers: Sequence[Address],
    shared_peers: Sequence[Address | None],
) -> HybridEndpoint:
    """Both kinds of links, whoever is where."""
    hosts = number_hosts(shared_peers)
    team = [one for one, host in enumerate(hosts) if host == hosts[rank]]
    far = links.endpoint(communicator, generation, rank, peers)
    if shared is None or len(team) == 1:
        return HybridEndpoint(far, None, hosts)
    try:
        together = [address for one in team if (address := shared_peers[one]) is not None]
        near = shared.endpoint(communicator, generation, team.index(rank), together)
    except BaseException:
        far.close()
        raise
    assert isinstance(near, SharedEndpoint), f"{shared.scheme} has no memory that ranks could share"
    return HybridEndpoint(far, near, hosts)


def number_hosts(shared_peers: Sequence[Address | None]) -> list[int]:
    """The host of each rank, as the number of its first rank; who shares no memory is on a host of its own."""
    first: dict[str, int] = {}
    return [
        rank if address is None else first.setdefault(address.host, rank)
        for rank, address in enumerate(shared_peers)
    ]


_TRIES = 20


class HybridTransport(Transport):
    """Peers whose addresses have the same host part share memory with each other."""

    scheme = "hybrid"

    def __init__(self, address: Address, arena: Arena | None = None, key: bytes = b"") -> None:
        for left in reversed(range(_TRIES)):
            self._links = TcpTransport(address, key=key)
            self.address = self._links.address
            try:
                self._shared = ShmTransport(self.address, arena)
                return
            except FailedPrecondition:  # its port is free for TCP, and not for shared memory
                self._links.close()
                if address.port or not left:
                    raise

    def endpoint(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        hosts: Sequence[str | None] = (),
    ) -> Endpoint:
        """``hosts`` says who shares memory where addresses do not tell: those with the same; None: with nobody."""
        places = [
            Address(host, peer.port) if host is not None else None
            for peer, host in zip(peers, hosts or [peer.host for peer in peers], strict=True)
        ]
        return spanning_endpoint(self._links, self._shared, communicator, generation, rank, peers, places)

    def close(self) -> None:
        self._shared.close()
        self._links.close()
