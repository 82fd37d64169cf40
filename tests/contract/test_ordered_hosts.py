"""The ordered sum on several hosts: the bits of one rank, and between hosts the bytes of one rank a host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks, deadline_in, endpoints_of, outcomes, uri_of
from test_hierarchical import PLACEMENTS

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce, linked_plan
from hoop.collectives.ordered_multi_host import TRIALS, HostLinks, MultiHostSum, host_nodes, multi_host_plan
from hoop.collectives.plan import CollectivePlan, Send, split_range, verify
from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import MergePlan, Node, merge_plan, sum_expression
from hoop.errors import CollectiveMismatch, PeerLost
from hoop.memory import Arena, dtype
from hoop.topology import Address
from hoop.transport.hybrid import HybridEndpoint, HybridTransport

every_placement = pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)


def holdings_of(hosts: Sequence[int], shards: int) -> list[MergePlan]:
    """Shards in the order of hosts, as data parallel training assigns them."""
    order = sorted(range(len(hosts)), key=lambda rank: hosts[rank])
    shares = dict(zip(order, split_range(shards, len(hosts)), strict=True))
    return [merge_plan(range(*shares[rank]), shards) for rank in range(len(hosts))]


def sent_between_hosts(plans: Sequence[CollectivePlan], hosts: Sequence[int]) -> list[int]:
    """Elements that each host sends to others."""
    sent = dict.fromkeys(hosts, 0)
    for rank, plan in enumerate(plans):
        for step in plan:
            if isinstance(step, Send) and hosts[step.peer] != hosts[rank]:
                sent[hosts[rank]] += step.range.length
    return list(sent.values())


# ---- plans


@st.composite
def placed_shards(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """Hosts of ranks, a number of shards, and the shards of each rank."""
    hosts = draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
    shards = draw(st.integers(1, 12))
    orders: list[list[int]] = [[] for _ in hosts]
    for shard in draw(st.permutations(range(shards))):
        orders[draw(st.integers(0, len(hosts) - 1))].append(shard)
    return hosts, shards, orders


@given(placed_shards(), st.integers(0, 40), st.integers(0, 3), st.booleans())
def test_every_plan_verifies(
    case: tuple[list[int], int, list[list[int]]], count: int, rails: int, mapped: bool
) -> None:
    hosts, shards, orders = case
    merge_plans = [merge_plan(order, shards) for order in orders]
    plans = [
        multi_host_plan(merge_plans, shards, count, rank, hosts, None, HostLinks(rails, mapped))
        for rank in range(len(hosts))
    ]
    assert verify(plans) == []


@pytest.mark.parametrize("rails", [1, 0], ids=["one rail", "all rails"])
@pytest.mark.parametrize(("h", "k"), [(2, 2), (2, 4), (4, 2)])
def test_a_host_sends_as_much_as_one_rank(h: int, k: int, rails: int) -> None:
    """2(h-1)/h of the vector, where every rank by itself sends k times as much."""
    hosts, count, shards = [rank // k for rank in range(h * k)], 8 * h * k, 2 * h * k
    merge_plans = holdings_of(hosts, shards)
    links = HostLinks(rails)
    plans = [multi_host_plan(merge_plans, shards, count, rank, hosts, links=links) for rank in range(len(hosts))]
    assert sent_between_hosts(plans, hosts) == [2 * (h - 1) * count // h] * h
    total = sum_expression(merge_plans, shards)
    linked = [linked_plan(total, merge_plans, count, rank) for rank in range(len(hosts))]
    assert sent_between_hosts(linked, hosts) == [k * 2 * (h - 1) * count // h] * h


def test_a_host_merges_the_nodes_of_its_ranks() -> None:
    merge_plans = [merge_plan(order, 8) for order in ([0], [1, 2], [3, 4, 5], [6, 7])]
    assert [node for node, _ in host_nodes(merge_plans, [0, 1], 8)] == [Node(0, 2), Node(2, 3)]
    assert [node for node, _ in host_nodes(merge_plans, [2, 3], 8)] == [Node(3, 4), Node(4, 8)]
    assert [node for node, _ in host_nodes(merge_plans, [0, 1, 2, 3], 8)] == [Node(0, 8)]


# ---- results


@pytest.mark.parametrize("arenas", [(), (0, 1, 2), (1,)], ids=["no arenas", "arenas", "arenas on one host"])
@every_placement
def test_every_rank_gets_the_bits_of_one_rank(tmp_path: Path, hosts: tuple[int, ...], arenas: tuple[int, ...]) -> None:
    """In the calls that measure and in those after; a host sends what its plans say, over TCP."""
    size, shards, count, calls = len(hosts), 12, 1001, 2 * TRIALS + 2
    holdings = holdings_of(hosts, shards)
    values = np.random.default_rng(3).normal(size=(shards, count)).astype(np.float32)
    expected = tree_sum(values, Node(0, shards)).tobytes()
    with ExitStack() as opened:
        devices = []
        for rank, host in enumerate(hosts):
            arena = opened.enter_context(Arena.create(tmp_path / f"{rank}", 64 * count + (1 << 20)))
            address = Address.parse(uri_of("hybrid", rank, hosts).removeprefix("hybrid://"))
            devices.append((arena, opened.enter_context(HybridTransport(address, arena if host in arenas else None))))
        communicators = [Communicator(endpoint) for endpoint in endpoints_of([one for _, one in devices])]
        for comm in communicators:
            opened.callback(comm.close)
        threads = opened.enter_context(Ranks("inproc", size))

        def worker(thread: Communicator) -> tuple[list[bool], list[int]]:
            arena, comm, mine = devices[thread.rank][0], communicators[thread.rank], holdings[thread.rank]
            memory = arena.array(arena.min_address, dtype("float32"), (mine.slots + 1) * count)
            slots, output = memory[count:].reshape(mine.slots, count), memory[:count]
            all_reduce = OrderedAllReduce(comm, holdings, shards, slots, output, deadline_in())
            assert isinstance(all_reduce._multi_host, MultiHostSum)
            assert isinstance(comm.endpoint, HybridEndpoint)
            same, sent = [], []
            for _ in range(calls):
                fill(slots, mine, values)
                before = comm.endpoint._links.endpoint.bytes_sent
                all_reduce(deadline_in())
                sent.append(comm.endpoint._links.endpoint.bytes_sent - before)
                same.append(output.tobytes() == expected)
            return same, sent

        found = threads.run(worker)
    assert [same for same, _ in found] == [[True] * calls] * size
    plans = [multi_host_plan(holdings, shards, count, rank, hosts) for rank in range(size)]
    sent = dict.fromkeys(hosts, 0)
    for host, (_, by_call) in zip(hosts, found, strict=True):
        sent[host] += by_call[-1]
    assert list(sent.values()) == [4 * elements for elements in sent_between_hosts(plans, hosts)]


# ---- errors


def prepare_sums(comm: Communicator, spans: Sequence[tuple[int, int]]) -> list[OrderedAllReduce]:
    holdings = [merge_plan([rank], comm.size) for rank in range(comm.size)]
    slots, buffer = np.zeros((1, 10), np.float32), np.zeros(10, np.float32)
    return [OrderedAllReduce(comm, holdings, comm.size, slots, buffer, deadline_in(), span) for span in spans]


def test_hosts_that_call_different_sums_all_raise() -> None:
    with Ranks("hybrid", 4, (0, 0, 1, 1)) as ranks:

        def worker(comm: Communicator) -> None:
            prepare_sums(comm, [(0, 5), (5, 10)])[comm.rank // 2](deadline_in())

        for error in outcomes(ranks.start(worker)):
            assert isinstance(error, CollectiveMismatch), error
            assert "elements 0 to 5" in str(error)
            assert "elements 5 to 10" in str(error)


@pytest.mark.parametrize("lost", [0, 3])
def test_a_rank_that_leaves_is_named_on_both_hosts(lost: int) -> None:
    with Ranks("hybrid", 4, (0, 0, 1, 1)) as ranks:

        def worker(comm: Communicator) -> None:
            (one,) = prepare_sums(comm, [(0, 10)])
            one(deadline_in())
            try:
                if comm.rank != lost:
                    one(deadline_in())
            finally:
                comm.close()  # as every rank does after an error

        found = outcomes(ranks.start(worker))
        for rank, error in enumerate(found):
            if rank != lost:
                assert isinstance(error, PeerLost), error
                assert f"rank {lost} " in str(error), error


def fill(slots: np.ndarray, mine: MergePlan, values: np.ndarray) -> None:
    for shard, merge in zip(mine.order, mine.slot_merges, strict=True):
        slots[merge.slot] = values[shard]
        for into, other in merge.merges:
            slots[into] += slots[other]


def tree_sum(values: Array, node: Node) -> Array:
    if node.high - node.low == 1:
        found: Array = values[node.low]
        return found
    left, right = node.halves
    return tree_sum(values, left) + tree_sum(values, right)
