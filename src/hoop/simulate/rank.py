"""One rank in virtual time: it runs its rule, or its list, as the engine's worker does.

inbox ──▶ rule.arrived     all that has come, before each choice; a server takes one message at a time
          rule.next ──▶ compute on the core, or wait
                    ──▶ a send goes to the network, which delivers it
                    ──▶ a reduction is a sum of its group
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from hoop.plan.rules import ListRule, Rule, in_turn
from hoop.simulate.clock import Group, Process
from hoop.simulate.instruction_cost import ReplicationCosts
from hoop.simulate.reduction_cost import FLOAT, ReductionCosts, reduction_seconds
from hoop.simulate.result import RankAccount, TracedSpan

if TYPE_CHECKING:
    from hoop.simulate.simulation import Simulation


BLOCK = 64 * 1024
"""Bytes that are handed over at a time between devices that share memory."""
_AWAKE = "awake"
_MIRROR = "mirror"
_LAST = frozenset({InstructionKind.UPDATE, InstructionKind.PUSH})
_SEEN = frozenset({*SENDS, InstructionKind.REDUCE, InstructionKind.UPDATE})
"""What concerns others, or has its moment noted."""


@dataclass(frozen=True)
class SimulatedStragglers:
    """Devices that are now and then slow: each computation, by chance, by a factor; the same for the same seed."""

    chance: float = 0.05
    factor: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.chance <= 1 or not self.factor >= 1:
            raise InvalidArgument(
                f"stragglers: chance {self.chance} is not in 0..1, or factor {self.factor} below 1"
            )


@dataclass(frozen=True)
class Outage:
    """A device that does nothing for a while, from its next instruction on, and then goes on where it was."""

    rank: int
    at: float
    seconds: float


class SimulatedRank:
    """One rank's process and its account."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self._all, self._rank = simulation, rank
        self._clock, self._machine = simulation.clock, simulation.machine
        self.account = RankAccount()
        self._busy = self.account.seconds
        self._outages = sorted(
            (one for one in simulation.outages if one.rank == rank), key=lambda one: one.at
        )
        straggle = simulation.stragglers
        self._random = random.Random((straggle.seed << 20) + rank) if straggle else None
        self._served = -1
        self._put_off = 0.0
        """Seconds of what waits until this rank would wait itself."""

    def run(self) -> Process:
        """All spans of steps, one after the other."""
        for steps in self._all.spans:
            mirrors = self._all.mirrors
            yield self._machine.step_s * steps + (mirrors.aside(self._rank) if mirrors is not None else 0.0)
            yield from self._follow(self._all.rule(self._rank, steps))
            if mirrors is not None:
                yield from self._keep(mirrors)
            if self._all.everybody is not None:
                yield from self._agree(self._all.everybody)
            if mirrors is not None:
                self._put_off = mirrors.update(self._rank)
        self.account.end = self._clock.now

    def _follow(self, rule: Rule) -> Process:
        clock, rank, prices = self._clock, self._rank, self._all.prices
        inbox, takes_all = clock.inbox[rank], self._all.takes_all
        account, trace = self.account, self._all.trace
        ahead, speed = self._runs_ahead(rule), clock.speeds[rank]
        owed = 0.0
        """Seconds of what has been done that others do not see: paid for with what they do see, or before a wait."""
        while True:
            if takes_all:
                while inbox:
                    rule.arrived(inbox.popleft())
            one = rule.next()
            if one is None:
                if owed:
                    yield owed
                    owed = 0.0
                elif rule.finished:
                    return
                elif inbox:
                    rule.arrived(self._taken())
                elif self._put_off:
                    yield from self._catch_up()
                else:
                    started = clock.now
                    yield None
                    self._note("wait", "wait", started)
                continue
            if self._outages and clock.now >= self._outages[0].at:
                yield from self._away()
            started, kind = clock.now, one.kind
            seconds = prices.seconds(rank, one)
            sends = kind in SENDS
            size = prices.size(rank, one) if sends else 0.0
            later = self._after_arrival(one.peer, size) if sends else 0.0
            category = "recv" if kind in RECEIVES else CATEGORY[kind]
            if ahead:
                self._busy[SHARE[category]] += seconds / speed
                if kind not in _SEEN:
                    owed += seconds
                    continue
            if (
                kind is InstructionKind.REDUCE
                and (summing := self._all.sums.get((rank, one.stage))) is not None
            ):
                yield owed + seconds
                yield from self._add_up(*summing)
            else:
                yield owed + (seconds if self._random is None else seconds * self._luck(kind)) - later
                if sends:
                    self._send(one.peer, one.mirrored(rank), size)
                    if later and not ahead:
                        yield later
                if not ahead:
                    self._busy[SHARE[category]] += clock.now - started
                if trace:
                    account.spans.append(TracedSpan(one, category, started, clock.now - started))
            owed = later if ahead else 0.0
            if kind in _LAST:
                self._progress(one)

    def _runs_ahead(self, rule: Rule) -> bool:
        """Whether what others see of this rank is all that matters: a list, on a core of its own, by no chance.

        Then the clock is not asked about the rest, which is most of a long plan.
        """
        everything = self._outages or self._random is not None or self._all.trace
        return isinstance(rule, ListRule) and self._clock.alone(self._rank) and not everything

    def _progress(self, one: Instruction) -> None:
        if one.kind is InstructionKind.UPDATE:
            self.account.updates.append(self._clock.now)
        if one.stage == self._all.last_part[self._rank]:
            self.account.steps.append(self._clock.now)

    def _luck(self, kind: InstructionKind) -> float:
        straggle, chance = self._all.stragglers, self._random
        assert straggle is not None
        assert chance is not None
        hit = SHARE[CATEGORY[kind]] == COMPUTE and chance.random() < straggle.chance
        return straggle.factor if hit else 1.0

    def _taken(self) -> Instruction:
        """The next message of whose turn it is, as the engine's ``RuleExecutor`` takes them."""
        inbox = self._clock.inbox[self._rank]
        self._served = in_turn([one.peer for one in inbox], self._served)
        found = next(one for one in inbox if one.peer == self._served)
        inbox.remove(found)
        return found

    def _send(self, peer: int, what: object, size: float) -> None:
        self._all.network.send(self._rank, peer, size, what)
        self.account.bytes += size
        self.account.messages += 1

    def _after_arrival(self, peer: int, size: float) -> float:
        """Seconds for which a sender still copies when its receiver begins to: in memory, block by block."""
        if size <= BLOCK or not self._all.network.in_memory(self._rank, peer):
            return 0.0
        return self._machine.message(size) - self._machine.message(BLOCK)

    def _note(self, name: str, category: str, started: float) -> None:
        took = self._clock.now - started
        self._busy[SHARE[category]] += took
        if self._all.trace and took > 0:
            self.account.spans.append(TracedSpan(name, category, started, took))

    # ---- waiting

    def _await(self, what: object) -> Process:
        """Until one of these has come."""
        came = self._clock.counted[self._rank]
        if not came[what]:
            started = self._clock.now
            while not came[what]:
                yield None
            self._busy[IDLE] += self._clock.now - started
        came[what] -= 1

    def _until(self, moment: float) -> Process:
        if moment > self._clock.now:
            self._clock.deliver(moment, self._rank, _AWAKE)
            while not self._clock.counted[self._rank][_AWAKE]:
                yield None
            self._clock.counted[self._rank][_AWAKE] -= 1

    def _away(self) -> Process:
        one, started = self._outages.pop(0), self._clock.now
        yield from self._until(one.at + one.seconds)
        self._note("away", "wait", started)

    def _meet(self, group: Group) -> Process:
        yield self._machine.meeting_s
        self._clock.meet(self._rank, group)
        yield from self._await(group)

    def _agree(self, group: Group) -> Process:
        """Whether somebody wants to stop, asked after each span of steps where no sum of gradients tells it."""
        started, waited = self._clock.now, self._busy[IDLE]
        yield self._machine.agree_s
        yield from self._meet(group)
        yield from self._until(self._clock.now + self._all.agreeing_s)
        self._busy[COMMUNICATE] += self._clock.now - started - (self._busy[IDLE] - waited)

    def _catch_up(self) -> Process:
        started, (seconds, self._put_off) = self._clock.now, (self._put_off, 0.0)
        yield seconds
        self._note("mirror", "compute", started)

    def _keep(self, mirrors: ReplicationCosts) -> Process:
        """What this rank's holder needs of it, and what others' mirrors here need."""
        if self._put_off:
            yield from self._catch_up()
        started, waited, rank = self._clock.now, self._busy[IDLE], self._rank
        if size := mirrors.sent(rank):
            holder = mirrors.holder(rank)
            told = mirrors.told(rank, self._all.network.in_memory(rank, holder))
            later = self._after_arrival(holder, told)
            yield self._machine.message(told) - later
            self._send(holder, _MIRROR, size)
            yield later
        for owner in mirrors.owners(rank):
            yield from self._await(_MIRROR)
            yield mirrors.hearing(owner, self._all.network.in_memory(owner, rank))
        took = self._clock.now - started - (self._busy[IDLE] - waited)
        self._busy[COMMUNICATE] += took
        if self._all.trace and took > 0:
            self.account.spans.append(TracedSpan("mirror", "send", self._clock.now - took, took))

    # ---- sums

    def _add_up(self, summing: ReductionCosts, index: int, group: Group) -> Process:
        started, waited = self._clock.now, self._busy[IDLE]
        if summing.mapped:
            yield from self._meet(group)
            begun = self._clock.now
            yield summing.mapped_seconds(index)
            yield from self._meet(group)
        elif summing.counted:
            self._clock.meet(self._rank, group)
            yield from self._await(group)
            begun = self._clock.now
            yield from self._until(begun + summing.counted_seconds)
        else:
            begun = started
            yield from self._messages(summing, index)
        if summing.mapped or summing.counted:
            self.account.bytes += summing.bytes(index)
            self.account.messages += summing.messages(index)
        if not summing.mapped:  # over links the engine cannot tell waiting from moving either
            self._busy[IDLE], begun = waited, started
        idle = self._busy[IDLE] - waited
        self._busy[COMMUNICATE] += self._clock.now - started - idle
        if self._all.trace:
            if begun > started:
                self.account.spans.append(TracedSpan("wait", "wait", started, begun - started))
            self.account.spans.append(TracedSpan("A", "reduce", begun, self._clock.now - begun))

    def _messages(self, summing: ReductionCosts, index: int) -> Iterator[float | None]:
        ranks, machine = summing.ranks, self._machine
        for one in summing.plan(index):
            if isinstance(one, Recv | Reduce):
                yield from self._await(ranks[one.peer])
            if isinstance(one, Meet):
                yield from self._meet(
                    self._all.group(tuple(ranks[peer] for peer in one.ranks or range(len(ranks))))
                )
                continue
            yield reduction_seconds(one, machine)
            if isinstance(one, Send):
                self._send(ranks[one.peer], self._rank, FLOAT * one.range.length)
