"""Asynchronous operations: their order, Work, futures, threads and the profiler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

RunRanks = Callable[..., list[Any]]


def order(rank: int) -> None:
    steps = [torch.ones(3) for _ in range(20)]
    total = torch.ones(3)
    works = []
    for index, step in enumerate(steps):
        works.append(dist.all_reduce(step, async_op=True))
        if index % 5 == 4:
            dist.all_reduce(total)  # runs after the pending operations
            assert all(work.is_completed() for work in works)
    for work in reversed(works):
        assert work.wait()
        assert work.is_success()
        assert work.exception() is None
    assert all(step.tolist() == [2, 2, 2] for step in steps)
    assert total.tolist() == [16, 16, 16]


def test_operations_run_in_the_order_of_their_calls(run_ranks: RunRanks) -> None:
    run_ranks(2, order)


def pending(rank: int) -> None:
    tensor = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed(), "rank 1 has not called all_reduce yet"
        with pytest.raises(RuntimeError, match=r"all_reduce is not finished after the timeout of 0\.01 s"):
            work.wait(timedelta(seconds=0.01))
        dist.send(torch.zeros(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2, 2, 2]


def test_an_asynchronous_call_returns_at_once(run_ranks: RunRanks) -> None:
    run_ranks(2, pending)


def futures(rank: int) -> None:
    work = dist.all_reduce(torch.full((3,), rank + 1.0), async_op=True)
    assert work.get_future().wait()[0].tolist() == [3, 3, 3]
    assert work.get_future() is work.get_future()
    assert work.result()[0].tolist() == [3, 3, 3]
    outputs = [torch.zeros(2), torch.zeros(2)]
    work = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    assert [tensor.tolist() for tensor in work.get_future().wait()] == [[0, 0], [1, 1]]

    def reduce_twice(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        (tensor,) = future.value()
        dist.all_reduce(tensor)  # waits for this group on the group's own thread
        total: torch.Tensor = dist.all_reduce(tensor, async_op=True).get_future().wait()[0]
        return total

    chained = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(reduce_twice)
    assert chained.wait().tolist() == [8, 8]
    message = torch.full((2,), float(rank))
    other = torch.zeros(2)
    sending, receiving = dist.isend(message, 1 - rank), dist.irecv(other, 1 - rank)
    assert receiving is not None
    assert sending is not None
    assert receiving.get_future().wait()[0].tolist() == [1 - rank] * 2
    sending.get_future().wait()


def test_futures(run_ranks: RunRanks) -> None:
    run_ranks(2, futures)


def every_collective(rank: int) -> None:
    ones, two = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
    works = [
        dist.broadcast(ones, 0, async_op=True),
        dist.reduce(ones.clone(), 0, async_op=True),
        dist.all_gather(two, ones, async_op=True),
        dist.all_gather_into_tensor(torch.zeros(8), ones, async_op=True),
        dist.gather(ones, two if rank == 0 else None, 0, async_op=True),
        dist.scatter(torch.zeros(4), two if rank == 0 else None, 0, async_op=True),
        dist.reduce_scatter(torch.zeros(4), two, async_op=True),
        dist.reduce_scatter_tensor(torch.zeros(2), ones, async_op=True),
        dist.all_to_all([torch.zeros(4)] * 2, two, async_op=True),
        dist.all_to_all_single(torch.zeros(4), ones, async_op=True),
        dist.barrier(async_op=True),
    ]
    assert [work.wait() for work in works] == [True] * len(works)


def test_every_collective_can_be_asynchronous(run_ranks: RunRanks) -> None:
    run_ranks(2, every_collective)


def from_threads(rank: int) -> None:
    """Two threads use two groups at the same time."""
    groups = [dist.new_group(), dist.new_group()]
    totals = [torch.zeros(1), torch.zeros(1)]

    def work(index: int) -> None:
        for _ in range(50):
            one = torch.ones(1)
            dist.all_reduce(one, group=groups[index])
            totals[index] += one

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [total.item() for total in totals] == [100, 100]


def test_groups_are_independent(run_ranks: RunRanks) -> None:
    run_ranks(2, from_threads)


def profiled(rank: int) -> list[tuple[str, list[list[int]]]]:
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(2, 3))
        dist.broadcast(torch.ones(5), 0, async_op=True).wait()
    return [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("hoop:")]


def test_operations_show_in_the_profiler(run_ranks: RunRanks) -> None:
    for events in run_ranks(2, profiled):
        assert events == [("hoop:all_reduce", [[2, 3]]), ("hoop:broadcast", [[5]])]


def late_peer(rank: int) -> list[Any]:
    """Rank 1 calls all_reduce only after rank 0's asynchronous calls have returned."""
    first, second = torch.full((1000,), float(rank + 1)), torch.full((300_000,), float(rank + 1))
    dist.all_reduce(first)  # plans the operation, so that the next call can try to run inline
    seen = torch.zeros(1)
    if rank == 1:
        dist.recv(seen, 0)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second, first)]
    if rank == 0:
        completed = [work.is_completed() for work in works if work is not None]
        dist.send(torch.ones(1), 1)
        assert completed == [False] * 3, "rank 1 had not called all_reduce"
    for work in reversed(works):
        assert work is not None
        work.wait()
    return [first.tolist()[-1], second.tolist()[-1], float(seen)]


def test_an_asynchronous_call_does_not_wait_for_a_late_peer(run_ranks: RunRanks) -> None:
    assert run_ranks(2, late_peer) == [[12.0, 3.0, 0.0], [12.0, 3.0, 1.0]]
