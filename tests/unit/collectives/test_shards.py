"""The ordered sum over shards has the same bits for every assignment of shards to ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.collectives.ordered_all_reduce import linked_plan
from hoop.collectives.plan import verify
from hoop.collectives.shard_tree import Leaf, MergePlan, Node, Sum, merge_plan, sum_expression
from hoop.errors import InvalidArgument


@st.composite
def assignments(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A number of shards, and the shards of each rank in the order in which it computes them."""
    shards, ranks = draw(st.integers(1, 17)), draw(st.integers(1, 6))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=shards, max_size=shards))
    orders = [[shard for shard in range(shards) if owners[shard] == rank] for rank in range(ranks)]
    return shards, [draw(st.permutations(order)) for order in orders]


def merged_slots(plan: MergePlan, values: np.ndarray) -> np.ndarray:
    """A rank's slots after it computed and merged its shards."""
    slots = np.full((plan.slots, values.shape[1]), np.nan, np.float32)
    for shard, landing in zip(plan.order, plan.slot_merges, strict=True):
        slots[landing.slot] = values[shard]
        for into, other in landing.merges:
            slots[into] += slots[other]
            slots[other] = np.nan
    return slots


def evaluate(total: Sum, slots: list[np.ndarray]) -> np.ndarray:
    if isinstance(total, Leaf):
        leaf: np.ndarray = slots[total.rank][total.slot]
        return leaf
    both: np.ndarray = evaluate(total[0], slots) + evaluate(total[1], slots)
    return both


@given(assignments())
def test_any_assignment_gives_the_bits_of_one_rank(case: tuple[int, list[list[int]]]) -> None:
    shards, orders = case
    values = np.random.default_rng(shards).normal(size=(shards, 33)).astype(np.float32) * np.float32(1e3)
    single = merge_plan(range(shards), shards)
    expected = evaluate(sum_expression([single], shards), [merged_slots(single, values)])
    merge_plans = [merge_plan(order, shards) for order in orders]
    found = evaluate(sum_expression(merge_plans, shards), [merged_slots(one, values) for one in merge_plans])
    assert found.tobytes() == expected.tobytes()


def test_another_order_of_summation_gives_other_bits() -> None:
    """The test above can fail: summing from left to right gives other bits."""
    values = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)
    single = merge_plan(range(8), 8)
    tree = evaluate(sum_expression([single], 8), [merged_slots(single, values)])
    total = values[0].copy()
    for value in values[1:]:
        total += value
    assert total.tobytes() != tree.tobytes()


@pytest.mark.parametrize(("shards", "slots"), [(1, 1), (2, 2), (4, 3), (8, 4), (16, 5), (64, 7)])
def test_one_rank_needs_logarithmically_many_slots(shards: int, slots: int) -> None:
    one = merge_plan(range(shards), shards)
    assert one.slots == slots
    assert one.nodes == ((Node(0, shards), 0),)


def test_contiguous_shards_merge_into_few_nodes() -> None:
    assert [node for node, _ in merge_plan([0, 1, 2], 8).nodes] == [Node(0, 2), Node(2, 3)]
    assert [node for node, _ in merge_plan([3, 4, 5], 8).nodes] == [Node(3, 4), Node(4, 6)]


@pytest.mark.parametrize("order", [[0, 0], [8], [-1]])
def test_an_invalid_order_is_rejected(order: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="order"):
        merge_plan(order, 8)


@pytest.mark.parametrize("orders", [[[0, 1]], [[0, 1, 2], [2, 3]]])
def test_every_shard_must_be_present_once(orders: list[list[int]]) -> None:
    with pytest.raises(InvalidArgument, match="each must be there once"):
        sum_expression([merge_plan(order, 4) for order in orders], 4)


@given(assignments(), st.integers(0, 40))
def test_the_linked_plan_passes_verification(case: tuple[int, list[list[int]]], count: int) -> None:
    shards, orders = case
    merge_plans = [merge_plan(order, shards) for order in orders]
    total = sum_expression(merge_plans, shards)
    plans = [linked_plan(total, merge_plans, count, rank) for rank in range(len(orders))]
    assert verify(plans) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_assignments_send_as_much_as_a_ring(ranks: int) -> None:
    count = 64 * ranks
    merge_plans = [merge_plan(range(rank * 2, rank * 2 + 2), 2 * ranks) for rank in range(ranks)]
    total = sum_expression(merge_plans, 2 * ranks)
    for rank in range(ranks):
        plan = linked_plan(total, merge_plans, count, rank)
        assert plan.messages == 2 * (ranks - 1)
        assert plan.elements == 2 * (ranks - 1) * count // ranks
