"""Every collective, type and operator, on every rank, against values worked out without any backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist

Together = Callable[..., list[Any]]
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
EVERY = [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]
FOLDS: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    AVG: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def vector(rank: int, kind: torch.dtype, shape: tuple[int, ...] = (7,)) -> torch.Tensor:
    """Small numbers that differ by rank and place: every sum and product of them is exact in every type."""
    count = int(torch.tensor(shape).prod())
    numbers = (torch.arange(count) + rank) % 3 + 1
    if kind.is_complex:
        return torch.complex(numbers.double(), -numbers.double() * (rank + 1)).to(kind).view(shape)
    return (numbers % 2 == 0 if kind is torch.bool else numbers).to(kind).view(shape)


def folded(op: Any, kind: torch.dtype, size: int, shape: tuple[int, ...] = (7,)) -> torch.Tensor:
    total = reduce(FOLDS[op], [vector(rank, kind, shape) for rank in range(size)])
    if op is AVG:
        floating = kind.is_floating_point or kind.is_complex
        total = total / size if floating else torch.div(total, size, rounding_mode="trunc")
    return total.to(kind)


def cases() -> list[tuple[torch.dtype, Any]]:
    found = [(kind, op) for kind in FLOATS + INTEGERS for op in (SUM, AVG, PRODUCT, MIN, MAX)]
    found += [(kind, op) for kind in [*INTEGERS, torch.bool] for op in (BAND, BOR, BXOR)]
    found += [(torch.bool, op) for op in (SUM, PRODUCT, MIN, MAX)]
    return found + [(kind, op) for kind in COMPLEX for op in (SUM, AVG)]


def same(found: torch.Tensor, wanted: torch.Tensor, what: Any) -> None:
    torch.testing.assert_close(found, wanted, msg=lambda text: f"{what}: {text}")


# ---- reductions


def reductions(rank: int, size: int) -> None:
    for kind, op in cases():
        what = (kind, op)
        tensor = vector(rank, kind)
        dist.all_reduce(tensor, op)
        same(tensor, folded(op, kind, size), ("all_reduce", *what))
        for root in (0, size - 1):
            tensor = vector(rank, kind)
            dist.reduce(tensor, root, op)
            wanted = folded(op, kind, size) if rank == root else vector(rank, kind)
            same(tensor, wanted, ("reduce", root, *what))
        if kind.is_complex:
            continue  # torch.distributed does not scatter complex reductions
        blocks = [vector(rank + place, kind) for place in range(size)]
        wanted = reduce(FOLDS[op], [vector(other + rank, kind) for other in range(size)])
        if op is AVG:
            wanted = wanted / size if kind.is_floating_point else torch.div(wanted, size, rounding_mode="trunc")
        output = torch.zeros(7, dtype=kind)
        dist.reduce_scatter(output, blocks, op)
        same(output, wanted.to(kind), ("reduce_scatter", *what))
        output = torch.zeros(7, dtype=kind)
        dist.reduce_scatter_tensor(output, torch.cat(blocks), op)
        same(output, wanted.to(kind), ("reduce_scatter_tensor", *what))


@pytest.mark.parametrize("size", [2, 3])
def test_reductions(together: Together, size: int) -> None:
    together(size, reductions, size)


def multiples(rank: int, size: int) -> None:
    for factor in (0.5, torch.tensor([2.0])):
        tensor = torch.full((5,), float(rank + 1))
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))
        wanted = float(factor) * sum(range(1, size + 1))
        same(tensor, torch.full((5,), wanted), ("premul_sum", factor))


def test_premul_sum(together: Together) -> None:
    together(2, multiples, 2)


def refusals(rank: int) -> list[str]:
    words = []
    for kind, op in (
        (torch.float32, BAND),
        (torch.complex64, MAX),
        (torch.bool, AVG),
        (torch.uint16, SUM),
        (torch.float8_e4m3fn, SUM),
    ):
        with pytest.raises((ValueError, RuntimeError)) as error:
            dist.all_reduce(torch.ones(3, dtype=kind), op)
        words.append(str(error.value))
    with pytest.raises(ValueError, match="2 tensors for 3 ranks") as error:
        dist.all_gather([torch.ones(1)] * 2, torch.ones(1))
    with pytest.raises(ValueError, match="has 3 elements, expected 2"):
        dist.all_gather([torch.ones(3)] * 3, torch.ones(2))
    with pytest.raises(ValueError, match="a tensor is on meta"):
        dist.broadcast(torch.ones(3, device="meta"), 0)
    dist.barrier()  # nothing has moved: the group works on
    return words


def test_what_makes_no_sense_is_refused_before_anything_moves(together: Together) -> None:
    for words in together(3, refusals):
        assert "band needs integers or booleans, the tensor is torch.float32" in words[0]
        assert "avg makes no sense for booleans" in words[2]
        assert "torch has no sum of torch.uint16" in words[3]
        assert "torch has no sum of torch.float8_e4m3fn" in words[4]


# ---- moving


def moves(rank: int, size: int) -> None:
    for kind in EVERY:
        own = vector(rank, kind)
        every = [vector(other, kind) for other in range(size)]
        for root in range(size):
            tensor = own.clone()
            dist.broadcast(tensor, root)
            same(tensor, every[root], ("broadcast", kind))
            gathered = [torch.zeros_like(own) for _ in range(size)] if rank == root else None
            dist.gather(own, gathered, root)
            for found, wanted in zip(gathered or [], every, strict=False):
                same(found, wanted, ("gather", kind))
            tensor = torch.zeros_like(own)
            dist.scatter(tensor, every if rank == root else None, root)
            same(tensor, own, ("scatter", kind))
        lists = [torch.zeros_like(own) for _ in range(size)]
        dist.all_gather(lists, own)
        whole = torch.zeros(size * 7, dtype=kind)
        dist.all_gather_into_tensor(whole, own)
        same(whole, torch.cat(every), ("all_gather_into_tensor", kind))
        same(torch.cat(lists), torch.cat(every), ("all_gather", kind))
        outputs = [torch.zeros(2, dtype=kind) for _ in range(size)]
        dist.all_to_all(outputs, [vector(rank * size + place, kind, (2,)) for place in range(size)])
        for other, found in enumerate(outputs):
            same(found, vector(other * size + rank, kind, (2,)), ("all_to_all", kind))
        output = torch.zeros(size * 2, dtype=kind)
        dist.all_to_all_single(output, torch.cat([vector(rank * size + place, kind, (2,)) for place in range(size)]))
        same(output, torch.cat(outputs), ("all_to_all_single", kind))
        dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_moves(together: Together, size: int) -> None:
    together(size, moves, size)


def uneven(rank: int, size: int) -> None:
    lengths = [other + 1 for other in range(size)]
    own = torch.full((lengths[rank],), float(rank))
    lists = [torch.zeros(length) for length in lengths]
    dist.all_gather(lists, own)
    for other, found in enumerate(lists):
        same(found, torch.full((other + 1,), float(other)), "uneven all_gather")
    output = torch.zeros(lengths[rank])
    dist.reduce_scatter(output, [torch.full((length,), rank + 1.0) for length in lengths])
    same(output, torch.full((lengths[rank],), float(sum(range(1, size + 1)))), "uneven reduce_scatter")
    # Rank r sends r+p rows to rank p, none among them.
    there = [(rank + place) % 3 for place in range(size)]
    here = [(other + rank) % 3 for other in range(size)]
    source = torch.cat([torch.full((rows, 2), rank * 10 + place) for place, rows in enumerate(there)])
    target = torch.zeros(sum(here), 2, dtype=torch.int64)
    dist.all_to_all_single(target, source, here, there)
    wanted = torch.cat([torch.full((rows, 2), other * 10 + rank) for other, rows in enumerate(here)])
    same(target, wanted, "uneven all_to_all_single")
    outputs = [torch.zeros(rows, 2, dtype=torch.int64) for rows in here]
    dist.all_to_all(outputs, list(source.split(there)))
    same(torch.cat(outputs), wanted, "uneven all_to_all")


def test_uneven_amounts(together: Together) -> None:
    together(3, uneven, 3)


def odd_shapes(rank: int) -> None:
    total, transposed = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    turned = transposed.t()
    dist.all_reduce(turned)
    same(transposed, total * 2, "all_reduce of a transposed tensor")
    strided = torch.arange(10.0)
    dist.broadcast(strided[::2].add_(rank), 0)
    same(strided[1::2], torch.arange(10.0)[1::2], "what lies between")
    same(strided[::2], torch.arange(10.0)[::2], "broadcast of every other element")
    lists = [torch.zeros(4, 3).t() for _ in range(2)]
    dist.all_gather(lists, total + rank)
    same(lists[1].contiguous(), total + 1, "all_gather into transposed tensors")
    for empty in (torch.zeros(0), torch.zeros(3, 0, 2, dtype=torch.int64)):
        dist.all_reduce(empty)
        dist.broadcast(empty, 1)
        dist.all_gather([empty.clone(), empty.clone()], empty)
    scalar = torch.tensor(rank + 1)
    dist.all_reduce(scalar)
    assert scalar.item() == 3
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    same(leaf.detach(), torch.full((3,), 2.0), "a leaf that requires grad")
    conjugated = torch.full((2,), 1 + 1j * (rank + 1)).conj()
    world = dist.group.WORLD
    assert world is not None
    world.allreduce([conjugated]).wait()  # dist.all_reduce itself refuses conjugated views
    same(conjugated.resolve_conj(), torch.full((2,), 2 - 3j), "a conjugated view")
    large = torch.full((3_000_000,), float(rank + 1))
    dist.all_reduce(large)
    assert bool((large == 3.0).all())


def test_odd_shapes(together: Together) -> None:
    together(2, odd_shapes)


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
def test_coalesced(together: Together) -> None:
    together(2, coalesced)


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


def test_objects(together: Together) -> None:
    together(3, objects)


def sparse(rank: int) -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[rank, 2]]), [[1.0, 2.0], [3.0, 4.0]], (4, 2))
    dist.all_reduce(tensor)
    same(tensor.to_dense(), torch.tensor([[1.0, 2], [1, 2], [6, 8], [0, 0]]), "sparse all_reduce")


def test_sparse_all_reduce(together: Together) -> None:
    together(2, sparse)
