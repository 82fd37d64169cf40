"""One rank in virtual time: it runs its rule or its instruction list as the engine does.

    inbox ──▶ rule.on_message     all received messages before each choice; a server takes one message at a time
              rule.next ──▶ compute on the core, or wait
                        ──▶ a send goes to the network, which delivers it
                        ──▶ a reduction runs among its group

``Simulation`` builds one ``SimulationContext`` and one ``SimulatedRank`` per rank; the clock drives the ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hoop.collectives.plan import Meet, Recv, Reduce, Send
from hoop.errors import InvalidArgument
from hoop.plan.instructions import (
    CATEGORY,
    COMMUNICATE,
    COMPUTE,
    IDLE,
    RECEIVES,
    SENDS,
    SHARE,
    Instruction,
    InstructionKind,
)
from hoop.plan.rules import ListRule, Rule, round_robin
from hoop.simulate.clock import Clock, Group, Network, Process
from hoop.simulate.cost_model import Machine
from hoop.simulate.instruction_cost import (
    FLOAT_BYTES,
    InstructionCosts,
    ReductionCosts,
    ReplicationCosts,
    reduction_seconds,
)
from hoop.simulate.result import RankAccount, TracedSpan

SHM_BLOCK_BYTES = 64 * 1024
"""Ranks that share memory pass messages in blocks of this size."""
SHM_RING_BYTES = 4 * SHM_BLOCK_BYTES
"""Bytes of a message that its sender can write before the receiver begins to read."""
_WAKE_UP = "awake"
_REPLICA = "replicate"
_STEP_END_KINDS = frozenset({InstructionKind.UPDATE, InstructionKind.PUSH})
_VISIBLE_KINDS = frozenset({*SENDS, InstructionKind.REDUCE, InstructionKind.UPDATE})
"""Instructions that involve other ranks, or whose moment is recorded."""


@dataclass(frozen=True)
class SimulatedStragglers:
    """Randomly slow devices: each computation is ``factor`` times slower with probability ``chance``.

    The same seed gives the same slow computations.
    """

    chance: float = 0.05
    factor: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1 or not self.factor >= 1:
            raise InvalidArgument(f"stragglers: chance {self.chance} is not in 0..1, or factor {self.factor} below 1")


@dataclass(frozen=True)
class Outage:
    """A device that pauses for ``seconds``, before its first instruction at or after time ``at``, and then goes on."""

    rank: int
    at: float
    seconds: float


@dataclass(frozen=True)
class GroupReduction:
    """A rank's part in the gradient reduction of a stage: the group, its costs, and the rank's index in it."""

    costs: ReductionCosts
    index: int
    group: Group


@dataclass
class SimulationContext:
    """State that the ranks of one simulation share."""

    clock: Clock
    network: Network
    machine: Machine
    instruction_costs: InstructionCosts
    replication: ReplicationCosts | None
    """None: no state is replicated."""
    reductions: Mapping[tuple[int, int], GroupReduction]
    """By (rank, stage); only stages with several replicas."""
    rule: Callable[[int, int], Rule]
    """``rule(rank, steps)``: the rule of a rank for a span of steps."""
    span_lengths: Sequence[int]
    """Number of steps in each span; a span ends with a flush."""
    stop_vote_group: Group | None
    """All ranks, where they vote on stopping after each span; None: the gradient sum carries the vote."""
    stop_vote_s: float
    """Seconds of messages in one such vote."""
    last_part: Sequence[int]
    """For each rank, the stage or slice whose update or push ends a step."""
    take_all_messages: bool
    """Whether a rank passes all received messages to its rule before each choice; servers take one at a time."""
    trace: bool
    stragglers: SimulatedStragglers | None
    outages: Sequence[Outage]
    _groups: dict[tuple[int, ...], Group] = field(default_factory=dict)

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The group of these ranks: the same object for the same ranks."""
        if ranks not in self._groups:
            self._groups[ranks] = Group(ranks)
        return self._groups[ranks]


@dataclass(frozen=True)
class _Receiving:
    """Key of a signal: the rank has begun to receive a message that does not fit into the ring of blocks."""

    rank: int


@dataclass(frozen=True)
class _Sent:
    """Key of a signal: the rank has written the last byte of such a message."""

    rank: int


class SimulatedRank:
    """The process of one rank, and the account of its time."""

    def __init__(self, context: SimulationContext, rank: int) -> None:
        self._context, self._rank = context, rank
        self._clock, self._machine = context.clock, context.machine
        self.account = RankAccount()
        self._seconds = self.account.seconds
        self._outages = sorted((one for one in context.outages if one.rank == rank), key=lambda one: one.at)
        stragglers = context.stragglers
        self._random = random.Random((stragglers.seed << 20) + rank) if stragglers else None
        self._last_served = -1
        self._replica_update_s = 0.0
        """Pending updates of the replicas that this rank holds; done when the rank would otherwise wait."""
        self._unsent: list[tuple[int, float]] = []
        """Messages of which a part waits for space in the ring: the receiver, and seconds to write that part. It is
        written when this rank would otherwise wait, and before the rule ends."""

    def run(self) -> Process:
        """The process that the clock runs: all spans of steps, one after the other.

        The replicas that the rank holds lack the update of the step before the first one, as they do before every step.
        """
        if self._context.replication is not None:
            self._replica_update_s = self._context.replication.update_seconds(self._rank)
        for steps in self._context.span_lengths:
            replication, gpu = self._context.replication, self._context.instruction_costs.gpu
            if gpu is not None:  # the host's part: the GPU is free for other devices
                self._seconds[COMPUTE] += gpu.step_s * steps
                yield from self._wait_until(self._clock.now + gpu.step_s * steps)
            else:
                yield self._machine.step_s * steps + (
                    replication.local_copy_seconds(self._rank) if replication is not None else 0.0
                )
            yield from self._run_rule(self._context.rule(self._rank, steps))
            if replication is not None:
                yield from self._replicate(replication)
            if self._context.stop_vote_group is not None:
                yield from self._vote_to_stop(self._context.stop_vote_group)
            if replication is not None:
                self._replica_update_s = replication.update_seconds(self._rank)
        self.account.end = self._clock.now

    def _run_rule(self, rule: Rule) -> Process:
        """Runs a rule to its end: messages in, instructions out, each charged to the clock and to the account."""
        clock, rank, costs = self._clock, self._rank, self._context.instruction_costs
        inbox, take_all = clock.inbox[rank], self._context.take_all_messages
        account, trace = self.account, self._context.trace
        defer, speed = self._can_defer(rule), clock.speeds[rank]
        deferred = 0.0
        """Seconds of unobserved compute time, charged at the next visible instruction or before a wait."""
        while True:
            if take_all:
                while inbox:
                    rule.on_message(inbox.popleft())
            one = rule.next()
            if one is None:
                if deferred:
                    yield deferred
                    deferred = 0.0
                elif rule.finished:
                    yield from self._write_unsent()
                    return
                else:
                    yield from self._take_message_or_wait(rule)
                continue
            if self._outages and clock.now >= self._outages[0].at:
                yield from self._sit_out_outage()
            started, waited, kind = clock.now, 0.0, one.kind
            seconds = costs.seconds(rank, one)
            sends = kind in SENDS
            size = costs.message_bytes(rank, one) if one.peer >= 0 else 0.0
            in_turns = size > SHM_RING_BYTES and self._context.network.shares_memory(rank, one.peer)
            overlap = self._overlap_seconds(one.peer, size) if sends else 0.0
            category = "recv" if kind in RECEIVES else CATEGORY[kind]
            if defer:
                self._seconds[SHARE[category]] += seconds / speed
                if kind not in _VISIBLE_KINDS and not in_turns:
                    deferred += seconds
                    continue
            if (
                kind is InstructionKind.REDUCE
                and (reduction := self._context.reductions.get((rank, one.stage))) is not None
            ):
                yield deferred + seconds
                yield from self._reduce(reduction)
            else:
                if in_turns and not sends:
                    clock.deliver(clock.now, one.peer, _Receiving(rank))
                yield (deferred + (seconds if self._random is None else seconds * self._slowdown(kind)) - overlap)
                if sends:
                    self._send(one.peer, one.counterpart(rank), size)
                    if in_turns:
                        rest = self._machine.message(size) - self._machine.message(SHM_RING_BYTES)
                        self._unsent.append((one.peer, rest))
                        overlap -= rest
                    if overlap and not defer:
                        yield overlap
                elif in_turns:
                    others = sum(self._seconds.values())
                    yield from self._wait_signal(_Sent(one.peer))
                    waited = sum(self._seconds.values()) - others
                if not defer:
                    self._seconds[SHARE[category]] += clock.now - started - waited
                if trace:
                    account.spans.append(TracedSpan(one, category, started, clock.now - started))
            deferred = overlap if defer else 0.0
            if kind in _STEP_END_KINDS:
                self._record_step_end(one)

    def _take_message_or_wait(self, rule: Rule) -> Process:
        """Gives the rule a message; without one, does work that waited for this moment, or waits."""
        if self._clock.inbox[self._rank]:
            rule.on_message(self._take_message())
        elif self._writable():
            yield from self._write_rest()
        elif self._replica_update_s:
            yield from self._update_replicas()
        else:
            started = self._clock.now
            yield None
            self._record("wait", "wait", started)

    def _can_defer(self, rule: Rule) -> bool:
        """Whether instructions that other ranks do not observe can be charged later, without asking the clock.

        They can for a fixed list on a core of its own, without stragglers, outages and traces. It saves most events of
        a long plan.
        """
        needs_every_moment = self._outages or self._random is not None or self._context.trace
        return isinstance(rule, ListRule) and self._clock.has_own_core(self._rank) and not needs_every_moment

    def _record_step_end(self, one: Instruction) -> None:
        if one.kind is InstructionKind.UPDATE:
            self.account.updates.append(self._clock.now)
        if one.stage == self._context.last_part[self._rank]:
            self.account.steps.append(self._clock.now)

    def _slowdown(self, kind: InstructionKind) -> float:
        """A straggler's factor, drawn for each computation."""
        stragglers, generator = self._context.stragglers, self._random
        assert stragglers is not None
        assert generator is not None
        hit = SHARE[CATEGORY[kind]] == COMPUTE and generator.random() < stragglers.chance
        return stragglers.factor if hit else 1.0

    def _take_message(self) -> Instruction:
        """The next message, peers in round-robin order, as the engine's ``RuleExecutor`` takes them."""
        inbox = self._clock.inbox[self._rank]
        self._last_served = round_robin([one.peer for one in inbox], self._last_served)
        found = next(one for one in inbox if one.peer == self._last_served)
        inbox.remove(found)
        return found

    def _send(self, peer: int, item: object, size: float) -> None:
        self._context.network.send(self._rank, peer, size, item)
        self.account.bytes += size
        self.account.messages += 1

    def _overlap_seconds(self, peer: int, size: float) -> float:
        """Seconds for which a sender still copies while its receiver copies too: block by block in shared memory."""
        if size <= SHM_BLOCK_BYTES or not self._context.network.shares_memory(self._rank, peer):
            return 0.0
        return self._machine.message(size) - self._machine.message(SHM_BLOCK_BYTES)

    # ---- messages that do not fit into the ring of blocks: the sender needs its core once more, for the rest

    def _writable(self) -> bool:
        """Whether the receiver of an unsent part reads."""
        signals = self._clock.signals[self._rank]
        return any(signals[_Receiving(receiver)] for receiver, _ in self._unsent)

    def _write_rest(self) -> Process:
        """Writes the rest of the first message whose receiver reads."""
        signals, started = self._clock.signals[self._rank], self._clock.now
        found = next(one for one in self._unsent if signals[_Receiving(one[0])])
        self._unsent.remove(found)
        receiver, seconds = found
        signals[_Receiving(receiver)] -= 1
        yield seconds
        self._clock.deliver(self._clock.now, receiver, _Sent(self._rank))
        self._record("write", "send", started)

    def _write_unsent(self) -> Process:
        """Writes the rest of all messages, and waits for their receivers."""
        while self._unsent:
            if self._writable():
                yield from self._write_rest()
            else:
                started = self._clock.now
                yield None
                self._record("wait", "wait", started)

    def _record(self, name: str, category: str, started: float) -> None:
        duration = self._clock.now - started
        self._seconds[SHARE[category]] += duration
        if self._context.trace and duration > 0:
            self.account.spans.append(TracedSpan(name, category, started, duration))

    # ---- waiting

    def _wait_signal(self, key: object) -> Process:
        """Waits for one signal with this key and consumes it."""
        signals = self._clock.signals[self._rank]
        while not signals[key]:
            if self._writable():
                yield from self._write_rest()
                continue
            started = self._clock.now
            yield None
            self._seconds[IDLE] += self._clock.now - started
        signals[key] -= 1

    def _wait_until(self, moment: float) -> Process:
        if moment > self._clock.now:
            self._clock.deliver(moment, self._rank, _WAKE_UP)
            while not self._clock.signals[self._rank][_WAKE_UP]:
                yield None
            self._clock.signals[self._rank][_WAKE_UP] -= 1

    def _sit_out_outage(self) -> Process:
        one, started = self._outages.pop(0), self._clock.now
        yield from self._wait_until(one.at + one.seconds)
        self._record("away", "wait", started)

    def _barrier(self, group: Group) -> Process:
        if self._context.instruction_costs.gpu is None:  # else the measured rest of a step has it
            yield self._machine.meeting_s
        self._clock.join_barrier(self._rank, group)
        yield from self._wait_signal(group)

    # ---- the end of a span

    def _vote_to_stop(self, group: Group) -> Process:
        """The vote on stopping after each span, where no gradient sum carries it."""
        started, idle_before = self._clock.now, self._seconds[IDLE]
        yield self._machine.agree_s
        yield from self._barrier(group)
        yield from self._wait_until(self._clock.now + self._context.stop_vote_s)
        self._seconds[COMMUNICATE] += self._clock.now - started - (self._seconds[IDLE] - idle_before)

    def _update_replicas(self) -> Process:
        started, (seconds, self._replica_update_s) = self._clock.now, (self._replica_update_s, 0.0)
        yield seconds
        self._record("replicate", "update", started)

    def _replicate(self, replication: ReplicationCosts) -> Process:
        """Sends this rank's state to its replica holders, and receives the state of the replicas held here."""
        if self._replica_update_s:
            yield from self._update_replicas()
        started, idle_before, rank = self._clock.now, self._seconds[IDLE], self._rank
        for holder in replication.holders(rank):
            message = replication.message_bytes(rank, self._context.network.shares_memory(rank, holder))
            overlap = self._overlap_seconds(holder, message)
            yield self._machine.message(message) - overlap
            self._send(holder, _REPLICA, replication.replica_bytes(rank))
            yield overlap
        for owner in replication.owners(rank):
            yield from self._wait_signal(_REPLICA)
            yield replication.receive_seconds(owner, self._context.network.shares_memory(owner, rank))
        duration = self._clock.now - started - (self._seconds[IDLE] - idle_before)
        self._seconds[COMMUNICATE] += duration
        if self._context.trace and duration > 0:
            self.account.spans.append(TracedSpan("replicate", "send", self._clock.now - duration, duration))

    # ---- reductions

    def _reduce(self, reduction: GroupReduction) -> Process:
        """One gradient reduction: in shared memory, by its closed-form time, or message by message."""
        costs, index, group = reduction.costs, reduction.index, reduction.group
        started, idle_before = self._clock.now, self._seconds[IDLE]
        if costs.in_shared_memory:
            yield from self._barrier(group)
            begun = self._clock.now
            yield costs.shared_memory_seconds(index)
            yield from self._barrier(group)
        elif costs.closed_form:
            self._clock.join_barrier(self._rank, group)
            yield from self._wait_signal(group)
            begun = self._clock.now
            yield from self._wait_until(begun + costs.closed_form_seconds)
        else:
            begun = started
            yield from self._execute_collective(costs, index)
        if costs.in_shared_memory or costs.closed_form:
            self.account.bytes += costs.bytes(index)
            self.account.messages += costs.messages(index)
        if not costs.in_shared_memory:  # over links the engine cannot tell waiting from transfer either
            self._seconds[IDLE], begun = idle_before, started
        idle = self._seconds[IDLE] - idle_before
        self._seconds[COMMUNICATE] += self._clock.now - started - idle
        if self._context.trace:
            if begun > started:
                self.account.spans.append(TracedSpan("wait", "wait", started, begun - started))
            self.account.spans.append(TracedSpan("A", "reduce", begun, self._clock.now - begun))

    def _execute_collective(self, costs: ReductionCosts, index: int) -> Iterator[float | None]:
        """Executes this rank's plan of the collective, instruction by instruction."""
        ranks, machine = costs.ranks, self._machine
        for one in costs.plan(index):
            if isinstance(one, Recv | Reduce):
                yield from self._wait_signal(ranks[one.peer])
            if isinstance(one, Meet):
                yield from self._barrier(
                    self._context.group(tuple(ranks[peer] for peer in one.ranks or range(len(ranks))))
                )
                continue
            yield reduction_seconds(one, machine)
            if isinstance(one, Send):
                self._send(ranks[one.peer], self._rank, FLOAT_BYTES * one.range.length)
