"""The sum of gradients in virtual time: as the engine adds up, or by any algorithm of ``collectives``.

    ordered     the engine's own: in each other's memory where all ranks share a host, else slice by slice over links
                (collectives/ordered_all_reduce.py)
    ring, tree, halving_doubling, naive, chunked_ring, hierarchical …      plans of collectives/registry.py

A plan is executed instruction by instruction while it has few messages. Above that the ring and the ordered sum, which
have n(n-1) messages a round, are counted instead: the formulas below are what executing them comes to when all ranks
begin together. Letters: n ranks, k a NIC, s bytes a message, q a message's cost for a core, u its time on a NIC.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hoop.collectives.ordered_all_reduce import linked_plan
from hoop.collectives.plan import CollectivePlan, Combine, Copy, Fold, Meet, Recv, Reduce, Send, Take
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.shard_tree import expression, merge_plan
from hoop.errors import InvalidArgument
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Machine

FLOAT = 4
ORDERED = "ordered"
MOST_MESSAGES = 20_000
"""Of a sum that is executed message by message."""
OUTSIDE = 1 << 20
"""What others have written is not in this core's own cache: it costs what vectors cost that do not fit there."""


def check_algorithm(name: str) -> str:
    known = [ORDERED, *CATALOG["all_reduce"].algorithms, *CATALOG["all_reduce"].spanning]
    if name not in known:
        raise InvalidArgument(f"all_reduce: {name!r} is none; choose {', '.join(known)}")
    return name


class ReductionCosts:
    """How the ranks of one group add up vectors of so many bytes."""

    def __init__(
        self,
        ranks: Sequence[int],
        shares: Sequence[Sequence[int]],
        nodes: Sequence[int],
        micros: int,
        size: float,
        cluster: Cluster,
        machine: Machine,
        algorithm: str,
        most_messages: int = MOST_MESSAGES,
    ) -> None:
        """``shares``: which shards each rank computes; ``nodes``: how many partial sums it then holds."""
        self.ranks, self._machine = tuple(ranks), machine
        self._shares, self._micros, self._nodes = shares, micros, nodes
        self._cluster, self._algorithm = cluster, algorithm
        self._count = round(size / FLOAT)
        hosts = cluster.host_of
        self._hosts = [hosts[rank] for rank in ranks]
        self._members = Counter(self._hosts)
        n = len(ranks)
        self.mapped = len(set(self._hosts)) == 1 and cluster.inside is None and algorithm == ORDERED
        many = n * (n - 1) * (1 + max(nodes, default=1)) if algorithm == ORDERED else 2 * n * (n - 1)
        self.counted = algorithm in (ORDERED, "ring") and not self.mapped and many > most_messages
        self._plans: dict[int, CollectivePlan] = {}
        self._plan_of: Callable[[int], CollectivePlan] = self._planned()

    def _planned(self) -> Callable[[int], CollectivePlan]:
        n, count = len(self.ranks), self._count
        if self.mapped or self.counted:
            return lambda index: CollectivePlan(())
        if self._algorithm == ORDERED:
            holdings = [merge_plan(share, self._micros) for share in self._shares]
            total = expression(holdings, self._micros)
            return lambda index: linked_plan(total, holdings, count, index)
        operation = Operation("all_reduce", count, algorithm=self._algorithm)
        spans = self._algorithm in CATALOG["all_reduce"].spanning
        hosts = tuple(self._hosts) if spans else ()
        return lambda index: operation.plan(n, index, hosts=hosts)

    def plan(self, index: int) -> CollectivePlan:
        """What the group's member of that number does, where it goes by messages."""
        if index not in self._plans:
            self._plans[index] = self._plan_of(index)
        return self._plans[index]

    def mapped_seconds(self, index: int) -> float:
        """Adding up one's slice of all nodes, and writing it into everybody's memory."""
        n, whole = len(self.ranks), self._count * FLOAT
        slice_, of = whole / n, max(whole, OUTSIDE)
        machine = self._machine
        return (sum(self._nodes) - 1) * machine.add(slice_, of) + (n - 1) * machine.copy(slice_, of)

    def bytes(self, index: int) -> float:
        """What a member sends, or moves through others' memory."""
        n, own = len(self.ranks), self._nodes[index]
        slice_ = self._count / n * FLOAT
        if self.mapped:
            return slice_ * (sum(self._nodes) - own + n - 1)
        if self.counted:
            return slice_ * (n - 1) * (2 if self._algorithm == "ring" else own + 1)
        return FLOAT * float(self.plan(index).elements)

    def messages(self, index: int) -> int:
        if self.mapped:
            return 0
        if self.counted:
            return (len(self.ranks) - 1) * (2 if self._algorithm == "ring" else self._nodes[index] + 1)
        return self.plan(index).messages

    @functools.cached_property
    def counted_seconds(self) -> float:
        """How long it takes if all begin together."""
        machine, link, n = self._machine, self._cluster.link, len(self.ranks)
        crowd = max(self._sharing())
        s = self._count * FLOAT / n
        q = crowd * machine.message(s)
        add = crowd * machine.add(s)
        if self._algorithm == "ring":
            u = s / link.bandwidth  # a host's devices are neighbours: one message a round crosses its NIC
            first = crowd * machine.copy(s * n)  # the source is copied, and summed in place
            return first + 2 * (n - 1) * (2 * q + u + link.latency) + (n - 1) * add
        together = max(self._members.values()) if link.shared else 1
        u = together * s / link.bandwidth
        nodes = max(self._nodes)

        def one_round(messages: int, outside: float) -> float:
            """Everybody sends to all others, then takes what came from all of them."""
            there = link.latency + max(messages * q + u, q + outside * u)
            return max(2 * messages * q, there + q, q + u + link.latency + messages * q)

        outside = (n - together) if link.shared else n - 1
        first = one_round(nodes * (n - 1), nodes * outside)
        return first + (sum(self._nodes) - 1) * add + one_round(n - 1, outside)

    def _sharing(self) -> Iterator[int]:
        """Members that share a core, host by host."""
        for number, members in self._members.items():
            host = self._cluster.hosts[number]
            yield -(-members // min(host.cores or host.devices, host.devices))


def reduction_seconds(instruction: object, machine: Machine) -> float:
    """What an instruction of a collective keeps a core busy."""
    match instruction:
        case Send(_, where) | Recv(_, where):
            return machine.message(FLOAT * where.length)
        case Reduce(_, where):
            return machine.message(FLOAT * where.length) + machine.add(FLOAT * where.length)
        case Copy(source, _):
            return machine.copy(FLOAT * source.length)
        case Combine(left, _, _):
            return machine.add(FLOAT * left.length)
        case Take(_, there, _):
            return machine.copy(FLOAT * there.length)
        case Fold(there, _, _, ranks):
            return max(1, len(ranks) - 1) * machine.add(FLOAT * there.length)
        case Meet():
            return machine.meeting_s
    return 0.0
