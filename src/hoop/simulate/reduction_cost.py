"""Cost of a gradient reduction in virtual time: the engine's ordered sum, or any all-reduce of ``collectives``.

    ordered     the engine's own (collectives/ordered_all_reduce.py): in shared memory if all ranks are on one host,
                else slice by slice over links
    ring, tree, halving_doubling, naive, chunked_ring, hierarchical …      plans of collectives/registry.py

A collective with few messages is executed instruction by instruction. The ring and the ordered sum have n(n-1) messages
per round; above a limit their time comes from the closed-form formulas below, which equal the time of execution when
all ranks begin together. Symbols: n ranks, s bytes per message, q core time per message, u NIC time per message.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hoop.collectives.ordered_all_reduce import linked_plan
from hoop.collectives.plan import CollectivePlan, Combine, Copy, Fold, Meet, Recv, Reduce, Send, Take
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.shard_tree import merge_plan, sum_expression
from hoop.errors import InvalidArgument
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import GpuCosts, Machine

FLOAT_BYTES = 4
ORDERED = "ordered"
MAX_EXECUTED_MESSAGES = 20_000
"""Reductions with more messages use their closed-form time."""
UNCACHED_BYTES = 1 << 20
"""Memory that another core has written is not in this core's cache, so it is priced like a vector of this size."""


def check_algorithm(name: str) -> str:
    """Returns the name if it is ``ordered`` or an all-reduce algorithm; raises otherwise."""
    known = [ORDERED, *CATALOG["all_reduce"].algorithms, *CATALOG["all_reduce"].spanning]
    if name not in known:
        raise InvalidArgument(f"all_reduce: {name!r} is unknown; choose {', '.join(known)}")
    return name


class ReductionCosts:
    """Costs of one all-reduce among the ranks of a group."""

    def __init__(
        self,
        ranks: Sequence[int],
        shares: Sequence[Sequence[int]],
        partial_sums: Sequence[int],
        num_microbatches: int,
        size: float,
        cluster: Cluster,
        machine: Machine,
        algorithm: str,
        max_messages: int = MAX_EXECUTED_MESSAGES,
        gpu: GpuCosts | None = None,
    ) -> None:
        """``shares``: each rank's shards; ``partial_sums``: their number on each rank; ``size``: bytes to reduce.

        ``gpu``: the ranks of a host read each other's GPU memory, and each adds all of it.
        """
        self._gpu = gpu
        self.ranks, self._machine = tuple(ranks), machine
        self._shares, self._num_microbatches, self._partial_sums = shares, num_microbatches, partial_sums
        self._cluster, self._algorithm = cluster, algorithm
        self._num_elements = round(size / FLOAT_BYTES)
        hosts = cluster.host_of
        self._hosts = [hosts[rank] for rank in ranks]
        self._ranks_on_host = Counter(self._hosts)
        n = len(ranks)
        self.in_shared_memory = len(set(self._hosts)) == 1 and cluster.inside is None and algorithm == ORDERED
        messages = n * (n - 1) * (1 + max(partial_sums, default=1)) if algorithm == ORDERED else 2 * n * (n - 1)
        self.closed_form = algorithm in (ORDERED, "ring") and not self.in_shared_memory and messages > max_messages
        self._plans: dict[int, CollectivePlan] = {}
        self._plan_of: Callable[[int], CollectivePlan] = self._make_planner()

    def _make_planner(self) -> Callable[[int], CollectivePlan]:
        n, count = len(self.ranks), self._num_elements
        if self.in_shared_memory or self.closed_form:
            return lambda index: CollectivePlan(())
        if self._algorithm == ORDERED:
            holdings = [merge_plan(share, self._num_microbatches) for share in self._shares]
            total = sum_expression(holdings, self._num_microbatches)
            return lambda index: linked_plan(total, holdings, count, index)
        operation = Operation("all_reduce", count, algorithm=self._algorithm)
        spans = self._algorithm in CATALOG["all_reduce"].spanning
        hosts = tuple(self._hosts) if spans else ()
        return lambda index: operation.plan(n, index, hosts=hosts)

    def plan(self, index: int) -> CollectivePlan:
        """The collective plan of the group's rank ``index``; empty unless the reduction is executed."""
        if index not in self._plans:
            self._plans[index] = self._plan_of(index)
        return self._plans[index]

    def shared_memory_seconds(self, index: int) -> float:
        """Time in which a rank sums its slice of all partial sums and writes it into the memory of every rank.

        On a GPU: time in which it reads the partial sums of all other ranks.
        """
        n, total = len(self.ranks), self._num_elements * FLOAT_BYTES
        if self._gpu is not None:
            return (sum(self._partial_sums) - self._partial_sums[index]) * total * self._gpu.read_s
        slice_, vector = total / n, max(total, UNCACHED_BYTES)
        machine = self._machine
        return (sum(self._partial_sums) - 1) * machine.add(slice_, vector) + (n - 1) * machine.copy(slice_, vector)

    def bytes(self, index: int) -> float:
        """Bytes that a rank sends, or moves through other ranks' memory."""
        n, own = len(self.ranks), self._partial_sums[index]
        slice_ = self._num_elements / n * FLOAT_BYTES
        if self.in_shared_memory and self._gpu is not None:
            return float(self._num_elements * FLOAT_BYTES * (sum(self._partial_sums) - own))
        if self.in_shared_memory:
            return slice_ * (sum(self._partial_sums) - own + n - 1)
        if self.closed_form:
            return slice_ * (n - 1) * (2 if self._algorithm == "ring" else own + 1)
        return FLOAT_BYTES * float(self.plan(index).elements)

    def messages(self, index: int) -> int:
        """Messages that a rank sends."""
        if self.in_shared_memory:
            return 0
        if self.closed_form:
            return (len(self.ranks) - 1) * (2 if self._algorithm == "ring" else self._partial_sums[index] + 1)
        return self.plan(index).messages

    @functools.cached_property
    def closed_form_seconds(self) -> float:
        """Time of the reduction if all ranks begin together."""
        machine, link, n = self._machine, self._cluster.link, len(self.ranks)
        ranks_per_core = max(self._ranks_per_core())
        s = self._num_elements * FLOAT_BYTES / n
        q = ranks_per_core * machine.message(s)
        add = ranks_per_core * machine.add(s)
        if self._algorithm == "ring":
            u = s / link.bandwidth  # the ranks of a host are ring neighbours: one message per round crosses its NIC
            first = ranks_per_core * machine.copy(s * n)  # the source is copied, then summed in place
            return first + 2 * (n - 1) * (2 * q + u + link.latency) + (n - 1) * add
        ranks_per_nic = max(self._ranks_on_host.values()) if link.shared else 1
        u = ranks_per_nic * s / link.bandwidth
        partial_sums = max(self._partial_sums)

        def one_round(messages: int, outside: float) -> float:
            """Time of a round in which every rank sends to all others and then receives from all others."""
            there = link.latency + max(messages * q + u, q + outside * u)
            return max(2 * messages * q, there + q, q + u + link.latency + messages * q)

        outside = (n - ranks_per_nic) if link.shared else n - 1
        first = one_round(partial_sums * (n - 1), partial_sums * outside)
        return first + (sum(self._partial_sums) - 1) * add + one_round(n - 1, outside)

    def _ranks_per_core(self) -> Iterator[int]:
        """Ranks of the group that share a core, for each host."""
        for number, ranks in self._ranks_on_host.items():
            host = self._cluster.hosts[number]
            yield -(-ranks // min(host.cores or host.devices, host.devices))


def reduction_seconds(instruction: object, machine: Machine) -> float:
    """Core time of one instruction of a collective plan."""
    match instruction:
        case Send(_, where) | Recv(_, where):
            return machine.message(FLOAT_BYTES * where.length)
        case Reduce(_, where):
            return machine.message(FLOAT_BYTES * where.length) + machine.add(FLOAT_BYTES * where.length)
        case Copy(source, _):
            return machine.copy(FLOAT_BYTES * source.length)
        case Combine(left, _, _):
            return machine.add(FLOAT_BYTES * left.length)
        case Take(_, there, _):
            return machine.copy(FLOAT_BYTES * there.length)
        case Fold(there, _, _, ranks):
            return max(1, len(ranks) - 1) * machine.add(FLOAT_BYTES * there.length)
        case Meet():
            return machine.meeting_s
    return 0.0
