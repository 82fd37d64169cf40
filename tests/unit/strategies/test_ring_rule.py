"""RingTMP's rule: the order of instructions, the limit of micro-batches in flight, and the weight version of each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shaken_links import run_with_random_delays

from hoop.errors import InvalidArgument
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan, in_flight
from hoop.plan.rules import Rule
from hoop.plan.unit_clock import run_rules, timeline
from hoop.plan.validation import check
from hoop.strategies.ring import RingModel


def rules_of(ring: RingModel, devices: int, micros: int, steps: int) -> tuple[Plan, list[Rule]]:
    plan = ring.plan(devices, micros)
    rules = [ring.rule(plan, rank, steps) for rank in range(devices)]
    return plan, [rule for rule in rules if rule is not None]


def drain(rule: Rule) -> list[str]:
    taken = []
    while (one := rule.next()) is not None:
        taken.append(str(one))
    return taken


def test_a_backward_that_is_ready_runs_first() -> None:
    plan = RingModel(limit=2).plan(2, 4)
    rule = RingModel(limit=2).rule(plan, 0)
    assert rule is not None
    assert drain(rule) == ["0L0", "0F0", "0>0@1", "0L1", "0F1", "0>1@1"]  # two may be in flight
    rule.on_message(Instruction.parse("0(0@1"))
    assert drain(rule) == ["0(0@1", "0B0", "0L2", "0F2", "0>2@1"]
    rule.on_message(Instruction.parse("0(1@1"))
    rule.on_message(Instruction.parse("0(2@1"))
    assert drain(rule) == ["0(1@1", "0(2@1", "0B1", "0B2", "0L3", "0F3", "0>3@1"]
    rule.on_message(Instruction.parse("0(3@1"))
    assert not rule.finished
    assert drain(rule) == ["0(3@1", "0B3", "0A", "0U"]
    assert rule.finished


def test_a_synchronous_step_waits_for_the_flush() -> None:
    plan, (first, _) = rules_of(RingModel(limit=9), 2, 1, 2)
    assert plan.num_microbatches == 1
    assert drain(first) == ["0L0", "0F0", "0>0@1"]  # the weights of the second step do not exist yet
    first.on_message(Instruction.parse("0(0@1"))
    assert drain(first) == ["0(0@1", "0B0", "0A", "0U", "0L1", "0F1", "0>1@1"]
    assert [first.weight_version(micro) for micro in range(2)] == [0, 1]


def test_an_asynchronous_step_uses_weights_one_update_behind() -> None:
    _, (first, _) = rules_of(RingModel(limit=9, asynchronous=True), 2, 1, 4)
    assert drain(first) == ["0L0", "0F0", "0>0@1", "0L1", "0F1", "0>1@1"]
    first.on_message(Instruction.parse("0(0@1"))
    assert drain(first) == ["0(0@1", "0B0", "0A", "0U", "0L2", "0F2", "0>2@1"]
    assert [first.weight_version(micro) for micro in range(4)] == [0, 0, 1, 2]


@given(st.builds(RingModel, st.integers(1, 3), st.none() | st.integers(1, 4), st.booleans()), st.data())
@settings(max_examples=60)
def test_no_link_delays_cause_a_deadlock(ring: RingModel, data: st.DataObject) -> None:
    devices, micros, steps = (data.draw(st.integers(1, most)) for most in (4, 4, 3))
    plan, rules = rules_of(ring, devices, micros, steps)
    lines = run_with_random_delays(rules, data)
    assert all(rule.finished for rule in rules)
    executed = Plan(micros * steps, plan.holders, tuple(map(tuple, lines)))
    assert not timeline(executed).stuck
    for rank, line in enumerate(lines):
        first = plan.held_by(rank)[0]
        assert in_flight(executed, rank, first) <= ring.max_in_flight(rank, devices)
        updates = 0
        for one in line:
            updates += one == Instruction(InstructionKind.UPDATE, first)
            if one.kind in {InstructionKind.FORWARD, InstructionKind.BACKWARD}:
                version = rules[rank].weight_version(one.micro)
                assert version is not None
                # That version still exists: it is the newest, or (asynchronous) the one before.
                assert updates - version in ({0, 1} if ring.asynchronous else {0})
        assert updates == steps


@pytest.mark.parametrize(("devices", "micros"), [(1, 1), (2, 1), (3, 2), (4, 4), (6, 5), (4, 9)])
def test_without_a_flush_the_bubble_is_only_at_the_ends(devices: int, micros: int) -> None:
    steps = 10
    ends = {}
    for asynchronous in (False, True):
        plan, rules = rules_of(RingModel(asynchronous=asynchronous), devices, micros, steps)
        lines = run_rules(rules)
        ends[asynchronous] = timeline(Plan(micros * steps, plan.holders, lines)).end
    work = 3 * micros * steps
    assert ends == {False: work + steps * 3 * (devices - 1), True: work + 3 * (devices - 1)}


def test_slices_close_the_ring() -> None:
    plan = RingModel(slices=2).plan(3, 6)
    assert plan.holders == ((0,), (1,), (2,), (0,), (1,), (2,))
    assert check(plan) == []
    peers = {(rank, one.peer) for rank, one in plan if one.kind is InstructionKind.SEND_OUTPUT}
    assert peers == {(0, 1), (1, 2), (2, 0)}


def test_invalid_options_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="slices: 0"):
        RingModel(slices=0)
    with pytest.raises(InvalidArgument, match="limit: 0"):
        RingModel(limit=0)
