"""A plan on a clock without links: when each instruction runs if computing costs units and messages cost nothing.

It is what schedules are compared by on paper: a forward costs 1, a backward 2, its two halves 1 each. The simulator
prices the same plans on real devices and links.

Rules run against each other on paper: what they do if computing costs units and messages cost nothing.
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


def units(rank: int, instruction: Instruction) -> float:
    """What an instruction costs on paper, on any rank."""
    return UNITS.get(instruction.kind, 0)


@dataclass(frozen=True)
class UnitTimeline:
    """When each instruction of a plan begins and ends."""

    spans: list[list[tuple[float, float]]]
    """For each rank, the times of its instructions, as far as it comes."""
    stuck: list[tuple[int, Instruction]]
    """Ranks that wait for ever, and for what; empty in a plan that finishes."""

    @property
    def end(self) -> float:
        return max((rank[-1][1] for rank in self.spans if rank), default=0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(end - start for start, end in self.spans[rank])

    def bubble(self, rank: int) -> float:
        """How long a rank waits from the beginning to the end, as a share of how long it computes."""
        return (self.end - self.busy(rank)) / self.busy(rank)


def timeline(plan: Plan, cost: Callable[[int, Instruction], float] = units) -> UnitTimeline:
    """Runs a plan with unlimited send buffers: sends never wait, receives and reductions do."""
    spans: list[list[tuple[float, float]]] = [[] for _ in plan.ranks]
    clocks = [0.0] * plan.size
    sent: defaultdict[tuple[int, Instruction], deque[float]] = defaultdict(deque)
    waiting: set[tuple[int, Instruction]] = set()
    meetings: defaultdict[int, list[int]] = defaultdict(list)
    runnable = list(range(plan.size))
    while runnable:
        rank = runnable.pop()
        instructions, mine = plan.ranks[rank], spans[rank]
        while len(mine) < len(instructions):
            one = instructions[len(mine)]
            start = clocks[rank]
            if one.kind in RECEIVES:
                if not sent[rank, one]:
                    waiting.add((rank, one))
                    break
                start = max(start, sent[rank, one].popleft())
            elif one.kind is REDUCE and rank not in plan.servers and len(plan.holders[one.stage]) > 1:
                if rank not in meetings[one.stage]:
                    meetings[one.stage].append(rank)
                here = meetings[one.stage]
                if len(here) < len(plan.holders[one.stage]):
                    break
                del meetings[one.stage]
                start = max(clocks[other] for other in here)
                for other in here:
                    if other != rank:
                        clocks[other] = start + cost(other, one)
                        spans[other].append((start, clocks[other]))
                        runnable.append(other)
            clocks[rank] = start + cost(rank, one)
            mine.append((start, clocks[rank]))
            if one.kind in SENDS:
                key = one.peer, one.mirrored(rank)
                sent[key].append(clocks[rank])
                if key in waiting:
                    waiting.remove(key)
                    runnable.append(one.peer)
    stuck = [
        (rank, plan.ranks[rank][len(mine)])
        for rank, mine in enumerate(spans)
        if len(mine) < len(plan.ranks[rank])
    ]
    return UnitTimeline(spans, stuck)


def chart(plan: Plan) -> str:
    """The plan as it is drawn on paper: a column a unit of time, ``.`` where a rank waits; letters as in the grid.

    A stage's number is left out where a rank holds only one.
    """
    spans = timeline(plan).spans
    rows = []
    for rank, instructions in enumerate(plan.ranks):
        row: list[str] = []
        several = len({one.stage for one in instructions}) > 1
        for one, (start, end) in zip(instructions, spans[rank], strict=False):
            text = str(one) if several else str(one)[len(str(one.stage)) :]
            row += ["."] * (int(start) - len(row) if end > start else 0) + [text] * int(end - start)
        rows.append(row)
    width = max((len(cell) for row in rows for cell in row), default=1)
    edge = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{edge}} | " + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )


def run_rules(
    rules: Sequence[Rule], cost: Callable[[int, Instruction], float] = units
) -> tuple[tuple[Instruction, ...], ...]:
    """What each rank does, in order. It raises where the rules leave somebody waiting for ever.

    A rank is asked again when it has finished what it does, or, if it waits, when a message arrives. Whatever happens
    at the same time is seen before anybody is asked, and then the ranks are asked in order: there is no chance in it.
    """
    lines: list[list[Instruction]] = [[] for _ in rules]
    queue: list[tuple[float, int, int, Instruction | None]] = []
    idle = set(range(len(rules)))
    count = 0

    def ask(rank: int, now: float) -> None:
        """Goes on until the rank waits or computes."""
        nonlocal count
        while (one := rules[rank].next()) is not None:
            lines[rank].append(one)
            took = cost(rank, one)
            if one.kind in SENDS:
                count += 1
                heapq.heappush(queue, (now + took, count, one.peer, one.mirrored(rank)))
            if took > 0:
                idle.discard(rank)
                count += 1
                heapq.heappush(queue, (now + took, count, rank, None))
                return

    for rank in range(len(rules)):
        ask(rank, 0)
    while queue:
        now = queue[0][0]
        awake = set()
        while queue and queue[0][0] == now:
            _, _, rank, message = heapq.heappop(queue)
            awake.add(rank)
            if message is None:
                idle.add(rank)
            else:
                rules[rank].arrived(message)
        for rank in sorted(awake & idle):
            ask(rank, now)
    stuck = [rank for rank, rule in enumerate(rules) if not rule.finished]
    if stuck:
        last = ", ".join(
            f"rank {rank} after {lines[rank][-1] if lines[rank] else 'nothing'}" for rank in stuck
        )
        raise InternalError(f"rules that leave each other waiting for ever: {last}")
    return tuple(map(tuple, lines))
