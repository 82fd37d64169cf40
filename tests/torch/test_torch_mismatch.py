"""Ranks whose calls do not match: every rank raises at once, naming both calls; what may differ keeps working."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import World

from hoop.errors import CollectiveMismatch

Together = Callable[..., list[Any]]
Call = Callable[[Any], Any]
LARGE = 300_000
TRANSPORTS = ("shm", "tcp")


def reduce_of(count: int, kind: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda group: dist.all_reduce(torch.ones(count, dtype=kind), op, group)


def broadcast_of(count: int, root: int, kind: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.broadcast(torch.ones(count, dtype=kind), root, group)


def started(count: int, op: Any) -> Call:
    return lambda group: dist.all_reduce(torch.ones(count), op, group, async_op=True).wait()


def split(sizes: list[int]) -> Call:
    """An all_to_all with rows for each rank; what comes back is as long."""
    total = sum(sizes)
    return lambda group: dist.all_to_all_single(
        torch.zeros(total), torch.ones(total), list(sizes), list(sizes), group=group
    )


def cases(size: int) -> dict[str, tuple[Call, str, Call, str]]:
    """What all ranks but the last call and how errors name it, then the same of the last rank."""
    maximum, last = dist.ReduceOp.MAX, size - 1
    sums = (reduce_of(5), "all_reduce sum of 5 float32")
    given = (broadcast_of(6, 0), "broadcast of 6 float32 from 0")
    many = (reduce_of(LARGE), f"all_reduce sum of {LARGE} float32")
    gathered = [torch.zeros(5) for _ in range(size)]
    return {
        "count": (*sums, reduce_of(6), "all_reduce sum of 6 float32"),
        "float64": (*sums, reduce_of(5, torch.float64), "all_reduce sum of 5 float64"),
        "int32": (*sums, reduce_of(5, torch.int32), "all_reduce sum of 5 int32"),
        "max": (*sums, reduce_of(5, op=maximum), "all_reduce max of 5 float32"),
        "broadcast": (*sums, broadcast_of(6, 1), "broadcast of 6 float32 from 1"),
        "root": (*given, broadcast_of(6, last), f"broadcast of 6 float32 from {last}"),
        "same bytes": (*given, broadcast_of(6, 0, torch.int32), "broadcast of 6 int32 from 0"),
        "bool": (*sums, reduce_of(5, torch.bool), "all_reduce sum of 5 bool"),
        "started": (
            *(started(5, dist.ReduceOp.SUM), sums[1]),
            *(started(5, maximum), "all_reduce max of 5 float32"),
        ),
        "large count": (*many, reduce_of(LARGE + 1), f"all_reduce sum of {LARGE + 1} float32"),
        "large broadcast": (*many, broadcast_of(LARGE, last), f"broadcast of {LARGE} float32 from {last}"),
        "barrier": (lambda group: dist.barrier(group), "barrier", *sums),
        "splits": (split([1] * size), "all_to_all with splits of float32", *sums),
        "all_gather": (
            *(lambda group: dist.all_gather(gathered, torch.ones(5), group), "all_gather of 5 float32"),
            *(lambda group: dist.all_to_all_single(torch.zeros(size), torch.ones(size), group=group),
              f"all_to_all of {size} float32"),
        ),
    }  # fmt: skip


def outcome(doing: Call, group: Any) -> tuple[list[str], str]:
    """The classes of what was raised, and its text."""
    try:
        doing(group)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], ""


def mismatched(rank: int, size: int) -> dict[tuple[str, str], tuple[Any, Any]]:
    """By transport and case: what its call raised, and what the next call on the same group did."""
    found = {}
    for transport in TRANSPORTS:
        os.environ["HOOP_TRANSPORT"] = transport
        for name, (usual, _, unusual, _) in cases(size).items():
            group = dist.new_group(list(range(size)))
            first = outcome(unusual if rank == size - 1 else usual, group)
            found[transport, name] = first, outcome(lambda group: dist.barrier(group), group)
            dist.destroy_process_group(group)
            box = torch.ones(1)
            dist.all_reduce(box)  # other groups are as before
            assert box.item() == size
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_names_both_calls(together: Together, size: int) -> None:
    expected = cases(size)
    for rank, found in enumerate(together(size, mismatched, size)):
        assert len(found) == len(TRANSPORTS) * len(expected)
        for (transport, name), ((kinds, text), (again, later)) in found.items():
            _, usual, _, unusual = expected[name]
            where = f"{transport}, {name}, rank {rank}: {text!r}"
            assert {CollectiveMismatch.__name__, "DistBackendError", "RuntimeError"} <= set(kinds), where
            assert f"rank {size - 1}: {unusual};" in text, where
            assert f": {usual};" in text, where
            assert kinds == again, f"{name}, rank {rank}: {later!r}"
            assert "cannot run any more" in later, later
            assert f"rank {size - 1}: {unusual};" in later, later


def wrong_splits(group: Any, rank: int) -> tuple[list[str], str]:
    """Rank 0 sends rank 1 two rows, which expects one."""
    sent = [[1, 2, 1], [1, 1, 1], [1, 1, 1]][rank]
    return outcome(
        lambda group: dist.all_to_all_single(torch.zeros(3), torch.ones(sum(sent)), [1, 1, 1], sent, group=group),
        group,
    )


def may_differ(group: Any, rank: int) -> bool:
    """Calls in which ranks give or take different amounts, or lay their tensors out differently."""
    into, given = torch.zeros(3 * (rank + 1)), torch.full((6,), float(rank))
    dist.all_to_all_single(into, given, [rank + 1] * 3, [1, 2, 3], group=group)
    right = into.tolist() == [float(peer) for peer in range(3) for _ in range(rank + 1)]
    rows = [torch.zeros(peer) for peer in range(3)]
    dist.all_gather(rows, torch.full((rank,), float(rank)), group)
    right &= [row.tolist() for row in rows] == [[float(peer)] * peer for peer in range(3)]
    tensor = torch.ones(4, 2)[:, 0] if rank else torch.ones(4)  # not contiguous, contiguous
    dist.all_reduce(tensor, group=group)
    right &= tensor.tolist() == [3.0] * 4
    out = [torch.zeros(2) for _ in range(3)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), out, 1, group)
    right &= out is None or [one.tolist() for one in out] == [[float(peer)] * 2 for peer in range(3)]
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, "x" * rank, group)
    right &= objects == ["", "x", "xx"]
    scaled = torch.ones(2)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(float(rank)), group)
    right &= scaled.tolist() == [3.0, 3.0]
    empty = torch.ones(0)
    for call in (dist.all_reduce, dist.barrier):
        call(empty, group=group) if call is dist.all_reduce else call(group)
    return right


def with_splits(rank: int) -> list[tuple[bool, tuple[list[str], str]]]:
    found = []
    for transport in TRANSPORTS:
        os.environ["HOOP_TRANSPORT"] = transport
        group = dist.new_group([0, 1, 2])
        found.append((may_differ(group, rank), wrong_splits(group, rank)))
        dist.destroy_process_group(group)
    return found


def test_only_what_must_agree_is_compared(together: Together) -> None:
    for found in together(3, with_splits):
        for right, (kinds, text) in found:
            assert right
            assert CollectiveMismatch.__name__ in kinds, text
            assert "all_to_all with splits of float32 rank 1 expects 4 bytes of rank 0, which sends 8" in text


def test_ranks_are_told_before_one_of_them_ends(world: Callable[..., World]) -> None:
    """A rank whose process ends with the error does not leave the others with a lost peer."""
    ranks = world(3)
    ranks.start(ends_at_once)
    for rank in (1, 2):
        kinds, text = ranks.result(rank)
        assert CollectiveMismatch.__name__ in kinds, text


def ends_at_once(rank: int) -> tuple[list[str], str]:
    os.environ["HOOP_TRANSPORT"] = "tcp"
    group = dist.new_group([0, 1, 2])
    found = outcome(reduce_of(6 if rank == 0 else 5), group)
    if rank == 0:
        os._exit(0)
    return found
