"""Ordered all_reduce over every transport: every rank gets the bits of a single rank, however shards are assigned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from ranks import URIS, Ranks, deadline_in

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.shard_tree import merge_plan
from hoop.errors import HoopError

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical

# For each world size, several assignments: the shards of each rank, in order.
SHARD_ASSIGNMENTS: dict[int, list[list[Sequence[int]]]] = {
    1: [[range(5)]],
    2: [[range(4), range(4, 8)], [range(3), range(3, 8)], [range(8), range(0)]],
    3: [[range(3), range(3, 6), range(6, 8)], [[0, 5], [1, 2, 7], [3, 4, 6]]],
    4: [
        [range(1), range(1, 2), range(2, 3), range(3, 4)],
        [range(5), range(5, 6), range(6, 11), range(11, 13)],
    ],
}


def totals(ranks: Ranks, orders: list[list[int]], count: int, calls: int = 2) -> list[bytes]:
    shards = sum(map(len, orders))
    values = np.random.default_rng(7).normal(size=(calls, shards, count)).astype(np.float32)
    holdings = [merge_plan(list(order), shards) for order in orders]

    def worker(comm: Communicator) -> bytes:
        mine = holdings[comm.rank]
        slots = np.zeros((max(1, mine.slots), count), np.float32)
        buffer = np.zeros(count, np.float32)
        all_reduce = OrderedAllReduce(comm, holdings, shards, slots, buffer, deadline_in())
        found = b""
        for call in range(calls):
            for shard, slot_merge in zip(mine.order, mine.slot_merges, strict=True):
                slots[slot_merge.slot] = values[call, shard]
                for into, other in slot_merge.merges:
                    slots[into] += slots[other]
            all_reduce(deadline_in())
            found += all_reduce.result.tobytes()
        return found

    return ranks.run(worker)


@pytest.mark.parametrize("count", [0, 1, 3, 1000, 70_001])
@pytest.mark.parametrize("size", SHARD_ASSIGNMENTS)
@pytest.mark.parametrize("scheme", URIS)
def test_every_rank_gets_the_same_bits_as_a_single_rank(scheme: str, size: int, count: int) -> None:
    for orders in SHARD_ASSIGNMENTS[size]:
        shards = sum(map(len, orders))
        with Ranks("inproc", 1) as alone:
            (expected,) = totals(alone, [list(range(shards))], count)
        with Ranks(scheme, size) as ranks:
            assert totals(ranks, [list(order) for order in orders], count) == [expected] * size


@pytest.mark.parametrize("scheme", URIS)
def test_a_rank_that_leaves_is_named(scheme: str) -> None:
    holdings = [merge_plan([0], 2), merge_plan([1], 2)]
    with Ranks(scheme, 2) as ranks:

        def prepared(comm: Communicator) -> OrderedAllReduce:
            slots, total = np.zeros((1, 9), np.float32), np.zeros(9, np.float32)
            return OrderedAllReduce(comm, holdings, 2, slots, total, deadline_in())

        def worker(comm: Communicator) -> str:
            if comm.rank == 1:
                prepared(comm)
                comm.close()
                return ""
            with pytest.raises(HoopError) as caught:
                prepared(comm)(deadline_in())  # rank 1 may be gone before this rank has seen that it is prepared
            return str(caught.value)

        assert "rank 1" in ranks.run(worker)[0]
