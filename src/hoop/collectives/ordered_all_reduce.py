"""All-reduce of shards' gradients, along the fixed tree of ``shards.py``: prepared once, called every step.

mapped    every rank sums its slice of all nodes and writes it to everybody's total: two meetings, no message
linked    every rank sends slice j of its nodes to rank j, who sums and sends the total of slice j to all:
          2·(n-1)/n of the vector for each node held, in 2·(n-1) messages: the ring's bytes, in two rounds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.link_executor import LinkExecution, together
from hoop.collectives.plan import (
    DESTINATION,
    SCRATCH,
    SOURCE,
    CollectiveInstruction,
    CollectivePlan,
    Combine,
    Copy,
    Range,
    Recv,
    Send,
    split_range,
)
from hoop.collectives.reduction import Array, Reduction
from hoop.collectives.shard_tree import Leaf, MergePlan, Sum, expression
from hoop.memory.dtypes import dtype
from hoop.transport.base import SharedEndpoint
from hoop.transport.calls import Call

_BLOCK = 64 * 1024
"""Elements that are summed at a time, so that what is added is still in the cache when it is written."""
_SUM = Reduction("sum", dtype("float32"))
Step = Callable[[float], None]


def linked_plan(
    total: Sum, holdings: Sequence[MergePlan], count: int, rank: int, span: tuple[int, int] | None = None
) -> CollectivePlan:
    """The sum over links. SOURCE is a rank's slots one after the other, each of ``count`` elements."""
    slices = _slices(*(span or (0, count)), len(holdings))
    low, high = slices[rank]
    width = high - low
    out: list[CollectiveInstruction] = []
    for peer in _others(rank, len(holdings)):
        start, stop = slices[peer]
        if stop > start:
            out += [
                Send(peer, Range(SOURCE, slot * count + start, slot * count + stop))
                for _, slot in holdings[rank].nodes
            ]
    if not width:
        return CollectivePlan((tuple(out), tuple(_spread(slices, rank))))
    places: dict[Leaf, Range] = {
        Leaf(rank, slot): Range(SOURCE, slot * count + low, slot * count + high)
        for _, slot in holdings[rank].nodes
    }
    used = 0
    for peer in reversed(_others(rank, len(holdings))):
        for _, slot in holdings[peer].nodes:
            places[Leaf(peer, slot)] = Range(SCRATCH, used, used + width)
            out.append(Recv(peer, places[Leaf(peer, slot)]))
            used += width
    into = Range(DESTINATION, low, high)

    def build(part: Sum, target: Range | None) -> Range:
        nonlocal used
        if isinstance(part, Leaf):
            if target is not None:
                out.append(Copy(places[part], target))
            return target or places[part]
        if target is None:
            target, used = Range(SCRATCH, used, used + width), used + width
        left = build(part[0], None)
        out.append(Combine(left, build(part[1], None), target))
        return target

    build(total, into)
    return CollectivePlan((tuple(out), tuple(_spread(slices, rank))), scratch=used)


def _slices(low: int, high: int, size: int) -> list[tuple[int, int]]:
    """Who sums which elements."""
    return [(low + start, low + stop) for start, stop in split_range(high - low, size)]


def _others(rank: int, size: int) -> list[int]:
    """Every other rank, beginning with the next: so that not all send to the same one first."""
    return [(rank + step) % size for step in range(1, size)]


def _spread(slices: Sequence[tuple[int, int]], rank: int) -> list[CollectiveInstruction]:
    """This rank's slice of the total to everybody, everybody's slice here."""
    others = _others(rank, len(slices))
    mine = Range(DESTINATION, *slices[rank])
    out: list[CollectiveInstruction] = [Send(peer, mine) for peer in others if mine.length]
    theirs = [(peer, Range(DESTINATION, *slices[peer])) for peer in reversed(others)]
    return out + [Recv(peer, where) for peer, where in theirs if where.length]


class OrderedAllReduce:
    """The sum of all shards at every rank, prepared once and called by all ranks alike."""

    def __init__(
        self,
        communicator: Communicator,
        holdings: Sequence[MergePlan],
        shards: int,
        slots: Array,
        room: Array,
        deadline: float,
        span: tuple[int, int] | None = None,
    ) -> None:
        """``slots`` has a row for each gradient this rank has room for; all ranks prepare in the same order.

        ``span``: only these elements; the others are left alone.
        """
        total = expression(holdings, shards)
        count = room.size
        low, high = span or (0, count)
        self.result = room
        """Where the sum is after a call."""
        self.moved = 0
        """Bytes that went through others' memory so far; what goes over links, their endpoint counts."""
        self._each = 0
        self._meet: Callable[[float, Call | None], None] | None = None
        if communicator.size == 1:
            if isinstance(total, Leaf) and span in (None, (0, count)):
                self.result = slots[total.slot]
                self._add: Step = _nothing
            else:
                self._add = _summing(total, [slots], [room], slice(low, high))
            return
        self._call = communicator.call(_text(holdings, count, (low, high), room))
        preparing = communicator.call(f"prepare {self._call.text}")
        seen = communicator.exchange(slots.reshape(-1), room, deadline, preparing)
        if seen is None:
            plan = linked_plan(total, holdings, count, communicator.rank, (low, high))
            self._add = _linked(communicator, self._call, plan, slots, room)
            return
        assert isinstance(communicator.endpoint, SharedEndpoint), "who sees others' memory can meet them"
        self._meet = communicator.endpoint.meet
        sources, destinations = seen
        mine = _slices(low, high, communicator.size)[communicator.rank]
        others = sum(len(one.nodes) for one in holdings) - len(holdings[communicator.rank].nodes)
        self._each = (others + communicator.size - 1) * (mine[1] - mine[0]) * room.itemsize
        self._add = _summing(total, [one.reshape(-1, count) for one in sources], destinations, slice(*mine))

    def __call__(self, deadline: float) -> float:
        """Sums; returns how many seconds it waited for the others to come."""
        if self._meet is None:
            self._add(deadline)
            return 0.0
        started = time.perf_counter()
        self._meet(deadline, self._call)
        waited = time.perf_counter() - started
        self._add(deadline)
        self._meet(deadline, None)
        self.moved += self._each
        return waited


def _nothing(deadline: float) -> None:
    """One rank that holds the whole sum already."""


def _text(holdings: Sequence[MergePlan], count: int, span: tuple[int, int], room: Array) -> str:
    """What all ranks must agree on."""
    held = " | ".join(" ".join(map(str, one.order)) for one in holdings)
    return f"ordered all_reduce of {count} {room.dtype}, elements {span[0]} to {span[1]}, of shards {held}"


def _linked(communicator: Communicator, call: Call, plan: CollectivePlan, slots: Array, room: Array) -> Step:
    scratch = np.empty(plan.scratch, room.dtype)
    endpoint, source = communicator.endpoint, slots.reshape(-1)

    def run(deadline: float) -> None:
        def add() -> None:
            endpoint.begin(call, deadline)
            LinkExecution(endpoint, source, room, scratch, _SUM, deadline).run(plan)

        together(endpoint, add)

    return run


def _summing(total: Sum, slots: Sequence[Array], into: Sequence[Array], span: slice) -> Step:
    """One slice of the sum, block by block, into everybody's destination."""
    calls: list[tuple[Callable[..., object], tuple[Array, ...]]] = []
    spare: list[Array] = []

    def build(part: Sum, low: int, high: int, target: Array | None, depth: int) -> Array:
        if isinstance(part, Leaf):
            leaf: Array = slots[part.rank][part.slot, low:high]
            if target is not None:
                calls.append((np.copyto, (target, leaf)))
            return leaf
        while len(spare) <= depth:
            spare.append(np.empty(_BLOCK, into[0].dtype))
        left = build(part[0], low, high, None, depth)
        # A sum on the left stays in its spare block while the right one is made.
        right = build(part[1], low, high, None, depth + 1)
        target = spare[depth][: high - low] if target is None else target
        calls.append((np.add, (left, right, target)))
        return target

    for low in range(span.start, span.stop, _BLOCK):
        high = min(low + _BLOCK, span.stop)
        first = into[0][low:high]
        build(total, low, high, first, 0)
        calls.extend((np.copyto, (other[low:high], first)) for other in into[1:])

    def run(deadline: float) -> None:
        for call, arguments in calls:
            call(*arguments)

    return run
