"""All ranks agree on measured link costs, and the costs determine the algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import LONG_S, URIS, Ranks, deadline_in

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.collectives.selection import LinkCost, choose_algorithm, measure_links
from hoop.memory.dtypes import dtype

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical


@pytest.mark.parametrize("scheme", URIS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_agree_on_link_costs(scheme: str, size: int) -> None:
    with Ranks(scheme, size) as ranks:
        costs = ranks.run(lambda comm: measure_links(comm.endpoint, deadline_in()))
        assert len(set(costs)) == 1
        assert costs[0].message_s > 0
        assert costs[0].byte_s > 0
        values = ranks.run(lambda comm: _sum(comm))  # the links still work
    assert all(value.tolist() == [sum(range(size))] * 3 for value in values)


def _sum(comm: Communicator) -> np.ndarray:
    vector = np.full(3, comm.rank, np.float32)
    comm.run(Operation("all_reduce", 3, dtype("float32")), vector, vector, LONG_S)
    return vector


def test_link_costs_determine_the_algorithm() -> None:
    with Ranks("inproc", 5) as ranks:
        endpoint = ranks.communicators[0].endpoint
        operation = Operation("all_reduce", 1 << 20, dtype("float32"))
        assert choose_algorithm(operation, endpoint, LinkCost(message_s=1.0, byte_s=1e-12)) == "tree"
        assert choose_algorithm(operation, endpoint, LinkCost(message_s=1e-9, byte_s=1e-6)) == "ring"


def test_the_first_choice_of_an_algorithm_measures_the_links() -> None:
    with Ranks("tcp", 3) as ranks:
        assert [comm.cost for comm in ranks.communicators] == [None] * 3
        ranks.run(_sum)
        costs = [comm.cost for comm in ranks.communicators]
    assert costs[0] is not None
    assert len(set(costs)) == 1
