"""Ranks whose calls do not match: every rank raises at once and names both calls. Calls may differ where allowed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import World

from hoop.errors import CollectiveMismatch

RunRanks = Callable[..., list[Any]]
Call = Callable[[Any], Any]
LARGE = 300_000
TRANSPORTS = ("shm", "tcp")


def all_reduce_of(count: int, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Call:
    return lambda group: dist.all_reduce(torch.ones(count, dtype=dtype), op, group)


def broadcast_of(count: int, root: int, dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: dist.broadcast(torch.ones(count, dtype=dtype), root, group)


def async_all_reduce_of(count: int, op: Any) -> Call:
    return lambda group: dist.all_reduce(torch.ones(count), op, group, async_op=True).wait()


def all_to_all_of(sizes: list[int]) -> Call:
    """An all_to_all_single that sends and receives ``sizes[r]`` rows to and from rank r."""
    total = sum(sizes)
    return lambda group: dist.all_to_all_single(
        torch.zeros(total), torch.ones(total), list(sizes), list(sizes), group=group
    )


def cases(size: int) -> dict[str, tuple[Call, str, Call, str]]:
    """By name: the call of all ranks but the last and its text in errors, then the same for the last rank."""
    maximum, last = dist.ReduceOp.MAX, size - 1
    sums = (all_reduce_of(5), "all_reduce sum of 5 float32")
    broadcasts = (broadcast_of(6, 0), "broadcast of 6 float32 from 0")
    large = (all_reduce_of(LARGE), f"all_reduce sum of {LARGE} float32")
    gathered = [torch.zeros(5) for _ in range(size)]
    return {
        "count": (*sums, all_reduce_of(6), "all_reduce sum of 6 float32"),
        "float64": (*sums, all_reduce_of(5, torch.float64), "all_reduce sum of 5 float64"),
        "int32": (*sums, all_reduce_of(5, torch.int32), "all_reduce sum of 5 int32"),
        "max": (*sums, all_reduce_of(5, op=maximum), "all_reduce max of 5 float32"),
        "broadcast": (*sums, broadcast_of(6, 1), "broadcast of 6 float32 from 1"),
        "root": (*broadcasts, broadcast_of(6, last), f"broadcast of 6 float32 from {last}"),
        "same bytes": (*broadcasts, broadcast_of(6, 0, torch.int32), "broadcast of 6 int32 from 0"),
        "bool": (*sums, all_reduce_of(5, torch.bool), "all_reduce sum of 5 bool"),
        "started": (
            *(async_all_reduce_of(5, dist.ReduceOp.SUM), sums[1]),
            *(async_all_reduce_of(5, maximum), "all_reduce max of 5 float32"),
        ),
        "large count": (*large, all_reduce_of(LARGE + 1), f"all_reduce sum of {LARGE + 1} float32"),
        "large broadcast": (*large, broadcast_of(LARGE, last), f"broadcast of {LARGE} float32 from {last}"),
        "barrier": (lambda group: dist.barrier(group), "barrier", *sums),
        "splits": (all_to_all_of([1] * size), "all_to_all with splits of float32", *sums),
        "all_gather": (
            *(lambda group: dist.all_gather(gathered, torch.ones(5), group), "all_gather of 5 float32"),
            *(lambda group: dist.all_to_all_single(torch.zeros(size), torch.ones(size), group=group),
              f"all_to_all of {size} float32"),
        ),
    }  # fmt: skip


def outcome(call: Call, group: Any) -> tuple[list[str], str]:
    """The classes and the message of the exception that a call raises; empty if it raises none."""
    try:
        call(group)
    except Exception as error:
        return [base.__name__ for base in type(error).__mro__], str(error)
    return [], ""


def mismatched(rank: int, size: int) -> dict[tuple[str, str], tuple[Any, Any]]:
    """By transport and case: the outcome of the call, and of the next call on the same group."""
    found = {}
    for transport in TRANSPORTS:
        os.environ["HOOP_TRANSPORT"] = transport
        for name, (usual, _, unusual, _) in cases(size).items():
            group = dist.new_group(list(range(size)))
            first = outcome(unusual if rank == size - 1 else usual, group)
            found[transport, name] = first, outcome(lambda group: dist.barrier(group), group)
            dist.destroy_process_group(group)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)  # other groups still work
            assert tensor.item() == size
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_names_both_calls(run_ranks: RunRanks, size: int) -> None:
    expected = cases(size)
    for rank, found in enumerate(run_ranks(size, mismatched, size)):
        assert len(found) == len(TRANSPORTS) * len(expected)
        for (transport, name), ((classes, message), (later_classes, later_message)) in found.items():
            _, usual, _, unusual = expected[name]
            context = f"{transport}, {name}, rank {rank}: {message!r}"
            assert {CollectiveMismatch.__name__, "DistBackendError", "RuntimeError"} <= set(classes), context
            assert f"rank {size - 1}: {unusual};" in message, context
            assert f": {usual};" in message, context
            assert classes == later_classes, f"{name}, rank {rank}: {later_message!r}"
            assert "cannot run any more" in later_message, later_message
            assert f"rank {size - 1}: {unusual};" in later_message, later_message


def wrong_splits(group: Any, rank: int) -> tuple[list[str], str]:
    """Rank 0 sends two rows to rank 1, which expects one."""
    sent = [[1, 2, 1], [1, 1, 1], [1, 1, 1]][rank]
    return outcome(
        lambda group: dist.all_to_all_single(torch.zeros(3), torch.ones(sum(sent)), [1, 1, 1], sent, group=group),
        group,
    )


def differ_where_allowed(group: Any, rank: int) -> bool:
    """Whether calls work in which ranks send or receive different amounts, or use different memory layouts."""
    received, sent = torch.zeros(3 * (rank + 1)), torch.full((6,), float(rank))
    dist.all_to_all_single(received, sent, [rank + 1] * 3, [1, 2, 3], group=group)
    correct = received.tolist() == [float(peer) for peer in range(3) for _ in range(rank + 1)]
    rows = [torch.zeros(peer) for peer in range(3)]
    dist.all_gather(rows, torch.full((rank,), float(rank)), group)
    correct &= [row.tolist() for row in rows] == [[float(peer)] * peer for peer in range(3)]
    tensor = torch.ones(4, 2)[:, 0] if rank else torch.ones(4)  # not contiguous, contiguous
    dist.all_reduce(tensor, group=group)
    correct &= tensor.tolist() == [3.0] * 4
    out = [torch.zeros(2) for _ in range(3)] if rank == 1 else None
    dist.gather(torch.full((2,), float(rank)), out, 1, group)
    correct &= out is None or [one.tolist() for one in out] == [[float(peer)] * 2 for peer in range(3)]
    objects: list[Any] = [None] * 3
    dist.all_gather_object(objects, "x" * rank, group)
    correct &= objects == ["", "x", "xx"]
    scaled = torch.ones(2)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(float(rank)), group)
    correct &= scaled.tolist() == [3.0, 3.0]
    empty = torch.ones(0)
    for call in (dist.all_reduce, dist.barrier):
        call(empty, group=group) if call is dist.all_reduce else call(group)
    return correct


def allowed_and_wrong_calls(rank: int) -> list[tuple[bool, tuple[list[str], str]]]:
    found = []
    for transport in TRANSPORTS:
        os.environ["HOOP_TRANSPORT"] = transport
        group = dist.new_group([0, 1, 2])
        found.append((differ_where_allowed(group, rank), wrong_splits(group, rank)))
        dist.destroy_process_group(group)
    return found


def test_calls_may_differ_where_allowed(run_ranks: RunRanks) -> None:
    for found in run_ranks(3, allowed_and_wrong_calls):
        for correct, (classes, message) in found:
            assert correct
            assert CollectiveMismatch.__name__ in classes, message
            assert "all_to_all with splits of float32 rank 1 expects 4 bytes of rank 0, which sends 8" in message


def test_a_mismatch_is_reported_before_a_rank_exits(world: Callable[..., World]) -> None:
    """If the process of one rank exits after the error, the others still raise the mismatch and not a lost peer."""
    ranks = world(3)
    ranks.start(exit_after_mismatch)
    for rank in (1, 2):
        classes, message = ranks.result(rank)
        assert CollectiveMismatch.__name__ in classes, message


def exit_after_mismatch(rank: int) -> tuple[list[str], str]:
    os.environ["HOOP_TRANSPORT"] = "tcp"
    group = dist.new_group([0, 1, 2])
    found = outcome(all_reduce_of(6 if rank == 0 else 5), group)
    if rank == 0:
        os._exit(0)
    return found


def errors_of_a_group(rank: int) -> list[str]:
    group: Any = dist.group.WORLD
    seen = [group.get_error().name]
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.ones(2 + rank))
    return [*seen, group.get_error().name]


def test_a_broken_group_says_so(run_ranks: RunRanks) -> None:
    """torch 2.15 asks a backend for its error."""
    assert run_ranks(2, errors_of_a_group) == [["SUCCESS", "COMM_ERROR"]] * 2
