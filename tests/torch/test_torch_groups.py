"""Creating and destroying groups: all init methods, subgroups, groups created again, nothing left afterwards."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from world import LONG_S, World

from hoop.errors import InvalidArgument
from hoop.torch_backend.process_group import HoopProcessGroup

RunRanks = Callable[..., list[Any]]
MakeWorld = Callable[..., World]

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("hoop")
tensor = torch.ones(3) * dist.get_rank()
dist.all_reduce(tensor)
os.write(1, f"{dist.get_rank()} {dist.get_backend()} {tensor.tolist()}\\n".encode())  # in one piece
"""


def total_of(rank: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return float(tensor)


def test_torchrun_and_a_script_that_only_names_the_backend(tmp_path: Path) -> None:
    """With env://, which is the default; the script does not destroy its group. torchrun is forked, its ranks not."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = "from torch.distributed.run import main; main()"
    command = [sys.executable, "-c", torchrun, "--nproc-per-node", "2", "--standalone", str(script)]
    done = preloaded.run(command, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if "hoop" in line)
    assert lines == ["0 hoop [1.0, 1.0, 1.0]", "1 hoop [1.0, 1.0, 1.0]"]


def init_again(rank: int, ports: list[int]) -> list[float]:
    """Other init methods, one after the other, in the same processes."""
    totals = []
    dist.destroy_process_group()
    dist.init_process_group("hoop", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2)
    totals.append(total_of(rank))
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", ports[1], 2, rank == 0)
    for _ in range(2):  # twice with one store: the keys of the first group do not affect the second
        dist.init_process_group("hoop", store=store, rank=rank, world_size=2)
        totals.append(total_of(rank))
        dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[2]), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("hoop")
    totals.append(total_of(rank))
    return totals


def test_tcp_env_and_a_given_store(run_ranks: RunRanks) -> None:
    assert run_ranks(2, init_again, [free_port() for _ in range(3)]) == [[3.0] * 4] * 2


def subgroups(rank: int) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    mine = halves[rank // 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == (1 if rank < 2 else 5)
    assert dist.get_backend(mine) == "hoop"
    root = [0, 3][rank // 2]
    tensor = torch.tensor([float(rank)])
    dist.broadcast(tensor, root, group=mine)  # by global rank
    assert tensor.item() == root
    other = {0: 1, 1: 0, 2: 3, 3: 2}[rank]
    if rank in (0, 3):
        dist.send(torch.tensor([float(rank)]), other, group=mine)
    else:
        assert dist.recv(tensor, group=mine) == other
    alone = dist.new_subgroups(1)[0]
    dist.all_reduce(tensor, group=alone)
    for group in (mine, alone):
        dist.destroy_process_group(group)
    assert total_of(rank) == 10.0


def test_subgroups(run_ranks: RunRanks) -> None:
    run_ranks(4, subgroups)


def queries_of_torch(rank: int) -> list[str]:
    """Queries of a group by torch's C++ code since 2.15, and by its Python code in all versions."""
    names = []
    for group in (dist.group.WORLD, dist.new_group([0, 1], group_desc="both")):
        assert dist.get_backend(group) == "hoop"
        assert group is not None
        assert group._device_types == [torch.device("cpu"), torch.device("cuda")]
        assert (group.rank(), group.size()) == (rank, 2)
        backend: Any = group._get_backend(torch.device("cpu"))
        assert backend is group
        for name in ("splitting", "window", "reconfigure", "abort_hooks", "completion_hooks"):
            assert getattr(group, f"supports_{name}", False) is False  # an older torch does not have most of them
        names.append(group.group_desc)
        hook = getattr(dist.distributed_c10d, "FlightRecorderHook", None)
        if hook is not None:
            assert hook.attach(group, [0, 1]) is not None
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50), dist.group.WORLD)
    assert total_of(rank) == 3.0
    return names


def test_a_group_answers_the_queries_of_torch(run_ranks: RunRanks) -> None:
    assert run_ranks(2, queries_of_torch) == [["default_pg", "both"]] * 2


def messages_through_cpp(rank: int) -> list[float]:
    """Functional batched messages begin and end coalescing in C++, which uses the method names of torch 2.15."""
    tensors = [torch.full((2,), rank + 1.0), torch.zeros(2)]
    batch = torch.ops._c10d_functional.batch_p2p_ops
    world = dist.group.WORLD
    assert world is not None
    _, received = batch(["isend", "irecv"], [1 - rank] * 2, [0, 0], tensors, world.group_name)
    return list(torch.ops._c10d_functional.wait_tensor(received).tolist())


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "get_backend"), reason="torch 2.15 has it")
def test_batched_messages_from_cpp(run_ranks: RunRanks) -> None:
    assert run_ranks(2, messages_through_cpp) == [[2.0, 2.0], [1.0, 1.0]]


def destroy_and_inspect(rank: int) -> tuple[list[str], int]:
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.new_group()
    dist.barrier()
    dist.destroy_process_group()
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    sockets = [link for link in links if link.startswith("socket:")]
    return [thread.name for thread in threading.enumerate()], len(sockets)


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_destroyed_group_leaves_no_thread_and_no_socket(run_ranks: RunRanks) -> None:
    for threads, sockets in run_ranks(2, destroy_and_inspect):
        assert threads == ["MainThread"]
        assert sockets == 0


def without_destroying(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._world.pg_map.clear()
    dist.distributed_c10d._update_default_pg(None)  # the process exits without destroying the group


def test_a_process_exits_without_destroying_its_group(run_ranks: RunRanks) -> None:
    run_ranks(3, without_destroying)


def operations_after_destroy(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="this process group is destroyed"):
        group.allreduce([torch.ones(1)]).wait()
    with pytest.raises(ConnectionError, match="this process group is destroyed"):
        group.send([torch.ones(1)], 1 - rank, 0)


def test_operations_on_a_destroyed_group_raise(run_ranks: RunRanks) -> None:
    run_ranks(2, operations_after_destroy)


def monitored(rank: int) -> list[str]:
    dist.monitored_barrier()
    messages: list[str] = []
    if rank == 1:
        dist.barrier()
        return messages
    with pytest.raises(RuntimeError) as error:
        # Rank 0 gives up and answers rank 2, which waits for that.
        dist.monitored_barrier(timeout=timedelta(seconds=LONG_S if rank else 0.3))
    messages.append(str(error.value))
    dist.barrier()  # collectives still work: the missing rank is only late
    return messages


def test_monitored_barrier_names_the_missing_rank(run_ranks: RunRanks) -> None:
    zero, _, two = run_ranks(3, monitored)
    assert zero[0].startswith("Rank 1 failed to pass monitoredBarrier in 0.3 s")
    assert "Rank 2 successfully reached monitoredBarrier" in two[0]
    assert "not every rank came" in two[0]


def test_a_group_that_takes_in_other_ranks_is_refused() -> None:
    """``init_process_group(enable_reconfigure=True)`` of torch 2.15: at the start, not at its first use."""
    options = SimpleNamespace(enable_reconfigure=True)
    with pytest.raises(InvalidArgument, match=r"^enable_reconfigure: .*destroy the group and create it again"):
        HoopProcessGroup.create(options)
