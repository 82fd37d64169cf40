"""A rank that dies or does not arrive: the others soon raise an error that names the rank and the operation."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from world import LONG_S, World

from hoop.errors import DeadlineExceeded, PeerLost

MakeWorld = Callable[..., World]
RunRanks = Callable[..., list[Any]]
VICTIM = 2


def all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(100_000))


def asynchronous(rank: int) -> None:
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def receive(rank: int) -> None:
    dist.recv(torch.ones(3), VICTIM)


def receive_from_any(rank: int) -> None:
    dist.recv(torch.ones(3))


def with_a_forked_child(rank: int) -> None:
    """The victim has a child process (a data loader, for example) that outlives it."""
    dist.all_reduce(torch.ones(3))


def subgroup(rank: int) -> None:
    dist.broadcast(torch.ones(3), 3, group=dist.distributed_c10d._world.group_of_test)  # type: ignore[attr-defined]


def over_tcp(rank: int) -> None:
    """In a group that uses TCP, as ranks on different hosts do."""
    dist.all_reduce(torch.ones(100_000), group=dist.distributed_c10d._world.group_of_test)  # type: ignore[attr-defined]


def backward(rank: int) -> None:
    model = dist.distributed_c10d._world.model_of_test  # type: ignore[attr-defined]
    model(torch.ones(2, 4)).sum().backward()


def die_or_report(rank: int, doing: Callable[[int], None]) -> tuple[str, bool]:
    """The victim kills itself when the others are about to wait. They return their error and whether it is a
    PeerLost."""
    world = dist.distributed_c10d._world
    if doing is over_tcp:
        os.environ["HOOP_TRANSPORT"] = "tcp"
    world.group_of_test = dist.new_group([1, VICTIM, 3])  # type: ignore[attr-defined]
    if doing is backward:
        world.model_of_test = DistributedDataParallel(torch.nn.Linear(4, 4))  # type: ignore[attr-defined]
    dist.barrier()
    if rank == VICTIM and doing is with_a_forked_child and os.fork() == 0:
        deadline = time.monotonic() + LONG_S
        while not os.path.exists(os.environ["FAULT_OVER"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        os._exit(0)
    if rank == VICTIM:
        for other in (0, 1, 3):
            dist.recv(torch.zeros(1), other)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(torch.zeros(1), VICTIM)  # lets the victim die
    if doing in (subgroup, over_tcp) and rank == 0:
        return "not in that group", True
    with pytest.raises(RuntimeError) as error:
        doing(rank)
    dist.destroy_process_group()
    return str(error.value), isinstance(error.value, PeerLost)


@pytest.mark.parametrize(
    ("doing", "title"),
    [
        (all_reduce, "all_reduce"),
        (asynchronous, "all_reduce"),
        (with_a_forked_child, "all_reduce"),
        (receive, "recv"),
        (receive_from_any, "recvAnySource"),
        (subgroup, "broadcast"),
        (over_tcp, "all_reduce"),
        (backward, "all_reduce"),
    ],
)
def test_a_killed_rank_is_named_before_any_timeout(
    world: MakeWorld, tmp_path: Path, doing: Callable[[int], None], title: str
) -> None:
    over = tmp_path / "over"
    ranks = world(4, timeout=100 * LONG_S)  # a rank that waits for it fails the test
    ranks.start(with_environment, {"FAULT_OVER": str(over)}, die_or_report, doing)
    reports = {rank: ranks.result(rank) for rank in range(4) if rank != VICTIM}
    over.touch()
    ranks.processes[VICTIM].join()
    assert ranks.processes[VICTIM].exitcode == -signal.SIGKILL
    for rank, (message, is_peer_lost) in reports.items():
        if message == "not in that group":
            continue
        group_rank = VICTIM - 1 if doing in (subgroup, over_tcp) else VICTIM
        pattern = rf"\(global rank {rank}\) of group '.*': {title} (failed|cannot run any more)"
        assert re.search(pattern, message), message
        named = re.findall(r"rank \d+ \(global rank \d+\) (?:is gone|has left)", message)
        assert named[0] == f"rank {group_rank} (global rank {VICTIM}) is gone", message
        assert is_peer_lost or doing is backward  # torch's C++ code keeps only the message


def with_environment(rank: int, variables: dict[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """Sets variables in a rank, which has the environment of the forkserver and not of the test."""
    os.environ.update(variables)
    return function(rank, *args)


def barrier_without_rank_1(rank: int) -> str:
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        return ""
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=0.3)  # the oldest supported dist.barrier has no timeout argument
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(RuntimeError) as error:
        world.barrier(options).wait()
    assert isinstance(error.value, DeadlineExceeded)
    with pytest.raises(RuntimeError, match="all_reduce cannot run any more"):
        dist.all_reduce(torch.ones(1))
    dist.send(torch.zeros(1), 1)
    return str(error.value)


def test_a_timeout_names_the_operation_and_the_missing_rank(run_ranks: RunRanks) -> None:
    message, _ = run_ranks(2, barrier_without_rank_1)
    assert message.startswith("rank 0 (global rank 0) of group '0': barrier ran into its timeout of 0.3 s"), message
    assert "waiting for rank 1" in message


def receive_without_send(rank: int) -> str:
    if rank == 1:
        dist.barrier()
        return ""
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(RuntimeError) as error:
        dist.recv(torch.zeros(5), 1, tag=3)
    group.set_timeout(timedelta(seconds=LONG_S))
    dist.barrier()  # a receive that timed out does not break the group
    return str(error.value)


def test_a_receive_without_a_send_times_out(run_ranks: RunRanks) -> None:
    message, _ = run_ranks(2, receive_without_send)
    assert "recv ran into its timeout of 0.3 s: waiting for a message from rank 1 (tag 3, 20 bytes)" in message


def destroy_with_pending_operations(rank: int) -> None:
    """Rank 0 destroys a group with operations that rank 1 never joins."""
    group = dist.new_group()
    if rank == 0:
        work = group.allreduce([torch.ones(3)])
        queued = group.barrier()
        dist.destroy_process_group(group)
        for one in (work, queued):
            with pytest.raises(RuntimeError, match=r"this process group is destroyed|closed"):
                one.wait()
    dist.barrier()


def test_a_group_can_be_destroyed_with_pending_operations(run_ranks: RunRanks) -> None:
    run_ranks(2, destroy_with_pending_operations, timeout=100 * LONG_S)


def leave_early(rank: int) -> list[str]:
    messages: list[str] = []
    if rank == 1:
        return messages
    for operation in (lambda: dist.recv(torch.zeros(5), 1), lambda: dist.all_reduce(torch.ones(1))):
        with pytest.raises(RuntimeError) as error:
            operation()
        messages.append(str(error.value))
    return messages


def test_a_rank_that_leaves_is_not_reported_as_dead(run_ranks: RunRanks) -> None:
    message, collective, *_ = run_ranks(2, leave_early)[0]
    assert (
        "recv failed: waiting for a message from rank 1 (tag 0, 20 bytes): rank 1 (global rank 1) has left" in message
    )
    assert "all_reduce failed: rank 1 (global rank 1) has left the group" in collective
