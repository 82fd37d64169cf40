"""Operations that are started: several in flight, in order, and what becomes of those behind one that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ranks import LONG_S, PROMPT_S, Ranks, outcomes, soon

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, PeerError

N = 3
SIZES = (1, 700, 300_000, 5)
"""Small and large ones, so that they go by different ways."""
BARELY_S = 0.01


@pytest.fixture
def three(scheme: str) -> Iterator[Ranks]:
    with Ranks(scheme, N) as made:
        yield made


def sum_of(count: int) -> Operation:
    return Operation("all_reduce", count)


def vector(one: Communicator, count: int) -> Any:
    return np.arange(count, dtype=np.float32) * (one.rank + 1)


def total(count: int) -> Any:
    return np.arange(count, dtype=np.float32) * sum(range(1, N + 1))


def test_several_in_flight_are_waited_for_in_any_order(three: Ranks) -> None:
    def job(one: Communicator) -> list[Any]:
        vectors = [vector(one, count) for count in SIZES]
        handles = [one.start(sum_of(each.size), each, each, LONG_S) for each in vectors]
        reports = [handle.wait(LONG_S) for handle in reversed(handles)]
        assert all(handle.done for handle in handles)
        assert all(report.algorithm and report.seconds >= 0 for report in reports)
        return vectors

    for rank, vectors in enumerate(three.run(job)):
        for found in vectors:
            assert np.array_equal(found, total(found.size)), f"rank {rank}, {found.size} elements"


def test_a_prepared_one_starts_like_any_other(three: Ranks) -> None:
    def job(one: Communicator) -> list[Any]:
        small, large = vector(one, 700), vector(one, 300_000)
        into = [np.zeros_like(small), np.zeros_like(large)]
        again = [
            one.prepare(sum_of(source.size), source, target)
            for source, target in zip((small, large), into, strict=True)
        ]
        handles = [prepared.start(LONG_S) for _ in range(3) for prepared in again]
        again[0](soon())  # in its turn, behind those
        assert all(handle.done for handle in handles)
        assert [handle.wait(LONG_S).algorithm for handle in handles[:2]] == [one.algorithm for one in again]
        return into

    for rank, vectors in enumerate(three.run(job)):
        for found in vectors:
            assert np.array_equal(found, total(found.size)), f"rank {rank}, {found.size} elements"


def test_one_that_is_run_comes_after_those_that_were_started(three: Ranks) -> None:
    def job(one: Communicator) -> Any:
        data = np.ones(300_000, np.float32)
        handles = [one.start(sum_of(data.size), data, data, LONG_S) for _ in range(3)]
        one.run(Operation("all_reduce", data.size, op="max"), data, data, LONG_S)
        assert all(handle.done for handle in handles)
        return data

    for rank, data in enumerate(three.run(job)):
        assert (data == N**3).all(), f"rank {rank}"


def test_buffers_that_do_not_fit_are_refused_at_once(three: Ranks) -> None:
    def job(one: Communicator) -> Any:
        data = vector(one, 10)
        first = one.start(sum_of(10), data, data, LONG_S)
        with pytest.raises(InvalidArgument, match="needs 11 elements of source, got 10"):
            one.start(sum_of(11), data, data, LONG_S)
        first.wait(LONG_S)
        other = vector(one, 10)
        one.start(sum_of(10), other, other, LONG_S).wait(LONG_S)
        return data, other

    for rank, found in enumerate(three.run(job)):
        assert all(np.array_equal(one, total(10)) for one in found), f"rank {rank}"


def test_whoever_waits_too_briefly_can_wait_again(three: Ranks) -> None:
    come = threading.Event()

    def job(one: Communicator) -> Any:
        data = vector(one, 10)
        if one.rank == 0:
            assert come.wait(LONG_S)
        handle = one.start(sum_of(10), data, data, LONG_S)
        if one.rank == 1:
            with pytest.raises(DeadlineExceeded, match=r"all_reduce sum of 10 float32 is not finished .* it goes on"):
                handle.wait(BARELY_S)
            assert not handle.done
            come.set()
        handle.wait(LONG_S)
        return data

    for rank, data in enumerate(three.run(job)):
        assert np.array_equal(data, total(10)), f"rank {rank}"


def test_one_that_fails_fails_those_behind_it(three: Ranks) -> None:
    left = threading.Event()

    def job(one: Communicator) -> list[HoopError]:
        data = [vector(one, count) for count in (10, 20, 30)]
        first = one.start(sum_of(10), data[0], data[0], LONG_S)
        first.wait(LONG_S)
        if one.rank == 2:
            one.close()
            left.set()
            return []
        assert left.wait(LONG_S)
        handles = [one.start(sum_of(each.size), each, each, LONG_S) for each in data[1:]]
        found: list[HoopError] = []
        for handle in handles:
            with pytest.raises(PeerError) as caught:
                handle.wait(PROMPT_S)
            found.append(caught.value)
        assert np.array_equal(data[0], total(10))
        one.close()  # so that whoever still waits for this rank learns of it
        return found

    for rank, found in enumerate(outcomes(three.start(job), LONG_S)):
        if rank == 2:
            continue
        assert isinstance(found, list), f"rank {rank}: {found!r}"
        first, second = map(str, found)
        assert "all_reduce sum of 20 float32" in first, f"rank {rank}: {first}"
        assert second.startswith(f"rank {rank}: all_reduce sum of 30 float32 was not run: "), f"rank {rank}: {second}"
        assert first in second, f"rank {rank}: {second}"
    three.broken = True
