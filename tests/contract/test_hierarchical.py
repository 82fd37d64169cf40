"""Ranks on several hosts: hierarchical plans, what they cost, what they come to, and who is missed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange import Waiter, receive, say, until_started
from ranks import COMMUNICATOR, LONG_S, PROMPT_S, Ranks, endpoints_of, outcomes, soon, uri_of
from test_collectives import Case, cases, check_large_vectors, inputs, prepare, run
from test_failures import take_part

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
    places = [
        pytest.param(("hybrid", len(PLACEMENTS[name]), PLACEMENTS[name]), id=name) for name in names or PLACEMENTS
    ]
    return pytest.mark.parametrize("ranks", places, indirect=True)


# ---- plans


def shapes(collective: str, hosts: tuple[int, ...]) -> Iterator[Shape]:
    """Every count and root, in arenas and with windows of some widths."""
    for count, chunk in itertools.product(range(32), (0, 3, 4, 7, 100)):
        for root in range(len(hosts) if collective == "broadcast" else 1):
            yield Shape(len(hosts), count, root, chunk=chunk, hosts=hosts)


def plans(collective: str, algorithm: str, shape: Shape) -> list[CollectivePlan]:
    return [CATALOG[collective].spanning[algorithm](shape, rank) for rank in range(shape.size)]


@every_placement
@every_algorithm
def test_nothing_is_wrong_with_any_plan(collective: str, algorithm: str, hosts: tuple[int, ...]) -> None:
    for shape in shapes(collective, hosts):
        made = plans(collective, algorithm, shape)
        assert not verify(made), shape
        assert len({len(plan.rounds) for plan in made}) == 1, shape
        for rank, plan in enumerate(made):
            assert not stray(shape, rank, plan), f"{shape}, rank {rank}: {stray(shape, rank, plan)}"


def stray(shape: Shape, rank: int, plan: CollectivePlan) -> str:
    """What is out of bounds in a plan: memory of another host, more than a buffer or window has, the source."""
    team = [one for one, host in enumerate(shape.hosts) if host == shape.hosts[rank]]
    room = {SOURCE: shape.count, DESTINATION: shape.count, WINDOW: shape.chunk or shape.count}
    for step in plan:
        ranges: list[Range] = []
        written: Range | None = None
        match step:
            case Send(peer, where):
                ranges = [where]
                if peer in team or not where.length:
                    return f"{step}: only to other hosts, and something"
            case Recv(peer, where) | Reduce(peer, where):
                ranges, written = [where], where
                if peer in team:
                    return f"{step}: only from other hosts"
            case Copy(there, here) | Take(_, there, here) | Fold(there, here):
                ranges, written = [there, here], here
                if there.length != here.length:
                    return f"{step}: lengths differ"
                if isinstance(step, Take) and step.peer not in team:
                    return f"{step}: rank {step.peer} is on another host"
                if isinstance(step, Fold) and list(step.ranks) != team:
                    return f"{step}: not the ranks of this host"
            case Finish(where):
                ranges, written = [where], where
            case Meet(those):
                if list(those) != team:
                    return f"{step}: not the ranks of this host"
        for where in ranges:
            if not 0 <= where.start <= where.stop <= room[where.buffer]:
                return f"{step} leaves a buffer of {room[where.buffer]}"
        if written is not None and (written.buffer == SOURCE or (written.buffer == WINDOW and not shape.chunk)):
            return f"{step} writes to the source"
    return ""


def test_a_meeting_of_some_that_one_misses_is_found() -> None:
    made = plans("all_reduce", "hierarchical", Shape(4, 8, hosts=(0, 0, 1, 1)))
    made[1] = CollectivePlan(())
    assert [problem for problem in verify(made) if problem.startswith("rank 0: waits for ever at Meet(ranks=(0, 1))")]
    assert not [problem for problem in verify(made) if problem.startswith("rank 2: waits for ever at Meet(ranks=(0")]


def log2_up(n: int) -> int:
    return math.ceil(math.log2(n))


@every_placement
def test_what_a_ring_between_hosts_costs(hosts: tuple[int, ...]) -> None:
    """2(h-1) messages and 2(h-1)/h · S/k elements a rank of a rail, where S/k/h is whole; nothing of the others."""
    h, k = len(set(hosts)), min(map(hosts.count, hosts))
    for times in range(1, 5):
        made = plans("all_reduce", "hierarchical", Shape(len(hosts), h * k * times, hosts=hosts))
        for rank, plan in enumerate(made):
            in_rail = hosts[:rank].count(hosts[rank]) < k
            assert (plan.messages, plan.elements) == ((2 * (h - 1), 2 * (h - 1) * times) if in_rail else (0, 0))
    for shape in shapes("all_reduce", hosts):
        made = plans("all_reduce", "hierarchical", shape)
        assert sum(plan.elements for plan in made) == 2 * (h - 1) * shape.count
        segments = [b - a for start, stop in split_range(shape.count, k) for a, b in split_range(stop - start, h)]
        assert sum(plan.messages for plan in made) == 2 * (h - 1) * sum(map(bool, segments))


@every_placement
def test_what_trees_between_hosts_cost(hosts: tuple[int, ...]) -> None:
    h, k = len(set(hosts)), min(map(hosts.count, hosts))
    for shape in shapes("all_reduce", hosts):
        made = plans("all_reduce", "hierarchical_tree", shape)
        assert sum(plan.messages for plan in made) == min(k, shape.count) * 2 * (h - 1)
        assert sum(plan.elements for plan in made) == 2 * (h - 1) * shape.count
        speaking = {
            index
            for plan in made
            for index, steps in enumerate(plan.rounds)
            if any(isinstance(step, Send) for step in steps)
        }
        assert len(speaking) == (2 * log2_up(h) if shape.count else 0)
    for shape in shapes("broadcast", hosts):
        made = plans("broadcast", "hierarchical", shape)
        assert sum(plan.messages for plan in made) == (h - 1 if shape.count else 0)
        assert sum(plan.elements for plan in made) == (h - 1) * shape.count


@every_placement
def test_hosts_may_lay_vectors_open_in_different_ways(hosts: tuple[int, ...]) -> None:
    """What is sent between hosts does not depend on how a host does its part."""
    for collective, algorithm in ALGORITHMS:
        for count, root in itertools.product(range(20), range(len(hosts))):
            mixed = [
                CATALOG[collective].spanning[algorithm](
                    Shape(len(hosts), count, root, chunk=(0, 3, 7)[host], hosts=hosts), rank
                )
                for rank, host in enumerate(hosts)
            ]
            assert not verify(mixed), (collective, algorithm, count, root)


def test_without_hosts_everybody_is_on_one_of_its_own() -> None:
    assert HostLayout.of(Shape(3, 8), 1) == HostLayout(((0,), (1,), (2,)), 1, 0)
    ring = [CATALOG["all_reduce"].algorithms["ring"](Shape(3, 8), rank) for rank in range(3)]
    for plan, like in zip(plans("all_reduce", "hierarchical", Shape(3, 8)), ring, strict=True):
        assert (plan.messages, plan.elements) == (like.messages, like.elements)


# ---- what they come to


@over_placements()
@every_algorithm
def test_matches_the_oracle(ranks: Ranks, collective: str, algorithm: str) -> None:
    run(ranks, list(cases(collective, algorithm, ranks.size, thinned=True)))


@over_placements("2x2", "3+1", "2x3")
@every_algorithm
def test_large_vectors(ranks: Ranks, collective: str, algorithm: str) -> None:
    """Several windows full, and messages that no socket takes at once."""
    check_large_vectors(ranks, collective, algorithm)


@over_placements()
@pytest.mark.parametrize("algorithm", ["hierarchical", "hierarchical_tree"])
def test_the_order_is_fixed_and_all_ranks_hold_the_same_bits(ranks: Ranks, algorithm: str) -> None:
    """Rank order inside a host, then over hosts: from the segment's own in a ring, as the tree goes in a tree."""
    count = 1003
    sources = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(ranks.size)]

    def job(one: Communicator) -> bytes:
        result = np.zeros(count, np.float32)
        one.run(Operation("all_reduce", count, algorithm=algorithm), sources[one.rank], result, LONG_S)
        return result.tobytes()

    layout = HostLayout.of(Shape(ranks.size, count, hosts=ranks.hosts), 0)
    sums = []
    for team in layout.host_ranks:
        total = sources[team[0]].copy()
        for rank in team[1:]:
            total += sources[rank]
        sums.append(total)
    h, wanted = len(sums), np.zeros(count, np.float32)
    for start, stop in split_range(count, layout.rails):
        if algorithm == "hierarchical_tree":
            parts = [total[start:stop] for total in sums]
            wanted[start:stop] = parts[0] + parts[1] if h == 2 else (parts[0] + parts[1]) + parts[2]
            continue
        for first, (low, high) in enumerate(split_range(stop - start, h)):
            part = slice(start + low, start + high)
            total = sums[first][part].copy()
            for step in range(1, h):
                total = sums[(first + step) % h][part] + total
            wanted[part] = total
    assert ranks.run(job) == [wanted.tobytes()] * ranks.size


@over_placements()
def test_what_is_sent_is_what_was_planned(ranks: Ranks) -> None:
    for (collective, algorithm), count in itertools.product(ALGORITHMS, (0, 3, 10, 400_000)):
        operation = Operation(collective, count, algorithm=algorithm, root=1)

        def job(one: Communicator, operation: Operation = operation) -> Report:
            return one.run(operation, np.ones(operation.count, "f4"), np.zeros(operation.count, "f4"), LONG_S)

        for rank, report in enumerate(ranks.run(job)):
            plan = operation.plan(ranks.size, rank, hosts=ranks.hosts)
            found = (report.messages_sent, report.bytes_sent, report.algorithm)
            assert found == (plan.messages, 4 * plan.elements, algorithm), f"rank {rank}: {operation}"


@over_placements("2x2", "2+1+2")
def test_an_operation_that_is_prepared(ranks: Ranks) -> None:
    def job(one: Communicator) -> list[float]:
        source, result = np.zeros(5, np.float32), np.zeros(5, np.float32)
        again = one.prepare(Operation("all_reduce", 5), source, result)
        found = []
        for times in range(4):
            source[:] = times * (one.rank + 1)
            again(soon())
            found.append(float(result.sum()))
        return found

    total = sum(rank + 1 for rank in range(ranks.size))
    assert ranks.run(job) == [[5.0 * times * total for times in range(4)]] * ranks.size


@over_placements("2x2", "2+1+2")
def test_everything_mixes(ranks: Ranks) -> None:
    """Hierarchical and other collectives follow one another on the same endpoints."""

    def job(one: Communicator) -> list[float]:
        n, found = one.size, []
        for times in range(20):
            source, result = np.full(n * 3, one.rank + times, np.float32), np.zeros(n * 3, np.float32)
            one.run(Operation("all_reduce", 3), source, result, LONG_S)
            found.append(float(result[0]))
            one.run(Operation("all_gather", 3), source, result, LONG_S)
            found.append(float(result[3 * (n - 1)]))
            one.run(Operation("broadcast", 3, root=times % n), source, result, LONG_S)
            found.append(float(result[2]))
            one.run(Operation("barrier"), source, result, LONG_S)
        return found

    n = ranks.size
    wanted = [(sum(range(n)) + n * times, n - 1 + times, times % n + times) for times in range(20)]
    assert ranks.run(job) == [[float(value) for values in wanted for value in values]] * n


@pytest.mark.parametrize("with_arenas", [(0, 1), (0,)], ids=["on both hosts", "on one of two"])
def test_in_arenas_nothing_is_copied_first(tmp_path: Path, with_arenas: tuple[int, ...]) -> None:
    """Vectors that lie in arenas are folded where they are; a host without does its part through stages."""
    hosts, count = PLACEMENTS["2x2"], 300_001
    with ExitStack() as opened:
        made = []
        for rank, host in enumerate(hosts):
            arena = opened.enter_context(Arena.create(tmp_path / f"{rank}", 8 * count + (1 << 20)))
            uri = uri_of("hybrid", rank, hosts).removeprefix("hybrid://")
            transport = HybridTransport(Address.parse(uri), arena if host in with_arenas else None)
            opened.enter_context(transport)
            made.append((arena, transport))
        ones = [Communicator(endpoint) for endpoint in endpoints_of([transport for _, transport in made])]
        for one in ones:
            opened.callback(one.close)
        with Ranks("inproc", len(hosts)) as threads:

            def job(thread: Communicator) -> list[bool]:
                arena, one = made[thread.rank][0], ones[thread.rank]
                vectors = arena.array(arena.min_address, dtype("float32"), 2 * count)
                source, result = vectors[:count], vectors[count:]
                right = []
                for into in (result, source):
                    source[:] = one.rank + 1
                    one.run(Operation("all_reduce", count, op="avg"), source, into, LONG_S)
                    right.append(bool((into == np.float32(2.5)).all()))
                source[:] = one.rank
                one.run(Operation("broadcast", count, root=3), source, result, LONG_S)
                return [*right, bool((result == 3).all())]

            assert threads.run(job) == [[True] * 3] * len(hosts)


# ---- messages, whichever way


@over_placements("2x2", "2x2 in turn")
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all"])
def test_what_is_pending_one_way_moves_while_a_rank_waits_the_other_way(ranks: Ranks, collective: str) -> None:
    """In a ring through both hosts links take turns; nobody could go on if only one kind were handed over."""
    algorithm = "pairwise" if collective == "all_to_all" else "ring"
    count = 6_000_000 if collective == "all_reduce" else 1_500_000
    operation = Operation(collective, count, algorithm=algorithm)
    rng = np.random.default_rng(4)
    sources = [inputs(rng, "sum", operation.dtype, ranks.size * count) for _ in range(ranks.size)]
    run(ranks, [prepare(Case(operation), sources)])


@over_placements("2x2")
def test_whoever_speaks_first_ends_a_wait_for_several(ranks: Ranks) -> None:
    """On the same host or another; and ``wake`` does, once."""
    zero, *others = [one.endpoint for one in ranks.communicators]
    with ThreadPoolExecutor(1) as thread:
        for speaker in (*others, *reversed(others), *others):
            waiting = thread.submit(zero.wait_readable, [1, 2, 3], soon())
            until_started(waiting)
            say(speaker, 0, b"word")
            assert waiting.result(PROMPT_S) == [speaker.rank]
            assert receive(zero, speaker.rank, 4) == b"word"
        waiting = thread.submit(zero.wait_readable, [1, 2, 3], soon())
        until_started(waiting)
        zero.wake()
        assert waiting.result(PROMPT_S) == []
        assert zero.wait_readable([1, 2, 3], soon(0.05)) == []


@pytest.mark.parametrize("peer", [1, 2], ids=["on the same host", "on another host"])
def test_a_peer_that_goes_is_named_by_who_waits_for_it(peer: int) -> None:
    with Ranks("hybrid", 4, PLACEMENTS["2x2"]) as ranks:
        waiter = Waiter(ranks.communicators[0].endpoint, peer)
        ranks.communicators[peer].close()
        error = waiter.error()
        assert isinstance(error, PeerLost)
        assert str(error).startswith(f"rank 0: rank {peer} at ")
        ranks.renew()
        waiter = Waiter(ranks.communicators[0].endpoint, peer)
        reason = MembershipChanged("generation 3 begins")
        ranks.communicators[0].endpoint.abort(reason)
        assert waiter.error() is reason


@pytest.mark.parametrize(("lost", "awaited"), [(1, 2), (2, 1)], ids=["on the same host", "on another host"])
def test_who_is_lost_with_messages_pending_ends_the_wait_for_another(lost: int, awaited: int) -> None:
    with Ranks("hybrid", 4, PLACEMENTS["2x2"]) as ranks:
        zero = ranks.communicators[0].endpoint
        assert zero.send(lost, memoryview(bytes(64 << 20)), soon()) is not None, "more than any link takes at once"
        waiter = Waiter(zero, awaited)
        ranks.communicators[lost].close()
        error = waiter.error()
        assert isinstance(error, PeerLost)
        assert str(error).startswith(f"rank 0: rank {lost} at ")


@pytest.mark.parametrize("peer", [3, 1], ids=["on the same host", "on another host"])
def test_a_deadline_names_who_was_waited_for(peer: int) -> None:
    with (
        Ranks("hybrid", 4, PLACEMENTS["2x2"]) as ranks,
        pytest.raises(DeadlineExceeded, match=rf"rank 2: waiting for rank {peer} at .* passed"),
    ):
        ranks.communicators[2].endpoint.recv_into(peer, memoryview(bytearray(1)), soon(0.05))


# ---- which one runs


def an_endpoint(hosts: tuple[int, ...]) -> HybridEndpoint:
    peers = [Address("nowhere", 1)] * len(hosts)
    return HybridEndpoint(InprocEndpoint(COMMUNICATOR, 1, 0, peers), None, hosts)


def test_hierarchical_is_chosen_where_hosts_have_several_ranks() -> None:
    for hosts in PLACEMENTS.values():
        assert choose_algorithm(Operation("all_reduce", 10**6), an_endpoint(hosts)) == "hierarchical"
        assert choose_algorithm(Operation("broadcast", 10**6), an_endpoint(hosts)) == "hierarchical"
        assert choose_algorithm(Operation("all_gather", 10**6), an_endpoint(hosts)) == "ring"
    many = an_endpoint(tuple(rank // 2 for rank in range(32)))
    assert choose_algorithm(Operation("all_reduce", 1), many) == "hierarchical_tree"
    assert choose_algorithm(Operation("all_reduce", 1), many, LinkCost(message_s=0.0)) == "hierarchical"
    assert choose_algorithm(Operation("all_reduce", 10**7), many) == "hierarchical"


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2), (0,)], ids=["one host", "one rank a host", "one rank"])
def test_where_there_is_nothing_to_gain_it_is_not_chosen_and_cannot_be_forced(hosts: tuple[int, ...]) -> None:
    assert "hierarchical" not in choose_algorithm(Operation("all_reduce", 10), an_endpoint(hosts))
    for algorithm in ("hierarchical", "hierarchical_tree"):
        with pytest.raises(
            InvalidArgument, match=rf"algorithm: {algorithm} needs several hosts, and .*; here there is ring,"
        ):
            choose_algorithm(Operation("all_reduce", 10, algorithm=algorithm), an_endpoint(hosts))


@pytest.mark.parametrize("scheme", ["inproc", "tcp", "shm"])
def test_it_cannot_be_forced_where_there_are_no_hosts(scheme: str) -> None:
    with open_transport(uri_of(scheme, 0)) as transport:
        one = Communicator(transport.endpoint(COMMUNICATOR, 1, 0, [transport.address]))
        vector = np.zeros(4, np.float32)
        there = "flat, staged" if scheme == "shm" else "ring, chunked_ring"
        with pytest.raises(InvalidArgument, match=rf"hierarchical needs several hosts.*here there is {there}"):
            one.run(Operation("all_reduce", 4, algorithm="hierarchical"), vector, vector, LONG_S)
        one.close()


def test_the_best_endpoint_for_who_is_where() -> None:
    with open_transport("tcp://127.0.0.1:0") as links, open_transport("shm://127.0.0.1:0") as shared:
        peers = [links.address] * 3

        def kind(number: int, *hosts: str | None) -> Any:
            places = [Address(host, shared.address.port) if host else None for host in hosts]
            with_whom = shared if hosts[0] else None
            endpoint = endpoint_for(links, with_whom, number, 1, 0, peers[: len(hosts)], places)
            endpoint.close()
            kinds: Callable[[type], bool] = lambda one: isinstance(endpoint, one)  # noqa: E731
            found = next(one for one in (HybridEndpoint, ShmEndpoint, TcpEndpoint) if kinds(one))
            return (found, endpoint.hosts) if isinstance(endpoint, HybridEndpoint) else found

        assert kind(1, "a", "a", "a") is ShmEndpoint
        assert kind(2, "a") is ShmEndpoint
        assert kind(3, "a", "b", None) is TcpEndpoint
        assert kind(4, None, None) is TcpEndpoint
        assert kind(5, "a", "b", "a") == (HybridEndpoint, (0, 1, 0))
        # A rank that shares nothing must see what the others see, or it would choose another algorithm.
        assert kind(6, None, "b", "b") == (HybridEndpoint, (0, 1, 1))
    assert number_hosts([None, Address("x", 1), None, Address("x", 2)]) == [0, 1, 2, 1]


# ---- a rank goes


class Leaves(Exception):
    """The rank has gone."""


def leave(one: Communicator, operation: Operation, messages: int) -> None:
    """Takes part until it is about to send so many messages, or never begins; then closes."""
    send, left = one.endpoint.send, [messages]

    def counted(peer: int, data: memoryview, deadline: float) -> PendingSend | None:
        if not left[0]:
            raise Leaves
        left[0] -= 1
        return send(peer, data, deadline)

    one.endpoint.send = counted  # type: ignore[method-assign]  # of this one endpoint, for this test
    try:
        if messages >= 0:
            take_part(one, operation)
    except Leaves:
        pass
    one.close()


@pytest.mark.parametrize("messages", [-1, 0], ids=["before it begins", "before it sends"])
@pytest.mark.parametrize("place", ["2x2", "3+1", "2x3", "3x2", "2+1+2"])
def test_a_rank_that_goes_is_named_by_everybody(place: str, messages: int) -> None:
    """Whichever it is, whoever waits for it or for somebody who does."""
    hosts = PLACEMENTS[place]
    operation = Operation("all_reduce", 1000)
    rails = min(map(hosts.count, hosts))
    with Ranks("hybrid", len(hosts), hosts) as ranks:
        for leaver in range(len(hosts)):
            if messages == 0 and hosts[:leaver].count(hosts[leaver]) >= rails:
                continue  # it sends nothing
            ranks.renew()

            def job(one: Communicator, leaver: int = leaver) -> Any:
                return leave(one, operation, messages) if one.rank == leaver else take_part(one, operation)

            found = outcomes(ranks.start(job))
            for rank, error in enumerate(found):
                if rank != leaver:
                    assert isinstance(error, PeerLost), f"rank {rank}, without {leaver}: {error!r}"
                    assert f"rank {leaver} at " in str(error), f"rank {rank}, without {leaver}: {error}"
                    assert str(error).startswith(f"rank {rank}: ")
                    assert str(error).endswith(f", in {operation}")


@pytest.mark.parametrize("place", ["2x2", "3+1"])
def test_the_next_generation_works_where_the_last_one_broke(place: str) -> None:
    hosts = PLACEMENTS[place]
    operation = Operation("all_reduce", 1000)

    def broken(one: Communicator, leaver: int) -> None:
        if one.rank == leaver:
            leave(one, operation, -1)
        else:
            take_part(one, operation)

    def whole(one: Communicator) -> float:
        result = np.zeros(1000, np.float32)
        one.run(operation, np.full(1000, one.rank, np.float32), result, LONG_S)
        return float(result.sum())

    with Ranks("hybrid", len(hosts), hosts) as ranks:
        for leaver in range(len(hosts)):
            outcomes(ranks.start(partial(broken, leaver=leaver)))
            ranks.renew()
            assert ranks.run(whole) == [1000.0 * sum(range(len(hosts)))] * len(hosts)


def test_a_rank_that_never_comes_is_named_by_its_number_in_the_whole(tmp_path: Path) -> None:
    hosts = PLACEMENTS["2x2"]
    with Ranks("hybrid", 4, hosts) as ranks:
        operation = Operation("all_reduce", 1000)

        def job(one: Communicator) -> Any:
            return take_part(one, operation, timeout=0.3) if one.rank != 3 else None

        found = outcomes(ranks.start(job))
        assert "rank 2: waiting for rank 3 at" in str(found[2]), found[2]


@over_placements("2x2")
def test_a_case_in_place_over_hosts(ranks: Ranks) -> None:
    rng = np.random.default_rng(3)
    operation = Operation("all_reduce", 17, algorithm="hierarchical")
    sources = [inputs(rng, "sum", operation.dtype, 17) for _ in range(4)]
    run(ranks, [prepare(Case(operation, in_place=True), sources)])
