"""Rules against each other over links that delay messages at will."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from hoop.plan.instructions import SENDS, Instruction
from hoop.plan.rules import Rule


def shake(rules: Sequence[Rule], chance: st.DataObject) -> list[list[Instruction]]:
    """Runs rules with messages of different pairs delayed at will; within a pair they stay in order."""
    lines: list[list[Instruction]] = [[] for _ in rules]
    links: dict[tuple[int, int], list[Instruction]] = {}
    while True:
        moves: list[tuple[int, int]] = sorted(pair for pair, waiting in links.items() if waiting)
        asked = [(rank, one) for rank, rule in enumerate(rules) if (one := rule.next()) is not None]
        for rank, one in asked:
            lines[rank].append(one)
            if one.kind in SENDS:
                links.setdefault((rank, one.peer), []).append(one.counterpart(rank))
        if not asked and not moves:
            return lines
        if moves and (not asked or chance.draw(st.booleans())):
            pair = chance.draw(st.sampled_from(moves))
            rules[pair[1]].on_message(links[pair].pop(0))
