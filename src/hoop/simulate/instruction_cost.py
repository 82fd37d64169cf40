"""Cost of the instructions of a plan, of gradient reductions, and of state replication, in virtual time.

``InstructionCosts``: seconds of a core, and bytes of a link, of each instruction.

``ReductionCosts``: the engine's ordered sum, or any all-reduce of ``collectives``.

    ordered     the engine's own (collectives/ordered_all_reduce.py): in shared memory if all ranks are on one host; on
                several, inside each host first (collectives/ordered_multi_host.py); else slice by slice over links
    ring, tree, halving_doubling, naive, chunked_ring, hierarchical …      plans of collectives/registry.py

A collective with few messages is executed instruction by instruction. The ring and the ordered sum have n(n-1) messages
per round; above a limit their time comes from the closed-form formulas below, which equal the time of execution when
all ranks begin together. Symbols: n ranks, s bytes per message, q core time per message, u NIC time per message.

``ReplicationCosts``:

    rank 0 ── its gradient ──▶ rank 1 ── its gradient ──▶ rank 2 ── its gradient ──▶ rank 0

Replication follows ``engine/fault_tolerance/replication.py``: after each step a rank sends its summed gradient to
each rank that holds its replica, which applies the same update when it would otherwise wait. Asynchronous strategies
send the whole state at each flush. State that another rank already has is not sent; data parallel training needs no
replication, unless its update is sharded. A sharded update costs what an all-reduce costs: a reduce-scatter of the
gradients, and an all-gather of the weights.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from hoop.collectives.ordered_all_reduce import linked_plan
from hoop.collectives.ordered_multi_host import host_nodes, multi_host_plan
from hoop.collectives.plan import CollectivePlan, Combine, Copy, Fold, Meet, Recv, Reduce, Send, Take
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.shard_tree import Node, merge_plan, sum_expression
from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.membership.replication import replica_holders, replica_shares, same_state
from hoop.plan.instructions import GRADIENT_KINDS, Instruction, InstructionKind
from hoop.plan.partition import StageCut
from hoop.plan.plan import Plan
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs, GpuCosts, LinearCost, Machine

_INPUT_SHARE = 0.5
"""The input half's part of a split backward."""
FLOAT_BYTES = 4
ORDERED = "ordered"
MAX_EXECUTED_MESSAGES = 20_000
"""Reductions with more messages use their closed-form time."""
UNCACHED_BYTES = 1 << 20
"""Memory that another core has written is not in this core's cache, so it is priced like a vector of this size."""


class InstructionCosts:
    """Costs of a plan's instructions, for a model whose stages begin at the blocks ``cuts``."""

    def __init__(self, plan: Plan, costs: Costs, cuts: Sequence[int], fixed_lists: bool, synchronous: bool) -> None:
        """``fixed_lists``: ranks run lists, not rules, so a rank with the whole model may batch several shards."""
        machine, rows = costs.machine, costs.rows
        self._machine, self._plan, self._rows = machine, plan, rows
        whole_state = plan.stages == 1 and not plan.servers and not plan.sharded_update
        self.gpu = costs.gpu if whole_state and fixed_lists else None
        """Costs of steps on a GPU, where the state stays there: data parallel."""
        stages = [costs.blocks[low:high] for low, high in itertools.pairwise([*cuts, len(costs.blocks)])]
        self.gradient_bytes = [sum(one.gradient_bytes for one in stage) for stage in stages]
        # Of two shards' gradients, which were written before other computations.
        self._add_seconds = [machine.add(size, max(size, UNCACHED_BYTES)) for size in self.gradient_bytes]
        weights = [sum(one.weight_bytes for one in stage) for stage in stages]
        updated = [size / len(plan.holders[0]) for size in weights] if plan.sharded_update else weights
        outputs = [stage[-1].output.at(rows) for stage in stages]
        self._partial_sums = {
            (rank, stage): self._partial_sums_of(rank, stage)
            for stage, ranks in enumerate(plan.holders)
            for rank in ranks
        }
        base = machine.instruction_s
        self._seconds: dict[tuple[InstructionKind, int], float] = {
            (InstructionKind.LOAD, 0): base + costs.load.at(rows)
        }
        self._sizes: dict[tuple[InstructionKind, int], float] = {}
        for stage, blocks in enumerate(stages):
            last = costs.loss.at(rows) if stage == plan.stages - 1 else 0.0
            if 0 < stage == plan.stages - 1:
                last += costs.load.at(rows)  # the last stage loads the targets itself, and the inputs with them
            # Between stages a computation follows a message; else shards are computed one right after the other.
            start = sum(one.start_s for one in blocks) if plan.stages > 1 else 0.0
            last += start
            backward = start + sum(one.backward.at(rows) for one in blocks)
            first_half, second_half = _INPUT_SHARE * backward, (1 - _INPUT_SHARE) * backward
            self._seconds |= {
                (InstructionKind.FORWARD, stage): base + sum(one.forward.at(rows) for one in blocks) + last,
                (InstructionKind.BACKWARD, stage): base + machine.shard_s + backward,
                (InstructionKind.BACKWARD_INPUT, stage): base + first_half,
                (InstructionKind.BACKWARD_WEIGHT, stage): base + machine.shard_s + second_half,
                (InstructionKind.REDUCE, stage): base,
                (InstructionKind.UPDATE, stage): base + costs.update_fixed_s + costs.update_s * updated[stage],
            }
            self._sizes |= {
                (InstructionKind.SEND_OUTPUT, stage): outputs[stage],
                (InstructionKind.RECV_INPUT, stage): outputs[stage - 1] if stage else 0.0,
                (InstructionKind.SEND_GRADIENT, stage): outputs[stage - 1] if stage else 0.0,
                (InstructionKind.RECV_GRADIENT, stage): outputs[stage],
            }
        self._push_bytes: dict[int, float] = {}
        if plan.servers:
            self._add_server_costs(costs, sum(weights), self.gradient_bytes[0], synchronous)
        self._messages = {key: machine.message(size) for key, size in self._sizes.items()}
        self._batched: set[tuple[int, int]] = set()
        """(rank, micro-batch) computed in one batch with an earlier micro-batch: the fixed costs are paid already."""
        if plan.stages == 1 and costs.joint > 1 and fixed_lists:
            for rank in plan.holders[0]:
                share = plan.computed_by(rank, 0)
                self._batched |= {(rank, micro) for index, micro in enumerate(share) if index % costs.joint}
        row_seconds = [sum(line.row for line in lines) for lines in _linear_costs(costs)]
        self._batched_seconds = dict(
            zip(
                (InstructionKind.LOAD, InstructionKind.FORWARD, InstructionKind.BACKWARD),
                (rows * one for one in row_seconds),
                strict=True,
            )
        )
        # A batched shard's gradient still has its own place in the sum.
        self._batched_seconds[InstructionKind.BACKWARD] += base + machine.shard_s

    def _add_server_costs(self, costs: Costs, weights: int, gradients: int, synchronous: bool) -> None:
        """Costs of pushes, gives, and the servers' reductions and updates; each server has an equal slice."""
        plan, base = self._plan, self._machine.instruction_s
        count = len(plan.servers)
        partial_sums = {rank: len(self._partial_sums[rank, 0][0]) for rank in plan.holders[0]}
        self._push_bytes = {
            rank: gradients / count * (pushed if synchronous else 1) for rank, pushed in partial_sums.items()
        }
        added = (sum(partial_sums.values()) - 1) * self._machine.add(gradients / count) if synchronous else 0.0
        for number in range(count):
            self._sizes |= {
                (InstructionKind.GIVE, number): weights / count,
                (InstructionKind.GET, number): weights / count,
            }
            self._seconds[InstructionKind.REDUCE, number] = base + added
            update = costs.update_fixed_s + costs.update_s * weights / count
            self._seconds[InstructionKind.UPDATE, number] = base + update

    def _partial_sums_of(self, rank: int, stage: int) -> tuple[tuple[Node, ...], float]:
        """The partial sums that a rank holds after its shards, and its gradient additions per shard until then."""
        share = self._plan.computed_by(rank, stage)
        if not share:
            return (), 0.0
        found = partial_sum_nodes(share, self._plan.num_microbatches)
        return found, (len(share) - len(found)) / len(share)

    def num_partial_sums(self, rank: int, stage: int) -> int:
        """Number of partial sums that a rank holds after it has computed its shards."""
        return len(self._partial_sums[rank, stage][0])

    def message_bytes(self, rank: int, one: Instruction) -> float:
        """Size of the message that ``one`` sends or receives on ``rank``."""
        if one.kind is InstructionKind.PUSH:
            return self._push_bytes[rank]
        if one.kind is InstructionKind.TAKE:
            return self._push_bytes[one.peer]
        return self._sizes[one.kind, one.stage]

    def seconds(self, rank: int, one: Instruction) -> float:
        """Time of an instruction on a core of speed 1."""
        kind, stage, micro, peer = one
        if self.gpu is not None:
            return self._gpu_seconds(self.gpu, rank, one)
        if peer >= 0:
            known = self._messages.get((kind, stage))
            return self._machine.instruction_s + (
                self._machine.message(self.message_bytes(rank, one)) if known is None else known
            )
        if self._batched and micro >= 0 and (rank, micro) in self._batched:
            found = self._batched_seconds[kind]
        else:
            found = self._seconds[kind, stage]
        if kind in GRADIENT_KINDS:
            found += self._partial_sums[rank, stage][1] * self._add_seconds[stage]
        return found

    def _gpu_seconds(self, gpu: GpuCosts, rank: int, one: Instruction) -> float:
        """Time of an instruction on a GPU: one launch computes all shards of the rank."""
        share = self._plan.computed_by(rank, 0)
        if one.kind is InstructionKind.FORWARD and one.micro == share[0]:
            return gpu.compute.at(len(share) * self._rows)
        return gpu.finish_s if one.kind is InstructionKind.UPDATE else 0.0


def _linear_costs(costs: Costs) -> list[list[LinearCost]]:
    blocks = costs.blocks
    return [[costs.load], [costs.loss, *(one.forward for one in blocks)], [one.backward for one in blocks]]


def partial_sum_nodes(share: Sequence[int], shards: int) -> tuple[Node, ...]:
    """The partial sums of a rank that computes the shards ``share``, as nodes of the summation tree over all shards.

    They are the largest nodes whose shards all belong to the rank.
    """
    low, high = min(share), max(share) + 1
    if high - low != len(share):
        return tuple(node for node, _ in merge_plan(share, shards).nodes)
    found: list[Node] = []
    pending = [Node(0, shards)]
    while pending:
        node = pending.pop()
        if low <= node.low and node.high <= high:
            found.append(node)
        elif node.low < high and low < node.high:
            pending += reversed(node.halves)
    return tuple(found)


_ADDRESS_BYTES = 8.0
"""Size of a message that carries only an address in shared memory."""


class ReplicationCosts:
    """Costs of replication for each rank, under a plan and for a partition of the model.

    A synchronous strategy replicates incrementally: a rank sends its gradient, and the holder applies the same update.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        stages: Sequence[StageCut],
        synchronous: bool,
        hosts: Sequence[Hashable] = (),
        replicas: int = 1,
    ) -> None:
        self._costs, self._incremental = costs, synchronous
        self._shares = replica_shares(plan, stages, costs.partition_blocks())
        holders = replica_holders(plan.size, hosts, replicas, same_state(plan))
        self._holders = [one if self.replica_bytes(owner) else () for owner, one in enumerate(holders)]
        self._owners: list[list[int]] = [[] for _ in range(plan.size)]
        for owner, ranks in enumerate(self._holders):
            for holder in ranks:
                self._owners[holder].append(owner)

    def holders(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold a replica of ``rank``."""
        return self._holders[rank]

    def replica_bytes(self, rank: int) -> int:
        """Bytes that each of the rank's holders needs after each span: a step's gradient, or the whole state."""
        share = self._shares[rank]
        return share.change if self._incremental else share.state

    def message_bytes(self, rank: int, shares_memory: bool) -> float:
        """Size of the rank's message to a holder; in shared memory a gradient's address is enough."""
        return _ADDRESS_BYTES if shares_memory and self._incremental else self.replica_bytes(rank)

    def receive_seconds(self, owner: int, shares_memory: bool) -> float:
        """Time in which the holder receives or copies the bytes of ``owner``."""
        machine = self._costs.machine
        copied = machine.copy(self.replica_bytes(owner)) if shares_memory and self._incremental else 0.0
        return machine.message(self.message_bytes(owner, shares_memory)) + copied

    def owners(self, rank: int) -> list[int]:
        """The ranks whose replicas ``rank`` holds."""
        return self._owners[rank]

    def local_copy_seconds(self, rank: int) -> float:
        """Time in which an asynchronous rank copies its own state before a span: the state to roll back to."""
        return 0.0 if self._incremental else self._costs.machine.copy(self._shares[rank].state)

    def update_seconds(self, rank: int) -> float:
        """Time in which the rank applies a step's gradients to the replicas that it holds."""
        costs = self._costs
        changed = [self._shares[owner].change for owner in self.owners(rank)] if self._incremental else []
        return sum(costs.update_fixed_s + costs.update_s * one for one in changed)

    def memory(self, own_bytes: Sequence[int], limits: Sequence[int | None]) -> list[int]:
        """Memory of each rank, replicas included; raises if a rank is too small for its replicas."""
        found = []
        fewer = "with --replicas 1 it needs less; " if max(map(len, self._holders)) > 1 else ""
        for rank, (own, limit) in enumerate(zip(own_bytes, limits, strict=True)):
            shares = [self._shares[owner] for owner in self.owners(rank)]
            if self._incremental:
                replicas = sum(one.state + one.change for one in shares)
            else:
                replicas = self._shares[rank].state + 2 * sum(one.state for one in shares)
            found.append(own + replicas)
            if limit is not None and own + replicas > limit:
                raise FailedPrecondition(
                    f"memory: device {rank} needs {format_size(own)}, and {format_size(replicas)} for replicas of "
                    f"other devices' state, and has {format_size(limit)}; {fewer}without replicas (--no-replicate) it "
                    "fits, and the loss of a device ends the run"
                )
        return found


def check_algorithm(name: str) -> str:
    """Returns the name if it is ``ordered`` or an all-reduce algorithm; raises otherwise."""
    known = [ORDERED, *CATALOG["all_reduce"].algorithms, *CATALOG["all_reduce"].spanning]
    if name not in known:
        raise InvalidArgument(f"all_reduce: {name!r} is unknown; choose {', '.join(known)}")
    return name


class HostShape(NamedTuple):
    """The shape of an ordered sum on several hosts."""

    hosts: int
    rails: int
    """Ranks of a host that talk to other hosts."""
    largest: int
    """Ranks of the largest host."""
    partial_sums: int
    """Of a host, after its ranks have merged theirs: the most of all hosts."""


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
        self._host_shape = self._shape_on_hosts() if algorithm == ORDERED and cluster.inside is None else None
        if self._host_shape is not None:
            messages = n * (len(self._ranks_on_host) - 1) * (1 + self._host_shape.partial_sums)
        self.closed_form = algorithm in (ORDERED, "ring") and not self.in_shared_memory and messages > max_messages
        self._plans: dict[int, CollectivePlan] = {}
        self._plan_of: Callable[[int], CollectivePlan] = self._make_planner()

    def _shape_on_hosts(self) -> HostShape | None:
        """How the sum runs on several hosts of which one has several ranks; None for other ranks."""
        if not 1 < len(self._ranks_on_host) < len(self.ranks):
            return None
        holdings = [merge_plan(share, self._num_microbatches) for share in self._shares]
        members = [[rank for rank, one in enumerate(self._hosts) if one == host] for host in self._ranks_on_host]
        partial_sums = max(len(host_nodes(holdings, ranks, self._num_microbatches)) for ranks in members)
        return HostShape(len(members), min(map(len, members)), max(map(len, members)), partial_sums)

    def _make_planner(self) -> Callable[[int], CollectivePlan]:
        n, count = len(self.ranks), self._num_elements
        if self.in_shared_memory or self.closed_form:
            return lambda index: CollectivePlan(())
        if self._algorithm == ORDERED:
            holdings = [merge_plan(share, self._num_microbatches) for share in self._shares]
            if self._host_shape is not None:
                hosts = tuple(self._hosts)
                return lambda index: multi_host_plan(holdings, self._num_microbatches, count, index, hosts)
            total = sum_expression(holdings, self._num_microbatches)
            return lambda index: linked_plan(total, holdings, count, index)
        operation = Operation("all_reduce", count, algorithm=self._algorithm)
        spanned = tuple(self._hosts) if self._algorithm in CATALOG["all_reduce"].spanning else ()
        return lambda index: operation.plan(n, index, hosts=spanned)

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
        return self._machine.reduce_s + sum_and_copy_seconds(self._machine, n, sum(self._partial_sums), total)

    def bytes(self, index: int) -> float:
        """Bytes that a rank sends, or moves through other ranks' memory."""
        n, own = len(self.ranks), self._partial_sums[index]
        slice_ = self._num_elements / n * FLOAT_BYTES
        if self.in_shared_memory and self._gpu is not None:
            return float(self._num_elements * FLOAT_BYTES * (sum(self._partial_sums) - own))
        if self.in_shared_memory:
            return slice_ * (sum(self._partial_sums) - own + n - 1)
        if self.closed_form and self._host_shape is not None:
            shape = self._host_shape
            messages = self.messages(index)
            return messages * self._num_elements / shape.hosts / shape.rails * FLOAT_BYTES
        if self.closed_form:
            return slice_ * (n - 1) * (2 if self._algorithm == "ring" else own + 1)
        return FLOAT_BYTES * float(self.plan(index).elements)

    def messages(self, index: int) -> int:
        """Messages that a rank sends."""
        if self.in_shared_memory:
            return 0
        if self.closed_form and self._host_shape is not None:
            in_rail = self._hosts[:index].count(self._hosts[index]) < self._host_shape.rails
            return (self._host_shape.hosts - 1) * (self._host_shape.partial_sums + 1) if in_rail else 0
        if self.closed_form:
            return (len(self.ranks) - 1) * (2 if self._algorithm == "ring" else self._partial_sums[index] + 1)
        return self.plan(index).messages

    @functools.cached_property
    def closed_form_seconds(self) -> float:
        """Time of the reduction if all ranks begin together."""
        machine, link, n = self._machine, self._cluster.link, len(self.ranks)
        ranks_per_core = max(self._ranks_per_core())
        if self._host_shape is not None:
            return self._host_shape_seconds(self._host_shape, ranks_per_core)
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
        outside = (n - ranks_per_nic) if link.shared else n - 1
        first = _round_seconds(partial_sums * (n - 1), partial_sums * outside, q, u, link.latency)
        return first + (sum(self._partial_sums) - 1) * add + _round_seconds(n - 1, outside, q, u, link.latency)

    def _host_shape_seconds(self, shape: HostShape, ranks_per_core: int) -> float:
        """Time of the sum on several hosts if all ranks begin together."""
        machine, link = self._machine, self._cluster.link
        total, peers = self._num_elements * FLOAT_BYTES, shape.hosts - 1
        slice_, s = total / shape.rails, total / shape.rails / shape.hosts
        q, add = ranks_per_core * machine.message(s), ranks_per_core * machine.add(s)
        u, partial_sums = s / link.bandwidth, shape.partial_sums
        theirs = (shape.largest - 1) * max(self._partial_sums)
        inside = 3 * machine.meeting_s + (theirs + shape.rails - 1) * ranks_per_core * machine.copy(slice_)
        merged = max(0, shape.largest * max(self._partial_sums) - partial_sums) * shape.hosts * add
        between = _round_seconds(partial_sums * peers, partial_sums * peers, q, u, link.latency)
        between += _round_seconds(peers, peers, q, u, link.latency) + (partial_sums * shape.hosts - 1) * add
        # The rails of a host share its NIC in turn, so that it sends those of one while another waits or adds.
        in_turn = (shape.rails if link.shared else 1) * (partial_sums + 1) * peers * u + link.latency + 2 * q
        return inside + merged + max(between, in_turn)

    def _ranks_per_core(self) -> Iterator[int]:
        """Ranks of the group that share a core, for each host."""
        for number, ranks in self._ranks_on_host.items():
            host = self._cluster.hosts[number]
            yield -(-ranks // min(host.cores or host.devices, host.devices))


def sum_and_copy_seconds(machine: Machine, ranks: int, partial_sums: int, size: float) -> float:
    """Time in which one of the ranks adds its slice of all partial sums of ``size`` bytes, and copies it to the others.

    The vectors were written by other cores.
    """
    slice_, vector = size / ranks, max(size, UNCACHED_BYTES)
    return (partial_sums - 1) * machine.add(slice_, vector) + (ranks - 1) * machine.copy(slice_, vector)


def _round_seconds(messages: int, outside: float, q: float, u: float, latency: float) -> float:
    """Time of a round in which every rank sends ``messages`` messages to others and then receives as many."""
    there = latency + max(messages * q + u, q + outside * u)
    return max(2 * messages * q, there + q, q + u + latency + messages * q)


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
