"""Runs plans and rules in abstract time units: computation costs units, messages cost nothing.

Papers compare schedules this way: a forward costs 1 unit, a backward 2, each half of a backward 1. ``timeline`` runs a
plan, ``run_rules`` runs rules. ``hoop.simulate`` prices the same plans and rules on modelled devices and links.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hoop.errors import InternalError
from hoop.plan.instructions import RECEIVES, SENDS, Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule

REDUCE = InstructionKind.REDUCE
UNITS = {
    InstructionKind.FORWARD: 1,
    InstructionKind.BACKWARD: 2,
    InstructionKind.BACKWARD_INPUT: 1,
    InstructionKind.BACKWARD_WEIGHT: 1,
}


def unit_cost(rank: int, instruction: Instruction) -> float:
    """Cost of an instruction in units, equal on all ranks: the default cost function below."""
    return UNITS.get(instruction.kind, 0)


@dataclass(frozen=True)
class UnitTimeline:
    """Start and end of each instruction of a plan, in units."""

    spans: list[list[tuple[float, float]]]
    """Start and end of each instruction of every rank, up to the one at which the rank blocks for ever."""
    stuck: list[tuple[int, Instruction]]
    """Deadlocked ranks, each with the instruction at which it blocks; empty if the plan finishes."""

    @property
    def end(self) -> float:
        return max((rank[-1][1] for rank in self.spans if rank), default=0)

    def busy(self, rank: int) -> float:
        """Time that a rank computes."""
        return sum(end - start for start, end in self.spans[rank])

    def bubble(self, rank: int) -> float:
        """Time that a rank waits, as a fraction of the time that it computes."""
        return (self.end - self.busy(rank)) / self.busy(rank)


def timeline(plan: Plan, cost: Callable[[int, Instruction], float] = unit_cost) -> UnitTimeline:
    """Runs a plan's instruction lists: when does each instruction run, and does the plan deadlock?

    Unlike ``run_rules`` it runs fixed lists; unlike ``simulate.clock`` it models neither links nor cores; unlike
    ``collectives.plan.verify`` it runs training steps, with times. Sends never wait (buffers are unlimited); receives
    and reductions do.
    """
    spans: list[list[tuple[float, float]]] = [[] for _ in plan.ranks]
    clocks = [0.0] * plan.size
    sent: defaultdict[tuple[int, Instruction], deque[float]] = defaultdict(deque)
    waiting: set[tuple[int, Instruction]] = set()
    reducing: defaultdict[int, list[int]] = defaultdict(list)
    runnable = list(range(plan.size))
    while runnable:
        rank = runnable.pop()
        instructions, done = plan.ranks[rank], spans[rank]
        while len(done) < len(instructions):
            one = instructions[len(done)]
            start = clocks[rank]
            if one.kind in RECEIVES:
                if not sent[rank, one]:
                    waiting.add((rank, one))
                    break
                start = max(start, sent[rank, one].popleft())
            elif one.kind is REDUCE and rank not in plan.servers and len(plan.holders[one.stage]) > 1:
                if rank not in reducing[one.stage]:
                    reducing[one.stage].append(rank)
                group = reducing[one.stage]
                if len(group) < len(plan.holders[one.stage]):
                    break
                del reducing[one.stage]
                start = max(clocks[other] for other in group)
                for other in group:
                    if other != rank:
                        clocks[other] = start + cost(other, one)
                        spans[other].append((start, clocks[other]))
                        runnable.append(other)
            clocks[rank] = start + cost(rank, one)
            done.append((start, clocks[rank]))
            if one.kind in SENDS:
                key = one.peer, one.counterpart(rank)
                sent[key].append(clocks[rank])
                if key in waiting:
                    waiting.remove(key)
                    runnable.append(one.peer)
    stuck = [
        (rank, plan.ranks[rank][len(done)]) for rank, done in enumerate(spans) if len(done) < len(plan.ranks[rank])
    ]
    return UnitTimeline(spans, stuck)


def chart(plan: Plan) -> str:
    """The plan as a text chart: one column per unit of time, ``.`` where a rank waits, instructions as in ``grid``.

    A rank that holds a single stage omits the stage number.
    """
    spans = timeline(plan).spans
    rows = []
    for rank, instructions in enumerate(plan.ranks):
        row: list[str] = []
        many_stages = len({one.stage for one in instructions}) > 1
        for one, (start, end) in zip(instructions, spans[rank], strict=False):
            text = str(one) if many_stages else str(one)[len(str(one.stage)) :]
            row += ["."] * (int(start) - len(row) if end > start else 0) + [text] * int(end - start)
        rows.append(row)
    width = max((len(cell) for row in rows for cell in row), default=1)
    rank_width = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{rank_width}} | " + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )


def run_rules(
    rules: Sequence[Rule], cost: Callable[[int, Instruction], float] = unit_cost
) -> tuple[tuple[Instruction, ...], ...]:
    """Runs rules against each other: which instruction list does each rank end up with? Raises if they deadlock.

    Strategies use it to turn rules into a plan. Unlike ``timeline``, the order is chosen by the rules as messages
    arrive; unlike ``simulate.clock``, messages take no time and cores are not shared.

    A rule is asked for its next instruction when its rank has finished the last one, or, if it waits, when a message
    arrives. All events of one moment are delivered before any rule is asked, and rules are asked in rank order: the
    result is deterministic.
    """
    lines: list[list[Instruction]] = [[] for _ in rules]
    queue: list[tuple[float, int, int, Instruction | None]] = []
    idle = set(range(len(rules)))
    count = 0  # breaks ties between events of one moment in the order of their creation

    def advance(rank: int, now: float) -> None:
        """Executes instructions until the rank waits or computes."""
        nonlocal count
        while (one := rules[rank].next()) is not None:
            lines[rank].append(one)
            duration = cost(rank, one)
            if one.kind in SENDS:
                count += 1
                heapq.heappush(queue, (now + duration, count, one.peer, one.counterpart(rank)))
            if duration > 0:
                idle.discard(rank)
                count += 1
                heapq.heappush(queue, (now + duration, count, rank, None))
                return

    for rank in range(len(rules)):
        advance(rank, 0)
    while queue:
        now = queue[0][0]
        awake = set()
        while queue and queue[0][0] == now:
            _, _, rank, message = heapq.heappop(queue)
            awake.add(rank)
            if message is None:
                idle.add(rank)
            else:
                rules[rank].on_message(message)
        for rank in sorted(awake & idle):
            advance(rank, now)
    stuck = [rank for rank, rule in enumerate(rules) if not rule.finished]
    if stuck:
        last = ", ".join(f"rank {rank} after {lines[rank][-1] if lines[rank] else 'nothing'}" for rank in stuck)
        raise InternalError(f"deadlock: rules wait for each other for ever: {last}")
    return tuple(map(tuple, lines))
