"""``hoop.horovod``: every collective against a computed expectation, at every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hoop.horovod as hvd
from hoop.errors import FailedPrecondition, InvalidArgument

Ranks = Callable[..., list[Any]]
Tensor = torch.Tensor
close = torch.testing.assert_close


def in_run(rank: int, check: Callable[[int, int], Any]) -> Any:
    """Runs a check between ``init``, which takes the group that the test has made, and ``shutdown``."""
    hvd.init()
    try:
        assert hvd.rank() == rank
        return check(rank, hvd.size())
    finally:
        hvd.shutdown()


def of_rank(rank: int) -> Tensor:
    return torch.arange(1.0, 7.0).reshape(2, 3) * (rank + 1)


def folded(function: Callable[[Tensor, Tensor], Tensor], size: int) -> Tensor:
    total = of_rank(0)
    for rank in range(1, size):
        total = function(total, of_rank(rank))
    return total


def check_places(rank: int, size: int) -> None:
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    hvd.init()  # a second call changes nothing
    assert hvd.size() == size


def check_all_reduce(rank: int, size: int) -> None:
    mine, total = of_rank(rank), folded(torch.add, size)
    expected = {
        hvd.Sum: total,
        hvd.Average: total / size,
        hvd.Min: folded(torch.minimum, size),
        hvd.Max: folded(torch.maximum, size),
        hvd.Product: folded(torch.mul, size),
    }
    for op, value in expected.items():
        close(hvd.allreduce(mine, op=op), value)
        close(hvd.synchronize(hvd.allreduce_async(mine, op=op)), value)
        inside = mine.clone()
        assert hvd.allreduce_(inside, op=op) is inside
        close(inside, value)
    close(mine, of_rank(rank))  # untouched
    close(hvd.allreduce(mine), total / size)
    close(hvd.allreduce(mine, average=False), total)
    close(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), total * 2)
    close(hvd.allreduce(torch.tensor(rank)), torch.tensor(sum(range(size)) // size))
    transposed = of_rank(rank).t()
    close(hvd.allreduce_(transposed, op=hvd.Sum), total.t())
    for compression, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        rounded = hvd.allreduce(mine / 3, compression=compression)
        assert rounded.dtype is torch.float32
        close(rounded, total / 3 / size, rtol=4 * torch.finfo(dtype).eps, atol=0)
    handle = hvd.allreduce_async_(of_rank(rank), op=hvd.Sum)
    while not hvd.poll(handle):
        pass
    close(hvd.synchronize(handle), total)
    with pytest.raises(InvalidArgument, match="Adasum is not offered"):
        hvd.allreduce(mine, op=hvd.Adasum)
    with pytest.raises(InvalidArgument, match="give op alone"):
        hvd.allreduce(mine, average=True, op=hvd.Sum)


def check_grouped_all_reduce(rank: int, size: int) -> None:
    mine = [of_rank(rank), torch.tensor([rank, 1]), of_rank(rank).double(), of_rank(rank).t()]
    total = folded(torch.add, size)
    expected = [total, torch.tensor([sum(range(size)), size]), total.double(), total.t()]
    close(hvd.grouped_allreduce(mine, op=hvd.Sum), expected)
    close(hvd.synchronize(hvd.grouped_allreduce_async(mine, op=hvd.Sum)), expected)
    close(mine[0], of_rank(rank))
    hvd.grouped_allreduce_(mine, op=hvd.Sum)
    close(mine, expected)


def check_sparse_all_reduce(rank: int, size: int) -> None:
    dense = torch.zeros(size + 1, 2)
    dense[rank], dense[-1] = rank + 1.0, 1.0
    total = torch.cat([torch.arange(1.0, size + 1), torch.tensor([float(size)])]).unsqueeze(1).expand(-1, 2)
    close(hvd.allreduce(dense.to_sparse(1), op=hvd.Sum).to_dense(), total)
    close(hvd.synchronize(hvd.sparse_allreduce_async(dense.to_sparse(1))).to_dense(), total / size)


def check_all_gather(rank: int, size: int) -> None:
    """Rank r has r rows, so rank 0 has none."""
    rows = [torch.full((one, 2), float(one)) for one in range(size)]
    close(hvd.allgather(rows[rank]), torch.cat(rows))
    close(hvd.synchronize(hvd.allgather_async(rows[rank])), torch.cat(rows))
    other = torch.tensor([rank])
    close(hvd.grouped_allgather([rows[rank], other]), [torch.cat(rows), torch.arange(size)])
    assert hvd.allgather_object({"rank": rank}) == [{"rank": one} for one in range(size)]
    with pytest.raises(InvalidArgument, match="without dimensions"):
        hvd.allgather(torch.tensor(1))
    if size > 1:
        with pytest.raises(InvalidArgument, match="only the first dimension may differ"):
            hvd.allgather(torch.zeros(1, rank + 1))


def check_broadcast(rank: int, size: int) -> None:
    root = size - 1
    close(hvd.broadcast(of_rank(rank), root), of_rank(root))
    close(hvd.synchronize(hvd.broadcast_async(of_rank(rank), root)), of_rank(root))
    inside = of_rank(rank).t()
    assert hvd.broadcast_(inside, root) is inside
    close(inside, of_rank(root).t())
    assert hvd.broadcast_object({"from": rank}, root) == {"from": root}
    with pytest.raises(InvalidArgument, match=f"root_rank: {size} is not a rank"):
        hvd.broadcast(of_rank(rank), size)


def check_all_to_all(rank: int, size: int) -> None:
    close(hvd.alltoall(torch.arange(size) + 10 * rank), torch.arange(size) * 10 + rank)
    # Rank r sends s + 1 rows of the value (r, s) to each rank s.
    splits = [one + 1 for one in range(size)]
    sent = torch.cat([torch.tensor([[rank, one]] * (one + 1)) for one in range(size)])
    received, counts = hvd.alltoall(sent, torch.tensor(splits))
    close(received, torch.cat([torch.tensor([[one, rank]] * (rank + 1)) for one in range(size)]))
    assert counts.tolist() == [rank + 1] * size
    close(hvd.synchronize(hvd.alltoall_async(sent, splits))[0], received)
    with pytest.raises(InvalidArgument, match="splits"):
        hvd.alltoall(sent, [1] * size + [0])


def check_reduce_scatter(rank: int, size: int) -> None:
    """2 * size + 1 rows: rank 0 gets 3, the others 2."""
    whole = torch.arange(float(4 * size + 2)).reshape(-1, 2)
    counts = [3] + [2] * (size - 1)
    factor = sum(range(1, size + 1))
    expected = (whole * factor).split(counts)[rank]
    mine = whole * (rank + 1)
    close(hvd.reducescatter(mine, op=hvd.Sum), expected)
    close(hvd.reducescatter(mine), expected / size)
    scaled = hvd.reducescatter_async(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0)
    close(hvd.synchronize(scaled), expected * 6)
    close(hvd.grouped_reducescatter([mine, mine], op=hvd.Sum), [expected, expected])
    close(hvd.synchronize(hvd.grouped_reducescatter_async([mine], op=hvd.Max)), [(whole * size).split(counts)[rank]])


def check_gradients(rank: int, size: int) -> None:
    def gradient(function: Callable[[Tensor], Any], tensor: Tensor, factor: float) -> Tensor:
        leaf = tensor.clone().requires_grad_()
        result = function(leaf)
        ((result[0] if isinstance(result, tuple) else result) * factor).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    mine, ones = of_rank(rank), torch.ones(2, 3)
    everyone = float(sum(range(1, size + 1)))
    close(gradient(lambda one: hvd.allreduce(one, op=hvd.Sum), mine, rank + 1), ones * everyone)
    close(gradient(hvd.allreduce, mine, rank + 1), ones * everyone / size)
    close(gradient(lambda one: hvd.grouped_allreduce([one, one])[1], mine, rank + 1), ones * everyone / size)
    close(gradient(hvd.allgather, mine, rank + 1), ones * everyone)
    close(gradient(lambda one: hvd.broadcast(one, 0), mine, rank + 1), ones * (everyone if rank == 0 else 0))
    rows = torch.ones(size, 1)
    close(gradient(hvd.alltoall, rows, rank + 1), torch.arange(1.0, size + 1).unsqueeze(1))
    close(gradient(hvd.reducescatter, rows, rank + 1), torch.arange(1.0, size + 1).unsqueeze(1) / size)


def check_process_sets(rank: int, size: int) -> None:
    assert hvd.global_process_set.size() == size
    assert not hvd.remove_process_set(hvd.global_process_set)
    if size < 3:
        return
    last_two = hvd.add_process_set([1, 2])
    first = hvd.add_process_set(hvd.ProcessSet([0]))
    assert last_two.included() == (rank > 0)
    if rank > 0:
        assert (last_two.rank(), last_two.size()) == (rank - 1, 2)
        close(hvd.allreduce(of_rank(rank), process_set=last_two), (of_rank(1) + of_rank(2)) / 2)
        close(hvd.broadcast(of_rank(rank), 2, process_set=last_two), of_rank(2))
        close(hvd.allgather(torch.tensor([rank]), process_set=last_two), torch.tensor([1, 2]))
        assert hvd.broadcast_object(rank, 2, process_set=last_two) == 2
        hvd.barrier(process_set=last_two)
        with pytest.raises(InvalidArgument, match=f"rank {rank} is not one of"):
            hvd.allreduce(of_rank(rank), process_set=first)
    with pytest.raises(InvalidArgument, match="already; use it"):
        hvd.add_process_set([2, 1])
    with pytest.raises(InvalidArgument, match=r"no list of ranks in 0\.\.2"):
        hvd.add_process_set([1, 3])
    assert hvd.remove_process_set(last_two)
    assert not hvd.remove_process_set(last_two)
    with pytest.raises(FailedPrecondition, match="add_process_set on every rank"):
        hvd.allreduce(of_rank(rank), process_set=last_two)


CHECKS = (
    check_places,
    check_all_reduce,
    check_grouped_all_reduce,
    check_sparse_all_reduce,
    check_all_gather,
    check_broadcast,
    check_all_to_all,
    check_reduce_scatter,
    check_gradients,
    check_process_sets,
)


def all_checks(rank: int, size: int) -> list[str]:
    for check in CHECKS:
        check(rank, size)
        hvd.barrier()
    return [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_collectives(run_ranks: Ranks, size: int) -> None:
    assert run_ranks(size, in_run, all_checks) == [[check.__name__ for check in CHECKS]] * size


# ---- join


def join_with_uneven_steps(rank: int, size: int) -> list[Any]:
    """Rank r has 2 * r steps: rank 0 joins at once, and the last one makes half of its steps alone."""
    found: list[Any] = []
    for _ in range(2):  # join can be used again
        for step in range(2 * rank):
            active = [one for one in range(size) if 2 * one > step]
            close(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(len(active))))
            close(hvd.allreduce(of_rank(rank)), sum(map(of_rank, active)) / size)
            close(hvd.allreduce(of_rank(rank), op=hvd.Min), of_rank(active[0]))
            close(hvd.allreduce(of_rank(rank).to(torch.int32), op=hvd.Max), of_rank(size - 1).to(torch.int32))
            close(hvd.allgather(torch.tensor([rank])), torch.tensor(active))
            close(hvd.broadcast(of_rank(rank), size - 1), of_rank(size - 1))
            assert hvd.broadcast_object(rank, size - 1) == size - 1
            hvd.barrier()
        found.append(hvd.join())
        close(hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum), torch.tensor([float(size)]))
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_with_fewer_batches_join(run_ranks: Ranks, size: int) -> None:
    assert run_ranks(size, in_run, join_with_uneven_steps) == [[size - 1, size - 1]] * size


def join_with_calls_in_flight(rank: int, size: int) -> list[float]:
    handle = None
    if rank:
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    hvd.join()
    return [] if handle is None else hvd.synchronize(handle).tolist()


def test_a_rank_may_join_before_it_has_waited_for_its_calls(run_ranks: Ranks) -> None:
    assert run_ranks(3, in_run, join_with_calls_in_flight) == [[], [2.0, 2.0], [2.0, 2.0]]


# ---- misuse


def different_order(rank: int, size: int) -> str:
    with pytest.raises(RuntimeError) as raised:
        hvd.allreduce(torch.ones(2)) if rank else hvd.broadcast(torch.ones(2), 0)
    return str(raised.value)


def test_calls_in_different_order_raise_at_every_rank(run_ranks: Ranks) -> None:
    for message in run_ranks(2, in_run, different_order):
        assert "all_reduce" in message
        assert "broadcast" in message


def test_a_call_before_init_is_refused() -> None:
    for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.join):
        with pytest.raises(FailedPrecondition, match=r"call hvd\.init\(\) first"):
            call()
    assert not hvd.is_initialized()


def test_every_public_name_has_a_docstring() -> None:
    values = {name: getattr(hvd, name) for name in hvd.__all__}
    plain = {"Adasum", "Average", "Max", "Min", "Product", "Sum", "global_process_set"}
    missing = [name for name, value in values.items() if name not in plain and not value.__doc__]
    assert missing == []
    assert sorted(set(hvd.__all__)) == hvd.__all__
