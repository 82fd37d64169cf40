"""Ranks whose collectives do not match: an error at every rank, at once, that names both calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ranks import LONG_S, URIS, Ranks, endpoints_of, outcomes, uri_of

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.shard_tree import merge_plan
from hoop.errors import CollectiveMismatch
from hoop.memory import Arena, dtype
from hoop.servers.operation_runner import OperationRunner
from hoop.topology import Address, DeviceInfo
from hoop.transport import Transport, open_transport
from hoop.transport.hybrid import HybridEndpoint, HybridTransport
from hoop.transport.shm_listener import ShmTransport
from hoop.transport.tcp_endpoint import TcpEndpoint
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import device_message

SMALL, LARGE = 5, 300_000
"""Elements: within one message or slot; and more than a stage, or what a socket takes at once."""


def cases(count: int, size: int) -> dict[str, tuple[Operation, Operation]]:
    """What all ranks but one call, and what that one calls."""
    sums = Operation("all_reduce", count)
    given = Operation("broadcast", count)
    return {
        "count": (sums, replace(sums, count=count + 1)),
        "no elements": (sums, replace(sums, count=0)),
        "float64": (sums, replace(sums, dtype=dtype("float64"))),
        "int32": (sums, replace(sums, dtype=dtype("int32"))),
        "max": (sums, replace(sums, op="max")),
        "broadcast": (sums, replace(given, count=count + 1, root=1)),
        "all_reduce": (given, sums),
        "root": (given, replace(given, root=size - 1)),
        "reduce root": (Operation("reduce", count), Operation("reduce", count, root=1)),
        "gather": (Operation("gather", count, root=1), Operation("scatter", count, root=1)),
        "all_gather count": (Operation("all_gather", count), Operation("all_gather", count + 1)),
        "barrier": (Operation("barrier"), sums),
        "algorithm": (sums, replace(sums, algorithm="naive")),
        "compression": (sums, replace(sums, compression="int8")),
    }


def call(one: Communicator, operation: Operation) -> None:
    """Runs it on new buffers."""
    given, taken = operation.extents(one.size, one.rank)
    source, destination = np.ones(given, operation.dtype.numpy), np.ones(taken, operation.dtype.numpy)
    one.run(operation, source, destination, LONG_S)


def assert_named(errors: Sequence[object], odd: int, usual: object, unusual: object) -> None:
    """Every rank has failed with both calls."""
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveMismatch), f"{usual} / {unusual}: rank {rank}: {error!r}"
        assert f"rank {odd}: {unusual};" in str(error), str(error)
        assert f": {usual};" in str(error), str(error)


@pytest.fixture
def made() -> Iterator[Callable[..., Ranks]]:
    every: list[Ranks] = []

    def make(*args: object) -> Ranks:
        every.append(Ranks(*args))  # type: ignore[arg-type]
        return every[-1]

    yield make
    for one in every:
        one.close()


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_names_both_calls(made: Callable[..., Ranks], scheme: str, size: int, count: int) -> None:
    ranks = made(scheme, size)
    for index, (usual, unusual) in enumerate(cases(count, size).values()):
        odd = index % size
        errors = outcomes(
            ranks.start(lambda one: call(one, unusual if one.rank == odd else usual))  # noqa: B023
        )
        assert_named(errors, odd, usual, unusual)
        ranks.renew()


@pytest.mark.parametrize("algorithm", [*CATALOG["all_reduce"].algorithms, "flat", "staged"])
def test_every_algorithm_compares(made: Callable[..., Ranks], scheme: str, algorithm: str) -> None:
    if algorithm in CATALOG["all_reduce"].shared and scheme != "shm":
        pytest.skip("only where ranks share memory")
    ranks = made(scheme, 3)
    for count in (SMALL, 4000):
        usual = Operation("all_reduce", count, algorithm=algorithm)
        unusual = replace(usual, op="max")
        errors = outcomes(ranks.start(lambda one: call(one, unusual if one.rank else usual)))  # noqa: B023
        for rank, error in enumerate(errors):
            assert isinstance(error, CollectiveMismatch), f"rank {rank}: {error!r}"
            assert f"rank 0: {usual};" in str(error)
            assert f": {unusual};" in str(error)
        ranks.renew()


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 0), (0, 0, 0, 1)], ids=str)
def test_ranks_on_several_hosts(made: Callable[..., Ranks], hosts: tuple[int, ...]) -> None:
    """The odd one is on a host with others, or alone; it uses shared memory, links, or both."""
    ranks = made("hybrid", 4, hosts)
    every = cases(SMALL, 4)
    for name in ("count", "broadcast", "root", "gather", "no elements"):
        usual, unusual = every[name]
        for odd in range(4):
            errors = outcomes(
                ranks.start(lambda one: call(one, unusual if one.rank == odd else usual))  # noqa: B023
            )
            assert_named(errors, odd, usual, unusual)
            ranks.renew()


def test_a_communicator_is_over_and_a_new_one_works(made: Callable[..., Ranks], scheme: str) -> None:
    ranks = made(scheme, 3)
    usual, unusual = cases(SMALL, 3)["count"]
    outcomes(ranks.start(lambda one: call(one, unusual if one.rank == 1 else usual)))
    for operation in (usual, Operation("barrier")):
        again = outcomes(ranks.start(lambda one: call(one, operation)))  # noqa: B023
        assert_named(again, 1, usual, unusual)
    started = [one.start(usual, np.ones(SMALL, np.float32), np.ones(SMALL, np.float32), LONG_S)
               for one in ranks.communicators]  # fmt: skip
    for handle in started:
        with pytest.raises(CollectiveMismatch, match="rank 1: "):
            handle.wait(LONG_S)
    ranks.renew()
    ranks.run(lambda one: call(one, usual))


def test_operations_that_were_started(made: Callable[..., Ranks], scheme: str) -> None:
    """In the second of two; the third fails with it."""
    ranks = made(scheme, 2)
    usual, unusual = cases(SMALL, 2)["max"]

    def job(one: Communicator) -> list[object]:
        vector = np.ones(SMALL, np.float32)
        handles = [
            one.start(unusual if one.rank and index == 1 else usual, vector, vector, LONG_S) for index in range(3)
        ]
        return outcomes(_Waited(handle) for handle in handles)  # type: ignore[misc]

    for first, second, third in ranks.run(job):
        assert not isinstance(first, Exception)
        assert_named([second], 1, usual, unusual)
        assert isinstance(third, CollectiveMismatch)
        assert "was not run" in str(third)


class _Waited:
    """A handle as ``outcomes`` wants it."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def result(self, timeout: float) -> object:
        return self._handle.wait(timeout)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
def test_prepared_operations(made: Callable[..., Ranks], scheme: str, count: int) -> None:
    """Prepared alike and called in another order."""
    ranks = made(scheme, 3)
    usual, unusual = cases(count, 3)["max"]

    def job(one: Communicator) -> None:
        vector = np.ones(count, np.float32)
        first, second = (one.prepare(operation, vector, vector) for operation in (usual, unusual))
        (second if one.rank == 2 else first)(time.monotonic() + LONG_S)

    assert_named(outcomes(ranks.start(job)), 2, usual, unusual)


def test_ordered_sums(made: Callable[..., Ranks], scheme: str) -> None:
    """Two sums over different elements, called in another order by one rank."""
    ranks = made(scheme, 2)
    holdings = [merge_plan([0], 2), merge_plan([1], 2)]

    def job(one: Communicator) -> None:
        slots, room = np.ones((1, 10), np.float32), np.ones(10, np.float32)
        deadline = time.monotonic() + LONG_S
        sums = [OrderedAllReduce(one, holdings, 2, slots, room, deadline, span) for span in ((0, 5), (5, 10))]
        sums[one.rank](deadline)

    for error in outcomes(ranks.start(job)):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 0: ordered all_reduce of 10 float32, elements 0 to 5, of shards 0 | 1;" in str(error)
        assert "rank 1: ordered all_reduce of 10 float32, elements 5 to 10, of shards 0 | 1;" in str(error)


@pytest.mark.parametrize("scheme", ["shm", "hybrid"])
def test_vectors_in_arenas(tmp_path: Path, scheme: str) -> None:
    """Where every rank reads and writes the others' memory: run, prepared, and prepared in another order."""
    count, hosts = 4000, (0, 0, 1, 1)
    usual = Operation("all_reduce", count)
    unusual = replace(usual, op="max")

    def outcome_of(job: Callable[[Communicator, np.ndarray], None], name: str) -> list[object]:
        with ExitStack() as opened:
            arenas = [opened.enter_context(Arena.create(tmp_path / f"{name}{rank}", 1 << 20)) for rank in range(4)]
            transports: list[Transport] = []
            for rank, arena in enumerate(arenas):
                address = Address.parse(uri_of("hybrid", rank, hosts).removeprefix("hybrid://"))
                made = HybridTransport(address, arena) if scheme == "hybrid" else ShmTransport(address, arena)
                transports.append(opened.enter_context(made))
            ones = [Communicator(endpoint) for endpoint in endpoints_of(transports)]
            for one in ones:
                opened.callback(one.close)
            threads = opened.enter_context(ThreadPoolExecutor(4))
            vectors = [arena.array(arena.min_address, dtype("float32"), count) for arena in arenas]
            return outcomes([threads.submit(job, *both) for both in zip(ones, vectors, strict=True)])

    def run(one: Communicator, vector: np.ndarray) -> None:
        one.run(unusual if one.rank == 3 else usual, vector, vector, LONG_S)

    def prepared(one: Communicator, vector: np.ndarray) -> None:
        first, second = (one.prepare(operation, vector, vector) for operation in (usual, unusual))
        (second if one.rank == 3 else first)(time.monotonic() + LONG_S)

    assert_named(outcome_of(run, "run"), 3, usual, unusual)
    assert_named(outcome_of(prepared, "prepared"), 3, usual, unusual)


def test_a_launch_with_different_operations(tmp_path: Path) -> None:
    """Devices compare what a coordinator launches: a client's operation or a lab's reaches every device as one request,
    and if it did not, they would say so."""
    with ExitStack() as opened:
        arenas = [opened.enter_context(Arena.create(tmp_path / str(rank), 1 << 20)) for rank in range(2)]
        links = [opened.enter_context(open_transport(URIS["tcp"])) for _ in range(2)]
        runners = [OperationRunner(arena, link, None) for arena, link in zip(arenas, links, strict=True)]
        for runner in runners:
            opened.callback(runner.close)
        members = [
            device_message(
                DeviceInfo(
                    rank,
                    link.address,
                    link.address,
                    arena.min_address,
                    arena.max_address,
                    "here",
                    1,
                    f"it{rank}",
                )
            )
            for rank, (arena, link) in enumerate(zip(arenas, links, strict=True))
        ]

        def request(rank: int, op: str) -> pb.LaunchRequest:
            operation = pb.Operation(collective="all_reduce", algorithm="ring", dtype="float64", op=op, count=8)
            place = pb.Location(address=arenas[rank].min_address)
            seat = pb.RankAssignment(communicator_id=1, generation=1, rank=rank, members=members)
            work = pb.LaunchOperation(operation=operation, operand=pb.Operand(source=place))
            return pb.LaunchRequest(assignment=seat, operations=[work], timeout_s=LONG_S)

        async def launch() -> list[object]:
            launches = [runner.launch(request(rank, ("sum", "max")[rank])) for rank, runner in enumerate(runners)]
            return await asyncio.gather(*launches, return_exceptions=True)

        errors = asyncio.run(launch())
    assert_named(errors, 1, "all_reduce sum of 8 float64 by ring", "all_reduce max of 8 float64 by ring")


@pytest.mark.parametrize("scheme", ["tcp", "hybrid"])
def test_a_rank_that_comes_late(made: Callable[..., Ranks], scheme: str) -> None:
    """Those who wait for it ask more than once, though nothing that it sends would reach them."""
    ranks = made(scheme, 2)
    usual, unusual = Operation("broadcast", SMALL, root=1), Operation("broadcast", SMALL, root=0)
    asked = threading.Event()
    endpoint = ranks.communicators[0].endpoint
    links = endpoint._links.endpoint if isinstance(endpoint, HybridEndpoint) else endpoint
    assert isinstance(links, TcpEndpoint)
    answered = links.call_check._query

    def answer_of(*question: object) -> object:
        answer = answered(*question)  # type: ignore[arg-type]
        asked.set()
        return answer

    links.call_check._query = answer_of  # type: ignore[assignment, method-assign]

    def job(one: Communicator) -> None:
        if one.rank:
            assert asked.wait(LONG_S)
        call(one, unusual if one.rank else usual)

    assert_named(outcomes(ranks.start(job)), 1, usual, unusual)


def test_a_rank_that_was_told_tells_the_others(made: Callable[..., Ranks]) -> None:
    """It may end before the rank that told it has come to them, and they would see a lost peer."""
    links = [one.endpoint for one in made("tcp", 3).communicators]
    assert all(isinstance(one, TcpEndpoint) for one in links)
    informed, _, other = (one.call_check for one in links if isinstance(one, TcpEndpoint))
    informed.receive_report(1, "rank 1: one operation; rank 2: another")
    assert informed._mismatch is not None
    links[0].broadcast_mismatch(informed._mismatch[1])
    assert other._mismatch is not None
    assert str(other._mismatch[1]) == "rank 1: one operation; rank 2: another"


def test_a_rank_that_is_not_there_yet_finds_the_mismatch_when_it_comes() -> None:
    """Those who found it may have ended by then."""
    with ExitStack() as opened:
        transports = [open_transport(URIS["tcp"]) for _ in range(2)]
        for transport in transports:
            opened.callback(transport.close)
        peers = [transport.address for transport in transports]
        first = Communicator(transports[0].endpoint(1, 1, 0, peers))
        first.endpoint.broadcast_mismatch(CollectiveMismatch("rank 0: one operation; rank 1: another"))
        first.close()
        transports[0].close()
        second = Communicator(transports[1].endpoint(1, 1, 1, peers))
        opened.callback(second.close)
        with pytest.raises(CollectiveMismatch, match="one operation"):
            call(second, Operation("all_reduce", SMALL))
