"""When a rank goes in the middle of a collective, the others learn of it: promptly, and by name."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from exchange import until_started
from ranks import LONG_S, PROMPT_S, SHARED, URIS, Ranks, endpoints_of, outcomes

from hoop.collectives.communicator import Communicator, Report
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, HoopError, MembershipChanged, PeerError, PeerLost
from hoop.transport import open_transport

pytestmark = pytest.mark.slow_if(when=lambda params: params.get("scheme") == "hybrid")  # see test_hierarchical

N, COUNT = 4, 1000


def take_part(one: Communicator, operation: Operation, timeout: float = LONG_S) -> Report:
    """As a device does: whoever fails closes its links, so that nobody waits for it."""
    try:
        return one.run(operation, np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32), timeout)
    except HoopError:
        one.close()
        raise


def leave_after(rounds: int, one: Communicator, operation: Operation) -> None:
    """Takes part in the first rounds, and closes."""
    source, destination = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
    for index in range(rounds):
        one.run(operation, source, destination, LONG_S, round_index=index)
    one.close()


def failures(futures: list[Future[Report | None]], but: int) -> dict[int, HoopError]:
    """What every rank raised, promptly, but the one that left."""
    found = outcomes(futures)
    errors = {rank: error for rank, error in enumerate(found) if rank != but and isinstance(error, HoopError)}
    assert set(errors) == set(range(len(futures))) - {but}, f"not everyone failed: {found}"
    return errors


def assert_located(rank: int, error: HoopError, operation: Operation) -> int:
    """The message names the peer, which is returned, the instruction and the operation."""
    assert isinstance(error, PeerError), repr(error)
    found = re.fullmatch(
        rf"rank {rank}: rank (\d) at \S+ .*"
        rf", at instruction (\d+) of (\d+) of {re.escape(str(operation))}",
        str(error),
    )
    assert found, str(error)
    peer, at, of = map(int, found.groups())
    assert 1 <= at <= of
    assert of == len(list(operation.plan(N, rank)))
    return peer


@pytest.fixture
def four(scheme: str) -> Iterator[Ranks]:
    with Ranks(scheme, N) as made:
        yield made


@pytest.mark.parametrize("leaver", range(N), ids="rank {} leaves".format)
@pytest.mark.parametrize("rounds", range(N), ids="after {} rounds".format)
def test_a_rank_that_leaves_a_ring_is_missed_by_all(four: Ranks, leaver: int, rounds: int) -> None:
    """Up to n-1 rounds nobody can have finished: whoever comes last in the ring still waits for a message."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")

    def job(one: Communicator) -> Report | None:
        if one.rank == leaver:
            leave_after(rounds, one, operation)
            return None
        return take_part(one, operation)

    errors = failures(four.start(job), but=leaver)
    blamed = {rank: assert_located(rank, error, operation) for rank, error in errors.items()}
    after = (leaver + 1) % N
    # The neighbour misses the leaver, or finds that its own neighbour has already given up; ranks that share memory
    # meet before the first round, so there it may be any that has.
    assert four.scheme == "shm" or blamed[after] in {leaver, (leaver + 2) % N}
    assert leaver in blamed.values()


@pytest.mark.parametrize("leaver", range(N), ids="rank {} leaves".format)
@pytest.mark.parametrize("algorithm", ["chunked_ring", "naive", "tree"])
def test_a_rank_that_does_not_contribute_is_missed_by_all(four: Ranks, leaver: int, algorithm: str) -> None:
    operation = Operation("all_reduce", COUNT, algorithm=algorithm, chunk_bytes=256)

    def job(one: Communicator) -> Report | None:
        if one.rank == leaver:
            leave_after(0, one, operation)
            return None
        return take_part(one, operation)

    for rank, error in failures(four.start(job), but=leaver).items():
        assert_located(rank, error, operation)


def test_links_that_were_never_used_break_as_well(scheme: str) -> None:
    """The first operation of all, and a rank that leaves before it has dialled anyone."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")
    with ExitStack() as opened:
        transports = [opened.enter_context(open_transport(URIS[scheme])) for _ in range(3)]
        threads = opened.enter_context(ThreadPoolExecutor(3))
        communicators = [Communicator(endpoint) for endpoint in endpoints_of(transports)]
        for communicator in communicators:
            opened.callback(communicator.close)
        communicators[2].close()
        waiting = [threads.submit(take_part, one, operation, PROMPT_S / 2) for one in communicators[:2]]
        for error in outcomes(waiting):
            assert isinstance(error, PeerLost), repr(error)


def test_a_rank_that_never_comes_is_named(four: Ranks) -> None:
    operation = Operation("all_reduce", COUNT, algorithm="naive")

    def job(one: Communicator) -> Report | None:
        return take_part(one, operation, timeout=0.2 if one.rank == 0 else LONG_S) if one.rank != 2 else None

    errors = failures(four.start(job), but=2)
    assert isinstance(errors[0], DeadlineExceeded)
    assert re.match(r"rank 0: waiting for rank 2 at \S+ passed its deadline", str(errors[0]))
    # Ranks that share memory meet before the first message, the others miss it when its message is due.
    at = 1 if four.scheme in SHARED else 3
    assert f", at instruction {at} of 8 of {operation}" in str(errors[0])
    # Those that wait in a meeting see any rank go: rank 0, or the other one that gave up because of it.
    for rank, other in ((1, 3), (3, 1)):
        gone = (0, other) if four.scheme in SHARED else (0,)
        assert assert_located(rank, errors[rank], operation) in gone


def test_an_abort_wakes_every_rank(four: Ranks) -> None:
    """As when the coordinator announces the next generation while the devices wait for a dead one."""
    operation = Operation("all_reduce", COUNT, algorithm="ring")
    reason = MembershipChanged("generation 2 begins without rank 3")

    def job(one: Communicator) -> Report | None:
        if one.rank == 3:
            return None
        # Nobody closes here: that would reach the neighbour before its own abort does.
        return one.run(operation, np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32), LONG_S)

    futures = four.start(job)
    for future in futures:
        until_started(future)
    started = time.monotonic()
    for communicator in four.communicators[:3]:
        communicator.endpoint.abort(reason)
    assert list(failures(futures, but=3).values()) == [reason] * 3
    assert time.monotonic() - started < PROMPT_S


def test_the_next_generation_works_where_the_last_one_broke(four: Ranks) -> None:
    operation = Operation("all_reduce", COUNT, algorithm="ring")

    def broken(one: Communicator) -> Report | None:
        if one.rank == 1:
            leave_after(1, one, operation)
            return None
        return take_part(one, operation)

    def whole(one: Communicator) -> float:
        destination = np.zeros(COUNT, np.float32)
        one.run(operation, np.full(COUNT, one.rank, np.float32), destination, LONG_S)
        return float(destination.sum())

    for _ in range(3):
        failures(four.start(broken), but=1)
        four.renew()
        assert four.run(whole) == [COUNT * sum(range(N))] * N
