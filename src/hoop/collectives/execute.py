"""Runs one rank's plan over its links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.plan import Combine, Copy, Finish, Instruction, Range, Recv, Reduce, Send
from hoop.collectives.reduction import Array, Reduction
from hoop.errors import CollectiveMismatch, DeadlineExceeded, LinkCorrupted, PeerLost
from hoop.transport.base import Endpoint, Pending, SharedEndpoint


class Execution:
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
        self._unsent: list[tuple[int, int, Pending]] = []
        self.done = 0
        """Instructions executed so far; what an error message quotes."""

    def run(self, instructions: Iterable[Instruction]) -> None:
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
    instructions: Sequence[Instruction],
    buffers: tuple[Array, Array, Array],
    reduction: Reduction,
    deadline: float,
) -> None:
    """An operation by messages, which ``begin`` opens; an error says how far it had come."""
    execution = Execution(endpoint, *buffers, reduction, deadline)
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
