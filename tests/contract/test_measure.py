"""Measured link costs: the same at every rank, and they decide."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import URIS, Ranks, soon

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.collectives.selection import LinkCost, choose_algorithm, measure_links
from hoop.memory.dtypes import dtype

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical


@pytest.mark.parametrize("scheme", URIS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_agree_on_what_a_link_costs(scheme: str, size: int) -> None:
    with Ranks(scheme, size) as ranks:
        costs = ranks.run(lambda one: measure_links(one.endpoint, soon()))
        assert len(set(costs)) == 1
        assert costs[0].message_s > 0
        assert costs[0].byte_s > 0
        values = ranks.run(lambda one: _sum(one))  # the links are left in order
    assert all(value.tolist() == [sum(range(size))] * 3 for value in values)


def _sum(one: Communicator) -> np.ndarray:
    vector = np.full(3, one.rank, np.float32)
    one.run(Operation("all_reduce", 3, dtype("float32")), vector, vector, 60.0)
    return vector


def test_what_a_link_costs_decides() -> None:
    with Ranks("inproc", 5) as ranks:
        endpoint = ranks.communicators[0].endpoint
        operation = Operation("all_reduce", 1 << 20, dtype("float32"))
        assert choose_algorithm(operation, endpoint, LinkCost(message_s=1.0, byte_s=1e-12)) == "tree"
        assert choose_algorithm(operation, endpoint, LinkCost(message_s=1e-9, byte_s=1e-6)) == "ring"


def test_over_links_the_first_choice_measures_them() -> None:
    with Ranks("tcp", 3) as ranks:
        assert [one.cost for one in ranks.communicators] == [None] * 3
        ranks.run(_sum)
        costs = [one.cost for one in ranks.communicators]
    assert costs[0] is not None
    assert len(set(costs)) == 1
