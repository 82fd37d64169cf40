"""Plan validation finds every kind of mistake in a plan, and none in a valid plan."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.plan.instructions import Instruction
from hoop.plan.plan import Plan, RankTraffic, in_flight, traffic
from hoop.plan.validation import check

TWO_STAGES = ["0L0 0F0 0>0@1 0(0@1 0B0 0A 0U", "1<0@0 1F0 1B0 1)0@0 1A 1U"]
TWO_REPLICAS = ["0L0 0F0 0B0 0A 0U", "0L1 0F1 0B1 0A 0U"]
SERVED = ["0G@1 0L0 0F0 0B0 0P@1", "0V@0 0T@0 0A 0U"]
ONE_RANK = ["0L0 0F0 1F0 1I0 0B0 1W0 0A 1A 0U 1U"]


def plan_of(ranks: list[str], holders: list[list[int]], micros: int = 1, servers: tuple[int, ...] = ()) -> Plan:
    return Plan.from_json(json.dumps({"micros": micros, "holders": holders, "ranks": ranks, "servers": servers}))


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(TWO_STAGES, [[0], [1]]),
        plan_of(TWO_REPLICAS, [[0, 1]], 2),
        plan_of(SERVED, [[0]], servers=(1,)),
        plan_of(ONE_RANK, [[0], [0]]),
    ],
)
def test_a_valid_plan_has_no_mistakes(plan: Plan) -> None:
    assert check(plan) == []


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (["0F0 0L0 0>0@1 0(0@1 0B0 0A 0U", TWO_STAGES[1]], "rank 0: 0F0 comes before its input"),
        (["0L0 0>0@1 0F0 0(0@1 0B0 0A 0U", TWO_STAGES[1]], "rank 0: 0>0@1 comes before the forward"),
        (["0L0 0F0 0>0@1 0B0 0(0@1 0A 0U", TWO_STAGES[1]], "rank 0: 0B0 comes before its gradient"),
        ([TWO_STAGES[0], "1<0@0 1B0 1F0 1)0@0 1A 1U"], "rank 1: 1B0 comes before its forward"),
        ([TWO_STAGES[0], "1<0@0 1F0 1)0@0 1B0 1A 1U"], "rank 1: 1)0@0 comes before the backward"),
        ([TWO_STAGES[0], "1<0@0 1F0 1A 1B0 1)0@0 1U"], "rank 1: 1A comes before 1 of its 1 backwards"),
        ([TWO_STAGES[0], "1<0@0 1F0 1B0 1)0@0 1U 1A"], "rank 1: 1U comes before its gradients are added up"),
        ([TWO_STAGES[0], "1<0@0 1F0 1B0 1)0@0 1A"], "rank 1: 1U is missing"),
        ([TWO_STAGES[0], "1<0@0 1F0 1I0 1)0@0 1A 1U"], "rank 1: 1W0 is missing"),
        ([TWO_STAGES[0], "1<0@0 1F0 1W0 1I0 1)0@0 1A 1U"], "rank 1: 1W0 comes before its other half"),
        ([TWO_STAGES[0], "1<0@0 1F0 1F0 1B0 1)0@0 1A 1U"], "rank 1: 1F0 was computed before"),
        ([TWO_STAGES[0], "1<0@0 1F0 1F0 1B0 1)0@0 1A 1U"], "1F0 happens 2 times over all ranks"),
        ([TWO_STAGES[0], "1<0@0 1F0 1)0@0 1A 1U"], "1B0 happens 0 times over all ranks"),
        (
            [TWO_STAGES[0], "1<0@0 1L0 1F0 1B0 1)0@0 1A 1U"],
            "rank 1: 1L0 is not how that stage gets its input",
        ),
        ([TWO_STAGES[0], "1<0@0 1F0 1(0@0 1B0 1)0@0 1A 1U"], "rank 1: 1(0@0 is of the last stage"),
        ([TWO_STAGES[0], "1<0@0 1F0 1B0 1)0@0 1A 1A 1U 1U"], "rank 1: 1A was added up before"),
        ([TWO_STAGES[0], "1<0@0 1F0 1B0 1)0@0 1A 1U 1U"], "rank 1: 1U was updated before"),
        ([TWO_STAGES[0], "1C 1<0@0 1F0 1B0 1)0@0 1A 1U"], "rank 1: 1C is in a plan: ranks with a sharded update"),
        ([TWO_STAGES[0], "1<0@0 1F0 1B0 1A 1U"], "rank 0: 0(0@1 is never sent"),
        ([TWO_STAGES[0], "1<0@0 1F0 1B0 1A 1U"], "rank 0: waits for ever at 0(0@1"),
        (["0L0 0F0 0>0@1 0B0 0A 0U", TWO_STAGES[1]], "rank 1: 1)0@0 is never received"),
        ([TWO_STAGES[0], "1<0@0 1F1 1B0 1)0@0 1A 1U"], "rank 1: 1F1 is of a micro-batch that is not there"),
        ([TWO_STAGES[0], "1<0@0 2F0 1B0 1)0@0 1A 1U"], "rank 1: 2F0 is of a stage that it does not hold"),
        ([TWO_STAGES[0], "1<0@7 1F0 1B0 1)0@0 1A 1U"], "rank 1: 1<0@7 has no such peer"),
        ([TWO_STAGES[0], "1<0@1 1F0 1B0 1)0@0 1A 1U"], "rank 1: 1<0@1 has no such peer"),
        ([TWO_STAGES[0], "0V@0 1<0@0 1F0 1B0 1)0@0 1A 1U"], "rank 1: 0V@0 is of slice 0, not one of []"),
    ],
)
def test_mistakes_in_a_plan_of_two_stages_are_found(ranks: list[str], complaint: str) -> None:
    found = check(plan_of(ranks, [[0], [1]]))
    assert any(mistake.startswith(complaint) for mistake in found), found


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        (["0L0 0F0 0G@1 0B0 0P@1", SERVED[1]], "rank 0: 0F0 comes before the weights of slices [0]"),
        (["0G@1 0L0 0F0 0P@1 0B0", SERVED[1]], "rank 0: 0P@1 comes before 1 of its 1 backwards"),
        (["0G@1 0L0 0F0 0B0", "0V@0"], "rank 0: the gradients of slices [0] are never pushed"),
        ([SERVED[0], "0V@0 0T@0"], "rank 1: 0U is missing"),
        ([SERVED[0], "0V@0 0U 0T@0 0U"], "rank 1: 0U comes before any gradient was taken"),
        ([SERVED[0], "0V@0 0A 0T@0 0U"], "rank 1: 0A adds up nothing"),
        ([SERVED[0], "0V@0 0A 0T@0 0U"], "rank 1: 0T@0 comes after the gradients are added up"),
        ([SERVED[0], "0T@0 0V@0 0A 0U"], "rank 0: waits for ever at 0G@1"),
        ([SERVED[0], "0V@0 0T@0 0F0 0A 0U"], "rank 1: 0F0 is no instruction of a server"),
        ([SERVED[0], "0V@0 0T@0 1A 0U"], "rank 1: 1A is of slice 1"),
    ],
)
def test_mistakes_in_a_plan_with_a_server_are_found(ranks: list[str], complaint: str) -> None:
    found = check(plan_of(ranks, [[0]], servers=(1,)))
    assert any(mistake.startswith(complaint) for mistake in found), found


def test_messages_in_different_orders_are_reported() -> None:
    ranks = [
        "0L0 0F0 0>0@1 0L1 0F1 0>1@1 0(0@1 0B0 0(1@1 0B1 0A 0U",
        "1<1@0 1<0@0 1F0 1B0 1)0@0 1F1 1B1 1)1@0 1A 1U",
    ]
    (found,) = check(plan_of(ranks, [[0], [1]], 2))
    assert found == ("rank 1: 1<1@0 is message 0 from rank 0, which sends 0>0@1 there: order or kind differ")


def test_replicas_that_reduce_in_different_orders_deadlock() -> None:
    one = "0L0 0F0 1F0 1B0 0B0 0A 1A 0U 1U"
    other = "0L1 0F1 1F1 1B1 0B1 1A 0A 0U 1U"
    assert check(plan_of([one, other], [[0, 1], [0, 1]], 2)) == [
        "rank 0: waits for ever at 0A",
        "rank 1: waits for ever at 1A",
    ]


def test_missing_holders_are_reported() -> None:
    assert check(plan_of(["", ""], [[0, 5]]))[0] == "stage 0 is held by ranks [0, 5], of 2 ranks"
    assert check(plan_of(["", ""], [[]]))[0] == "stage 0 is held by ranks [], of 2 ranks"
    assert check(plan_of(["", ""], [[0]], servers=(2,)))[0] == "slice 0 is held by ranks [2], of 2 ranks"


@given(st.data())
@settings(max_examples=300)
def test_any_single_change_is_found(data: st.DataObject) -> None:
    """With one instruction left out or repeated, no plan is valid, and validation does not crash."""
    valid = data.draw(
        st.sampled_from(
            [
                plan_of(TWO_STAGES, [[0], [1]]),
                plan_of(TWO_REPLICAS, [[0, 1]], 2),
                plan_of(SERVED, [[0]], servers=(1,)),
                plan_of(ONE_RANK, [[0], [0]]),
            ]
        )
    )
    rank = data.draw(st.integers(0, valid.size - 1))
    instructions = list(valid.ranks[rank])
    index = data.draw(st.integers(0, len(instructions) - 1))
    if data.draw(st.booleans()):
        dropped = instructions.pop(index)
        if str(dropped) == "0A" and valid.servers:
            return  # a server that updates at each push does not reduce
    else:
        instructions.insert(index, instructions[index])
    ranks = [*valid.ranks]
    ranks[rank] = tuple(instructions)
    assert check(Plan(valid.num_microbatches, valid.holders, tuple(ranks), valid.servers))


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_random_instructions_are_reported_and_never_crash_the_validation(rng: random.Random, length: int) -> None:
    texts = ["0L0", "0F0", "1F1", "0B0", "1I0", "1W0", "0>0@1", "1<0@0", "1)0@0", "0(0@1", "0A", "1A", "0U"]
    texts += ["0P@1", "0T@0", "0V@1", "0G@0", "7F7", "1>0@1", "0)0@1"]
    ranks = tuple(tuple(Instruction.parse(rng.choice(texts)) for _ in range(length)) for _ in range(2))
    assert check(Plan(2, ((0,), (1,)), ranks, rng.choice([(), (1,)])))


def test_activations_are_held_from_forward_to_the_end_of_the_backward() -> None:
    plan = plan_of(["0L0 0F0 0L1 0F1 1F0 1B0 0B0 1F1 1I1 0B1 1W1 0A 1A 0U 1U"], [[0], [0]], 2)
    assert check(plan) == []
    assert (in_flight(plan, 0), in_flight(plan, 0, 0), in_flight(plan, 0, 1)) == (3, 2, 1)


def test_traffic_counts_bytes_and_messages() -> None:
    assert traffic(plan_of(TWO_STAGES, [[0], [1]]), [10], [100, 200]) == [RankTraffic(10, 1, 10, 0)] * 2
    assert traffic(plan_of(TWO_REPLICAS, [[0, 1]], 2), [], [100]) == [RankTraffic(100, 2, 0, 100)] * 2
    assert traffic(plan_of(SERVED, [[0]], servers=(1,)), [], [100]) == [RankTraffic(100, 1, 0, 100)] * 2
    with pytest.raises(InvalidArgument, match="weight_bytes: 1 values for 2"):
        traffic(plan_of(TWO_STAGES, [[0], [1]]), [10], [100])
    with pytest.raises(InvalidArgument, match="output_bytes: 0 values for 2"):
        traffic(plan_of(TWO_STAGES, [[0], [1]]), [], [100, 200])
