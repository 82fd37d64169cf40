"""Ranks that call different collectives: every rank fails at once with an error that names both calls."""

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
from ranks import LONG_S, SHARED_MEMORY, URIS, Ranks, endpoints_of, outcomes, uri_of

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
"""Elements: within one message or slot; and more than a window holds or a socket takes at once."""


def cases(count: int, size: int) -> dict[str, tuple[Operation, Operation]]:
    """The call of all ranks but one, and the call of that one."""
    all_reduce = Operation("all_reduce", count)
    broadcast = Operation("broadcast", count)
    return {
        "count": (all_reduce, replace(all_reduce, count=count + 1)),
        "no elements": (all_reduce, replace(all_reduce, count=0)),
        "float64": (all_reduce, replace(all_reduce, dtype=dtype("float64"))),
        "int32": (all_reduce, replace(all_reduce, dtype=dtype("int32"))),
        "max": (all_reduce, replace(all_reduce, op="max")),
        "broadcast": (all_reduce, replace(broadcast, count=count + 1, root=1)),
        "all_reduce": (broadcast, all_reduce),
        "root": (broadcast, replace(broadcast, root=size - 1)),
        "reduce root": (Operation("reduce", count), Operation("reduce", count, root=1)),
        "gather": (Operation("gather", count, root=1), Operation("scatter", count, root=1)),
        "all_gather count": (Operation("all_gather", count), Operation("all_gather", count + 1)),
        "barrier": (Operation("barrier"), all_reduce),
        "algorithm": (all_reduce, replace(all_reduce, algorithm="naive")),
        "compression": (all_reduce, replace(all_reduce, compression="int8")),
    }


def call(comm: Communicator, operation: Operation) -> None:
    """Runs the operation on new buffers."""
    source_size, destination_size = operation.extents(comm.size, comm.rank)
    source, destination = np.ones(source_size, operation.dtype.numpy), np.ones(destination_size, operation.dtype.numpy)
    comm.run(operation, source, destination, LONG_S)


def assert_named(errors: Sequence[object], odd: int, usual: object, unusual: object) -> None:
    """Every rank has failed with an error that names both calls."""
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveMismatch), f"{usual} / {unusual}: rank {rank}: {error!r}"
        assert f"rank {odd}: {unusual};" in str(error), str(error)
        assert f": {usual};" in str(error), str(error)


@pytest.fixture
def make_ranks() -> Iterator[Callable[..., Ranks]]:
    created: list[Ranks] = []

    def make(*args: object) -> Ranks:
        created.append(Ranks(*args))  # type: ignore[arg-type]
        return created[-1]

    yield make
    for group in created:
        group.close()


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_names_both_calls(make_ranks: Callable[..., Ranks], scheme: str, size: int, count: int) -> None:
    ranks = make_ranks(scheme, size)
    for index, (usual, unusual) in enumerate(cases(count, size).values()):
        odd = index % size
        errors = outcomes(
            ranks.start(lambda comm: call(comm, unusual if comm.rank == odd else usual))  # noqa: B023
        )
        assert_named(errors, odd, usual, unusual)
        ranks.next_generation()


@pytest.mark.parametrize("algorithm", [*CATALOG["all_reduce"].algorithms, "flat", "staged"])
def test_every_algorithm_detects_a_mismatch(make_ranks: Callable[..., Ranks], scheme: str, algorithm: str) -> None:
    if algorithm in CATALOG["all_reduce"].shared and scheme not in SHARED_MEMORY:
        pytest.skip("only where ranks share memory")
    ranks = make_ranks(scheme, 3)
    for count in (SMALL, 4000):
        usual = Operation("all_reduce", count, algorithm=algorithm)
        unusual = replace(usual, op="max")
        errors = outcomes(ranks.start(lambda comm: call(comm, unusual if comm.rank else usual)))  # noqa: B023
        for rank, error in enumerate(errors):
            assert isinstance(error, CollectiveMismatch), f"rank {rank}: {error!r}"
            assert f"rank 0: {usual};" in str(error)
            assert f": {unusual};" in str(error)
        ranks.next_generation()


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 0), (0, 0, 0, 1)], ids=str)
def test_ranks_on_several_hosts_name_both_calls(make_ranks: Callable[..., Ranks], hosts: tuple[int, ...]) -> None:
    """The odd rank shares its host with others or is alone; it uses shared memory, links or both."""
    ranks = make_ranks("hybrid", 4, hosts)
    all_cases = cases(SMALL, 4)
    for name in ("count", "broadcast", "root", "gather", "no elements"):
        usual, unusual = all_cases[name]
        for odd in range(4):
            errors = outcomes(
                ranks.start(lambda comm: call(comm, unusual if comm.rank == odd else usual))  # noqa: B023
            )
            assert_named(errors, odd, usual, unusual)
            ranks.next_generation()


def test_after_a_mismatch_the_communicator_fails_and_a_new_one_works(
    make_ranks: Callable[..., Ranks], scheme: str
) -> None:
    ranks = make_ranks(scheme, 3)
    usual, unusual = cases(SMALL, 3)["count"]
    outcomes(ranks.start(lambda comm: call(comm, unusual if comm.rank == 1 else usual)))
    for operation in (usual, Operation("barrier")):
        again = outcomes(ranks.start(lambda comm: call(comm, operation)))  # noqa: B023
        assert_named(again, 1, usual, unusual)
    handles = [comm.start(usual, np.ones(SMALL, np.float32), np.ones(SMALL, np.float32), LONG_S)
               for comm in ranks.communicators]  # fmt: skip
    for handle in handles:
        with pytest.raises(CollectiveMismatch, match="rank 1: "):
            handle.wait(LONG_S)
    ranks.next_generation()
    ranks.run(lambda comm: call(comm, usual))


def test_a_mismatch_of_started_operations(make_ranks: Callable[..., Ranks], scheme: str) -> None:
    """The second of three operations differs; the third fails with it."""
    ranks = make_ranks(scheme, 2)
    usual, unusual = cases(SMALL, 2)["max"]

    def worker(comm: Communicator) -> list[object]:
        vector = np.ones(SMALL, np.float32)
        handles = [
            comm.start(unusual if comm.rank and index == 1 else usual, vector, vector, LONG_S) for index in range(3)
        ]
        return outcomes(_HandleAsFuture(handle) for handle in handles)  # type: ignore[misc]

    for first, second, third in ranks.run(worker):
        assert not isinstance(first, Exception)
        assert_named([second], 1, usual, unusual)
        assert isinstance(third, CollectiveMismatch)
        assert "was not run" in str(third)


class _HandleAsFuture:
    """Adapts a handle to ``outcomes``."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def result(self, timeout: float) -> object:
        return self._handle.wait(timeout)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [SMALL, LARGE], ids=["small", "large"])
def test_a_mismatch_of_prepared_operations(make_ranks: Callable[..., Ranks], scheme: str, count: int) -> None:
    """All ranks prepare the same two operations; one rank calls the second first."""
    ranks = make_ranks(scheme, 3)
    usual, unusual = cases(count, 3)["max"]

    def worker(comm: Communicator) -> None:
        vector = np.ones(count, np.float32)
        first, second = (comm.prepare(operation, vector, vector) for operation in (usual, unusual))
        (second if comm.rank == 2 else first)(time.monotonic() + LONG_S)

    assert_named(outcomes(ranks.start(worker)), 2, usual, unusual)


def test_a_mismatch_of_ordered_all_reduces(make_ranks: Callable[..., Ranks], scheme: str) -> None:
    """Two sums over different elements; the ranks call them in different order."""
    ranks = make_ranks(scheme, 2)
    holdings = [merge_plan([0], 2), merge_plan([1], 2)]

    def worker(comm: Communicator) -> None:
        slots, buffer = np.ones((1, 10), np.float32), np.ones(10, np.float32)
        deadline = time.monotonic() + LONG_S
        sums = [OrderedAllReduce(comm, holdings, 2, slots, buffer, deadline, span) for span in ((0, 5), (5, 10))]
        sums[comm.rank](deadline)

    for error in outcomes(ranks.start(worker)):
        assert isinstance(error, CollectiveMismatch)
        assert "rank 0: ordered all_reduce of 10 float32, elements 0 to 5, of shards 0 | 1;" in str(error)
        assert "rank 1: ordered all_reduce of 10 float32, elements 5 to 10, of shards 0 | 1;" in str(error)


@pytest.mark.parametrize("scheme", ["shm", "hybrid"])
def test_a_mismatch_of_vectors_in_arenas(tmp_path: Path, scheme: str) -> None:
    """Ranks access each other's memory: a plain run, and prepared operations called in different order."""
    count, hosts = 4000, (0, 0, 1, 1)
    usual = Operation("all_reduce", count)
    unusual = replace(usual, op="max")

    def outcome_of(worker: Callable[[Communicator, np.ndarray], None], name: str) -> list[object]:
        with ExitStack() as opened:
            arenas = [opened.enter_context(Arena.create(tmp_path / f"{name}{rank}", 1 << 20)) for rank in range(4)]
            transports: list[Transport] = []
            for rank, arena in enumerate(arenas):
                address = Address.parse(uri_of("hybrid", rank, hosts).removeprefix("hybrid://"))
                transport = HybridTransport(address, arena) if scheme == "hybrid" else ShmTransport(address, arena)
                transports.append(opened.enter_context(transport))
            communicators = [Communicator(endpoint) for endpoint in endpoints_of(transports)]
            for comm in communicators:
                opened.callback(comm.close)
            threads = opened.enter_context(ThreadPoolExecutor(4))
            vectors = [arena.array(arena.min_address, dtype("float32"), count) for arena in arenas]
            return outcomes([threads.submit(worker, *both) for both in zip(communicators, vectors, strict=True)])

    def run(comm: Communicator, vector: np.ndarray) -> None:
        comm.run(unusual if comm.rank == 3 else usual, vector, vector, LONG_S)

    def prepared(comm: Communicator, vector: np.ndarray) -> None:
        first, second = (comm.prepare(operation, vector, vector) for operation in (usual, unusual))
        (second if comm.rank == 3 else first)(time.monotonic() + LONG_S)

    assert_named(outcome_of(run, "run"), 3, usual, unusual)
    assert_named(outcome_of(prepared, "prepared"), 3, usual, unusual)


def test_a_launch_with_different_operations(tmp_path: Path) -> None:
    """A launch sends one request to all devices; should the requests ever differ, the devices report a mismatch."""
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
            location = pb.Location(address=arenas[rank].min_address)
            assignment = pb.RankAssignment(communicator_id=1, generation=1, rank=rank, members=members)
            work = pb.LaunchOperation(operation=operation, operand=pb.Operand(source=location))
            return pb.LaunchRequest(assignment=assignment, operations=[work], timeout_s=LONG_S)

        async def launch() -> list[object]:
            launches = [runner.launch(request(rank, ("sum", "max")[rank])) for rank, runner in enumerate(runners)]
            return await asyncio.gather(*launches, return_exceptions=True)

        errors = asyncio.run(launch())
    assert_named(errors, 1, "all_reduce sum of 8 float64 by ring", "all_reduce max of 8 float64 by ring")


@pytest.mark.parametrize("scheme", ["tcp", "hybrid"])
def test_a_mismatch_with_a_rank_that_calls_late(make_ranks: Callable[..., Ranks], scheme: str) -> None:
    """The waiting rank repeats its query, because the late rank would never send it a message."""
    ranks = make_ranks(scheme, 2)
    usual, unusual = Operation("broadcast", SMALL, root=1), Operation("broadcast", SMALL, root=0)
    queried = threading.Event()
    endpoint = ranks.communicators[0].endpoint
    links = endpoint._links.endpoint if isinstance(endpoint, HybridEndpoint) else endpoint
    assert isinstance(links, TcpEndpoint)
    query = links.call_check._query

    def recorded_query(*arguments: object) -> object:
        answer = query(*arguments)  # type: ignore[arg-type]
        queried.set()
        return answer

    links.call_check._query = recorded_query  # type: ignore[assignment, method-assign]

    def worker(comm: Communicator) -> None:
        if comm.rank:
            assert queried.wait(LONG_S)
        call(comm, unusual if comm.rank else usual)

    assert_named(outcomes(ranks.start(worker)), 1, usual, unusual)


def test_a_rank_forwards_a_reported_mismatch(make_ranks: Callable[..., Ranks]) -> None:
    """It may exit before the reporting rank reaches the others, which would then see a lost peer."""
    links = [comm.endpoint for comm in make_ranks("tcp", 3).communicators]
    assert all(isinstance(endpoint, TcpEndpoint) for endpoint in links)
    informed, _, other = (endpoint.call_check for endpoint in links if isinstance(endpoint, TcpEndpoint))
    informed.receive_report(1, "rank 1: one operation; rank 2: another")
    assert informed._mismatch is not None
    links[0].broadcast_mismatch(informed._mismatch[1])
    assert other._mismatch is not None
    assert str(other._mismatch[1]) == "rank 1: one operation; rank 2: another"


def test_a_rank_that_connects_later_learns_of_the_mismatch() -> None:
    """The ranks that found it may have exited by then."""
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
