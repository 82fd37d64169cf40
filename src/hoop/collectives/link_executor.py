"""Runs one rank's plan over its links.

Runs plans of ranks on several hosts: in shared memory inside this one, by messages to the others.

Inside, a vector is laid open in this rank's stage, piece by piece, or it lies in shared memory already (an arena). Two
stages are used in turn: what was laid open before a meeting is read after it, while the next piece goes to the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

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
from hoop.errors import CollectiveMismatch, DeadlineExceeded, LinkCorrupted, PeerLost
from hoop.transport.base import Endpoint, PendingSend, SharedEndpoint, SpanningEndpoint
from hoop.transport.calls import Call
from hoop.transport.shm_segment import STAGE_BYTES


class LinkExecution:
    """One rank's buffers and links during one operation."""

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
        self._landing = np.empty(0, source.dtype)
        self._unsent: list[tuple[int, int, PendingSend]] = []
        self.done = 0
        """Instructions executed so far; what an error message quotes."""

    def run(self, instructions: Iterable[CollectiveInstruction]) -> None:
        endpoint, deadline = self._endpoint, self._deadline
        for instruction in instructions:
            match instruction:
                case Send(peer, where):
                    pending = endpoint.send(peer, self._bytes(where), deadline)
                    if pending is not None:
                        self._unsent.append((*self._span(where), pending))
                case Recv(peer, where):
                    self._about_to_write(where)
                    endpoint.recv_into(peer, self._bytes(where), deadline)
                case Reduce(peer, where):
                    landing = self._land(where.length)
                    endpoint.recv_into(peer, landing.view(np.uint8).data, deadline)
                    self._about_to_write(where)
                    self._reduction.combine(self._array(where), landing)
                case Copy(source, destination):
                    if self._span(source) != self._span(destination):
                        self._about_to_write(destination)
                        np.copyto(self._array(destination), self._array(source))
                case Combine(left, right, into):
                    self._about_to_write(into)
                    self._reduction.combine_into(self._array(left), self._array(right), self._array(into))
                case Finish(where):
                    self._about_to_write(where)
                    self._reduction.finish(self._array(where), endpoint.size)
            self.done += 1
        endpoint.flush(deadline)

    def _array(self, where: Range) -> Array:
        return self._buffers[where.place][where.start : where.stop]

    def _bytes(self, where: Range) -> memoryview:
        return self._array(where).view(np.uint8).data

    def _span(self, where: Range) -> tuple[int, int]:
        base = self._bases[where.place]
        return base + where.start * self._itemsize, base + where.stop * self._itemsize

    def _land(self, length: int) -> Array:
        """Where a message lies before it is combined; one buffer that grows."""
        if self._landing.size < length:
            self._landing = np.empty(length, self._landing.dtype)
        return self._landing[:length]

    def _about_to_write(self, where: Range) -> None:
        """Messages that still have to leave from here are copied aside first."""
        if not self._unsent:
            return
        start, stop = self._span(where)
        for low, high, pending in self._unsent:
            if low < stop and start < high:
                pending.detach()
        self._unsent = [entry for entry in self._unsent if not entry[2].done]


def over_links(
    endpoint: Endpoint,
    operation: Operation,
    begin: Callable[[], None],
    instructions: Sequence[CollectiveInstruction],
    buffers: tuple[Array, Array, Array],
    reduction: Reduction,
    deadline: float,
) -> None:
    """An operation by messages, which ``begin`` opens; an error says how far it had come."""
    execution = LinkExecution(endpoint, *buffers, reduction, deadline)
    try:
        begin()
        execution.run(instructions)
    except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
        at = f"instruction {execution.done + 1} of {len(instructions)}"
        raise type(error)(f"{error}, at {at} of {operation}") from error


def together(endpoint: Endpoint, run: Callable[[], None]) -> None:
    """Runs a collective, from the endpoint's ``begin`` on; a mismatch is told to every rank before it is raised."""
    try:
        run()
    except CollectiveMismatch as error:
        endpoint.tell(error)
        raise
    finally:
        endpoint.end()


def confirm(endpoint: Endpoint, deadline: float) -> None:
    """Returns when every rank has begun the collective under way: log2 n empty messages a rank.

    Ends collectives that do not synchronize by themselves: the root of a broadcast needs nothing of the others, and
    would not learn that their calls do not match. Ranks that share memory have met when it began.
    """
    if isinstance(endpoint, SharedEndpoint):
        return
    sent = endpoint.messages_sent, endpoint.bytes_sent
    n, rank, nothing = endpoint.size, endpoint.rank, memoryview(bytearray())
    for level in range((n - 1).bit_length()):
        endpoint.send((rank + (1 << level)) % n, nothing, deadline)
        endpoint.recv_into((rank - (1 << level)) % n, nothing, deadline)
    endpoint.flush(deadline)
    endpoint.messages_sent, endpoint.bytes_sent = sent  # a report counts what carries the vector


class MultiHostExecutor:
    """One rank's side of hierarchical plans."""

    def __init__(self, endpoint: SpanningEndpoint) -> None:
        self._endpoint = endpoint
        self._sharing = None if endpoint.local is None else ShmExecutor(endpoint.local)

    def run(
        self,
        operation: Operation,
        algorithm: str,
        call: Call,
        source: Array,
        destination: Array,
        deadline: float,
    ) -> None:
        """One operation, from the first meeting to the last."""
        endpoint = self._endpoint
        try:
            if operation.count:
                endpoint.begin_links(call, deadline)
                self._run(operation, algorithm, call, source, destination, deadline)
            else:
                endpoint.begin(call, deadline)
            if not operation.synchronizes:
                confirm(endpoint, deadline)
        except CollectiveMismatch as mismatch:
            endpoint.tell(mismatch)
            raise
        except PeerLost as error:
            # Whoever waits for this rank is told whom it waited for.
            told = endpoint.explained(error)
            endpoint.abort(told)
            raise told from error
        finally:
            endpoint.end()

    def _run(
        self,
        operation: Operation,
        algorithm: str,
        call: Call,
        source: Array,
        destination: Array,
        deadline: float,
    ) -> None:
        endpoint, width = self._endpoint, STAGE_BYTES // operation.dtype.itemsize
        host, in_arenas = None, False
        if endpoint.local is not None:
            host = _HostExecution(endpoint.local, operation, source, destination, deadline)
            host.call = call.among(endpoint.local.size)
            # Every host finds out for itself: what is sent between hosts is the same either way.
            in_arenas = self._lay_open(host, source, destination, deadline)
        plan = operation.plan(
            endpoint.size, endpoint.rank, algorithm, hosts=endpoint.hosts, window=0 if in_arenas else width
        )
        reduction = Reduction(operation.op, operation.dtype)
        links = LinkExecution(endpoint, source, destination, source[:0], reduction, deadline)
        # Where vectors are in arenas the first meeting was for telling where.
        steps = itertools.islice(plan, int(in_arenas), None)
        for inside, group in itertools.groupby(steps, _is_inside):
            if inside:
                assert host is not None, "who is alone on its host has nobody to meet"
                host.run(group)
            else:
                links.run(group)

    def _lay_open(self, host: _HostExecution, source: Array, destination: Array, deadline: float) -> bool:
        """Whether all vectors of this host's ranks lie in arenas."""
        host.local.gather(deadline)
        if self._sharing is None or any(arena is None for arena in host.local.arenas):
            return False
        assert host.call is not None, "the first meeting compares it"
        seen = self._sharing.exchange(source, destination, deadline, host.call)
        host.call = None
        if seen is not None:
            host.sources, host.destinations = seen
        return seen is not None


class _HostExecution:
    """This rank among those of its host, in one operation."""

    def __init__(
        self,
        local: SharedEndpoint,
        operation: Operation,
        source: Array,
        destination: Array,
        deadline: float,
    ) -> None:
        self.local = local
        self._deadline = deadline
        self.call: Call | None = None
        """Compared at the next meeting; None once it was."""
        self._own = (source, destination)
        # What a host combines is not the end of it: the last host to combine finishes.
        self._reduction = Reduction("sum" if operation.op == "avg" else operation.op, operation.dtype)
        self._stages: list[list[Array]] = []
        self.sources: list[Array] = []
        """Everybody's vector, as last laid open; or where it lies."""
        self.destinations: list[Array] = []

    def run(self, steps: Iterable[CollectiveInstruction]) -> None:
        for step in steps:
            match step:
                case Copy(there, here):
                    np.copyto(self._mine(here), self._mine(there))
                case Meet():
                    self._meet()
                case Take(peer, there, here):
                    np.copyto(self._mine(here), self._theirs(there)[self.local.names.index(peer)])
                case Fold(there, here):
                    self._reduction.fold(self._theirs(there), [self._mine(here)])

    def _meet(self) -> None:
        self.local.meet(self._deadline, self.call)
        self.call = None
        if not self.destinations:
            self.sources = self._staged(self.local.publications + 1)
            self.local.publications += 1

    def _mine(self, where: Range) -> Array:
        if where.place == WINDOW:
            return self._staged(self.local.publications + 1)[self.local.rank][where.start : where.stop]
        return self._own[where.place][where.start : where.stop]

    def _theirs(self, where: Range) -> list[Array]:
        arrays = self.sources if where.place == WINDOW else self.destinations
        return [array[where.start : where.stop] for array in arrays]

    def _staged(self, publication: int) -> list[Array]:
        if not self._stages:
            kind = self._own[BufferRole.SOURCE].dtype
            boxes = self.local.mailboxes
            self._stages = [[box.stages[turn].view(kind) for box in boxes] for turn in (0, 1)]
        return self._stages[publication & 1]


def _is_inside(step: CollectiveInstruction) -> bool:
    """Whether it is for the ranks of one host."""
    return isinstance(step, Meet | Take | Fold) or (
        isinstance(step, Copy) and step.destination.place == WINDOW
    )
