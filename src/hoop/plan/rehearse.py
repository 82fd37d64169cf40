"""Rules run against each other on paper: what they do if computing costs units and messages cost nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from hoop.errors import InternalError
from hoop.plan.instructions import SENDS, Instruction
from hoop.plan.rules import Rule
from hoop.plan.timing import units


def rehearse(
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
