"""The sum over shards does not depend on who computed which."""

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
def shares(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Some shards, dealt out to some ranks, each with an order of its own."""
    shards, ranks = draw(st.integers(1, 17)), draw(st.integers(1, 6))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=shards, max_size=shards))
    orders = [[shard for shard in range(shards) if owners[shard] == rank] for rank in range(ranks)]
    return shards, [draw(st.permutations(order)) for order in orders]


def held(one: MergePlan, values: np.ndarray) -> np.ndarray:
    """What a rank's slots hold after it has computed its shards and merged."""
    slots = np.full((one.slots, values.shape[1]), np.nan, np.float32)
    for shard, landing in zip(one.order, one.slot_merges, strict=True):
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


@given(shares())
def test_any_share_gives_the_bits_of_one_rank(case: tuple[int, list[list[int]]]) -> None:
    shards, orders = case
    values = np.random.default_rng(shards).normal(size=(shards, 33)).astype(np.float32) * np.float32(1e3)
    alone = merge_plan(range(shards), shards)
    wanted = evaluate(sum_expression([alone], shards), [held(alone, values)])
    holdings = [merge_plan(order, shards) for order in orders]
    found = evaluate(sum_expression(holdings, shards), [held(one, values) for one in holdings])
    assert found.tobytes() == wanted.tobytes()


def test_a_different_tree_gives_other_bits() -> None:
    """The test above can fail: adding from left to right is not the tree."""
    values = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)
    alone = merge_plan(range(8), 8)
    tree = evaluate(sum_expression([alone], 8), [held(alone, values)])
    line = values[0].copy()
    for value in values[1:]:
        line += value
    assert line.tobytes() != tree.tobytes()


@pytest.mark.parametrize(("shards", "slots"), [(1, 1), (2, 2), (4, 3), (8, 4), (16, 5), (64, 7)])
def test_one_rank_needs_room_for_a_logarithm(shards: int, slots: int) -> None:
    one = merge_plan(range(shards), shards)
    assert one.slots == slots
    assert one.nodes == ((Node(0, shards), 0),)


def test_contiguous_shares_hold_few_nodes() -> None:
    assert [node for node, _ in merge_plan([0, 1, 2], 8).nodes] == [Node(0, 2), Node(2, 3)]
    assert [node for node, _ in merge_plan([3, 4, 5], 8).nodes] == [Node(3, 4), Node(4, 6)]


@pytest.mark.parametrize("order", [[0, 0], [8], [-1]])
def test_what_is_no_share_is_refused(order: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="order"):
        merge_plan(order, 8)


@pytest.mark.parametrize("orders", [[[0, 1]], [[0, 1, 2], [2, 3]]])
def test_every_shard_must_be_there_once(orders: list[list[int]]) -> None:
    with pytest.raises(InvalidArgument, match="each must be there once"):
        sum_expression([merge_plan(order, 4) for order in orders], 4)


@given(shares(), st.integers(0, 40))
def test_the_plan_over_links_is_sound(case: tuple[int, list[list[int]]], count: int) -> None:
    shards, orders = case
    holdings = [merge_plan(order, shards) for order in orders]
    total = sum_expression(holdings, shards)
    plans = [linked_plan(total, holdings, count, rank) for rank in range(len(orders))]
    assert verify(plans) == []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_shares_send_what_a_ring_sends(ranks: int) -> None:
    count = 64 * ranks
    holdings = [merge_plan(range(rank * 2, rank * 2 + 2), 2 * ranks) for rank in range(ranks)]
    total = sum_expression(holdings, 2 * ranks)
    for rank in range(ranks):
        plan = linked_plan(total, holdings, count, rank)
        assert plan.messages == 2 * (ranks - 1)
        assert plan.elements == 2 * (ranks - 1) * count // ranks
