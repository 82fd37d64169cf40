"""Started operations: several in flight, executed in order; a failure also fails the operations behind it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ranks import LONG_S, PROMPT_S, Ranks, deadline_in, outcomes

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, PeerError

N = 3
SIZES = (1, 700, 300_000, 5)
"""Small and large, so that different algorithms run."""
BARELY_S = 0.01


@pytest.fixture
def three(scheme: str) -> Iterator[Ranks]:
    with Ranks(scheme, N) as ranks:
        yield ranks


def sum_of(count: int) -> Operation:
    return Operation("all_reduce", count)


def vector(comm: Communicator, count: int) -> Any:
    return np.arange(count, dtype=np.float32) * (comm.rank + 1)


def total(count: int) -> Any:
    return np.arange(count, dtype=np.float32) * sum(range(1, N + 1))


def test_operations_in_flight_can_be_awaited_in_any_order(three: Ranks) -> None:
    def worker(comm: Communicator) -> list[Any]:
        vectors = [vector(comm, count) for count in SIZES]
        handles = [comm.start(sum_of(each.size), each, each, LONG_S) for each in vectors]
        reports = [handle.wait(LONG_S) for handle in reversed(handles)]
        assert all(handle.done for handle in handles)
        assert all(report.algorithm and report.seconds >= 0 for report in reports)
        return vectors

    for rank, vectors in enumerate(three.run(worker)):
        for found in vectors:
            assert np.array_equal(found, total(found.size)), f"rank {rank}, {found.size} elements"


def test_prepared_operations_can_be_started(three: Ranks) -> None:
    def worker(comm: Communicator) -> list[Any]:
        small, large = vector(comm, 700), vector(comm, 300_000)
        into = [np.zeros_like(small), np.zeros_like(large)]
        operations = [
            comm.prepare(sum_of(source.size), source, target)
            for source, target in zip((small, large), into, strict=True)
        ]
        handles = [operation.start(LONG_S) for _ in range(3) for operation in operations]
        operations[0](deadline_in())  # runs after the started ones
        assert all(handle.done for handle in handles)
        assert [handle.wait(LONG_S).algorithm for handle in handles[:2]] == [
            operation.algorithm for operation in operations
        ]
        return into

    for rank, vectors in enumerate(three.run(worker)):
        for found in vectors:
            assert np.array_equal(found, total(found.size)), f"rank {rank}, {found.size} elements"


def test_run_executes_after_the_started_operations(three: Ranks) -> None:
    def worker(comm: Communicator) -> Any:
        data = np.ones(300_000, np.float32)
        handles = [comm.start(sum_of(data.size), data, data, LONG_S) for _ in range(3)]
        comm.run(Operation("all_reduce", data.size, op="max"), data, data, LONG_S)
        assert all(handle.done for handle in handles)
        return data

    for rank, data in enumerate(three.run(worker)):
        assert (data == N**3).all(), f"rank {rank}"


def test_start_rejects_buffers_of_the_wrong_size(three: Ranks) -> None:
    def worker(comm: Communicator) -> Any:
        data = vector(comm, 10)
        first = comm.start(sum_of(10), data, data, LONG_S)
        with pytest.raises(InvalidArgument, match="needs 11 elements of source, got 10"):
            comm.start(sum_of(11), data, data, LONG_S)
        first.wait(LONG_S)
        other = vector(comm, 10)
        comm.start(sum_of(10), other, other, LONG_S).wait(LONG_S)
        return data, other

    for rank, found in enumerate(three.run(worker)):
        assert all(np.array_equal(each, total(10)) for each in found), f"rank {rank}"


def test_a_wait_that_times_out_can_be_repeated(three: Ranks) -> None:
    may_start = threading.Event()

    def worker(comm: Communicator) -> Any:
        data = vector(comm, 10)
        if comm.rank == 0:
            assert may_start.wait(LONG_S)
        handle = comm.start(sum_of(10), data, data, LONG_S)
        if comm.rank == 1:
            with pytest.raises(DeadlineExceeded, match=r"all_reduce sum of 10 float32 is not finished .* it goes on"):
                handle.wait(BARELY_S)
            assert not handle.done
            may_start.set()
        handle.wait(LONG_S)
        return data

    for rank, data in enumerate(three.run(worker)):
        assert np.array_equal(data, total(10)), f"rank {rank}"


def test_a_failure_fails_the_operations_behind_it(three: Ranks) -> None:
    finished, left = threading.Barrier(N), threading.Event()

    def worker(comm: Communicator) -> list[HoopError]:
        data = [vector(comm, count) for count in (10, 20, 30)]
        first = comm.start(sum_of(10), data[0], data[0], LONG_S)
        first.wait(LONG_S)
        finished.wait(LONG_S)  # before, another rank may still be inside the first operation
        if comm.rank == 2:
            comm.close()
            left.set()
            return []
        assert left.wait(LONG_S)
        handles = [comm.start(sum_of(each.size), each, each, LONG_S) for each in data[1:]]
        found: list[HoopError] = []
        for handle in handles:
            with pytest.raises(PeerError) as caught:
                handle.wait(PROMPT_S)
            found.append(caught.value)
        assert np.array_equal(data[0], total(10))
        comm.close()  # so that ranks that still wait for this one fail too
        return found

    for rank, found in enumerate(outcomes(three.start(worker), LONG_S)):
        if rank == 2:
            continue
        assert isinstance(found, list), f"rank {rank}: {found!r}"
        first, second = map(str, found)
        assert "all_reduce sum of 20 float32" in first, f"rank {rank}: {first}"
        assert second.startswith(f"rank {rank}: all_reduce sum of 30 float32 was not run: "), f"rank {rank}: {second}"
        assert first in second, f"rank {rank}: {second}"
    three.broken = True
