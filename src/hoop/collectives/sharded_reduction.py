"""Reduce-scatter of shards' gradients along the fixed tree, and all-gather of the updated weights: a sharded update.

    reduce   every rank sums its slice of all nodes; all ranks also sum the elements ``rest`` (metrics, votes, buffers)
    gather   every rank gets the other ranks' slices of the weight vector

The order of additions is that of ``ordered_all_reduce.py``, so a slice has the bits that it has in the all-reduce.

mapped   vectors in shared arenas: one barrier, then a rank reads what it needs from the other ranks' memory. No rank
         writes to another one's memory.
linked   messages: a rank sends each other rank that rank's slice of its nodes; and its slice of the weights

Between two ``reduce`` all ranks call ``gather``, or synchronize otherwise, before they write to their slots. A rank
changes its slice of the weights only after the ``reduce`` that follows a ``gather``.

``engine/stage/sharded_update.py`` prepares it once for a plan, and calls it every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import (
    BLOCK,
    Calls,
    Step,
    all_gather_slices,
    append_block,
    build_linked_step,
    other_ranks,
    run_calls,
)
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
)
from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import Leaf, MergePlan, Sum, sum_expression
from hoop.transport.base import SharedEndpoint, WaitingWork
from hoop.transport.call_check import Call

Span = tuple[int, int]


@dataclass(frozen=True)
class ShardSpans:
    """Which elements each rank sums and provides. Equal at all ranks."""

    sums: tuple[Span, ...]
    """By rank: the elements of the gradient that it sums. They may overlap."""
    rest: Span
    """The elements that every rank sums."""
    weights: tuple[Span, ...]
    """By rank: the elements of the weight vector that the others get from it."""

    def parts(self, rank: int) -> list[Span]:
        """The elements that a rank sums, in the order of its output."""
        return [self.sums[rank], self.rest]

    def output_size(self, rank: int) -> int:
        """Number of elements that a rank sums."""
        return sum(high - low for low, high in self.parts(rank))


def reduce_scatter_plan(
    merge_plans: Sequence[MergePlan], shards: int, count: int, rank: int, spans: ShardSpans
) -> CollectivePlan:
    """The plan of one rank over links. SOURCE: its slots in a row, each of ``count`` elements.

    DESTINATION: its sums, one part after the other.
    """
    expression, size = sum_expression(merge_plans, shards), len(merge_plans)
    steps: list[CollectiveInstruction] = [
        Send(peer, Range(SOURCE, slot * count + low, slot * count + high))
        for peer in other_ranks(rank, size)
        for low, high in spans.parts(peer)
        if high > low
        for _, slot in merge_plans[rank].nodes
    ]
    operands: dict[tuple[int, Leaf], Range] = {}
    scratch = end = 0
    for peer in [*reversed(other_ranks(rank, size)), rank]:
        for part, (low, high) in enumerate(spans.parts(rank)):
            for _, slot in merge_plans[peer].nodes if high > low else ():
                if peer == rank:
                    operands[part, Leaf(peer, slot)] = Range(SOURCE, slot * count + low, slot * count + high)
                    continue
                where = operands[part, Leaf(peer, slot)] = Range(SCRATCH, scratch, scratch + high - low)
                steps.append(Recv(peer, where))
                scratch += high - low

    def build(part: int, value: Sum, target: Range | None, width: int) -> Range:
        """Appends the instructions of a partial sum; returns its range: ``target`` if given."""
        nonlocal scratch
        if isinstance(value, Leaf):
            if target is not None:
                steps.append(Copy(operands[part, value], target))
            return target or operands[part, value]
        if target is None:
            target, scratch = Range(SCRATCH, scratch, scratch + width), scratch + width
        left = build(part, value[0], None, width)
        steps.append(Combine(left, build(part, value[1], None, width), target))
        return target

    for part, (low, high) in enumerate(spans.parts(rank)):
        if high > low:
            build(part, expression, Range(DESTINATION, end, end + high - low), high - low)
            end += high - low
    return CollectivePlan((tuple(steps),), scratch=scratch)


class ShardedReduction:
    """The reduce-scatter and the all-gather of two or more ranks. All ranks prepare and call it in the same order."""

    def __init__(
        self,
        communicator: Communicator,
        merge_plans: Sequence[MergePlan],
        shards: int,
        buffers: tuple[Array, Array, Array],
        spans: ShardSpans,
        deadline: float,
    ) -> None:
        """Collective. ``buffers``: this rank's slots, one row each; its sums, part after part; its weight vector."""
        slots, output, weights = buffers
        count, rank = slots.shape[1], communicator.rank
        self.bytes_moved = 0
        """Bytes read from other ranks' memory so far; the endpoint counts bytes sent over links."""
        self._reduced_bytes = self._gathered_bytes = 0
        nodes = " | ".join(" ".join(map(str, one.order)) for one in merge_plans)
        cut = " ".join(f"{low}:{high}" for low, high in spans.sums)
        self._reduce_call = communicator.call(f"ordered reduce_scatter of {count} {output.dtype}, {cut}, of {nodes}")
        self._gather_call = communicator.call(f"all_gather of {weights.size} {weights.dtype}, {cut}")
        self._barrier: Callable[[float, Call | None, WaitingWork | None], None] | None = None
        preparing = communicator.call(f"prepare {self._reduce_call.text}")
        mapped = communicator.map_peer_buffers(slots.reshape(-1), weights, deadline, preparing)
        if mapped is None:
            plan = reduce_scatter_plan(merge_plans, shards, count, rank, spans)
            self._sum = build_linked_step(communicator, self._reduce_call, plan, slots, output)
            gathering = CollectivePlan((tuple(all_gather_slices(spans.weights, rank)),))
            self._copy = build_linked_step(communicator, self._gather_call, gathering, weights, weights)
            return
        assert isinstance(communicator.endpoint, SharedEndpoint), "only ranks that share memory map buffers"
        self._barrier = communicator.endpoint.barrier
        rows = [one.reshape(-1, count) for one in mapped[0]]
        self._sum = _build_sums(sum_expression(merge_plans, shards), rows, output, spans.parts(rank))
        self._copy = _build_copies(mapped[1], weights, spans.weights, rank)
        others = sum(len(one.nodes) for one in merge_plans) - len(merge_plans[rank].nodes)
        self._reduced_bytes = others * spans.output_size(rank) * output.itemsize
        other_spans = [span for peer, span in enumerate(spans.weights) if peer != rank]
        self._gathered_bytes = sum(high - low for low, high in other_spans) * weights.itemsize

    def reduce(self, deadline: float, work: WaitingWork | None = None) -> float:
        """Sums; returns the seconds that this rank waited for the others to arrive, without those spent in ``work``.

        ``work``: other work of this rank, done while it waits for ranks that share memory with it.
        """
        waited = self._meet(deadline, self._reduce_call, work)
        self._sum(deadline)
        self.bytes_moved += self._reduced_bytes
        return waited

    def gather(self, deadline: float) -> float:
        """Gets the other ranks' slices of the weights; returns the seconds that this rank waited for the others."""
        waited = self._meet(deadline, self._gather_call, None)
        self._copy(deadline)
        self.bytes_moved += self._gathered_bytes
        return waited

    def _meet(self, deadline: float, call: Call, work: WaitingWork | None) -> float:
        if self._barrier is None:
            return 0.0  # messages wait
        started, worked = time.perf_counter(), work.seconds if work is not None else 0.0
        self._barrier(deadline, call, work)
        waited = time.perf_counter() - started
        return waited - (work.seconds - worked) if work is not None else waited


def _build_sums(expression: Sum, rows: Sequence[Array], output: Array, parts: Sequence[Span]) -> Step:
    """The step that sums the elements of each part, block by block, into ``output``, one part after the other.

    ``rows``: for each rank its slots, one row each. All NumPy calls are prepared here.
    """
    calls: Calls = []
    temporaries: list[Array] = []
    end = 0
    for low, high in parts:
        for start in range(low, high, BLOCK):
            stop = min(start + BLOCK, high)
            append_block(calls, temporaries, expression, rows, [output[end : end + stop - start]], (start, stop))
            end += stop - start
    return run_calls(calls)


def _build_copies(theirs: Sequence[Array], weights: Array, spans: Sequence[Span], rank: int) -> Step:
    """The step that copies the other ranks' elements of the weight vector."""
    copies = [
        (weights[low:high], theirs[peer][low:high])
        for peer in other_ranks(rank, len(spans))
        for low, high in [spans[peer]]
        if high > low
    ]

    def run(deadline: float) -> None:
        for into, one in copies:
            np.copyto(into, one)

    return run
