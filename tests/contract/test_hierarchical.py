"""Ranks on several hosts: hierarchical plans, their costs, their results, and errors when a rank leaves."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import Waiter, receive, send_and_flush, wait_until_running
from ranks import COMMUNICATOR, LONG_S, PROMPT_S, Ranks, deadline_in, endpoints_of, outcomes, uri_of
from test_collectives import Case, cases, check_large_vectors, inputs, needed_inputs, prepare, run
from test_failures import run_or_close

from hoop.collectives.communicator import Communicator, Report
from hoop.collectives.hierarchical import HostLayout
from hoop.collectives.plan import (
    DESTINATION,
    SOURCE,
    WINDOW,
    CollectivePlan,
    Copy,
    Finish,
    Fold,
    Meet,
    Range,
    Recv,
    Reduce,
    Send,
    Shape,
    Take,
    split_range,
    verify,
)
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.selection import LinkCost, choose_algorithm
from hoop.errors import DeadlineExceeded, InvalidArgument, MembershipChanged, PeerLost
from hoop.memory import Arena, dtype
from hoop.memory.dtypes import DTYPES
from hoop.topology import Address
from hoop.transport import open_transport
from hoop.transport.base import PendingSend
from hoop.transport.hybrid import HybridEndpoint, HybridTransport, endpoint_for, number_hosts
from hoop.transport.inproc import InprocEndpoint
from hoop.transport.shm_endpoint import ShmEndpoint
from hoop.transport.tcp_endpoint import TcpEndpoint

PLACEMENTS = {
    "2x2": (0, 0, 1, 1),
    "2x2 in turn": (0, 1, 0, 1),
    "3+1": (0, 0, 0, 1),
    "1+3": (0, 1, 1, 1),
    "2x3": (0, 0, 0, 1, 1, 1),
    "3x2": (0, 0, 1, 1, 2, 2),
    "2+1+2": (0, 0, 1, 2, 2),
}
ALGORITHMS = [(name, algorithm) for name, entry in CATALOG.items() for algorithm in entry.spanning]

every_algorithm = pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS, ids=lambda text: text)
every_placement = pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)


def over_placements(*names: str) -> pytest.MarkDecorator:
    params = [
        pytest.param(("hybrid", len(PLACEMENTS[name]), PLACEMENTS[name]), id=name) for name in names or PLACEMENTS
    ]
    return pytest.mark.parametrize("ranks", params, indirect=True)


# ---- plans


def shapes(collective: str, hosts: tuple[int, ...]) -> Iterator[Shape]:
    """Every root, every count up to three times the most ranks and two larger ones, for vectors in arenas (chunk 0) and
    for windows of several sizes."""
    for count, chunk in itertools.product((*range(18), 24, 31), (0, 3, 4, 7, 100)):
        for root in range(len(hosts) if collective == "broadcast" else 1):
            yield Shape(len(hosts), count, root, chunk=chunk, hosts=hosts)


def plans(collective: str, algorithm: str, shape: Shape) -> list[CollectivePlan]:
    return [CATALOG[collective].spanning[algorithm](shape, rank) for rank in range(shape.size)]


@every_placement
@every_algorithm
def test_every_plan_verifies_and_stays_within_bounds(collective: str, algorithm: str, hosts: tuple[int, ...]) -> None:
    for shape in shapes(collective, hosts):
        rank_plans = plans(collective, algorithm, shape)
        assert not verify(rank_plans), shape
        assert len({len(plan.rounds) for plan in rank_plans}) == 1, shape
        for rank, plan in enumerate(rank_plans):
            assert not find_violation(shape, rank, plan), f"{shape}, rank {rank}: {find_violation(shape, rank, plan)}"


def find_violation(shape: Shape, rank: int, plan: CollectivePlan) -> str:
    """The first instruction that uses memory of another host, exceeds a buffer or window, or writes to the source."""
    host_ranks = [peer_rank for peer_rank, host in enumerate(shape.hosts) if host == shape.hosts[rank]]
    limits = {SOURCE: shape.count, DESTINATION: shape.count, WINDOW: shape.chunk or shape.count}
    for step in plan:
        ranges: list[Range] = []
        written: Range | None = None
        match step:
            case Send(peer, where):
                ranges = [where]
                if peer in host_ranks or not where.length:
                    return f"{step}: only to other hosts, and something"
            case Recv(peer, where) | Reduce(peer, where):
                ranges, written = [where], where
                if peer in host_ranks:
                    return f"{step}: only from other hosts"
            case Copy(remote, local) | Take(_, remote, local) | Fold(remote, local):
                ranges, written = [remote, local], local
                if remote.length != local.length:
                    return f"{step}: lengths differ"
                if isinstance(step, Take) and step.peer not in host_ranks:
                    return f"{step}: rank {step.peer} is on another host"
                if isinstance(step, Fold) and list(step.ranks) != host_ranks:
                    return f"{step}: not the ranks of this host"
            case Finish(where):
                ranges, written = [where], where
            case Meet(participants):
                if list(participants) != host_ranks:
                    return f"{step}: not the ranks of this host"
        for where in ranges:
            if not 0 <= where.start <= where.stop <= limits[where.buffer]:
                return f"{step} leaves a buffer of {limits[where.buffer]}"
        if written is not None and (written.buffer == SOURCE or (written.buffer == WINDOW and not shape.chunk)):
            return f"{step} writes to the source"
    return ""


def test_verify_finds_a_rank_that_misses_the_barrier_of_its_host() -> None:
    rank_plans = plans("all_reduce", "hierarchical", Shape(4, 8, hosts=(0, 0, 1, 1)))
    rank_plans[1] = CollectivePlan(())
    assert [
        problem for problem in verify(rank_plans) if problem.startswith("rank 0: waits for ever at Meet(ranks=(0, 1))")
    ]
    assert not [
        problem for problem in verify(rank_plans) if problem.startswith("rank 2: waits for ever at Meet(ranks=(0")
    ]


def log2_up(n: int) -> int:
    return math.ceil(math.log2(n))


@every_placement
def test_cost_of_a_ring_between_hosts(hosts: tuple[int, ...]) -> None:
    """A rank of a rail sends 2(h-1) messages and 2(h-1)/h · S/k elements if S/k/h is whole; others send nothing."""
    h, k = len(set(hosts)), min(map(hosts.count, hosts))
    for times in range(1, 5):
        rank_plans = plans("all_reduce", "hierarchical", Shape(len(hosts), h * k * times, hosts=hosts))
        for rank, plan in enumerate(rank_plans):
            in_rail = hosts[:rank].count(hosts[rank]) < k
            assert (plan.messages, plan.elements) == ((2 * (h - 1), 2 * (h - 1) * times) if in_rail else (0, 0))
    for shape in shapes("all_reduce", hosts):
        rank_plans = plans("all_reduce", "hierarchical", shape)
        assert sum(plan.elements for plan in rank_plans) == 2 * (h - 1) * shape.count
        segments = [b - a for start, stop in split_range(shape.count, k) for a, b in split_range(stop - start, h)]
        assert sum(plan.messages for plan in rank_plans) == 2 * (h - 1) * sum(map(bool, segments))


@every_placement
def test_cost_of_trees_between_hosts(hosts: tuple[int, ...]) -> None:
    h, k = len(set(hosts)), min(map(hosts.count, hosts))
    for shape in shapes("all_reduce", hosts):
        rank_plans = plans("all_reduce", "hierarchical_tree", shape)
        assert sum(plan.messages for plan in rank_plans) == min(k, shape.count) * 2 * (h - 1)
        assert sum(plan.elements for plan in rank_plans) == 2 * (h - 1) * shape.count
        sending_rounds = {
            index
            for plan in rank_plans
            for index, steps in enumerate(plan.rounds)
            if any(isinstance(step, Send) for step in steps)
        }
        assert len(sending_rounds) == (2 * log2_up(h) if shape.count else 0)
    for shape in shapes("broadcast", hosts):
        rank_plans = plans("broadcast", "hierarchical", shape)
        assert sum(plan.messages for plan in rank_plans) == (h - 1 if shape.count else 0)
        assert sum(plan.elements for plan in rank_plans) == (h - 1) * shape.count


@every_placement
def test_hosts_may_publish_vectors_in_different_ways(hosts: tuple[int, ...]) -> None:
    """Messages between hosts do not depend on whether a host uses arenas or windows."""
    for collective, algorithm in ALGORITHMS:
        for count, root in itertools.product(range(20), range(len(hosts))):
            mixed = [
                CATALOG[collective].spanning[algorithm](
                    Shape(len(hosts), count, root, chunk=(0, 3, 7)[host], hosts=hosts), rank
                )
                for rank, host in enumerate(hosts)
            ]
            assert not verify(mixed), (collective, algorithm, count, root)


def test_without_hosts_every_rank_has_its_own_host() -> None:
    assert HostLayout.of(Shape(3, 8), 1) == HostLayout(((0,), (1,), (2,)), 1, 0)
    ring = [CATALOG["all_reduce"].algorithms["ring"](Shape(3, 8), rank) for rank in range(3)]
    for plan, ring_plan in zip(plans("all_reduce", "hierarchical", Shape(3, 8)), ring, strict=True):
        assert (plan.messages, plan.elements) == (ring_plan.messages, ring_plan.elements)


# ---- results


@over_placements()
@every_algorithm
def test_matches_the_oracle(ranks: Ranks, collective: str, algorithm: str) -> None:
    """One element type per operation and count, another one for each count and placement."""
    turn = list(PLACEMENTS.values()).index(ranks.hosts)
    run(ranks, list(cases(collective, algorithm, ranks.size, len(DTYPES), turn)))


@over_placements("2x2", "3+1", "2x3")
@every_algorithm
def test_large_vectors(ranks: Ranks, collective: str, algorithm: str) -> None:
    """The vectors fill several windows, and no socket takes the messages at once."""
    check_large_vectors(ranks, collective, algorithm)


@over_placements()
@pytest.mark.parametrize("algorithm", ["hierarchical", "hierarchical_tree"])
def test_the_order_of_summation_is_fixed_and_all_ranks_hold_the_same_bits(ranks: Ranks, algorithm: str) -> None:
    """Rank order within a host; between hosts the ring starts at the segment's own host, the tree follows its edges."""
    count = 1003
    sources = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(ranks.size)]

    def worker(comm: Communicator) -> bytes:
        result = np.zeros(count, np.float32)
        comm.run(Operation("all_reduce", count, algorithm=algorithm), sources[comm.rank], result, LONG_S)
        return result.tobytes()

    layout = HostLayout.of(Shape(ranks.size, count, hosts=ranks.hosts), 0)
    sums = []
    for host_ranks in layout.host_ranks:
        total = sources[host_ranks[0]].copy()
        for rank in host_ranks[1:]:
            total += sources[rank]
        sums.append(total)
    h, expected = len(sums), np.zeros(count, np.float32)
    for start, stop in split_range(count, layout.rails):
        if algorithm == "hierarchical_tree":
            parts = [total[start:stop] for total in sums]
            expected[start:stop] = parts[0] + parts[1] if h == 2 else (parts[0] + parts[1]) + parts[2]
            continue
        for first, (low, high) in enumerate(split_range(stop - start, h)):
            part = slice(start + low, start + high)
            total = sums[first][part].copy()
            for step in range(1, h):
                total = sums[(first + step) % h][part] + total
            expected[part] = total
    assert ranks.run(worker) == [expected.tobytes()] * ranks.size


@over_placements()
def test_messages_and_bytes_sent_match_the_plan(ranks: Ranks) -> None:
    for (collective, algorithm), count in itertools.product(ALGORITHMS, (0, 3, 10, 400_000)):
        operation = Operation(collective, count, algorithm=algorithm, root=1)

        def worker(comm: Communicator, operation: Operation = operation) -> Report:
            return comm.run(operation, np.ones(operation.count, "f4"), np.zeros(operation.count, "f4"), LONG_S)

        for rank, report in enumerate(ranks.run(worker)):
            plan = operation.plan(ranks.size, rank, hosts=ranks.hosts)
            sent = (report.messages_sent, report.bytes_sent, report.algorithm)
            assert sent == (plan.messages, 4 * plan.elements, algorithm), f"rank {rank}: {operation}"


@over_placements("2x2", "2+1+2")
def test_a_prepared_operation_can_be_repeated(ranks: Ranks) -> None:
    def worker(comm: Communicator) -> list[float]:
        source, result = np.zeros(5, np.float32), np.zeros(5, np.float32)
        prepared = comm.prepare(Operation("all_reduce", 5), source, result)
        sums = []
        for index in range(4):
            source[:] = index * (comm.rank + 1)
            prepared(deadline_in())
            sums.append(float(result.sum()))
        return sums

    total = sum(rank + 1 for rank in range(ranks.size))
    assert ranks.run(worker) == [[5.0 * index * total for index in range(4)]] * ranks.size


@over_placements("2x2", "2+1+2")
def test_hierarchical_and_other_collectives_can_alternate(ranks: Ranks) -> None:
    def worker(comm: Communicator) -> list[float]:
        n, results = comm.size, []
        for index in range(20):
            source, result = np.full(n * 3, comm.rank + index, np.float32), np.zeros(n * 3, np.float32)
            comm.run(Operation("all_reduce", 3), source, result, LONG_S)
            results.append(float(result[0]))
            comm.run(Operation("all_gather", 3), source, result, LONG_S)
            results.append(float(result[3 * (n - 1)]))
            comm.run(Operation("broadcast", 3, root=index % n), source, result, LONG_S)
            results.append(float(result[2]))
            comm.run(Operation("barrier"), source, result, LONG_S)
        return results

    n = ranks.size
    expected = [(sum(range(n)) + n * index, n - 1 + index, index % n + index) for index in range(20)]
    assert ranks.run(worker) == [[float(value) for values in expected for value in values]] * n


@pytest.mark.parametrize("with_arenas", [(0, 1), (0,)], ids=["on both hosts", "on one of two"])
def test_vectors_in_arenas(tmp_path: Path, with_arenas: tuple[int, ...]) -> None:
    """Vectors in arenas are reduced where they are; a host without arenas uses its windows."""
    hosts, count = PLACEMENTS["2x2"], 300_001
    with ExitStack() as opened:
        devices = []
        for rank, host in enumerate(hosts):
            arena = opened.enter_context(Arena.create(tmp_path / f"{rank}", 8 * count + (1 << 20)))
            uri = uri_of("hybrid", rank, hosts).removeprefix("hybrid://")
            transport = HybridTransport(Address.parse(uri), arena if host in with_arenas else None)
            opened.enter_context(transport)
            devices.append((arena, transport))
        communicators = [Communicator(endpoint) for endpoint in endpoints_of([transport for _, transport in devices])]
        for comm in communicators:
            opened.callback(comm.close)
        with Ranks("inproc", len(hosts)) as threads:

            def worker(thread: Communicator) -> list[bool]:
                arena, comm = devices[thread.rank][0], communicators[thread.rank]
                vectors = arena.array(arena.min_address, dtype("float32"), 2 * count)
                source, result = vectors[:count], vectors[count:]
                correct = []
                for into in (result, source):
                    source[:] = comm.rank + 1
                    comm.run(Operation("all_reduce", count, op="avg"), source, into, LONG_S)
                    correct.append(bool((into == np.float32(2.5)).all()))
                source[:] = comm.rank
                comm.run(Operation("broadcast", count, root=3), source, result, LONG_S)
                return [*correct, bool((result == 3).all())]

            assert threads.run(worker) == [[True] * 3] * len(hosts)


# ---- messages over shared memory and links


@pytest.mark.slow_if(when=lambda params: params["ranks"][2] == PLACEMENTS["2x2 in turn"])  # all links of a ring are TCP
@over_placements("2x2", "2x2 in turn")
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_pending_sends_progress_while_a_rank_waits_on_the_other_transport(ranks: Ranks, collective: str) -> None:
    """A ring through both hosts alternates between shared memory and links; if only one kind progressed, it would
    deadlock."""
    algorithm = "pairwise" if collective == "all_to_all" else "ring"
    count = 6_000_000 if collective == "all_reduce" else 1_500_000
    operation = Operation(collective, count, algorithm=algorithm)
    sources = needed_inputs(np.random.default_rng(4), operation, ranks.size)
    run(ranks, [prepare(Case(operation), sources)])


@over_placements("2x2")
def test_a_message_from_any_host_ends_wait_readable(ranks: Ranks) -> None:
    """One ``wake`` ends one wait."""
    zero, *others = [comm.endpoint for comm in ranks.communicators]
    with ThreadPoolExecutor(1) as thread:
        for sender in (*others, *reversed(others), *others):
            waiting = thread.submit(zero.wait_readable, [1, 2, 3], deadline_in())
            wait_until_running(waiting)
            send_and_flush(sender, 0, b"word")
            assert waiting.result(PROMPT_S) == [sender.rank]
            assert receive(zero, sender.rank, 4) == b"word"
        waiting = thread.submit(zero.wait_readable, [1, 2, 3], deadline_in())
        wait_until_running(waiting)
        zero.wake()
        assert waiting.result(PROMPT_S) == []
        assert zero.wait_readable([1, 2, 3], deadline_in(0.05)) == []


@pytest.mark.parametrize("peer", [1, 2], ids=["on the same host", "on another host"])
def test_a_waiting_rank_names_the_peer_that_left(peer: int) -> None:
    with Ranks("hybrid", 4, PLACEMENTS["2x2"]) as ranks:
        waiter = Waiter(ranks.communicators[0].endpoint, peer)
        ranks.communicators[peer].close()
        error = waiter.error()
        assert isinstance(error, PeerLost)
        assert str(error).startswith(f"rank 0: rank {peer} at ")
        ranks.next_generation()
        waiter = Waiter(ranks.communicators[0].endpoint, peer)
        reason = MembershipChanged("generation 3 begins")
        ranks.communicators[0].endpoint.abort(reason)
        assert waiter.error() is reason


@pytest.mark.parametrize(("lost", "awaited"), [(1, 2), (2, 1)], ids=["on the same host", "on another host"])
def test_losing_a_peer_with_pending_messages_ends_the_wait_for_another_peer(lost: int, awaited: int) -> None:
    with Ranks("hybrid", 4, PLACEMENTS["2x2"]) as ranks:
        zero = ranks.communicators[0].endpoint
        assert zero.send(lost, memoryview(bytes(64 << 20)), deadline_in()) is not None, (
            "more than any link takes at once"
        )
        waiter = Waiter(zero, awaited)
        ranks.communicators[lost].close()
        error = waiter.error()
        assert isinstance(error, PeerLost)
        assert str(error).startswith(f"rank 0: rank {lost} at ")


@pytest.mark.parametrize("peer", [3, 1], ids=["on the same host", "on another host"])
def test_a_deadline_error_names_the_awaited_peer(peer: int) -> None:
    with (
        Ranks("hybrid", 4, PLACEMENTS["2x2"]) as ranks,
        pytest.raises(DeadlineExceeded, match=rf"rank 2: waiting for rank {peer} at .* passed"),
    ):
        ranks.communicators[2].endpoint.recv_into(peer, memoryview(bytearray(1)), deadline_in(0.05))


# ---- choice of algorithm and endpoint


def make_endpoint(hosts: tuple[int, ...]) -> HybridEndpoint:
    peers = [Address("nowhere", 1)] * len(hosts)
    return HybridEndpoint(InprocEndpoint(COMMUNICATOR, 1, 0, peers), None, hosts)


def test_hierarchical_is_chosen_where_hosts_have_several_ranks() -> None:
    for hosts in PLACEMENTS.values():
        assert choose_algorithm(Operation("all_reduce", 10**6), make_endpoint(hosts)) == "hierarchical"
        assert choose_algorithm(Operation("broadcast", 10**6), make_endpoint(hosts)) == "hierarchical"
        assert choose_algorithm(Operation("all_gather", 10**6), make_endpoint(hosts)) == "ring"
    many = make_endpoint(tuple(rank // 2 for rank in range(32)))
    assert choose_algorithm(Operation("all_reduce", 1), many) == "hierarchical_tree"
    assert choose_algorithm(Operation("all_reduce", 1), many, LinkCost(message_s=0.0)) == "hierarchical"
    assert choose_algorithm(Operation("all_reduce", 10**7), many) == "hierarchical"


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2), (0,)], ids=["one host", "one rank a host", "one rank"])
def test_hierarchical_is_neither_chosen_nor_accepted_where_it_gains_nothing(hosts: tuple[int, ...]) -> None:
    assert "hierarchical" not in choose_algorithm(Operation("all_reduce", 10), make_endpoint(hosts))
    for algorithm in ("hierarchical", "hierarchical_tree"):
        with pytest.raises(
            InvalidArgument, match=rf"algorithm: {algorithm} needs several hosts, and .*; here there is ring,"
        ):
            choose_algorithm(Operation("all_reduce", 10, algorithm=algorithm), make_endpoint(hosts))


@pytest.mark.parametrize("scheme", ["inproc", "tcp", "shm"])
def test_hierarchical_is_rejected_by_transports_without_hosts(scheme: str) -> None:
    with open_transport(uri_of(scheme, 0)) as transport:
        comm = Communicator(transport.endpoint(COMMUNICATOR, 1, 0, [transport.address]))
        vector = np.zeros(4, np.float32)
        available = "flat, staged" if scheme == "shm" else "ring, chunked_ring"
        with pytest.raises(InvalidArgument, match=rf"hierarchical needs several hosts.*here there is {available}"):
            comm.run(Operation("all_reduce", 4, algorithm="hierarchical"), vector, vector, LONG_S)
        comm.close()


def test_the_endpoint_depends_on_which_ranks_share_a_host() -> None:
    with open_transport("tcp://127.0.0.1:0") as links, open_transport("shm://127.0.0.1:0") as shared:
        peers = [links.address] * 3

        def kind(number: int, *hosts: str | None) -> Any:
            addresses = [Address(host, shared.address.port) if host else None for host in hosts]
            own_shared = shared if hosts[0] else None
            endpoint = endpoint_for(links, own_shared, number, 1, 0, peers[: len(hosts)], addresses)
            endpoint.close()
            matches: Callable[[type], bool] = lambda cls: isinstance(endpoint, cls)  # noqa: E731
            found = next(cls for cls in (HybridEndpoint, ShmEndpoint, TcpEndpoint) if matches(cls))
            return (found, endpoint.hosts) if isinstance(endpoint, HybridEndpoint) else found

        assert kind(1, "a", "a", "a") is ShmEndpoint
        assert kind(2, "a") is ShmEndpoint
        assert kind(3, "a", "b", None) is TcpEndpoint
        assert kind(4, None, None) is TcpEndpoint
        assert kind(5, "a", "b", "a") == (HybridEndpoint, (0, 1, 0))
        # A rank that shares no memory must number the hosts like the others, or it would choose another algorithm.
        assert kind(6, None, "b", "b") == (HybridEndpoint, (0, 1, 1))
    assert number_hosts([None, Address("x", 1), None, Address("x", 2)]) == [0, 1, 2, 1]


# ---- a rank leaves


class RankLeft(Exception):
    """Ends the run of the rank that leaves."""


def run_and_leave(comm: Communicator, operation: Operation, messages: int) -> None:
    """Runs the operation up to the send after ``messages`` messages (-1: not at all), then closes the communicator."""
    send, remaining = comm.endpoint.send, [messages]

    def limited_send(peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if not remaining[0]:
            raise RankLeft
        remaining[0] -= 1
        return send(peer, data, deadline)

    comm.endpoint.send = limited_send  # type: ignore[method-assign]  # only this endpoint
    try:
        if messages >= 0:
            run_or_close(comm, operation)
    except RankLeft:
        pass
    comm.close()


@pytest.mark.parametrize("messages", [-1, 0], ids=["before it begins", "before it sends"])
@pytest.mark.parametrize("placement", ["2x2", "3+1", "2x3", "3x2", "2+1+2"])
def test_every_rank_names_a_rank_that_leaves(placement: str, messages: int) -> None:
    """Also ranks that wait for it only indirectly."""
    hosts = PLACEMENTS[placement]
    operation = Operation("all_reduce", 1000)
    rails = min(map(hosts.count, hosts))
    with Ranks("hybrid", len(hosts), hosts) as ranks:
        for leaver in range(len(hosts)):
            if messages == 0 and hosts[:leaver].count(hosts[leaver]) >= rails:
                continue  # this rank sends no message
            ranks.next_generation()

            def worker(comm: Communicator, leaver: int = leaver) -> Any:
                return (
                    run_and_leave(comm, operation, messages) if comm.rank == leaver else run_or_close(comm, operation)
                )

            errors = outcomes(ranks.start(worker))
            for rank, error in enumerate(errors):
                if rank != leaver:
                    assert isinstance(error, PeerLost), f"rank {rank}, without {leaver}: {error!r}"
                    assert f"rank {leaver} at " in str(error), f"rank {rank}, without {leaver}: {error}"
                    assert str(error).startswith(f"rank {rank}: ")
                    assert str(error).endswith(f", in {operation}")


@pytest.mark.parametrize("placement", ["2x2", "3+1"])
def test_the_next_generation_works_after_a_failure(placement: str) -> None:
    hosts = PLACEMENTS[placement]
    operation = Operation("all_reduce", 1000)

    def failing(comm: Communicator, leaver: int) -> None:
        if comm.rank == leaver:
            run_and_leave(comm, operation, -1)
        else:
            run_or_close(comm, operation)

    def succeeding(comm: Communicator) -> float:
        result = np.zeros(1000, np.float32)
        comm.run(operation, np.full(1000, comm.rank, np.float32), result, LONG_S)
        return float(result.sum())

    with Ranks("hybrid", len(hosts), hosts) as ranks:
        for leaver in range(len(hosts)):
            outcomes(ranks.start(partial(failing, leaver=leaver)))
            ranks.next_generation()
            assert ranks.run(succeeding) == [1000.0 * sum(range(len(hosts)))] * len(hosts)


def test_an_absent_rank_is_named_by_its_global_rank() -> None:
    """Rank 2 gives up alone: it could name another rank that gave up first."""
    hosts, given_up = PLACEMENTS["2x2"], threading.Event()
    with Ranks("hybrid", 4, hosts) as ranks:
        operation = Operation("all_reduce", 1000)

        def worker(comm: Communicator) -> Any:
            if comm.rank == 3:
                assert given_up.wait(LONG_S)
                comm.close()
                return None
            try:
                return run_or_close(comm, operation, 0.3 if comm.rank == 2 else LONG_S)
            finally:
                if comm.rank == 2:
                    given_up.set()

        errors = outcomes(ranks.start(worker))
        assert "rank 2: waiting for rank 3 at" in str(errors[2]), errors[2]


@over_placements("2x2")
def test_in_place_all_reduce_over_hosts(ranks: Ranks) -> None:
    rng = np.random.default_rng(3)
    operation = Operation("all_reduce", 17, algorithm="hierarchical")
    sources = [inputs(rng, "sum", operation.dtype, 17) for _ in range(4)]
    run(ranks, [prepare(Case(operation, in_place=True), sources)])
