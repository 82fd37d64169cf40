"""Links between ranks of which some share a host: shared memory within the host, TCP to other hosts.

    rank 0 ── local ──▶ rank 1      one host: an endpoint in shared memory, of the ranks of this host only
      │  ╲
      links ──▶ rank 2, rank 3      other hosts: an endpoint over TCP, of all ranks

A rank waits in one of the two endpoints at a time. If the other one has pending messages, a background thread pushes
them meanwhile and stops before the wait returns, so that one thread at a time uses each endpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hoop.errors import CollectiveMismatch, FailedPrecondition, HoopError, InvalidArgument, PeerLost
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.base import Endpoint, PendingSend, SharedEndpoint, SpanningEndpoint, Transport
from hoop.transport.call_check import Call
from hoop.transport.shm_listener import ShmTransport
from hoop.transport.tcp_endpoint import TcpEndpoint
from hoop.transport.tcp_listener import TcpTransport

_LISTEN_TRIES = 20


class _LinkSet:
    """One of the two endpoints, and its pending messages."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._pending: list[PendingSend] = []
        self._stopping = False

    @property
    def pending_count(self) -> int:
        self._pending = [message for message in self._pending if not message.done]
        return len(self._pending)

    def track(self, message: PendingSend | None) -> None:
        if message is not None:
            self._pending.append(message)

    def push_pending(self, deadline: float) -> list[int]:
        """Pushes until all messages are sent, a peer is lost, or ``run_in_background`` stops it; the lost peers."""
        while not self._stopping and self.pending_count and time.monotonic() < deadline:
            if lost := self.endpoint.wait_readable([], deadline):
                return lost
        return []

    def wait_readable(self, peers: Sequence[int], deadline: float, on_return: Callable[[], None]) -> list[int]:
        """``wait_readable`` of its endpoint, until a peer is readable, a message was sent, or
        ``run_in_background`` stops it; calls ``on_return`` at the end."""
        ready: list[int] = []
        before = self.pending_count
        while not self._stopping and not ready and self.pending_count == before and time.monotonic() < deadline:
            ready = self.endpoint.wait_readable(peers, deadline)
        on_return()
        return ready

    @contextlib.contextmanager
    def run_in_background(self, pool: ThreadPoolExecutor, job: Callable[[], list[int]]) -> Iterator[list[int]]:
        """Runs one of the methods above on another thread, and stops it when the context ends.

        Yields a list that contains the job's result after the context has ended.
        """
        self._stopping = False
        result: list[int] = []
        future = pool.submit(job)
        try:
            yield result
        finally:
            self._stopping = True
            if not future.done():
                self.endpoint.wake()
            with contextlib.suppress(HoopError):  # an abort, which the waiting thread raises as well
                result += future.result()


class HybridEndpoint(SpanningEndpoint):
    """One rank's links to its own host and to others."""

    def __init__(self, links: Endpoint, local: SharedEndpoint | None, hosts: Sequence[int]) -> None:
        super().__init__(links.communicator, links.generation, links.rank, links.peers)
        self.link_stats = links.link_stats
        self.hosts = tuple(hosts)
        self.local = local
        host_ranks = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        self._local_ranks = {rank: index for index, rank in enumerate(host_ranks) if local is not None}
        """Global rank to local rank, for the ranks of this host."""
        self._links = _LinkSet(links)
        self._local = None if local is None else _LinkSet(local)
        if local is not None:
            local.global_ranks = host_ranks
            if isinstance(links, TcpEndpoint):
                # A rank that waits for ranks of its host does not see an abort of its TCP endpoint.
                links.call_check.on_mismatch = local.abort
        self._woken = False
        self._pool = ThreadPoolExecutor(1, f"hoop-hybrid-{self.rank}")  # starts its thread on first use

    def _route(self, peer: int) -> tuple[_LinkSet, int]:
        """The endpoint that leads to a peer, and the peer's rank there."""
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a rank cannot send a message to itself")
        local_rank = self._local_ranks.get(peer)
        if local_rank is None or self._local is None:
            return self._links, peer
        return self._local, local_rank

    # ---- sending and receiving

    def send(self, peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        links, peer_there = self._route(peer)
        message = links.endpoint.send(peer_there, data, deadline)
        links.track(message)
        self.messages_sent += 1
        self.bytes_sent += data.nbytes
        return message

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        links, peer_there = self._route(peer)
        with self._pushing_other(links, deadline):
            links.endpoint.recv_into(peer_there, into, deadline)

    def flush(self, deadline: float) -> None:
        for links in (self._local, self._links):
            if links is not None:
                with self._pushing_other(links, deadline):
                    links.endpoint.flush(deadline)

    @contextlib.contextmanager
    def _pushing_other(self, waiting: _LinkSet, deadline: float) -> Iterator[None]:
        """While this rank waits in one endpoint, pushes the pending messages of the other one."""
        other = self._links if waiting is self._local else self._local
        if other is None or not other.pending_count:
            yield
            return

        def push() -> list[int]:
            lost = other.push_pending(deadline)
            for peer in lost:
                text = f"rank {self.rank}: {other.endpoint.describe(peer)} closed its link"
                self.abort(PeerLost(text, rank=other.endpoint.global_ranks[peer]))
            return lost

        with other.run_in_background(self._pool, push):
            yield

    # ---- collectives

    def begin_collective(self, call: Call, deadline: float, resumed: bool = False) -> None:
        self._links.endpoint.begin_collective(call, deadline, resumed)
        if self.local is not None and not resumed:
            self.local.barrier(deadline, call.for_size(self.local.size))

    def begin_collective_on_links(self, call: Call, deadline: float) -> None:
        self._links.endpoint.begin_collective(call, deadline)

    def end_collective(self) -> None:
        self._links.endpoint.end_collective()

    def broadcast_mismatch(self, error: CollectiveMismatch) -> None:
        self._links.endpoint.broadcast_mismatch(error)
        if self.local is not None:
            self.local.abort(error)

    # ---- waiting

    def wait_readable(self, peers: Sequence[int], deadline: float) -> list[int]:
        local_peers = [self._local_ranks[peer] for peer in peers if peer in self._local_ranks]
        remote_peers = [peer for peer in peers if peer not in self._local_ranks]
        before = self._pending_count
        while True:
            # The two endpoints wake each other, sometimes once too often: only what they find counts.
            ready = self._wait_readable(local_peers, remote_peers, deadline)
            if ready or self._woken or self._pending_count < before or time.monotonic() >= deadline:
                self._woken = False
                return ready

    def _wait_readable(self, local_peers: list[int], remote_peers: list[int], deadline: float) -> list[int]:
        links, local = self._links.endpoint, self._local
        if local is None or not (local_peers or local.pending_count):
            return links.wait_readable(remote_peers, deadline)
        job = partial(local.wait_readable, local_peers, deadline, on_return=links.wake)
        with local.run_in_background(self._pool, job) as local_ready:
            remote_ready = links.wait_readable(remote_peers, deadline)
        return [*(local.endpoint.global_ranks[peer] for peer in local_ready), *remote_ready]

    @property
    def _pending_count(self) -> int:
        return sum(links.pending_count for links in (self._local, self._links) if links is not None)

    def wake(self) -> None:
        self._woken = True
        self._links.endpoint.wake()

    # ---- closing

    def with_local_cause(self, error: PeerLost) -> PeerLost:
        segments = self.local.segments if self.local is not None else []
        reasons = [
            segment.abort_reason
            for local_rank, segment in enumerate(segments)
            if local_rank != self._local_ranks[self.rank]
        ]
        cause = next((reason for reason in reasons if reason and reason not in str(error)), "")
        return PeerLost(f"{error}; {cause}", rank=error.rank, cause=error.cause) if cause else error

    def raise_failure(self) -> None:
        for links in (self._local, self._links):
            if links is not None:
                links.endpoint.raise_failure()

    def current_wait(self) -> tuple[Sequence[int], Hashable]:
        peers, state = self.local.current_wait() if self.local is not None else ((), None)
        if self.local is not None and peers:
            return [self.local.global_ranks[peer] for peer in peers], state
        return self._links.endpoint.current_wait()

    def verify_reads(self) -> None:
        if self.local is not None:
            self.local.verify_reads()

    def abort(self, error: HoopError) -> None:
        if self.local is not None:
            # The other ranks of this host will see this rank as lost; this gives them the original cause.
            self.local.segments[self.local.rank].abort_reason = str(error)
        for links in (self._local, self._links):
            if links is not None:
                links.endpoint.abort(error)

    def close(self) -> None:
        for links in (self._local, self._links):
            if links is not None:
                links.endpoint.close()
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
    """The best endpoint for these ranks: shared memory if all are on one host, ``links`` if no two are, else both.

    ``shared_peers``: ranks whose addresses have the same host part share memory; None: that rank shares none.
    """
    hosts = number_hosts(shared_peers)
    shared_addresses = [address for address in shared_peers if address is not None]
    if shared is not None and len(set(hosts)) == 1 and shared_addresses:
        return shared.endpoint(communicator, generation, rank, shared_addresses)
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
    """An endpoint that can use both kinds of links, whatever the hosts of the ranks."""
    hosts = number_hosts(shared_peers)
    host_ranks = [one for one, host in enumerate(hosts) if host == hosts[rank]]
    remote = links.endpoint(communicator, generation, rank, peers)
    if shared is None or len(host_ranks) == 1:
        return HybridEndpoint(remote, None, hosts)
    try:
        addresses = [address for one in host_ranks if (address := shared_peers[one]) is not None]
        local = shared.endpoint(communicator, generation, host_ranks.index(rank), addresses)
    except BaseException:
        remote.close()
        raise
    assert isinstance(local, SharedEndpoint), f"{shared.scheme} has no memory that ranks could share"
    return HybridEndpoint(remote, local, hosts)


def number_hosts(shared_peers: Sequence[Address | None]) -> list[int]:
    """The host of each rank, as the number of its first rank; a rank that shares no memory has a host of its own."""
    first: dict[str, int] = {}
    return [
        rank if address is None else first.setdefault(address.host, rank) for rank, address in enumerate(shared_peers)
    ]


class HybridTransport(Transport):
    """TCP and shared memory behind one address; peers whose addresses have the same host part share memory."""

    scheme = "hybrid"

    def __init__(self, address: Address, arena: Arena | None = None, key: bytes = b"") -> None:
        for tries_left in reversed(range(_LISTEN_TRIES)):
            self._links = TcpTransport(address, key=key)
            self.address = self._links.address
            try:
                self._shared = ShmTransport(self.address, arena)
                return
            except FailedPrecondition:  # its port is free for TCP, but not for shared memory
                self._links.close()
                if address.port or not tries_left:
                    raise

    def endpoint(
        self, communicator: int, generation: int, rank: int, peers: Sequence[Address], hosts: Sequence[str | None] = ()
    ) -> Endpoint:
        """``hosts``: an identity for each rank, if not its address; ranks with the same identity share memory,
        a rank with None shares none."""
        shared_peers = [
            Address(host, peer.port) if host is not None else None
            for peer, host in zip(peers, hosts or [peer.host for peer in peers], strict=True)
        ]
        return spanning_endpoint(self._links, self._shared, communicator, generation, rank, peers, shared_peers)

    def close(self) -> None:
        self._shared.close()
        self._links.close()
