"""A collective as data: for each rank, rounds of instructions over its buffers.

Letters used in this package: n ranks, this one is r; a rank's vector has S elements (``count``). A *segment* is one of
the n nearly equal parts of a vector; a *chunk* is the part that one message carries.

Instructions name ranges of four buffers: the caller's SOURCE and DESTINATION (which may be the same memory), SCRATCH,
which the executor provides, and WINDOW, the memory that a rank shares with the others.

    Send, Recv    one message                              Meet     barrier among ranks that share memory
    Reduce        receive one message and combine it       Take     copy from a peer's shared memory
    Copy          local copy                               Fold     combine the same range of every rank's shared memory
    Combine       combine two local ranges
    Finish        last step of the operation (AVG divides)

The same plan is executed, priced by the simulator and asserted in tests; ``verify`` checks plans without running them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class BufferRole(IntEnum):
    """The buffer of a range."""

    SOURCE = 0
    DESTINATION = 1
    SCRATCH = 2
    WINDOW = 3
    """The part of shared memory that this rank publishes; it begins as a copy of the source, or is the source."""


SOURCE, DESTINATION, SCRATCH, WINDOW = (
    BufferRole.SOURCE,
    BufferRole.DESTINATION,
    BufferRole.SCRATCH,
    BufferRole.WINDOW,
)


class Range(NamedTuple):
    """Elements ``[start, stop)`` of a buffer."""

    buffer: BufferRole
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class Send(NamedTuple):
    """Send a range to a peer."""

    peer: int
    range: Range


class Recv(NamedTuple):
    """Receive a message from a peer into a range."""

    peer: int
    range: Range


class Reduce(NamedTuple):
    """Receive a message from a peer and combine it into a range."""

    peer: int
    range: Range


class Copy(NamedTuple):
    """Copy a range to another of the same length."""

    source: Range
    destination: Range


class Combine(NamedTuple):
    """Combine two ranges into a third of the same length, which may be one of them."""

    left: Range
    right: Range
    into: Range


class Finish(NamedTuple):
    """Apply the last step of the operation to a range that holds the complete combination (AVG divides)."""

    range: Range


# ---- between ranks that share memory


class Meet(NamedTuple):
    """Barrier: wait until every rank is here; afterwards each can read what the others wrote before."""

    ranks: tuple[int, ...] = ()
    """The participants: the ranks of one host; empty: all ranks."""


class Take(NamedTuple):
    """Copy a range of a peer's window (or destination) to a local range of the same length."""

    peer: int
    remote: Range
    local: Range


class Fold(NamedTuple):
    """Combine a range of every rank's window in rank order, finish it, and write it to ``local``."""

    remote: Range
    local: Range
    to_all: bool = False
    """Write to the same range of every rank's destination, not only to this rank's."""
    ranks: tuple[int, ...] = ()
    """The ranks of one host: only their windows, and without finishing, since other hosts follow; empty: all ranks."""


CollectiveInstruction = Send | Recv | Reduce | Copy | Combine | Finish | Meet | Take | Fold
Round = tuple[CollectiveInstruction, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """The instructions of one rank, round by round."""

    rounds: tuple[Round, ...]
    scratch: int = 0
    """Elements of scratch that it needs."""

    def __iter__(self) -> Iterator[CollectiveInstruction]:
        for instructions in self.rounds:
            yield from instructions

    @property
    def messages(self) -> int:
        """Number of messages that this rank sends."""
        return sum(isinstance(instruction, Send) for instruction in self)

    @property
    def elements(self) -> int:
        """Number of elements that this rank sends."""
        return sum(instruction.range.length for instruction in self if isinstance(instruction, Send))


@dataclass(frozen=True, slots=True)
class Shape:
    """Everything but the rank that a plan depends on."""

    size: int
    """n, the number of ranks."""
    count: int
    """S, the elements of one rank's vector."""
    root: int = 0
    peer: int = 0
    chunk: int = 0
    """The most elements of a message (inside a host: of a window); 0: no limit."""
    hosts: tuple[int, ...] = ()
    """The host of each rank, for hierarchical plans; empty: every rank has a host of its own."""


def split_range(count: int, parts: int) -> list[tuple[int, int]]:
    """``count`` elements as ``parts`` nearly equal ranges; the first ones take the remainder."""
    size, rest = divmod(count, parts)
    bounds = [index * size + min(index, rest) for index in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def pieces(start: int, stop: int, chunk: int) -> list[tuple[int, int]]:
    """A range as consecutive pieces of at most ``chunk`` elements."""
    if not chunk:
        return [(start, stop)] if stop > start else []
    return [(at, min(at + chunk, stop)) for at in range(start, stop, chunk)]


def verify(plans: Sequence[CollectivePlan]) -> list[str]:
    """Checks the plans of all ranks, in rank order, and returns the problems as sentences; empty: none.

    Runs the plans against each other with unlimited buffering. Every Send must find its Recv, of the same length and
    in order, and no rank may wait for ever.

    It runs the instructions of one collective, without times; ``plan.unit_clock`` and ``simulate.clock`` time training
    steps.
    """
    problems: list[str] = []
    remaining = [deque(plan) for plan in plans]
    links: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    progress = True
    while progress:
        progress = False
        for rank, instructions in enumerate(remaining):
            while instructions:
                instruction = instructions[0]
                if isinstance(instruction, Meet):
                    break
                if isinstance(instruction, Send):
                    links[rank, instruction.peer].append(instruction.range.length)
                elif isinstance(instruction, Recv | Reduce):
                    link = links[instruction.peer, rank]
                    if not link:
                        break
                    if (length := link.popleft()) != instruction.range.length:
                        problems.append(f"rank {rank}: {instruction} gets {length} elements")
                instructions.popleft()
                progress = True
        for barrier in {queue[0] for queue in remaining if queue and isinstance(queue[0], Meet)}:
            participants = [remaining[rank] for rank in barrier.ranks or range(len(remaining))]
            if all(queue and isinstance(queue[0], Meet) and queue[0] == barrier for queue in participants):
                for queue in participants:
                    queue.popleft()
                progress = True
    problems += [f"rank {rank}: waits for ever at {queue[0]}" for rank, queue in enumerate(remaining) if queue]
    problems += [f"{len(link)} messages {a} -> {b} are never received" for (a, b), link in links.items() if link]
    return problems
