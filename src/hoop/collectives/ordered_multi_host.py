"""The ordered sum of ``ordered_all_reduce.py`` on several hosts: shared memory inside a host, one vector between hosts.

    host A: ranks 0 1      host B: ranks 2 3      h hosts; r *rails*: ranks of a host that talk to other hosts

    inside     rail i of a host merges slice i of all nodes of its host, as far as the tree of shards allows
    between    of slice i, host g owns part g: it receives the nodes of the other hosts, adds all of them along the
               tree, and sends the total to the same rail of the other hosts
    inside     every rank copies the finished slices from the rails of its host

A host sends 2(h-1)/h of the vector, if its shards are one node of the tree: as much as one rank would, whatever the
number of its ranks. A host with more nodes sends (h-1)/h of the vector for each, and (h-1)/h for the totals. The
additions are those of the tree, so the bits are those of one rank.

All rails together are as many sockets between two hosts. Whether all ranks of a host or one of them should be rails
depends on the network and on the cores: ``MultiHostSum`` measures both on its first calls, which are real sums with
the same bits, and continues with the faster way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.hierarchical import HostLayout
from hoop.collectives.link_executor import LinkExecution, multi_host_errors
from hoop.collectives.plan import (
    DESTINATION,
    SCRATCH,
    SOURCE,
    WINDOW,
    BufferRole,
    CollectiveInstruction,
    CollectivePlan,
    Combine,
    Copy,
    Meet,
    Range,
    Recv,
    Send,
    Shape,
    Take,
    split_range,
)
from hoop.collectives.reduction import Array, Reduction
from hoop.collectives.selection import max_over_ranks
from hoop.collectives.shard_tree import Leaf, MergePlan, Node, Sum, sum_expression
from hoop.collectives.shm_executor import ShmExecutor
from hoop.memory.dtypes import dtype
from hoop.transport.base import SpanningEndpoint
from hoop.transport.call_check import Call

TRIALS = 3
"""Calls with each number of rails before the faster one is chosen."""
Span = tuple[int, int]


class HostNode(NamedTuple):
    """A node of the tree that the ranks of one host have together, and the sum over their slots that makes it."""

    node: Node
    value: Sum


def host_nodes(merge_plans: Sequence[MergePlan], ranks: Sequence[int], shards: int) -> list[HostNode]:
    """The largest nodes of the tree that these ranks can make without others, from left to right."""
    leaves = {node: Leaf(rank, slot) for rank in ranks for node, slot in merge_plans[rank].nodes}
    found: list[HostNode] = []

    def build(node: Node) -> Sum | None:
        if (leaf := leaves.get(node)) is not None:
            return leaf
        if node.high - node.low <= 1:
            return None
        left, right = node.halves
        first, second = build(left), build(right)
        if first is not None and second is not None:
            return first, second
        if first is not None:
            found.append(HostNode(left, first))
        if second is not None:
            found.append(HostNode(right, second))
        return None

    root = Node(0, shards)
    if (whole := build(root)) is not None:
        return [HostNode(root, whole)]
    return sorted(found)


class _PlanBuilder:
    """Builds the plan of one rank; ``build`` is called once."""

    def __init__(
        self, merge_plans: Sequence[MergePlan], shards: int, count: int, layout: HostLayout, span: Span, rails: int
    ) -> None:
        self._count, self._layout = count, layout
        self._local = layout.local_ranks
        self._rank = self._local[layout.local_rank]
        self._nodes = [host_nodes(merge_plans, ranks, shards) for ranks in layout.host_ranks]
        self._slots = {rank: [slot for _, slot in merge_plans[rank].nodes] for rank in self._local}
        self._shards = shards
        low, high = span
        self._slices = [(low + start, low + stop) for start, stop in split_range(high - low, rails)]
        self._scratch = 0
        self._leaves: dict[Leaf, Range] = {}
        """Where the own slice of each slot of this host is: the own source, or scratch."""

    def build(self, mapped: bool) -> CollectivePlan:
        """``mapped``: the ranks of this host read each other's slots and outputs; else they send them."""
        own = self._slices[self._layout.local_rank] if self._layout.local_rank < len(self._slices) else None
        inside = self._collect_inside(own, mapped)
        between: list[CollectiveInstruction] = []
        if own is not None and own[1] > own[0]:
            between = self._exchange_between_hosts(own)
        return CollectivePlan(
            (tuple(inside), tuple(between), tuple(self._share_inside(own, mapped))), scratch=self._scratch
        )

    def _allocate(self, length: int) -> Range:
        self._scratch += length
        return Range(SCRATCH, self._scratch - length, self._scratch)

    # ---- inside the host

    def _collect_inside(self, own: Span | None, mapped: bool) -> list[CollectiveInstruction]:
        """Brings the own slice of every slot of this host to this rank."""
        steps: list[CollectiveInstruction] = []
        others = [rank for rank in self._local if rank != self._rank]
        if others and mapped:
            steps.append(Meet(self._local))
        elif others:
            steps += [
                Send(peer, self._slot_range(SOURCE, slot, part))
                for peer, part in zip(self._local, self._slices, strict=False)
                if peer != self._rank and part[1] > part[0]
                for slot in self._slots[self._rank]
            ]
        if own is None or own[0] == own[1]:
            return steps
        for rank in self._local:
            for slot in self._slots[rank]:
                there = self._slot_range(SOURCE if rank == self._rank else WINDOW, slot, own)
                if rank == self._rank:
                    self._leaves[Leaf(rank, slot)] = there
                    continue
                here = self._leaves[Leaf(rank, slot)] = self._allocate(there.length)
                steps.append(Take(rank, there, here) if mapped else Recv(rank, here))
        return steps

    def _slot_range(self, buffer: BufferRole, slot: int, part: Span) -> Range:
        return Range(buffer, slot * self._count + part[0], slot * self._count + part[1])

    def _share_inside(self, own: Span | None, mapped: bool) -> list[CollectiveInstruction]:
        """Brings the finished slices of the other rails of this host to this rank."""
        others = [rank for rank in self._local if rank != self._rank]
        if not others:
            return []
        theirs = [
            (peer, Range(DESTINATION, *part))
            for peer, part in zip(self._local, self._slices, strict=False)
            if peer != self._rank and part[1] > part[0]
        ]
        if mapped:
            return [Meet(self._local), *(Take(peer, part, part) for peer, part in theirs), Meet(self._local)]
        sent = [Send(peer, Range(DESTINATION, *own)) for peer in others if own is not None and own[1] > own[0]]
        return [*sent, *(Recv(peer, part) for peer, part in theirs)]

    # ---- between hosts

    def _exchange_between_hosts(self, own: Span) -> list[CollectiveInstruction]:
        """The rounds between the ranks of one rail, one on each host; ``own``: the rail's slice."""
        layout, start = self._layout, own[0]
        rail = [ranks[layout.local_rank] for ranks in layout.host_ranks]
        hosts = len(rail)
        parts = [(start + low, start + high) for low, high in split_range(own[1] - own[0], hosts)]
        others = [(layout.host + step) % hosts for step in range(1, hosts)]
        steps: list[CollectiveInstruction] = []
        for host in others:
            if parts[host][1] > parts[host][0]:
                for one in self._nodes[layout.host]:
                    steps.append(Send(rail[host], self._add(steps, one.value, self._part_of(own, parts[host]))))
        mine = parts[layout.host]
        if mine[1] > mine[0]:
            steps += self._total_of(own, mine, rail, others)
            steps += [Send(rail[host], Range(DESTINATION, *mine)) for host in others]
        received = [(rail[host], Range(DESTINATION, *parts[host])) for host in reversed(others)]
        return steps + [Recv(peer, where) for peer, where in received if where.length]

    def _total_of(
        self, own: Span, mine: Span, rail: Sequence[int], others: Sequence[int]
    ) -> list[CollectiveInstruction]:
        """Receives the other hosts' nodes of the part that this host owns, and adds all nodes along the tree."""
        steps: list[CollectiveInstruction] = []
        operands: dict[Node, Range] = {}
        for host in reversed(others):
            for one in self._nodes[host]:
                operands[one.node] = self._allocate(mine[1] - mine[0])
                steps.append(Recv(rail[host], operands[one.node]))
        where = self._part_of(own, mine)
        for one in self._nodes[self._layout.host]:
            operands[one.node] = self._add(steps, one.value, where)

        def total(node: Node, target: Range | None) -> Range:
            found = operands.get(node)
            if found is None:
                left, right = (total(half, None) for half in node.halves)
                found = target or self._allocate(left.length)
                steps.append(Combine(left, right, found))
            elif target is not None:
                steps.append(Copy(found, target))
            return found

        total(Node(0, self._shards), Range(DESTINATION, *mine))
        return steps

    @staticmethod
    def _part_of(own: Span, part: Span) -> slice:
        """A part of the rail's slice, relative to its start."""
        return slice(part[0] - own[0], part[1] - own[0])

    def _add(self, steps: list[CollectiveInstruction], value: Sum, part: slice) -> Range:
        """Appends the additions of a part of a sum over slots of this host; returns where it is."""
        if isinstance(value, Leaf):
            whole = self._leaves[value]
            return Range(whole.buffer, whole.start + part.start, whole.start + part.stop)
        left, right = (self._add(steps, half, part) for half in value)
        into = self._allocate(part.stop - part.start)
        steps.append(Combine(left, right, into))
        return into


@dataclass(frozen=True)
class HostLinks:
    """How the ranks of a host reach each other, and the other hosts."""

    rails: int = 0
    """How many ranks of a host talk to other hosts; 0: as many as the smallest host has."""
    mapped: bool = True
    """The ranks of this host map each other's vectors, else they send them. The messages between hosts are the same
    either way, so each host decides for itself."""


ALL_RAILS = HostLinks()


def multi_host_plan(
    merge_plans: Sequence[MergePlan],
    shards: int,
    count: int,
    rank: int,
    hosts: Sequence[int],
    span: Span | None = None,
    links: HostLinks = ALL_RAILS,
) -> CollectivePlan:
    """The plan of one rank. SOURCE: the rank's slots in a row, each of ``count`` elements; WINDOW: a peer's.

    ``hosts``: the host of each rank. ``span``: sum only these elements; None: all.
    """
    sum_expression(merge_plans, shards)  # checks that each shard is there once
    layout = HostLayout.of(Shape(len(merge_plans), count, hosts=tuple(hosts)), rank)
    rails = min(links.rails, layout.rails) if links.rails else layout.rails
    return _PlanBuilder(merge_plans, shards, count, layout, span or (0, count), rails).build(links.mapped)


class MultiHostSum:
    """The sum of all shards on every rank of several hosts. Call it with a deadline; returns the seconds waited."""

    def __init__(
        self,
        communicator: Communicator,
        merge_plans: Sequence[MergePlan],
        shards: int,
        buffers: tuple[Array, Array],
        deadline: float,
        span: Span,
        call: Call,
    ) -> None:
        """Collective. ``buffers``: this rank's slots, one row each, and its output."""
        endpoint = communicator.endpoint
        assert isinstance(endpoint, SpanningEndpoint), "ranks on several hosts have links of both kinds"
        self._endpoint, self._call = endpoint, call
        self._source, self._output = buffers[0].reshape(-1), buffers[1]
        self._peers: tuple[list[Array], list[Array]] | None = ([], [])
        if endpoint.local is not None:
            endpoint.local.wait_for_peers(deadline)
            preparing = communicator.call(f"prepare {call.text}").for_size(endpoint.local.size)
            executor = ShmExecutor(endpoint.local)
            self._peers = executor.map_peer_buffers(self._source, self._output, deadline, preparing)
        most = HostLayout.of(Shape(endpoint.size, 0, hosts=endpoint.hosts), endpoint.rank).rails
        self._plans = {
            rails: multi_host_plan(
                merge_plans,
                shards,
                self._output.size,
                endpoint.rank,
                endpoint.hosts,
                span,
                HostLinks(rails, self._mapped),
            )
            for rails in dict.fromkeys((most, 1))
        }
        self._trials: dict[int, list[float]] = {rails: [] for rails in self._plans}
        self.rails = most
        """Ranks of a host that talk to other hosts; final after ``TRIALS`` calls with each number."""
        self._scratch = np.empty(max(plan.scratch for plan in self._plans.values()), self._output.dtype)
        self._reduction = Reduction("sum", dtype(self._output.dtype.name))

    @property
    def _mapped(self) -> bool:
        return self._peers is not None

    @property
    def bytes_per_call(self) -> int:
        """Bytes that a call reads from the memory of other ranks of this host."""
        steps = self._plans[self.rails]
        return sum(one.local.length for one in steps if isinstance(one, Take)) * self._output.itemsize

    def __call__(self, deadline: float) -> float:
        """Sums; returns the seconds that this rank waited for the other ranks of its host to arrive."""
        started = time.perf_counter()
        with multi_host_errors(self._endpoint):
            self._endpoint.begin_collective(self._call, deadline)  # all ranks of this host are here now
            arrived = time.perf_counter()
            self._run(self._plans[self.rails], deadline)
            if len(self._trials) > 1:
                self._compare_rails(time.perf_counter() - arrived, deadline)
        return arrived - started

    def _run(self, plan: CollectivePlan, deadline: float) -> None:
        collect, between, share = plan.rounds
        links = LinkExecution(self._endpoint, self._source, self._output, self._scratch, self._reduction, deadline)
        if not self._mapped:
            links.run(plan)
            return
        # ``begin_collective`` was the first barrier.
        self._run_inside([one for one in collect if isinstance(one, Take)], deadline)
        if between:
            links.run(between)
        self._run_inside(share, deadline)

    def _run_inside(self, steps: Sequence[CollectiveInstruction], deadline: float) -> None:
        local = self._endpoint.local
        if local is None or self._peers is None:
            return
        sources, outputs = self._peers
        for one in steps:
            if isinstance(one, Meet):
                local.barrier(deadline)
            elif isinstance(one, Take):
                index = local.global_ranks.index(one.peer)
                theirs = (sources if one.remote.buffer == WINDOW else outputs)[index]
                own = self._scratch if one.local.buffer == SCRATCH else self._output
                np.copyto(own[one.local.start : one.local.stop], theirs[one.remote.start : one.remote.stop])

    def _compare_rails(self, seconds: float, deadline: float) -> None:
        """Notes the time of a trial; after the last one all ranks choose the same number of rails."""
        self._trials[self.rails].append(seconds)
        most = max(self._trials)
        if len(self._trials[1]) < TRIALS:
            self.rails = 1 if self.rails == most else most
            return
        # A rank that arrives early waits for the others: the shortest time of all ranks is that of the sum itself.
        own = np.array([self._trials[rails] for rails in (most, 1)], np.float64)
        times = -max_over_ranks(self._endpoint, -own.reshape(-1), deadline).reshape(2, TRIALS)
        self.rails = most if float(times[0].min()) <= float(times[1].min()) else 1
        self._trials = {self.rails: []}
