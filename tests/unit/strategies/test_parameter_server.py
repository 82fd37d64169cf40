"""Parameter servers: which workers wait under BSP, ASP and SSP, with any delays of the links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shaken_links import run_with_random_delays

from hoop.errors import InvalidArgument
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule
from hoop.plan.unit_clock import run_rules, unit_cost
from hoop.strategies.parameter_server import ParameterServer


def rules_of(strategy: ParameterServer, devices: int, micros: int, steps: int) -> tuple[Plan, list[Rule]]:
    plan = strategy.plan(devices, micros)
    rules = [strategy.rule(plan, rank, steps) for rank in range(devices)]
    return plan, [rule for rule in rules if rule is not None]


def dedent(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_bsp_grid() -> None:
    plan = ParameterServer(2).plan(4, 2)
    assert (plan.servers, plan.holders) == ((2, 3), ((0, 1),))
    assert plan.grid(messages=True) == dedent("""
        rank 0 | 0G@2 1G@3 0L0  0F0  0B0  0P@2 1P@3
        rank 1 | 0G@2 1G@3 0L1  0F1  0B1  0P@2 1P@3
        rank 2 | 0V@0 0V@1 0T@0 0T@1 0A   0U
        rank 3 | 1V@0 1V@1 1T@0 1T@1 1A   1U
    """)


def test_asp_grid() -> None:
    assert ParameterServer(mode="asp").plan(3, 3).grid(messages=True) == dedent("""
        rank 0 | 0G@2 0L0  0F0  0B0  0L1  0F1  0B1  0P@2
        rank 1 | 0G@2 0L2  0F2  0B2  0P@2
        rank 2 | 0V@0 0V@1 0T@1 0U   0T@0 0U
    """)


def test_a_worker_without_a_shard_has_no_instructions() -> None:
    for mode in ("bsp", "asp", "ssp"):
        plan = ParameterServer(mode=mode).plan(4, 2)
        assert plan.ranks[2] == ()
        assert {one.peer for one in plan.ranks[3] if one.peer >= 0} == {0, 1}


def test_only_asp_and_ssp_have_rules() -> None:
    for mode, has_rules in (("bsp", False), ("asp", True), ("ssp", True)):
        strategy = ParameterServer(mode=mode)
        plan = strategy.plan(3, 4)
        assert [strategy.rule(plan, rank) is not None for rank in range(3)] == [has_rules] * 3
        assert strategy.synchronous is not has_rules


def clocks_at_gives(line: list[Instruction], workers: int) -> list[tuple[int, int]]:
    """For each GIVE of a server, return the clock of the worker that gets weights, and the slowest clock."""
    clocks = [0] * workers
    found = []
    for one in line:
        if one.kind is InstructionKind.TAKE:
            clocks[one.peer] += 1
        elif one.kind is InstructionKind.GIVE:
            found.append((clocks[one.peer], min(clocks)))
    return found


@given(
    st.sampled_from(["asp", "ssp"]),
    st.integers(1, 2),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.data(),
)
@settings(max_examples=80)
def test_no_worker_exceeds_the_staleness_bound_or_deadlocks(
    mode: str, servers: int, staleness: int, workers: int, steps: int, data: st.DataObject
) -> None:
    strategy = ParameterServer(servers, mode, staleness)
    plan, rules = rules_of(strategy, workers + servers, workers, steps)
    lines = run_with_random_delays(rules, data)
    assert all(rule.finished for rule in rules)
    for rank in plan.servers:
        gives = clocks_at_gives(lines[rank], workers)
        assert len(gives) == workers * steps
        if mode == "ssp":
            assert all(clock <= slowest + staleness for clock, slowest in gives)
        takes = [index for index, one in enumerate(lines[rank]) if one.kind is InstructionKind.TAKE]
        assert len(takes) == workers * steps
        # Each push is applied at once.
        assert all(lines[rank][index + 1].kind is InstructionKind.UPDATE for index in takes)


def steps_begun_by_the_fast_worker(strategy: ParameterServer, steps: int) -> int:
    """Return how many steps it has begun when the slow worker, 100 times slower, pushes its first gradients."""
    _, rules = rules_of(strategy, 3, 2, steps)

    def cost(rank: int, one: Instruction) -> float:
        return unit_cost(rank, one) * (100 if rank == 1 else 1)

    line = run_rules(rules, cost)[2]
    first_push_of_slow = line.index(Instruction(InstructionKind.TAKE, 0, peer=1))
    return sum(one == Instruction(InstructionKind.GIVE, 0, peer=0) for one in line[:first_push_of_slow])


def test_asp_is_unbounded_and_ssp_keeps_its_staleness_bound() -> None:
    assert steps_begun_by_the_fast_worker(ParameterServer(mode="asp"), 20) == 20
    assert steps_begun_by_the_fast_worker(ParameterServer(mode="ssp", staleness=3), 20) == 4
    assert steps_begun_by_the_fast_worker(ParameterServer(mode="ssp", staleness=0), 20) == 1


def test_micro_batch_numbers_continue_across_steps() -> None:
    _, rules = rules_of(ParameterServer(mode="asp"), 3, 4, 2)
    line = run_rules(rules)[1]
    assert [one.micro for one in line if one.kind is InstructionKind.FORWARD] == [2, 3, 6, 7]
    assert rules[2].weight_version(0) is None


@pytest.mark.parametrize(
    ("choice", "complaint"),
    [
        ({"mode": "fast"}, "mode: 'fast' is unknown; choose bsp, asp, ssp"),
        ({"servers": 0}, "servers: 0"),
        ({"staleness": -1}, "staleness: -1"),
    ],
)
def test_invalid_options_are_refused(choice: dict[str, object], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        ParameterServer(**choice)  # type: ignore[arg-type]


def test_too_few_devices_are_refused_with_a_remedy() -> None:
    with pytest.raises(InvalidArgument, match=r"devices: 1 are too few for 1 servers .* take 2 or more"):
        ParameterServer().plan(1, 4)
