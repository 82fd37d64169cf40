"""Reduce-scatter along the fixed tree and all-gather of slices, over every transport: the bits of a single rank."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import URIS, Ranks, deadline_in

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.plan import verify
from hoop.collectives.shard_tree import merge_plan
from hoop.collectives.sharded_reduction import ShardedReduction, ShardSpans, reduce_scatter_plan

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")
COUNT, WEIGHTS = 70_100, 70_000
ORDERS = [[0, 5], [1, 2, 7], [], [3, 4, 6]]
SPANS = ShardSpans(
    sums=((0, 30_000), (25_000, 70_000), (70_000, 70_000), (69_999, 70_000)),
    rest=(70_000, COUNT),
    weights=((0, 30_000), (30_000, 69_999), (69_999, 69_999), (69_999, WEIGHTS)),
)
"""Spans that overlap, an empty one, and one of a single element."""


def shard_values() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(8, COUNT)).astype(np.float32)


def total_of(values: np.ndarray) -> np.ndarray:
    """The sum along the tree on one rank."""
    holding = merge_plan(range(8), 8)
    slots, output = np.zeros((holding.slots, COUNT), np.float32), np.zeros(COUNT, np.float32)
    with Ranks("inproc", 1) as alone:

        def worker(comm: Communicator) -> np.ndarray:
            reduce = OrderedAllReduce(comm, [holding], 8, slots, output, deadline_in())
            for shard, landing in zip(holding.order, holding.slot_merges, strict=True):
                slots[landing.slot] = values[shard]
                for into, other in landing.merges:
                    slots[into] += slots[other]
            reduce(deadline_in())
            return reduce.result.copy()

        return alone.run(worker)[0]


@pytest.mark.parametrize("scheme", URIS)
def test_slices_have_the_bits_of_the_all_reduce(scheme: str) -> None:
    values = shard_values()
    expected, holdings = total_of(values), [merge_plan(order, 8) for order in ORDERS]
    weights = np.arange(WEIGHTS, dtype=np.float32)

    def worker(comm: Communicator) -> bool:
        mine, parts = holdings[comm.rank], SPANS.parts(comm.rank)
        slots = np.zeros((max(1, mine.slots), COUNT), np.float32)
        sums, own = np.zeros(SPANS.output_size(comm.rank), np.float32), np.full(WEIGHTS, -1, np.float32)
        reduction = ShardedReduction(comm, holdings, 8, (slots, sums, own), SPANS, deadline_in())
        same = True
        for call in range(2):
            for shard, landing in zip(mine.order, mine.slot_merges, strict=True):
                slots[landing.slot] = values[shard]
                for into, other in landing.merges:
                    slots[into] += slots[other]
            reduction.reduce(deadline_in())
            same &= sums.tobytes() == b"".join(expected[low:high].tobytes() for low, high in parts)
            low, high = SPANS.weights[comm.rank]
            own[low:high] = weights[low:high] + call
            reduction.gather(deadline_in())
            same &= own.tobytes() == (weights + call).tobytes()
        return same

    with Ranks(scheme, len(ORDERS)) as ranks:
        assert ranks.run(worker) == [True] * len(ORDERS)


def test_plans_pass_verification_and_send_half_of_an_all_reduce() -> None:
    holdings = [merge_plan(order, 8) for order in ORDERS]
    assert verify([reduce_scatter_plan(holdings, 8, COUNT, rank, SPANS) for rank in range(len(ORDERS))]) == []
    ranks, count = 4, 256
    even = tuple((rank * 64, rank * 64 + 64) for rank in range(ranks))
    spans, plans = ShardSpans(even, (count, count), even), [merge_plan([rank], ranks) for rank in range(ranks)]
    for rank in range(ranks):
        plan = reduce_scatter_plan(plans, ranks, count, rank, spans)
        assert (plan.messages, plan.elements) == (ranks - 1, (ranks - 1) * count // ranks)
