"""All-reduce of shards' gradients along the fixed tree of ``shard_tree.py``: prepared once, called every step.

mapped    vectors in shared arenas: every rank sums its slice of all nodes and writes it to all ranks' outputs, between
          two barriers and without messages
hosts     several hosts, of which some have several ranks: ``ordered_multi_host.py``
linked    every rank sends slice j of its nodes to rank j, which sums them and sends the total of slice j to all ranks:
          2·(n-1)/n of the vector for each node of a rank, in 2·(n-1) messages: the bytes of a ring, in two rounds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.link_executor import LinkExecution, run_collective
from hoop.collectives.native_all_reduce import NativeOrderedSum, supports
from hoop.collectives.ordered_multi_host import MultiHostSum
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
from hoop.collectives.selection import spans_hosts
from hoop.collectives.shard_tree import Leaf, MergePlan, Sum, sum_expression
from hoop.memory.dtypes import dtype
from hoop.transport.base import SharedEndpoint, WaitingWork
from hoop.transport.call_check import Call

BLOCK = 64 * 1024
"""Elements summed at a time, so that a partial sum is still in the cache when the next addition reads it."""
Step = Callable[[float], None]
"""``step(deadline)``: performs the sum."""


def linked_plan(
    expression: Sum, merge_plans: Sequence[MergePlan], count: int, rank: int, span: tuple[int, int] | None = None
) -> CollectivePlan:
    """The plan of one rank for the sum over links. SOURCE: the rank's slots in a row, each of ``count`` elements.

    ``span``: sum only these elements; None: all.
    """
    slices = _slices(*(span or (0, count)), len(merge_plans))
    low, high = slices[rank]
    width = high - low
    first_round: list[CollectiveInstruction] = []
    for peer in other_ranks(rank, len(merge_plans)):
        start, stop = slices[peer]
        if stop > start:
            first_round += [
                Send(peer, Range(SOURCE, slot * count + start, slot * count + stop))
                for _, slot in merge_plans[rank].nodes
            ]
    if not width:
        return CollectivePlan((tuple(first_round), tuple(all_gather_slices(slices, rank))))
    operands: dict[Leaf, Range] = {
        Leaf(rank, slot): Range(SOURCE, slot * count + low, slot * count + high) for _, slot in merge_plans[rank].nodes
    }
    scratch = 0
    for peer in reversed(other_ranks(rank, len(merge_plans))):
        for _, slot in merge_plans[peer].nodes:
            operands[Leaf(peer, slot)] = Range(SCRATCH, scratch, scratch + width)
            first_round.append(Recv(peer, operands[Leaf(peer, slot)]))
            scratch += width
    output = Range(DESTINATION, low, high)

    def build(part: Sum, target: Range | None) -> Range:
        """Appends the instructions of a partial sum; returns its range: ``target`` if given."""
        nonlocal scratch
        if isinstance(part, Leaf):
            if target is not None:
                first_round.append(Copy(operands[part], target))
            return target or operands[part]
        if target is None:
            target, scratch = Range(SCRATCH, scratch, scratch + width), scratch + width
        left = build(part[0], None)
        first_round.append(Combine(left, build(part[1], None), target))
        return target

    build(expression, output)
    return CollectivePlan((tuple(first_round), tuple(all_gather_slices(slices, rank))), scratch=scratch)


def _slices(low: int, high: int, size: int) -> list[tuple[int, int]]:
    """The elements that each rank sums."""
    return [(low + start, low + stop) for start, stop in split_range(high - low, size)]


def other_ranks(rank: int, size: int) -> list[int]:
    """Every other rank, beginning with the next one, so that not all ranks send to the same rank first."""
    return [(rank + step) % size for step in range(1, size)]


def all_gather_slices(slices: Sequence[tuple[int, int]], rank: int) -> list[CollectiveInstruction]:
    """Sends this rank's slice of the total to all ranks, and receives theirs."""
    others = other_ranks(rank, len(slices))
    own = Range(DESTINATION, *slices[rank])
    sends: list[CollectiveInstruction] = [Send(peer, own) for peer in others if own.length]
    received = [(peer, Range(DESTINATION, *slices[peer])) for peer in reversed(others)]
    return sends + [Recv(peer, where) for peer, where in received if where.length]


class OrderedAllReduce:
    """The sum of all shards on every rank. All ranks prepare and call it in the same order."""

    def __init__(
        self,
        communicator: Communicator,
        merge_plans: Sequence[MergePlan],
        shards: int,
        slots: Array,
        output: Array,
        deadline: float,
        span: tuple[int, int] | None = None,
    ) -> None:
        """Collective. ``merge_plans``: those of all ranks, in rank order. ``slots``: one row for each own slot.

        ``span``: sum only these elements and leave the others unchanged; None: all.
        """
        expression = sum_expression(merge_plans, shards)
        count = output.size
        low, high = span or (0, count)
        self.result = output
        """The sum, after a call."""
        self.result_slot: int | None = None
        """The slot that is the result, if this rank is the only one and has the whole sum there."""
        self.bytes_moved = 0
        """Bytes read from and written to other ranks' memory so far; the endpoint counts bytes sent over links."""
        self._bytes_per_call = 0
        self._barrier: Callable[[float, Call | None, WaitingWork | None], None] | None = None
        """The endpoint's barrier if vectors are mapped; None if they are sent over links, or there is one rank."""
        self._multi_host: MultiHostSum | None = None
        """The sum of ranks on several hosts, if some of them share a host."""
        self._native: NativeOrderedSum | None = None
        """The whole call, barriers included, if vectors are mapped and all ranks have the native core."""
        if communicator.size == 1:
            if isinstance(expression, Leaf) and span in (None, (0, count)):
                self.result, self.result_slot = slots[expression.slot], expression.slot
                self._sum: Step = _no_sum
            else:
                self._sum = _build_sum(expression, [slots], [output], slice(low, high))
            return
        self._call = communicator.call(_call_text(merge_plans, count, (low, high), output))
        if spans_hosts(communicator.endpoint):
            self._multi_host = MultiHostSum(
                communicator, merge_plans, shards, (slots, output), deadline, (low, high), self._call
            )
            return
        preparing = communicator.call(f"prepare {self._call.text}")
        mapped = communicator.map_peer_buffers(slots.reshape(-1), output, deadline, preparing)
        if mapped is None:
            plan = linked_plan(expression, merge_plans, count, communicator.rank, (low, high))
            self._sum = build_linked_step(communicator, self._call, plan, slots, output)
            return
        assert isinstance(communicator.endpoint, SharedEndpoint), "only ranks that share memory map buffers"
        self._barrier = communicator.endpoint.barrier
        sources, destinations = mapped
        own = _slices(low, high, communicator.size)[communicator.rank]
        other_nodes = sum(len(one.nodes) for one in merge_plans) - len(merge_plans[communicator.rank].nodes)
        self._bytes_per_call = (other_nodes + communicator.size - 1) * (own[1] - own[0]) * output.itemsize
        rows = [one.reshape(-1, count) for one in sources]
        endpoint = communicator.endpoint
        if endpoint.native is not None and supports(output.dtype.name):
            self._native = NativeOrderedSum(endpoint, self._call, expression, rows, destinations, own)
            return
        self._sum = _build_sum(expression, rows, destinations, slice(*own))

    def __call__(self, deadline: float, work: WaitingWork | None = None) -> float:
        """Sums; returns the seconds that this rank waited for the others to arrive, without those spent in ``work``.

        ``work``: other work of this rank, done while it waits for ranks that share memory with it.
        """
        if self._multi_host is not None:
            self.bytes_moved += self._multi_host.bytes_per_call
            return self._multi_host(deadline)
        if self._native is not None:
            self._native.run(deadline, work)
            self.bytes_moved += self._bytes_per_call
            return self._native.waited_s
        if self._barrier is None:
            self._sum(deadline)
            return 0.0
        started, worked = time.perf_counter(), work.seconds if work is not None else 0.0
        self._barrier(deadline, self._call, work)
        waited = time.perf_counter() - started
        if work is not None:
            waited -= work.seconds - worked
        self._sum(deadline)
        self._barrier(deadline, None, work)
        self.bytes_moved += self._bytes_per_call
        return waited


def _no_sum(deadline: float) -> None:
    """For a single rank that has the whole sum in one slot."""


def _call_text(merge_plans: Sequence[MergePlan], count: int, span: tuple[int, int], output: Array) -> str:
    """The text of the call, which all ranks must agree on."""
    shards = " | ".join(" ".join(map(str, one.order)) for one in merge_plans)
    return f"ordered all_reduce of {count} {output.dtype}, elements {span[0]} to {span[1]}, of shards {shards}"


def build_linked_step(
    communicator: Communicator, call: Call, plan: CollectivePlan, slots: Array, output: Array
) -> Step:
    """The step that executes a plan over links. SOURCE is ``slots``, DESTINATION ``output``."""
    scratch = np.empty(plan.scratch, output.dtype)
    addition = Reduction("sum", dtype(output.dtype.name))
    endpoint, source = communicator.endpoint, slots.reshape(-1)

    def run(deadline: float) -> None:
        def execute() -> None:
            endpoint.begin_collective(call, deadline)
            LinkExecution(endpoint, source, output, scratch, addition, deadline).run(plan)

        run_collective(endpoint, execute)

    return run


Calls = list[tuple[Callable[..., object], tuple[Array, ...]]]
"""NumPy functions with their arguments."""


def _build_sum(expression: Sum, slots: Sequence[Array], outputs: Sequence[Array], span: slice) -> Step:
    """The step that sums the elements ``span``, block by block, and writes them to all outputs.

    ``slots``: for each rank its slots, one row each. All NumPy calls are prepared here.
    """
    calls: Calls = []
    temporaries: list[Array] = []
    for low in range(span.start, span.stop, BLOCK):
        high = min(low + BLOCK, span.stop)
        append_block(calls, temporaries, expression, slots, [one[low:high] for one in outputs], (low, high))
    return run_calls(calls)


def run_calls(calls: Calls) -> Step:
    """The step that makes these calls, in order."""

    def run(deadline: float) -> None:
        for call, arguments in calls:
            call(*arguments)

    return run


def append_block(
    calls: Calls,
    temporaries: list[Array],
    expression: Sum,
    slots: Sequence[Array],
    targets: Sequence[Array],
    span: tuple[int, int],
) -> None:
    """Appends the calls that sum the elements ``span``, at most ``BLOCK`` of them, into each of the targets.

    ``temporaries``: for partial sums, one a depth of the tree; it grows as needed.
    """
    low, high = span

    def leaf(one: Leaf) -> Array:
        part: Array = slots[one.rank][one.slot, low:high]
        return part

    def temporary(depth: int) -> Array:
        while len(temporaries) <= depth:
            temporaries.append(np.empty(BLOCK, targets[0].dtype))
        return temporaries[depth][: high - low]

    _append_sum(calls, expression, leaf, temporary, targets[0], 0)
    calls.extend((np.copyto, (other, targets[0])) for other in targets[1:])


def _append_sum(
    calls: Calls,
    part: Sum,
    leaf: Callable[[Leaf], Array],
    temporary: Callable[[int], Array],
    target: Array | None,
    depth: int,
) -> Array:
    """Appends the calls that make a partial sum (in ``target``, if given); returns an array that holds it.

    Not a closure: a function that refers to itself and to all ranks' memory would keep that of a lost rank, gigabytes,
    until the next garbage collection.
    """
    if isinstance(part, Leaf):
        if target is not None:
            calls.append((np.copyto, (target, leaf(part))))
        return leaf(part)
    left = _append_sum(calls, part[0], leaf, temporary, None, depth)
    # The left sum stays in the temporary of this depth while the right sum is made in the next one.
    right = _append_sum(calls, part[1], leaf, temporary, None, depth + 1)
    target = temporary(depth) if target is None else target
    calls.append((np.add, (left, right, target)))
    return target
