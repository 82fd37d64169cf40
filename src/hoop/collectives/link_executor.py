"""Executes plans by messages, and plans of several hosts: shared memory inside this host, messages to the others.

``LinkExecution`` executes the instructions of one rank over its links. ``MultiHostExecutor`` executes hierarchical
plans; ``_HostExecution`` does the part of such a plan inside this host. ``all_to_all_v`` needs no plan.

Inside a host a rank publishes its vector in its staging buffers, piece by piece, unless the vector is in shared memory
already (an arena). A rank has two of them (double buffering): the piece published before a barrier is read after it,
while the next piece is written to the other one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from hoop.collectives.plan import (
    WINDOW,
    BufferRole,
    CollectiveInstruction,
    Combine,
    Copy,
    Finish,
    Fold,
    Meet,
    Range,
    Recv,
    Reduce,
    Send,
    Take,
)
from hoop.collectives.reduction import Array, Reduction
from hoop.collectives.registry import Operation
from hoop.collectives.shm_executor import ShmExecutor
from hoop.errors import CollectiveMismatch, DeadlineExceeded, LinkCorrupted, PeerLost, WrongLength
from hoop.transport.base import Endpoint, PendingSend, SharedEndpoint, SpanningEndpoint
from hoop.transport.call_check import Call, length_mismatch_error
from hoop.transport.shm_segment import SLOT_BYTES, STAGING_BYTES


class LinkExecution:
    """Executes instructions over one rank's buffers and links, for one operation."""

    def __init__(
        self,
        endpoint: Endpoint,
        source: Array,
        destination: Array,
        scratch: Array,
        reduction: Reduction,
        deadline: float,
    ) -> None:
        self._endpoint = endpoint
        self._buffers = (source, destination, scratch)
        self._bases = tuple(buffer.__array_interface__["data"][0] for buffer in self._buffers)
        self._itemsize = source.dtype.itemsize
        self._reduction = reduction
        self._deadline = deadline
        self._receive_buffer = np.empty(0, source.dtype)
        self._unsent: list[tuple[int, int, PendingSend]] = []
        """Messages that the links have not taken whole, with the addresses [low, high) of their memory."""
        self.done = 0
        """Instructions executed so far, for error messages."""

    def run(self, instructions: Iterable[CollectiveInstruction]) -> None:
        endpoint, deadline = self._endpoint, self._deadline
        for instruction in instructions:
            match instruction:
                case Send(peer, where):
                    pending = endpoint.send(peer, self._bytes(where), deadline)
                    if pending is not None:
                        self._unsent.append((*self._addresses(where), pending))
                case Recv(peer, where):
                    self._detach_unsent(where)
                    endpoint.recv_into(peer, self._bytes(where), deadline)
                case Reduce(peer, where):
                    received = self._buffer_of(where.length)
                    endpoint.recv_into(peer, received.view(np.uint8).data, deadline)
                    self._detach_unsent(where)
                    self._reduction.combine(self._array(where), received)
                case Copy(source, destination):
                    if self._addresses(source) != self._addresses(destination):
                        self._detach_unsent(destination)
                        np.copyto(self._array(destination), self._array(source))
                case Combine(left, right, into):
                    self._detach_unsent(into)
                    self._reduction.combine_into(self._array(left), self._array(right), self._array(into))
                case Finish(where):
                    self._detach_unsent(where)
                    self._reduction.finish(self._array(where), endpoint.size)
            self.done += 1
        endpoint.flush(deadline)

    def _array(self, where: Range) -> Array:
        return self._buffers[where.buffer][where.start : where.stop]

    def _bytes(self, where: Range) -> memoryview:
        return self._array(where).view(np.uint8).data

    def _addresses(self, where: Range) -> tuple[int, int]:
        base = self._bases[where.buffer]
        return base + where.start * self._itemsize, base + where.stop * self._itemsize

    def _buffer_of(self, length: int) -> Array:
        """Memory for a message that is combined after it is received; one buffer that grows."""
        if self._receive_buffer.size < length:
            self._receive_buffer = np.empty(length, self._receive_buffer.dtype)
        return self._receive_buffer[:length]

    def _detach_unsent(self, where: Range) -> None:
        """Before a write to a range: copies the unsent bytes of messages that are sent from it."""
        if not self._unsent:
            return
        start, stop = self._addresses(where)
        for low, high, pending in self._unsent:
            if low < stop and start < high:
                pending.detach()
        self._unsent = [entry for entry in self._unsent if not entry[2].done]


def run_over_links(
    endpoint: Endpoint,
    operation: Operation,
    begin: Callable[[], None],
    instructions: Sequence[CollectiveInstruction],
    buffers: tuple[Array, Array, Array],
    reduction: Reduction,
    deadline: float,
) -> None:
    """Executes an operation by messages; an error names the instruction at which it occurred.

    ``begin`` calls the endpoint's ``begin_collective``. ``buffers``: source, destination, scratch.
    """
    source, destination, scratch = buffers
    execution = LinkExecution(endpoint, source, destination, scratch, reduction, deadline)
    try:
        begin()
        execution.run(instructions)
    except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
        at = f"instruction {execution.done + 1} of {len(instructions)}"
        raise type(error)(f"{error}, at {at} of {operation}") from error


def run_collective(endpoint: Endpoint, run: Callable[[], None]) -> None:
    """Calls ``run``, which begins and executes a collective, and ends the collective on the endpoint.

    A CollectiveMismatch is sent to all ranks before it is raised.
    """
    try:
        run()
    except CollectiveMismatch as error:
        endpoint.broadcast_mismatch(error)
        raise
    finally:
        endpoint.end_collective()


def confirm_all_started(endpoint: Endpoint, deadline: float) -> None:
    """Returns when every rank has begun the current collective: log2 n empty messages a rank.

    Called at the end of collectives that do not synchronize all ranks. The root of a broadcast, for example, receives
    nothing from other ranks and would not learn that their calls do not match. Ranks that share memory have passed a
    barrier at the start and need no confirmation.
    """
    if isinstance(endpoint, SharedEndpoint):
        return
    sent = endpoint.messages_sent, endpoint.bytes_sent
    n, rank, nothing = endpoint.size, endpoint.rank, memoryview(bytearray())
    for level in range((n - 1).bit_length()):
        endpoint.send((rank + (1 << level)) % n, nothing, deadline)
        endpoint.recv_into((rank - (1 << level)) % n, nothing, deadline)
    endpoint.flush(deadline)
    endpoint.messages_sent, endpoint.bytes_sent = sent  # a report counts only messages that carry the vector


@contextlib.contextmanager
def multi_host_errors(endpoint: SpanningEndpoint) -> Iterator[None]:
    """A collective on several hosts runs in this block: it tells an error to the other ranks, and ends the collective.

    A rank that waits for others of its host learns there which rank was lost on another host.
    """
    try:
        yield
    except CollectiveMismatch as mismatch:
        endpoint.broadcast_mismatch(mismatch)
        raise
    except PeerLost as error:
        # Abort with the cause, so that ranks waiting for this one learn which rank it waited for.
        explained = endpoint.with_local_cause(error)
        endpoint.abort(explained)
        raise explained from error
    finally:
        endpoint.end_collective()


class MultiHostExecutor:
    """Executes one rank's hierarchical plans."""

    def __init__(self, endpoint: SpanningEndpoint) -> None:
        self._endpoint = endpoint
        self._shm_executor = None if endpoint.local is None else ShmExecutor(endpoint.local)

    def run(
        self, operation: Operation, algorithm: str, call: Call, source: Array, destination: Array, deadline: float
    ) -> None:
        """Runs one operation, from the first barrier to the last."""
        endpoint = self._endpoint
        with multi_host_errors(endpoint):
            if operation.count:
                endpoint.begin_collective_on_links(call, deadline)
                self._run(operation, algorithm, call, source, destination, deadline)
            else:
                endpoint.begin_collective(call, deadline)
            if not operation.synchronizes:
                confirm_all_started(endpoint, deadline)

    def _run(
        self, operation: Operation, algorithm: str, call: Call, source: Array, destination: Array, deadline: float
    ) -> None:
        endpoint, width = self._endpoint, STAGING_BYTES // operation.dtype.itemsize
        host, in_arenas = None, False
        if endpoint.local is not None:
            host = _HostExecution(endpoint.local, operation, source, destination, deadline)
            host.call = call.for_size(endpoint.local.size)
            # Each host decides for itself: the messages between hosts are the same either way.
            in_arenas = self._map_arenas(host, source, destination, deadline)
        plan = operation.plan(
            endpoint.size, endpoint.rank, algorithm, hosts=endpoint.hosts, window=0 if in_arenas else width
        )
        reduction = Reduction(operation.op, operation.dtype)
        links = LinkExecution(endpoint, source, destination, source[:0], reduction, deadline)
        # With vectors in arenas, exchanging their addresses was the plan's first barrier.
        steps = itertools.islice(plan, int(in_arenas), None)
        for inside_host, group in itertools.groupby(steps, _is_inside_host):
            if inside_host:
                assert host is not None, "a rank alone on its host has no instruction inside it"
                host.run(group)
            else:
                links.run(group)

    def _map_arenas(self, host: _HostExecution, source: Array, destination: Array, deadline: float) -> bool:
        """Maps the vectors of this host's ranks, if all of them are in arenas; returns whether they are."""
        host.local.wait_for_peers(deadline)
        if self._shm_executor is None or any(arena is None for arena in host.local.arenas):
            return False
        assert host.call is not None, "the first barrier compares it"
        mapped = self._shm_executor.map_peer_buffers(source, destination, deadline, host.call)
        host.call = None
        if mapped is not None:
            host.sources, host.destinations = mapped
        return mapped is not None


class _HostExecution:
    """Executes the instructions of one operation among the ranks of this host."""

    def __init__(
        self, local: SharedEndpoint, operation: Operation, source: Array, destination: Array, deadline: float
    ) -> None:
        self.local = local
        self._deadline = deadline
        self.call: Call | None = None
        """Compared at the next barrier; None once it was."""
        self._own = (source, destination)
        # A host's total is not final: an average is divided after the last host's total was added.
        self._reduction = Reduction("sum" if operation.op == "avg" else operation.op, operation.dtype)
        self._staging: list[list[Array]] = []
        self.sources: list[Array] = []
        """The windows of all ranks of this host: their staging buffers last published, or their sources in arenas."""
        self.destinations: list[Array] = []
        """The destinations of all ranks of this host in arenas; empty where staging buffers are used."""

    def run(self, steps: Iterable[CollectiveInstruction]) -> None:
        for step in steps:
            match step:
                case Copy(source, destination):
                    np.copyto(self._own_range(destination), self._own_range(source))
                case Meet():
                    self._barrier()
                case Take(peer, remote, local):
                    index = self.local.global_ranks.index(peer)
                    np.copyto(self._own_range(local), self._all_ranges(remote)[index])
                case Fold(remote, local):
                    self._reduction.fold(self._all_ranges(remote), [self._own_range(local)])

    def _barrier(self) -> None:
        self.local.barrier(self._deadline, self.call)
        self.call = None
        if not self.destinations:
            self.sources = self._staging_of(self.local.publish_count + 1)
            self.local.publish_count += 1

    def _own_range(self, where: Range) -> Array:
        if where.buffer == WINDOW:
            own = self._staging_of(self.local.publish_count + 1)[self.local.rank]
            return own[where.start : where.stop]
        return self._own[where.buffer][where.start : where.stop]

    def _all_ranges(self, where: Range) -> list[Array]:
        arrays = self.sources if where.buffer == WINDOW else self.destinations
        return [array[where.start : where.stop] for array in arrays]

    def _staging_of(self, publication: int) -> list[Array]:
        """The staging buffers of all ranks that hold their ``publication``-th vector."""
        if not self._staging:
            kind = self._own[BufferRole.SOURCE].dtype
            segments = self.local.segments
            self._staging = [[segment.staging_buffers[turn].view(kind) for segment in segments] for turn in (0, 1)]
        return self._staging[publication & 1]


def _is_inside_host(step: CollectiveInstruction) -> bool:
    return isinstance(step, Meet | Take | Fold) or (isinstance(step, Copy) and step.destination.buffer == WINDOW)


# ---- all_to_all in which every pair of ranks may have its own message length


def all_to_all_v(
    endpoint: Endpoint, call: Call, sources: Sequence[Array], destinations: Sequence[Array], deadline: float
) -> None:
    """Collective. Sends the bytes ``sources[i]`` to rank i and receives ``destinations[i]`` from it.

    In round k rank r sends to r+k and receives from r-k. Every rank must pass the same ``call``. The lengths are
    checked: rank i's message to rank j must be as long as rank j's buffer for it. Ranks that share memory compare all
    lengths at their first barrier. Over links, the receiver of a message of another length informs all ranks.
    """
    rank, size = endpoint.rank, endpoint.size

    def run() -> None:
        if isinstance(endpoint, SharedEndpoint):
            _compare_lengths(endpoint, call, sources, destinations, deadline)
        else:
            endpoint.begin_collective(call, deadline)
        if sources[rank].size != destinations[rank].size:
            raise length_mismatch_error(call, rank, rank, destinations[rank].nbytes, str(sources[rank].nbytes))
        np.copyto(destinations[rank], sources[rank])
        for k in range(1, size):
            _exchange_round(endpoint, call, sources, destinations, k, deadline)
        endpoint.flush(deadline)
        # Empty messages are not sent, so a rank may not have received from every other rank.
        confirm_all_started(endpoint, deadline)

    run_collective(endpoint, run)


def _exchange_round(
    endpoint: Endpoint, call: Call, sources: Sequence[Array], destinations: Sequence[Array], k: int, deadline: float
) -> None:
    to, by = (endpoint.rank + k) % endpoint.size, (endpoint.rank - k) % endpoint.size
    if sources[to].size:
        endpoint.send(to, sources[to].data, deadline)
    if destinations[by].size:
        try:
            endpoint.recv_into(by, destinations[by].data, deadline)
        except WrongLength as error:
            size = destinations[by].nbytes
            raise length_mismatch_error(call, endpoint.rank, by, size, str(error.received_bytes)) from error


def _compare_lengths(
    endpoint: SharedEndpoint, call: Call, sources: Sequence[Array], destinations: Sequence[Array], deadline: float
) -> None:
    """Begins the collective: every rank publishes its lengths before the barrier and compares all lengths after it."""
    size = endpoint.size
    if 2 * size * 8 > SLOT_BYTES:
        endpoint.begin_collective(call, deadline)
        return
    endpoint.wait_for_peers(deadline)  # the segments of all ranks are mapped from here on
    endpoint.publish_count = publication = endpoint.publish_count + 1
    lengths = [
        segment.slots[publication & 1].view(np.int64)[: 2 * size].reshape(2, size) for segment in endpoint.segments
    ]
    lengths[endpoint.rank][:] = [[one.nbytes for one in vectors] for vectors in (sources, destinations)]
    endpoint.begin_collective(call, deadline)
    sent = np.array([one[0] for one in lengths])
    expected = np.array([one[1] for one in lengths]).T
    different = np.argwhere(sent != expected)
    if len(different):
        sender, receiver = (int(one) for one in different[0])
        names = endpoint.global_ranks
        error = length_mismatch_error(
            call, names[receiver], names[sender], int(expected[sender, receiver]), str(sent[sender, receiver])
        )
        endpoint.abort(error)
        raise error
