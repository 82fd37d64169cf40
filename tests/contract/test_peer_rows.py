"""Every kind of rows that ranks with a GPU sum gives the bits of one rank, and fails promptly when a rank is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from gloo_group import open_gloo_group
from ranks import LONG_S, PROMPT_S, Ranks, deadline_in, outcomes
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.collectives.shard_tree import MergePlan, Node, merge_plan
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.device_group import DeviceGroup
from hoop.engine.stage.exchanged_rows import ExchangedRows
from hoop.engine.stage.peer_rows import SETS, MappedRows, PeerRows, StagedRows
from hoop.engine.stage.state import StateVectors
from hoop.errors import DeadlineExceeded, HoopError, MembershipChanged, PeerLost
from hoop.memory import Arena

KINDS = [("mapped", "shm"), ("staged", "shm"), ("staged", "tcp"), *(("exchanged", one) for one in ("shm", "tcp"))]
"""Kinds of rows, with transports between ranks that use them."""
ORDERS: dict[str, list[list[int]]] = {
    "one rank": [[0, 1, 2, 3, 4]],
    "even": [[0, 1], [2, 3]],
    "uneven": [[0, 1, 2], [3], [4, 5, 6, 7]],
    "several nodes": [[0, 5], [1, 2, 7], [3, 4, 6]],
    "a rank without shards": [[0, 1, 2], [], [3, 4], [5]],
    "five ranks": [[0], [1, 2], [3, 4, 5, 6], [7], [8, 9, 10, 11, 12]],
}
STEPS = 3
"""More than sets of rows."""
EMULATED = torch.device("cpu")

Opened = Callable[[Communicator, list[MergePlan], int, int], PeerRows]


def gradients(shards: int, count: int) -> Tensor:
    """(step, shard, element)."""
    return torch.randn(STEPS, shards, count, generator=torch.Generator().manual_seed(shards * 1000 + count))


def fill(rows: Tensor, plan: MergePlan, values: Tensor) -> None:
    """Write the gradients of a rank's shards to its rows, and add them to its nodes, as a step does."""

    def merge(node: Node) -> None:
        if node.high - node.low > 1:
            left, right = node.halves
            merge(left)
            merge(right)
            rows[plan.order.index(left.low)].add_(rows[plan.order.index(right.low)])

    for row, shard in zip(rows, plan.order, strict=True):
        row.copy_(values[shard])
    for node, _ in plan.nodes:
        merge(node)


def opener(kind: str, plans: list[MergePlan], count: int, arenas: list[Arena]) -> Opened:
    """Makes rows of a kind at a rank; collective. ``arenas``: one for each rank."""
    mapped = [torch.zeros(SETS, len(plan.order), count) for plan in plans]

    def open_rows(comm: Communicator, plans: list[MergePlan], shards: int, count: int) -> PeerRows:
        if kind == "mapped":
            return MappedRows(comm, plans, shards, mapped)
        if kind == "staged":
            vectors = StateVectors(arenas[comm.rank], "test.")
            return StagedRows(comm, plans, shards, count, Accelerator(EMULATED), vectors, deadline_in())
        return exchanged_rows(comm, plans, shards, count)

    return open_rows


def exchanged_rows(comm: Communicator, plans: list[MergePlan], shards: int, count: int) -> ExchangedRows:
    """Collective."""
    group = open_gloo_group(comm, Accelerator(EMULATED), LONG_S)
    assert isinstance(group, DeviceGroup)
    rows = ExchangedRows(comm, plans, shards, count, EMULATED, group)
    assert rows.connect(deadline_in()) == ""
    return rows


def expected_sums(values: Tensor) -> list[list[float]]:
    """The sums of a single rank, one for each step."""
    shards = values.shape[1]
    plan = merge_plan(range(shards), shards)
    found = []
    for step in values:
        rows = step.clone()
        fill(rows, plan, step)
        found.append(rows[0].tolist())
    return found


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(("kind", "scheme"), KINDS)
def test_every_rank_gets_the_bits_of_a_single_rank(
    kind: str, scheme: str, orders: list[list[int]], tmp_path: Path
) -> None:
    with Ranks(scheme, len(orders)) as ranks:
        for count in (1, 3, 4, 1001):
            (tmp_path / str(count)).mkdir()
            check_sums(ranks, kind, orders, count, tmp_path / str(count))


def check_sums(ranks: Ranks, kind: str, orders: list[list[int]], count: int, folder: Path) -> None:
    shards = sum(map(len, orders))
    plans = [merge_plan(order, shards) for order in orders]
    values = gradients(shards, count)
    arenas = [Arena.create(f"{folder}/{rank}", 1 << 20) for rank in range(len(orders))]
    open_rows = opener(kind, plans, count, arenas)

    def worker(comm: Communicator) -> list[list[float]]:
        rows, total, found = open_rows(comm, plans, shards, count), torch.zeros(count), []
        for step in range(STEPS):
            number = step % SETS
            fill(rows.own[number], plans[comm.rank], values[step])
            assert rows.meet(number, deadline_in()) >= 0
            rows.sum_into(total, number)
            found.append(total.tolist())
        rows.meet(0, deadline_in())  # no rank closes its rows while another one reads them
        rows.close()
        return found

    assert ranks.run(worker) == [expected_sums(values)] * len(orders)
    for arena in arenas:
        arena.close()


# ---- a rank is lost while the others exchange


def run_without_last(
    scheme: str, act: Callable[[list[Communicator]], object], seconds: float
) -> Sequence[HoopError | None]:
    """Three ranks meet; the last does not exchange, and calls ``act``. Returns the outcomes of the other two.

    ``act`` gets the communicators of all ranks. The process group of the last rank stays open and says nothing: the
    others must learn it from their links.
    """
    plans, met = [merge_plan([rank], 3) for rank in range(3)], threading.Barrier(3)
    over = threading.Event()

    def worker(comm: Communicator) -> None:
        rows = exchanged_rows(comm, plans, 3, 10)
        met.wait(LONG_S)
        if comm.rank == 2:
            rows._barrier(torch.zeros(0).numpy(), torch.zeros(0).numpy(), deadline_in())
            act(ranks.communicators)
            over.wait(LONG_S)
            rows.close()
            return
        try:
            rows.meet(0, deadline_in(seconds))
        finally:
            rows.close()

    with Ranks(scheme, 3) as ranks:
        futures = ranks.start(worker)
        found = outcomes(futures[:2], PROMPT_S)
        over.set()
        futures[2].result(LONG_S)
    return found


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_rank_that_leaves_the_exchange_is_found_through_its_links(scheme: str) -> None:
    found = run_without_last(scheme, lambda all_ranks: all_ranks[2].close(), LONG_S)
    assert [type(one) for one in found] == [PeerLost, PeerLost], found


def test_a_rank_that_does_not_exchange_is_given_up_at_the_deadline() -> None:
    found = run_without_last("tcp", lambda all_ranks: None, 2.0)
    assert isinstance(found[0], HoopError)
    assert any(isinstance(one, DeadlineExceeded) for one in found), found
    assert all(isinstance(one, DeadlineExceeded | PeerLost) for one in found), found


def test_a_change_of_members_ends_the_exchange() -> None:
    """As the coordinator's message does, from another thread."""
    reason = MembershipChanged("generation 2 begins")
    found = run_without_last("tcp", lambda all_ranks: [one.endpoint.abort(reason) for one in all_ranks], LONG_S)
    assert found == [reason, reason]


def test_a_group_that_fails_is_no_reason_to_wait() -> None:
    """What a process group raises while it connects is returned; an endpoint's own error is raised."""
    with Ranks("tcp", 2) as ranks:

        class Broken:
            def __init__(self) -> None:
                self.aborted = 0

            def abort(self) -> None:
                self.aborted += 1

        def fail() -> None:
            raise RuntimeError("no route\n to host")

        backend = Broken()
        group = DeviceGroup(backend, ranks.communicators[0].endpoint, EMULATED)  # type: ignore[arg-type]
        assert group.run_on_thread(fail, deadline_in()) == "no route to host"
        blocked = threading.Event()

        def wait() -> None:
            blocked.wait(LONG_S)

        assert group.run_on_thread(wait, deadline_in(0.01)) == "it did not connect in time"
        assert backend.aborted == 2
        ranks.communicators[0].endpoint.abort(PeerLost("rank 1 is gone"))
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            group.run_on_thread(wait, deadline_in())
        blocked.set()
