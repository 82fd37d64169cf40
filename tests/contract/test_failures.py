"""When a rank leaves during a collective, every other rank promptly fails with an error that names a peer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from exchange import wait_until, wait_until_running
from ranks import LONG_S, PROMPT_S, SHARED_MEMORY, URIS, Ranks, deadline_in, endpoints_of, outcomes

from hoop.collectives.communicator import Communicator, Report
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, HoopError, MembershipChanged, PeerError, PeerLost
from hoop.transport import open_transport
from hoop.transport.shm_endpoint import ShmEndpoint

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical

N, COUNT = 4, 1000


def run_or_close(comm: Communicator, operation: Operation, timeout: float = LONG_S) -> Report:
    """Runs the operation as a device does: on an error it closes its links, so that no peer waits for it."""
    try:
        return comm.run(operation, np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32), timeout)
    except HoopError:
        comm.close()
        raise


def run_rounds_and_close(rounds: int, comm: Communicator, operation: Operation) -> None:
    source, destination = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    for index in range(rounds):
        comm.run(operation, source, destination, LONG_S, round_index=index)
    comm.close()


def failures(futures: list[Future[Report | None]], without: int) -> dict[int, HoopError]:
    """The errors of all ranks except the one that left; each must fail promptly."""
    found = outcomes(futures)
    errors = {rank: error for rank, error in enumerate(found) if rank != without and isinstance(error, HoopError)}
    assert set(errors) == set(range(len(futures))) - {without}, f"not everyone failed: {found}"
    return errors


def assert_located(rank: int, error: HoopError, operation: Operation) -> int:
    """Checks that the message names a peer, the instruction and the operation; returns the peer."""
    assert isinstance(error, PeerError), repr(error)
    found = re.fullmatch(
        rf"rank {rank}: rank (\d) at \S+ .*"
        rf", at instruction (\d+) of (\d+) of {re.escape(str(operation))}",
        str(error),
    )
    assert found, str(error)
    peer, index, total = map(int, found.groups())
    assert 1 <= index <= total
    assert total == len(list(operation.plan(N, rank)))
    return peer


@pytest.fixture
def four(scheme: str) -> Iterator[Ranks]:
    with Ranks(scheme, N) as ranks:
        yield ranks


@pytest.mark.parametrize("leaver", range(N), ids="rank {} leaves".format)
@pytest.mark.parametrize("rounds", range(N), ids="after {} rounds".format)
def test_every_rank_fails_when_a_rank_leaves_a_ring(four: Ranks, leaver: int, rounds: int) -> None:
    """After at most n-1 rounds no rank can have finished: the last in the ring still waits for a message."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")

    def worker(comm: Communicator) -> Report | None:
        if comm.rank == leaver:
            run_rounds_and_close(rounds, comm, operation)
            return None
        return run_or_close(comm, operation)

    errors = failures(four.start(worker), without=leaver)
    blamed = {rank: assert_located(rank, error, operation) for rank, error in errors.items()}
    next_rank = (leaver + 1) % N
    # The next rank names the leaver, or its own next rank if that one failed first. Ranks that share memory start with
    # a barrier, where the error may name any rank that failed.
    assert four.scheme in SHARED_MEMORY or blamed[next_rank] in {leaver, (leaver + 2) % N}
    assert leaver in blamed.values()


@pytest.mark.parametrize("leaver", range(N), ids="rank {} leaves".format)
@pytest.mark.parametrize("algorithm", ["chunked_ring", "naive", "tree"])
def test_every_rank_fails_when_a_rank_does_not_contribute(four: Ranks, leaver: int, algorithm: str) -> None:
    operation = Operation("all_reduce", COUNT, algorithm=algorithm, chunk_bytes=256)

    def worker(comm: Communicator) -> Report | None:
        if comm.rank == leaver:
            run_rounds_and_close(0, comm, operation)
            return None
        return run_or_close(comm, operation)

    for rank, error in failures(four.start(worker), without=leaver).items():
        assert_located(rank, error, operation)


def test_ranks_fail_when_a_peer_leaves_before_it_connects(scheme: str) -> None:
    """It closes before the first operation, without having dialled a peer."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")
    with ExitStack() as opened:
        transports = [opened.enter_context(open_transport(URIS[scheme])) for _ in range(3)]
        threads = opened.enter_context(ThreadPoolExecutor(3))
        communicators = [Communicator(endpoint) for endpoint in endpoints_of(transports)]
        for communicator in communicators:
            opened.callback(communicator.close)
        communicators[2].close()
        waiting = [threads.submit(run_or_close, comm, operation) for comm in communicators[:2]]
        for error in outcomes(waiting):
            assert isinstance(error, PeerLost), repr(error)


def wait_until_begun(comm: Communicator, ranks: Sequence[int]) -> None:
    """Returns when these ranks have entered the first barrier of an operation, or sent their first message here."""
    endpoint = comm.endpoint
    if isinstance(endpoint, ShmEndpoint):
        counts, own = endpoint._barrier_counts, int(endpoint._own_barrier_count[0])
        wait_until(lambda: all(int(counts[rank][0]) > own for rank in ranks), "the others in their barrier")
        return
    for rank in ranks:
        while not endpoint.wait_readable([rank], deadline_in()):
            pass


def test_a_rank_that_does_not_call_is_named(four: Ranks) -> None:
    operation = Operation("all_reduce", COUNT, algorithm="naive")

    def worker(comm: Communicator) -> Report | None:
        if comm.rank == 0:
            wait_until_begun(comm, (1, 3))  # else it could name one of them at its deadline
        return run_or_close(comm, operation, timeout=0.2 if comm.rank == 0 else LONG_S) if comm.rank != 2 else None

    errors = failures(four.start(worker), without=2)
    assert isinstance(errors[0], DeadlineExceeded)
    assert re.match(r"rank 0: waiting for rank 2 at \S+ passed its deadline", str(errors[0]))
    # Ranks that share memory wait in the first barrier, the others when the message is due, or when they connect.
    index = "1" if four.scheme in SHARED_MEMORY else "[13]"
    assert re.search(rf", at instruction {index} of 8 of {operation}", str(errors[0])), errors[0]
    # A rank in a barrier notices any rank that leaves: rank 0, or the other one, which failed because of it.
    for rank, other in ((1, 3), (3, 1)):
        gone = (0, other) if four.scheme in SHARED_MEMORY else (0,)
        assert assert_located(rank, errors[rank], operation) in gone


def suspended(comm: Communicator, operation: Operation, vector: Array) -> Callable[[], None]:
    """Enters the first barrier of the operation; returns the function that goes on with it."""
    resume = comm.prepared(operation).try_run(vector, vector, time.monotonic(), deadline_in())
    assert resume is not None, "the other ranks have not come"
    return resume


def sees_a_loss(comm: Communicator) -> bool:
    try:
        comm.endpoint.raise_failure()
    except PeerLost:
        return True
    return False


@pytest.mark.parametrize("scheme", SHARED_MEMORY)
def test_an_operation_that_every_rank_has_entered_completes_though_one_has_left(scheme: str) -> None:
    """Rank 1 finishes it and leaves before rank 0, which has no processor, goes on; only the next one fails."""
    with Ranks(scheme, 2) as ranks:
        operation = Operation("all_reduce", 4)
        vectors = [np.full(4, rank + 1, np.float32) for rank in range(2)]
        ranks.run(lambda comm: comm.run(operation, vectors[comm.rank].copy(), vectors[comm.rank].copy(), LONG_S))
        first, second = ranks.communicators
        resume = suspended(first, operation, vectors[0])
        second.run(operation, vectors[1], vectors[1], LONG_S)
        second.close()
        wait_until(lambda: sees_a_loss(first), "rank 0 sees that rank 1 has left")
        resume()
        assert vectors[0].tolist() == [3.0] * 4
        with pytest.raises(PeerLost, match="rank 0: rank 1 at "):
            first.run(operation, vectors[0], vectors[0], LONG_S)


@pytest.mark.parametrize("scheme", SHARED_MEMORY)
def test_an_operation_that_a_rank_has_not_entered_fails_when_it_is_resumed(scheme: str) -> None:
    with Ranks(scheme, 3) as ranks:
        operation, vector = Operation("all_reduce", 4), np.ones(4, np.float32)
        ranks.run(lambda comm: comm.run(operation, vector.copy(), vector.copy(), LONG_S))
        first, second, third = ranks.communicators
        resume, resume_other = (suspended(comm, operation, vector.copy()) for comm in (first, second))
        third.close()
        for comm, go_on in ((first, resume), (second, resume_other)):
            wait_until(partial(sees_a_loss, comm), "that rank 2 has left")
            started = time.monotonic()
            with pytest.raises(PeerLost, match="rank 2 at "):
                go_on()
            with pytest.raises(PeerLost, match="rank 2 at "):
                comm.run(operation, vector, vector, LONG_S)
            assert time.monotonic() - started < PROMPT_S


def test_an_abort_wakes_every_rank(four: Ranks) -> None:
    """As when the coordinator announces the next generation while devices wait for a dead one."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")
    reason = MembershipChanged("generation 2 begins without rank 3")

    def worker(comm: Communicator) -> Report | None:
        if comm.rank == 3:
            return None
        # No rank closes here: its neighbour could see the close before its own abort.
        return comm.run(operation, np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32), LONG_S)

    futures = four.start(worker)
    for future in futures:
        wait_until_running(future)
    started = time.monotonic()
    for communicator in four.communicators[:3]:
        communicator.endpoint.abort(reason)
    assert list(failures(futures, without=3).values()) == [reason] * 3
    assert time.monotonic() - started < PROMPT_S


def test_the_next_generation_works_after_a_failure(four: Ranks) -> None:
    operation = Operation("all_reduce", COUNT, algorithm="ring")

    def failing(comm: Communicator) -> Report | None:
        if comm.rank == 1:
            run_rounds_and_close(1, comm, operation)
            return None
        return run_or_close(comm, operation)

    def succeeding(comm: Communicator) -> float:
        destination = np.zeros(COUNT, np.float32)
        comm.run(operation, np.full(COUNT, comm.rank, np.float32), destination, LONG_S)
        return float(destination.sum())

    for _ in range(3):
        failures(four.start(failing), without=1)
        four.next_generation()
        assert four.run(succeeding) == [COUNT * sum(range(N))] * N
