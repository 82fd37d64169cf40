"""Cost of one instruction of a plan, in seconds of a core and bytes of a link, and cost of state replication.

    rank 0 ── its gradient ──▶ rank 1 ── its gradient ──▶ rank 2 ── its gradient ──▶ rank 0

Replication follows ``engine/fault_tolerance/replication.py``: after each step a rank sends its summed gradient to
the rank that holds its replica, which applies the same update when it would otherwise wait. Asynchronous strategies
send the whole state whenever all ranks meet. State that another rank already has is not sent; data parallel
training needs no replication.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence

from hoop.collectives.shard_tree import Node, merge_plan
from hoop.config import format_size
from hoop.errors import FailedPrecondition
from hoop.plan.instructions import GRADIENT_KINDS, Instruction, InstructionKind
from hoop.plan.partition import StageCut
from hoop.plan.plan import Plan
from hoop.plan.replica_placement import replica_holders, replica_shares
from hoop.simulate.cost_model import Costs, LinearCost

_INPUT_SHARE = 0.5
"""Of a backward that is cut in two, the half of the input."""


class InstructionCosts:
    """A plan's instructions, priced for a model that is cut at ``cuts``."""

    def __init__(
        self, plan: Plan, costs: Costs, cuts: Sequence[int], listed: bool, synchronous: bool
    ) -> None:
        """``listed``: ranks run lists, and whole models may be computed several shards at once."""
        machine, rows = costs.machine, costs.rows
        self._machine, self._plan = machine, plan
        stages = [costs.blocks[low:high] for low, high in itertools.pairwise([*cuts, len(costs.blocks)])]
        self.gradient_bytes = [sum(one.gradient_bytes for one in stage) for stage in stages]
        self._added = [machine.add(size) for size in self.gradient_bytes]
        weights = [sum(one.weight_bytes for one in stage) for stage in stages]
        outputs = [stage[-1].output.at(rows) for stage in stages]
        self._held = {
            (rank, stage): self._nodes(rank, stage)
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
                last += costs.load.at(rows)  # targets are read where they are used, and inputs come with them
            backward = sum(one.backward.at(rows) for one in blocks)
            first_half, second_half = _INPUT_SHARE * backward, (1 - _INPUT_SHARE) * backward
            self._seconds |= {
                (InstructionKind.FORWARD, stage): base + sum(one.forward.at(rows) for one in blocks) + last,
                (InstructionKind.BACKWARD, stage): base + backward,
                (InstructionKind.BACKWARD_INPUT, stage): base + first_half,
                (InstructionKind.BACKWARD_WEIGHT, stage): base + second_half,
                (InstructionKind.REDUCE, stage): base,
                (InstructionKind.UPDATE, stage): base
                + costs.update_fixed_s
                + costs.update_s * weights[stage],
            }
            self._sizes |= {
                (InstructionKind.SEND_OUTPUT, stage): outputs[stage],
                (InstructionKind.RECV_INPUT, stage): outputs[stage - 1] if stage else 0.0,
                (InstructionKind.SEND_GRADIENT, stage): outputs[stage - 1] if stage else 0.0,
                (InstructionKind.RECV_GRADIENT, stage): outputs[stage],
            }
        self._pushed: dict[int, float] = {}
        if plan.servers:
            self._serve(costs, sum(weights), self.gradient_bytes[0], synchronous)
        self._messages = {key: machine.message(size) for key, size in self._sizes.items()}
        self._later: set[tuple[int, int]] = set()
        if plan.stages == 1 and costs.joint > 1 and listed:
            for rank in plan.holders[0]:
                share = plan.computed_by(rank, 0)
                self._later |= {(rank, micro) for at, micro in enumerate(share) if at % costs.joint}
        row = [sum(line.row for line in lines) for lines in _lines(costs)]
        self._row = dict(
            zip(
                (InstructionKind.LOAD, InstructionKind.FORWARD, InstructionKind.BACKWARD),
                (rows * one for one in row),
                strict=True,
            )
        )
        self._row[InstructionKind.BACKWARD] += base  # each has a place of its own in the sum

    def _serve(self, costs: Costs, weights: int, gradients: int, synchronous: bool) -> None:
        plan, base = self._plan, self._machine.instruction_s
        count = len(plan.servers)
        nodes = {rank: len(self._held[rank, 0][0]) for rank in plan.holders[0]}
        self._pushed = {
            rank: gradients / count * (found if synchronous else 1) for rank, found in nodes.items()
        }
        added = (sum(nodes.values()) - 1) * self._machine.add(gradients / count) if synchronous else 0.0
        for number in range(count):
            self._sizes |= {
                (InstructionKind.GIVE, number): weights / count,
                (InstructionKind.GET, number): weights / count,
            }
            self._seconds[InstructionKind.REDUCE, number] = base + added
            update = costs.update_fixed_s + costs.update_s * weights / count
            self._seconds[InstructionKind.UPDATE, number] = base + update

    def _nodes(self, rank: int, stage: int) -> tuple[tuple[Node, ...], float]:
        """The nodes of the sum that a rank holds in the end, and additions of gradients a shard until then."""
        share = self._plan.computed_by(rank, stage)
        if not share:
            return (), 0.0
        found = nodes_of(share, self._plan.micros)
        return found, (len(share) - len(found)) / len(share)

    def nodes(self, rank: int, stage: int) -> int:
        """How many nodes of the sum a rank holds when it has computed its shards."""
        return len(self._held[rank, stage][0])

    def size(self, rank: int, one: Instruction) -> float:
        """Bytes of a message, seen from either end."""
        if one.kind is InstructionKind.PUSH:
            return self._pushed[rank]
        if one.kind is InstructionKind.TAKE:
            return self._pushed[one.peer]
        return self._sizes[one.kind, one.stage]

    def seconds(self, rank: int, one: Instruction) -> float:
        """What it keeps a core of speed 1 busy."""
        kind, stage, micro, peer = one
        if peer >= 0:
            known = self._messages.get((kind, stage))
            return self._machine.instruction_s + (
                self._machine.message(self.size(rank, one)) if known is None else known
            )
        if self._later and micro >= 0 and (rank, micro) in self._later:
            found = self._row[kind]
        else:
            found = self._seconds[kind, stage]
        if kind in GRADIENT_KINDS:
            found += self._held[rank, stage][1] * self._added[stage]
        return found


def _lines(costs: Costs) -> list[list[LinearCost]]:
    blocks = costs.blocks
    return [[costs.load], [costs.loss, *(one.forward for one in blocks)], [one.backward for one in blocks]]


def nodes_of(share: Sequence[int], shards: int) -> tuple[Node, ...]:
    """The nodes of the tree over shards that a rank holds which computes these: the largest that are all its own."""
    low, high = min(share), max(share) + 1
    if high - low != len(share):
        return tuple(node for node, _ in merge_plan(share, shards).nodes)
    found: list[Node] = []
    todo = [Node(0, shards)]
    while todo:
        node = todo.pop()
        if low <= node.low and node.high <= high:
            found.append(node)
        elif node.low < high and low < node.high:
            todo += reversed(node.halves)
    return tuple(found)


_PLACE = 8.0
"""Bytes that say where something lies."""


class ReplicationCosts:
    """What each rank does for mirrors under a plan, for a model that is cut into these stages."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        stages: Sequence[StageCut],
        synchronous: bool,
        hosts: Sequence[Hashable] = (),
    ) -> None:
        self._costs, self.follow = costs, synchronous
        self._shares = replica_shares(plan, stages, costs.partition_blocks())
        self._holders = replica_holders(plan.size, hosts)
        self._owners: list[list[int]] = [[] for _ in range(plan.size)]
        for owner, holder in enumerate(self._holders):
            if self.sent(owner):
                self._owners[holder].append(owner)

    def holder(self, rank: int) -> int:
        return self._holders[rank]

    def sent(self, rank: int) -> int:
        """Bytes that its holder gets: what a step's update is made with, or the state."""
        share = self._shares[rank]
        return (share.change if self.follow else share.state) if self.holder(rank) != rank else 0

    def told(self, rank: int, near: bool) -> float:
        """Bytes of the message about it: where it lies, for who is ``near`` and sees that memory."""
        return _PLACE if near and self.follow else self.sent(rank)

    def hearing(self, owner: int, near: bool) -> float:
        """Seconds in which a holder gets it."""
        machine = self._costs.machine
        copied = machine.copy(self.sent(owner)) if near and self.follow else 0.0
        return machine.message(self.told(owner, near)) + copied

    def owners(self, rank: int) -> list[int]:
        """Whose mirrors a rank holds."""
        return self._owners[rank]

    def aside(self, rank: int) -> float:
        """Seconds for a copy of what it holds, before steps after which it may not be what all have."""
        return 0.0 if self.follow else self._costs.machine.copy(self._shares[rank].state)

    def update(self, rank: int) -> float:
        """Seconds that bring what it holds of others a step further."""
        costs = self._costs
        changed = [self._shares[owner].change for owner in self.owners(rank)] if self.follow else []
        return sum(costs.update_fixed_s + costs.update_s * one for one in changed)

    def memory(self, held: Sequence[int], room: Sequence[int | None]) -> list[int]:
        """What ranks hold with mirrors; raises where one is too small for them."""
        found = []
        for rank, (own, cap) in enumerate(zip(held, room, strict=True)):
            theirs = [self._shares[owner] for owner in self.owners(rank)]
            if self.follow:
                mirrors = sum(one.state + one.change for one in theirs)
            else:
                mirrors = self._shares[rank].state + 2 * sum(one.state for one in theirs)
            found.append(own + mirrors)
            if cap is not None and own + mirrors > cap:
                raise FailedPrecondition(
                    f"memory: device {rank} needs {format_size(own)}, and {format_size(mirrors)} for mirrors of what "
                    f"others hold, and has {format_size(cap)}; without mirrors (--no-mirror) it fits, and the loss of "
                    "a device ends the run"
                )
        return found
