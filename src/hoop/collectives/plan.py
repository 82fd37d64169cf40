"""A collective as data: for each rank, rounds of instructions over its buffers.

Letters used throughout this room: n ranks, this one is r; S elements (``count``) a rank's vector
has; a *segment* is one of the n nearly equal parts of a vector, a *chunk* what one message carries.

A plan names ranges of three buffers: the caller's ``SOURCE`` and ``DESTINATION`` (which may be the
same memory) and ``SCRATCH``, which the executor provides; where ranks share memory, also of their ``WINDOW``s.
The same plan is executed over links, priced by
the simulator and asserted in tests; ``verify`` checks one without running it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class BufferRole(IntEnum):
    """Which buffer a range is in."""

    SOURCE = 0
    DESTINATION = 1
    SCRATCH = 2
    WINDOW = 3
    """What this rank lays open to the others, where they share memory; starts as a copy of the source, or is it."""


SOURCE, DESTINATION, SCRATCH, WINDOW = (
    BufferRole.SOURCE,
    BufferRole.DESTINATION,
    BufferRole.SCRATCH,
    BufferRole.WINDOW,
)


class Range(NamedTuple):
    """Elements ``[start, stop)`` of a buffer."""

    place: BufferRole
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
    """A range holds its final combination: apply what the operation does last (AVG divides)."""

    range: Range


# ---- where ranks share memory


class Meet(NamedTuple):
    """Wait until every rank has come here; what they wrote before can be read afterwards."""

    ranks: tuple[int, ...] = ()
    """Whom it is for: the ranks of one host; empty: all."""


class Take(NamedTuple):
    """Copy a range of a peer's window (or of its destination) to a range of the same length."""

    peer: int
    there: Range
    here: Range


class Fold(NamedTuple):
    """Combine this range of every rank's window, in rank order, and finish it; put it into one's own range, or the
    same range of everybody's destination."""

    there: Range
    here: Range
    everyone: bool = False
    ranks: tuple[int, ...] = ()
    """Whose windows: the ranks of one host, and then it is not finished, for other hosts follow; empty: all."""


CollectiveInstruction = Send | Recv | Reduce | Copy | Combine | Finish | Meet | Take | Fold
Round = tuple[CollectiveInstruction, ...]


@dataclass(frozen=True)
class CollectivePlan:
    """What one rank does, round by round."""

    rounds: tuple[Round, ...]
    scratch: int = 0
    """Elements of scratch that it needs."""

    def __iter__(self) -> Iterator[CollectiveInstruction]:
        for instructions in self.rounds:
            yield from instructions

    @property
    def messages(self) -> int:
        """How many messages this rank sends."""
        return sum(isinstance(instruction, Send) for instruction in self)

    @property
    def elements(self) -> int:
        """How many elements this rank sends."""
        return sum(instruction.range.length for instruction in self if isinstance(instruction, Send))


@dataclass(frozen=True, slots=True)
class Shape:
    """All that a plan depends on but the rank."""

    size: int
    """n, the number of ranks."""
    count: int
    """S, the elements of one rank's vector."""
    root: int = 0
    peer: int = 0
    chunk: int = 0
    """Elements a message (or a window, inside a host) may carry at most; 0: no limit."""
    hosts: tuple[int, ...] = ()
    """The host of each rank, where some share one; empty: nobody does, or nobody asks."""


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
    """What is wrong with these plans, one for each rank, as sentences; empty when nothing is.

    Runs them against each other with unlimited buffering: every Send must find its Recv, of the same
    length and in order, and nobody may wait for ever.
    """
    problems: list[str] = []
    todo = [deque(plan) for plan in plans]
    wires: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    moved = True
    while moved:
        moved = False
        for rank, instructions in enumerate(todo):
            while instructions:
                instruction = instructions[0]
                if isinstance(instruction, Meet):
                    break
                if isinstance(instruction, Send):
                    wires[rank, instruction.peer].append(instruction.range.length)
                elif isinstance(instruction, Recv | Reduce):
                    wire = wires[instruction.peer, rank]
                    if not wire:
                        break
                    if (length := wire.popleft()) != instruction.range.length:
                        problems.append(f"rank {rank}: {instruction} gets {length} elements")
                instructions.popleft()
                moved = True
        for meeting in {left[0] for left in todo if left and isinstance(left[0], Meet)}:
            those = [todo[rank] for rank in meeting.ranks or range(len(todo))]
            if all(left and isinstance(left[0], Meet) and left[0] == meeting for left in those):
                for left in those:
                    left.popleft()
                moved = True
    problems += [f"rank {rank}: waits for ever at {left[0]}" for rank, left in enumerate(todo) if left]
    problems += [
        f"{len(wire)} messages {a} -> {b} are never received" for (a, b), wire in wires.items() if wire
    ]
    return problems
