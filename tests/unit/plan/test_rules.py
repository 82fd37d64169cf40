"""Rules from lists, rules run against each other, and plans on the unit clock."""

from __future__ import annotations

import pytest

from hoop.errors import InternalError
from hoop.plan.builder import build_plan
from hoop.plan.instructions import Instruction
from hoop.plan.plan import Plan
from hoop.plan.rules import ListRule, Rule
from hoop.plan.unit_clock import chart, run_rules, timeline
from hoop.plan.validation import check


def line(text: str) -> tuple[Instruction, ...]:
    return tuple(map(Instruction.parse, text.split()))


FIRST = line("0L0 0F0 0>0@1 0L1 0F1 0>1@1 0(0@1 0B0 0(1@1 0B1 0A 0U")
SECOND = line("1<0@0 1F0 1B0 1)0@0 1<1@0 1F1 1B1 1)1@0 1A 1U")
PLAN = Plan(2, ((0,), (1,)), (FIRST, SECOND))


def test_a_list_rule_waits_for_its_messages() -> None:
    rule: Rule = ListRule(SECOND)
    assert rule.next() is None
    rule.on_message(SECOND[4])  # the second input, first
    assert rule.next() is None
    rule.on_message(SECOND[0])
    taken = []
    while (one := rule.next()) is not None:
        taken.append(one)
    assert tuple(taken) == SECOND
    assert rule.finished
    assert rule.weight_version(0) is None


def test_a_message_is_used_once() -> None:
    rule = ListRule(line("0G@1 0F0 0G@1"))
    rule.on_message(line("0G@1")[0])
    assert [rule.next(), rule.next(), rule.next()] == [*line("0G@1 0F0"), None]
    assert not rule.finished


def test_running_list_rules_gives_the_lists() -> None:
    assert run_rules([ListRule(FIRST), ListRule(SECOND)]) == PLAN.ranks


def test_deadlocked_rules_are_named_in_the_error() -> None:
    with pytest.raises(InternalError, match="rank 0 after 0F0, rank 1 after nothing"):
        run_rules([ListRule(line("0F0 0(0@1")), ListRule(line("1<0@0"))])


def test_the_timeline_of_a_plan() -> None:
    times = timeline(PLAN)
    assert times.stuck == []
    assert times.end == 9
    assert [times.busy(rank) for rank in range(2)] == [6, 6]
    assert times.bubble(0) == 0.5
    assert chart(PLAN) == (
        "rank 0 | F0 F1 .  .  B0 B0 .  B1 B1\n"
        "rank 1 | .  F0 B0 B0 F1 B1 B1"
    )  # fmt: skip


def test_a_receive_never_overtakes_an_earlier_message() -> None:
    """Rank 1 needs the second output first: the first is received before it, and used later."""
    computes = [line("0F0 0F1 0B0 0B1"), line("1F1 1B1 1F0 1B0")]
    plan = build_plan(2, [[0], [1]], computes)
    assert check(plan) == []
    assert plan.grid(messages=True).splitlines() == [
        "rank 0 | 0L0   0F0   0>0@1 0L1   0F1   0>1@1 0(1@1 0(0@1 0B0   0B1   0A    0U",
        "rank 1 | 1<0@0 1<1@0 1F1   1B1   1)1@0 1F0   1B0   1)0@0 1A    1U",
    ]


def test_a_timeline_with_custom_costs() -> None:
    times = timeline(PLAN, lambda rank, one: 10.0 if rank == 1 and one.kind == "F" else 0)
    assert times.end == 20


@pytest.mark.parametrize("late", [0, 1])
def test_a_reduction_waits_for_all_ranks(late: int) -> None:
    lines = [line("0A 0U"), line("0A 0U")]
    lines[late] = line("0L0 0F0 0B0 0L1 0F1 0B1 0A 0U")
    times = timeline(Plan(2, ((0, 1),), tuple(lines)))
    assert times.spans[1 - late] == [(6, 6), (6, 6)]
    assert times.spans[late][-2:] == [(6, 6), (6, 6)]


def test_a_timeline_lists_deadlocked_ranks() -> None:
    plan = Plan(1, ((0, 1),), (line("0A"), line("0(0@0")))
    assert [(rank, str(one)) for rank, one in timeline(plan).stuck] == [(0, "0A"), (1, "0(0@0")]
