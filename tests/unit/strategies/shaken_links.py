"""Runs rules against each other over links with random delays."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hoop.plan.instructions import SENDS, Instruction
from hoop.plan.rules import Rule


def run_with_random_delays(rules: Sequence[Rule], data: st.DataObject) -> list[list[Instruction]]:
    """Run the rules with random delays; messages from one rank to another stay in order."""
    lines: list[list[Instruction]] = [[] for _ in rules]
    links: dict[tuple[int, int], list[Instruction]] = {}
    while True:
        moves: list[tuple[int, int]] = sorted(pair for pair, waiting in links.items() if waiting)
        issued = [(rank, one) for rank, rule in enumerate(rules) if (one := rule.next()) is not None]
        for rank, one in issued:
            lines[rank].append(one)
            if one.kind in SENDS:
                links.setdefault((rank, one.peer), []).append(one.counterpart(rank))
        if not issued and not moves:
            return lines
        if moves and (not issued or data.draw(st.booleans())):
            pair = data.draw(st.sampled_from(moves))
            rules[pair[1]].on_message(links[pair].pop(0))
