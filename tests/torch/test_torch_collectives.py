"""Every collective, dtype and operator, on every rank, compared with values computed without a backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

RunRanks = Callable[..., list[Any]]
SUM, AVG, PRODUCT, MIN, MAX = (
    dist.ReduceOp.SUM,
    dist.ReduceOp.AVG,
    dist.ReduceOp.PRODUCT,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
)
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
ALL_DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
TORCH_OPERATIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    AVG: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def vector(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (7,)) -> torch.Tensor:
    """Small numbers that differ by rank and index: all their sums and products are exact in every dtype."""
    count = int(torch.tensor(shape).prod())
    numbers = (torch.arange(count) + rank) % 3 + 1
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double() * (rank + 1)).to(dtype).view(shape)
    return (numbers % 2 == 0 if dtype is torch.bool else numbers).to(dtype).view(shape)


def reduced(op: Any, dtype: torch.dtype, size: int, shape: tuple[int, ...] = (7,)) -> torch.Tensor:
    total = reduce(TORCH_OPERATIONS[op], [vector(rank, dtype, shape) for rank in range(size)])
    if op is AVG:
        floating = dtype.is_floating_point or dtype.is_complex
        total = total / size if floating else torch.div(total, size, rounding_mode="trunc")
    return total.to(dtype)


def cases() -> list[tuple[torch.dtype, Any]]:
    pairs = [(dtype, op) for dtype in FLOATS + INTEGERS for op in (SUM, AVG, PRODUCT, MIN, MAX)]
    pairs += [(dtype, op) for dtype in [*INTEGERS, torch.bool] for op in (BAND, BOR, BXOR)]
    pairs += [(torch.bool, op) for op in (SUM, PRODUCT, MIN, MAX)]
    return pairs + [(dtype, op) for dtype in COMPLEX for op in (SUM, AVG)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, case: Any) -> None:
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{case}: {text}")


# ---- reductions


def repeated_sums(rank: int, size: int) -> None:
    """The second sum of a shape goes to the native core at once; what only looks like it goes the ordinary way."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 7, 5000, 300_000):
            expected = reduced(SUM, dtype, size, (count,))
            for repeat in range(3):
                tensor = vector(rank, dtype, (count,))
                dist.all_reduce(tensor)
                assert_close(tensor, expected, (dtype, count, repeat))
            largest = vector(rank, dtype, (count,))
            dist.all_reduce(largest, MAX)
            assert_close(largest, reduced(MAX, dtype, size, (count,)), ("max", dtype, count))
            strided = vector(rank, dtype, (count,)).repeat_interleave(2)[::2]
            dist.all_reduce(strided)
            assert_close(strided, expected, ("strided", dtype, count))
            work = dist.all_reduce(later := vector(rank, dtype, (count,)), async_op=True)
            work.wait()
            assert_close(later, expected, ("asynchronous", dtype, count))


def test_repeated_sums(run_ranks: RunRanks) -> None:
    run_ranks(2, repeated_sums, 2)


def mismatched_repeated_sums(rank: int) -> str:
    for count in (3, 4):
        for _ in range(2):
            dist.all_reduce(torch.ones(count))
    try:
        dist.all_reduce(torch.ones(3 + rank))
    except RuntimeError as error:
        return str(error)
    return ""


def test_repeated_sums_are_compared(run_ranks: RunRanks) -> None:
    for text in run_ranks(2, mismatched_repeated_sums):
        assert "rank 0: all_reduce sum of 3 float32; rank 1: all_reduce sum of 4 float32" in text


def reductions(rank: int, size: int) -> None:
    for dtype, op in cases():
        case = (dtype, op)
        tensor = vector(rank, dtype)
        dist.all_reduce(tensor, op)
        assert_close(tensor, reduced(op, dtype, size), ("all_reduce", *case))
        for root in (0, size - 1):
            tensor = vector(rank, dtype)
            dist.reduce(tensor, root, op)
            expected = reduced(op, dtype, size) if rank == root else vector(rank, dtype)
            assert_close(tensor, expected, ("reduce", root, *case))
        if dtype.is_complex:
            continue  # torch.distributed does not scatter complex reductions
        blocks = [vector(rank + destination, dtype) for destination in range(size)]
        expected = reduce(TORCH_OPERATIONS[op], [vector(other + rank, dtype) for other in range(size)])
        if op is AVG:
            expected = expected / size if dtype.is_floating_point else torch.div(expected, size, rounding_mode="trunc")
        output = torch.zeros(7, dtype=dtype)
        dist.reduce_scatter(output, blocks, op)
        assert_close(output, expected.to(dtype), ("reduce_scatter", *case))
        output = torch.zeros(7, dtype=dtype)
        dist.reduce_scatter_tensor(output, torch.cat(blocks), op)
        assert_close(output, expected.to(dtype), ("reduce_scatter_tensor", *case))


@pytest.mark.parametrize("size", [2, 3])
def test_reductions(run_ranks: RunRanks, size: int) -> None:
    run_ranks(size, reductions, size)


def premul_sums(rank: int, size: int) -> None:
    for factor in (0.5, torch.tensor([2.0])):
        tensor = torch.full((5,), float(rank + 1))
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        expected = float(factor) * sum(range(1, size + 1))
        assert_close(tensor, torch.full((5,), expected), ("premul_sum", factor))


def test_premul_sum(run_ranks: RunRanks) -> None:
    run_ranks(2, premul_sums, 2)


def invalid_arguments(rank: int) -> list[str]:
    messages = []
    for dtype, op in (
        (torch.float32, BAND),
        (torch.complex64, MAX),
        (torch.bool, AVG),
        (torch.uint16, SUM),
        (torch.float8_e4m3fn, SUM),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            dist.all_reduce(torch.ones(3, dtype=dtype), op)
        messages.append(str(error.value))
    with pytest.raises(ValueError, match="2 tensors for 3 ranks") as error:
        dist.all_gather([torch.ones(1)] * 2, torch.ones(1))
    with pytest.raises(ValueError, match="has 3 elements, expected 2"):
        dist.all_gather([torch.ones(3)] * 3, torch.ones(2))
    with pytest.raises(ValueError, match="a tensor is on meta"):
        dist.broadcast(torch.ones(3, device="meta"), 0)
    dist.barrier()  # nothing was sent: the group still works
    return messages


def test_invalid_arguments_are_refused_before_any_transfer(run_ranks: RunRanks) -> None:
    for messages in run_ranks(3, invalid_arguments):
        assert "band needs integers or booleans, the tensor is torch.float32" in messages[0]
        assert "complex" in messages[1]
        assert "avg makes no sense for booleans" in messages[2]
        assert "torch has no sum of torch.uint16" in messages[3]
        assert "torch has no sum of torch.float8_e4m3fn" in messages[4]


# ---- data movement


def data_movement(rank: int, size: int) -> None:
    for dtype in ALL_DTYPES:
        own = vector(rank, dtype)
        tensors = [vector(other, dtype) for other in range(size)]
        for root in range(size):
            tensor = own.clone()
            dist.broadcast(tensor, root)
            assert_close(tensor, tensors[root], ("broadcast", dtype))
            gathered = [torch.zeros_like(own) for _ in range(size)] if rank == root else None
            dist.gather(own, gathered, root)
            for actual, expected in zip(gathered or [], tensors, strict=False):
                assert_close(actual, expected, ("gather", dtype))
            tensor = torch.zeros_like(own)
            dist.scatter(tensor, tensors if rank == root else None, root)
            assert_close(tensor, own, ("scatter", dtype))
        lists = [torch.zeros_like(own) for _ in range(size)]
        dist.all_gather(lists, own)
        whole = torch.zeros(size * 7, dtype=dtype)
        dist.all_gather_into_tensor(whole, own)
        assert_close(whole, torch.cat(tensors), ("all_gather_into_tensor", dtype))
        assert_close(torch.cat(lists), torch.cat(tensors), ("all_gather", dtype))
        outputs = [torch.zeros(2, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outputs, [vector(rank * size + destination, dtype, (2,)) for destination in range(size)])
        for other, actual in enumerate(outputs):
            assert_close(actual, vector(other * size + rank, dtype, (2,)), ("all_to_all", dtype))
        output = torch.zeros(size * 2, dtype=dtype)
        dist.all_to_all_single(
            output, torch.cat([vector(rank * size + destination, dtype, (2,)) for destination in range(size)])
        )
        assert_close(output, torch.cat(outputs), ("all_to_all_single", dtype))
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_data_movement(run_ranks: RunRanks, size: int) -> None:
    run_ranks(size, data_movement, size)


def uneven_sizes(rank: int, size: int) -> None:
    lengths = [other + 1 for other in range(size)]
    own = torch.full((lengths[rank],), float(rank))
    lists = [torch.zeros(length) for length in lengths]
    dist.all_gather(lists, own)
    for other, actual in enumerate(lists):
        assert_close(actual, torch.full((other + 1,), float(other)), "uneven all_gather")
    output = torch.zeros(lengths[rank])
    dist.reduce_scatter(output, [torch.full((length,), rank + 1.0) for length in lengths])
    assert_close(output, torch.full((lengths[rank],), float(sum(range(1, size + 1)))), "uneven reduce_scatter")
    # Rank r sends (r + p) % 3 rows to rank p; some of these counts are 0.
    sent_rows = [(rank + destination) % 3 for destination in range(size)]
    received_rows = [(other + rank) % 3 for other in range(size)]
    source = torch.cat([torch.full((rows, 2), rank * 10 + destination) for destination, rows in enumerate(sent_rows)])
    target = torch.zeros(sum(received_rows), 2, dtype=torch.int64)
    dist.all_to_all_single(target, source, received_rows, sent_rows)
    expected = torch.cat([torch.full((rows, 2), other * 10 + rank) for other, rows in enumerate(received_rows)])
    assert_close(target, expected, "uneven all_to_all_single")
    outputs = [torch.zeros(rows, 2, dtype=torch.int64) for rows in received_rows]
    dist.all_to_all(outputs, list(source.split(sent_rows)))
    assert_close(torch.cat(outputs), expected, "uneven all_to_all")


def test_uneven_sizes(run_ranks: RunRanks) -> None:
    run_ranks(3, uneven_sizes, 3)


def odd_shapes(rank: int) -> None:
    total, transposed = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    view = transposed.t()
    dist.all_reduce(view)
    assert_close(transposed, total * 2, "all_reduce of a transposed tensor")
    strided = torch.arange(10.0)
    dist.broadcast(strided[::2].add_(rank), 0)
    assert_close(strided[1::2], torch.arange(10.0)[1::2], "what lies between")
    assert_close(strided[::2], torch.arange(10.0)[::2], "broadcast of every other element")
    lists = [torch.zeros(4, 3).t() for _ in range(2)]
    dist.all_gather(lists, total + rank)
    assert_close(lists[1].contiguous(), total + 1, "all_gather into transposed tensors")
    for empty in (torch.zeros(0), torch.zeros(3, 0, 2, dtype=torch.int64)):
        dist.all_reduce(empty)
        dist.broadcast(empty, 1)
        dist.all_gather([empty.clone(), empty.clone()], empty)
    scalar = torch.tensor(rank + 1)
    dist.all_reduce(scalar)
    assert scalar.item() == 3
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert_close(leaf.detach(), torch.full((3,), 2.0), "a leaf that requires grad")
    conjugated = torch.full((2,), 1 + 1j * (rank + 1)).conj()
    world = dist.group.WORLD
    assert world is not None
    world.allreduce([conjugated]).wait()  # dist.all_reduce itself refuses conjugated views
    assert_close(conjugated.resolve_conj(), torch.full((2,), 2 - 3j), "a conjugated view")
    large = torch.full((3_000_000,), float(rank + 1))
    dist.all_reduce(large)
    assert bool((large == 3.0).all())


def test_odd_shapes(run_ranks: RunRanks) -> None:
    run_ranks(2, odd_shapes)


def coalesced(rank: int) -> None:
    tensors = [torch.full((count,), float(rank + 1)) for count in (1, 5, 3)]
    dist.all_reduce_coalesced(tensors)
    assert all(bool((tensor == 3.0).all()) for tensor in tensors)
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(bool((tensor == 6.0).all()) for tensor in tensors)
    inputs, outputs = [torch.full((2,), float(rank))] * 2, [torch.zeros(4), torch.zeros(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor)
    manager.wait()
    assert [output.tolist() for output in outputs] == [[0, 0, 1, 1]] * 2
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_tensor(output[:2], torch.full((4,), rank + 1.0))
    assert [output[:2].tolist() for output in outputs] == [[3, 3]] * 2
    rows = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
    dist.all_gather_coalesced(rows, [torch.full((2,), float(rank)), torch.full((3,), rank + 5.0)])
    assert [[tensor[0].item() for tensor in row] for row in rows] == [[0, 5], [1, 6]]


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_.*_coalesced` will be deprecated")
def test_coalesced(run_ranks: RunRanks) -> None:
    run_ranks(2, coalesced)


def objects(rank: int) -> None:
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, {"rank": rank, "more": "x" * rank * 1000})
    assert [one["rank"] for one in every] == [0, 1, 2]
    shared = [f"from {rank}", rank]
    dist.broadcast_object_list(shared, 2)
    assert shared == ["from 2", 2]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", {"b": 1}, None] if rank == 1 else None, 1)
    assert mine == [["a", {"b": 1}, None][rank]]
    gathered: list[Any] | None = [None] * 3 if rank == 0 else None
    dist.gather_object(rank * 2, gathered, 0)
    assert gathered == ([0, 2, 4] if rank == 0 else None)


def test_objects(run_ranks: RunRanks) -> None:
    run_ranks(3, objects)


def sparse(rank: int) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), [[1.0, 2.0], [3.0, 4.0]], (4, 2))
    dist.all_reduce(tensor)
    assert_close(tensor.to_dense(), torch.tensor([[1.0, 2], [1, 2], [6, 8], [0, 0]]), "sparse all_reduce")


def test_sparse_all_reduce(run_ranks: RunRanks) -> None:
    run_ranks(2, sparse)
