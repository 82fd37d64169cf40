"""CUDA tensors: one suite over the ways in which ranks exchange them.

    emulated           the logic of the GPU path with host memory in the place of a GPU
    host meetings      the same, for a device on which streams cannot wait for each other
    through the host   the same ranks without shared memory: tensors are copied to the host, and travel over TCP
    cuda               a GPU, which all ranks share

On a machine where Hoop is not installed:

    PYTHONPATH=src python3 -m pytest --noconftest -c /dev/null -p no:cacheprovider tests/torch/test_torch_device.py
"""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_torch_async
import test_torch_collectives
import test_torch_messages
import test_torch_mismatch
import torch
import torch.distributed as dist
from world import World

from hoop.errors import CollectiveMismatch, InvalidArgument
from hoop.torch_backend import device_links, device_memory
from hoop.torch_backend.device_memory import EmulatedMemory

RunOn = Callable[..., list[Any]]
MADE: list[EmulatedMemory] = []
"""The emulated memories that this rank has made."""


class RecordedMemory(EmulatedMemory):
    """An emulated memory that a test can find."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        MADE.append(self)


def on_emulated(rank: int) -> None:
    device_memory.MEMORIES["cpu"] = RecordedMemory


def with_host_meetings(rank: int) -> None:
    on_emulated(rank)
    device_links.MEET_ON_DEVICE = False


def through_host(rank: int) -> None:
    on_emulated(rank)
    os.environ["HOOP_TRANSPORT"] = "tcp"
    warnings.simplefilter("ignore", device_links.HostStagingWarning)


def on_cuda(rank: int) -> None:
    from hoop.torch_backend import autoload

    if not hasattr(dist.Backend, "HOOP"):
        autoload.register()  # this machine may run Hoop's files without an installation
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_default_device("cuda")


CUDA = pytest.param(
    on_cuda,
    id="cuda",
    marks=pytest.mark.gpu,
)
EMULATED = pytest.param(on_emulated, id="emulated")
MAPPED = [EMULATED, pytest.param(with_host_meetings, id="host meetings"), CUDA]
"""Ranks map each other's memory."""
ALL = [EMULATED, pytest.param(through_host, id="through the host"), CUDA]


@pytest.fixture
def run_on(tmp_path: Path) -> Iterator[RunOn]:
    """Runs a function on every rank, ``run_on(before, 3, function, …)``, and returns the result of each."""
    worlds: list[World] = []

    def run(before: Callable[[int], None], size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        worlds.append(World(folder, size, before=before))
        worlds[-1].start(function, *arguments)
        return worlds[-1].results()

    yield run
    for one in worlds:
        one.close()


# ---- the suite of the CPU


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("before", ALL)
def test_reductions(run_on: RunOn, before: Callable[[int], None], size: int) -> None:
    run_on(before, size, test_torch_collectives.reductions, size)


@pytest.mark.parametrize("before", ALL)
def test_premul_sum(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, test_torch_collectives.premul_sums, 2)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("before", ALL)
def test_data_movement(run_on: RunOn, before: Callable[[int], None], size: int) -> None:
    run_on(before, size, test_torch_collectives.data_movement, size)


@pytest.mark.parametrize("before", ALL)
def test_uneven_sizes(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 3, test_torch_collectives.uneven_sizes, 3)


@pytest.mark.parametrize("before", [*ALL, MAPPED[1]])
def test_odd_shapes(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, test_torch_collectives.odd_shapes)


@pytest.mark.filterwarnings("ignore:`torch.distributed.all_.*_coalesced` will be deprecated")
@pytest.mark.parametrize("before", ALL)
def test_coalesced(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, test_torch_collectives.coalesced)


@pytest.mark.parametrize("before", ALL)
def test_objects(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 3, test_torch_collectives.objects)


@pytest.mark.parametrize("before", ALL)
def test_messages(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, test_torch_messages.tags)
    run_on(before, 3, test_torch_messages.batches)


@pytest.mark.parametrize("before", ALL)
def test_any_source(run_on: RunOn, before: Callable[[int], None]) -> None:
    assert sorted(run_on(before, 4, test_torch_messages.any_source)[0]) == [1, 2, 3]


def new_tensor(count: int) -> torch.Tensor:
    """A tensor in memory that other ranks can map: any on a GPU, a special one where the GPU is emulated."""
    if "cpu" not in device_memory.MEMORIES:
        return torch.zeros(count)
    group: Any = dist.group.WORLD
    _, route = group._routes._by_type["cpu"]
    return route._memory.tensor(count, torch.float32)  # type: ignore[no-any-return]


def large_messages(rank: int) -> int:
    """Messages that are copied out of the sender's memory; returns how many bytes were sent through the host."""
    dist.all_reduce(torch.ones(1))
    count, other = 600_000, 1 - rank
    own, received = new_tensor(count), new_tensor(count)
    for round_number in range(3):
        own.fill_(10 * rank + round_number)
        works = [dist.isend(own, other, tag=3), dist.irecv(received, other, tag=3)]
        for work in works:
            assert work is not None
            work.wait()
        assert bool((received == 10 * other + round_number).all())
    if rank:
        dist.send(own, 0)
        dist.send(own.view(600, 1000).t(), 0)
        dist.send(own, 0)
    else:
        assert dist.recv(received) == 1
        assert bool((received == 12.0).all())
        dist.recv(received.zero_().view(1000, 600).t(), 1)
        assert bool((received == 12.0).all())
        with pytest.raises(RuntimeError, match=r"rank 1 sent 2400000 bytes with tag 0, .* has 2000000"):
            dist.recv(new_tensor(500_000), 1)
    works = [dist.isend(own, rank, tag=5), dist.irecv(received, rank, tag=5)]  # to itself
    for work in works:
        assert work is not None
        work.wait()
    assert bool((received == 10 * rank + 2).all())
    group: Any = dist.group.WORLD
    return int(group._links.p2p._endpoint.bytes_sent)


@pytest.mark.parametrize("before", ALL)
def test_large_messages(run_on: RunOn, before: Callable[[int], None]) -> None:
    sent = run_on(before, 2, large_messages)
    if before is not through_host:  # the receiver cannot map it
        assert sent[0] < 100_000, "rank 0 has sent only addresses"


@pytest.mark.parametrize("before", ALL)
def test_asynchronous_calls(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, test_torch_async.order)
    run_on(before, 2, test_torch_async.every_collective)


# ---- bits, errors, groups


def bits_of_sums(rank: int, size: int) -> list[Any]:
    """The results of sums and averages of numbers whose sum depends on the order, as integers."""
    found: list[Any] = []
    for kind, count in itertools.product((torch.float32, torch.bfloat16, torch.float16), (5, 1000, 300_000)):
        generator = torch.Generator("cpu").manual_seed(17 * rank + count)
        numbers = torch.randn(count, generator=generator, device="cpu").to(torch.get_default_device()).to(kind)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            total = numbers.clone()
            dist.all_reduce(total, op)
            found.append(total.cpu().view(torch.int16).to(torch.int64).sum().item())
            found.append(total.cpu().view(torch.int16)[:64].tolist())
    return found


def on_cpu(rank: int) -> None:
    """Ordinary tensors in host memory; where Hoop is not installed, its backend is registered."""
    from hoop.torch_backend import autoload

    if not hasattr(dist.Backend, "HOOP"):
        autoload.register()


@pytest.mark.parametrize("before", MAPPED)
def test_sums_have_the_bits_of_the_cpu(run_on: RunOn, before: Callable[[int], None]) -> None:
    expected = run_on(on_cpu, 3, bits_of_sums, 3)
    assert expected[0] == expected[1] == expected[2]
    assert run_on(before, 3, bits_of_sums, 3) == expected


def mismatched(rank: int) -> dict[str, str]:
    """The error of each case of calls that do not match; each has a group of its own."""
    found = {}
    for used in (False, True):
        for name, (usual, _, unusual, _) in test_torch_mismatch.cases(2).items():
            group = dist.new_group([0, 1])
            if used:  # the first operation of a group decides how ranks exchange tensors, and compares calls too
                dist.all_reduce(torch.ones(3), group=group)
            with pytest.raises(RuntimeError) as raised:
                (unusual if rank else usual)(group)
            assert isinstance(raised.value, CollectiveMismatch), raised.value
            found[f"{name} {used}"] = str(raised.value)
            dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("before", MAPPED)
def test_calls_that_do_not_match(run_on: RunOn, before: Callable[[int], None]) -> None:
    place = "cuda" if before is on_cuda else "cpu"
    for found in run_on(before, 2, mismatched):
        for name, (_, first, _, second) in test_torch_mismatch.cases(2).items():
            for used in (False, True):
                text = found[f"{name} {used}"]
                for rank, call in enumerate((first, second)):
                    where = "" if call == "barrier" else f" on {place}"
                    assert f"rank {rank}: {call}{where};" in text, (name, text)


def wrong_splits(rank: int) -> str:
    sent = [[1, 2], [1, 1]][rank]
    with pytest.raises(RuntimeError) as raised:
        dist.all_to_all_single(torch.zeros(2), torch.ones(sum(sent)), [1, 1], sent)
    assert isinstance(raised.value, CollectiveMismatch)
    return str(raised.value)


@pytest.mark.parametrize("before", ALL)
def test_splits_that_do_not_match(run_on: RunOn, before: Callable[[int], None]) -> None:
    for text in run_on(before, 2, wrong_splits):
        assert "rank 1 expects 4 bytes of rank 0, which sends 8" in text


def subgroups(rank: int) -> list[float]:
    """Sums in the whole group and in groups of some ranks, interleaved."""
    low, high = dist.new_group([0, 1]), dist.new_group([1, 2])
    found = []
    for _ in range(3):
        for group, members in ((None, (0, 1, 2)), (low, (0, 1)), (high, (1, 2))):
            if rank in members:
                tensor = torch.full((70_000,), float(rank + 1))
                dist.all_reduce(tensor, group=group)
                found.append(tensor[-1].item())
    return found


@pytest.mark.parametrize("before", ALL)
def test_groups_of_some_ranks(run_on: RunOn, before: Callable[[int], None]) -> None:
    assert run_on(before, 3, subgroups) == [[6.0, 3.0] * 3, [6.0, 3.0, 5.0] * 3, [6.0, 5.0] * 3]


def sum_without_end() -> None:
    while True:
        dist.all_reduce(torch.ones(1000))


def killed(rank: int) -> tuple[str, float]:
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        sum_without_end()
    return str(raised.value), time.monotonic() - started


@pytest.mark.parametrize("before", MAPPED)
def test_a_killed_rank_is_named(tmp_path: Path, before: Callable[[int], None]) -> None:
    world = World(tmp_path, 3, before=before)
    try:
        world.start(killed)
        for rank in (0, 2):
            message, seconds = world.result(rank)
            assert "rank 1 (global rank 1) is gone" in message
            assert seconds < world.timeout / 2, "noticed at once, not by the time-out"
    finally:
        world.close()


def killed_before_a_meeting(rank: int) -> str:
    """Rank 1 dies after it has made the call, when the streams of the others wait for its own."""
    dist.all_reduce(torch.ones(10))
    group: Any = dist.group.WORLD
    ((_, route),) = group._routes._by_type.values()
    if rank == 1:
        route._device_links._meet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as raised:
        sum_without_end()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # the stream was released
    return str(raised.value)


@pytest.mark.parametrize("before", [EMULATED, CUDA])
def test_no_stream_waits_for_a_killed_rank(tmp_path: Path, before: Callable[[int], None]) -> None:
    world = World(tmp_path, 3, before=before)
    try:
        world.start(killed_before_a_meeting)
        for rank in (0, 2):
            assert "rank 1 (global rank 1) is gone" in world.result(rank)
    finally:
        world.close()


@pytest.mark.parametrize("before", ALL)
def test_data_parallel_training(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, train_together)


def train_together(rank: int) -> None:
    """DistributedDataParallel: the parameters are equal on all ranks, and those of the average gradient."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    alone = torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    alone.load_state_dict(model.state_dict())
    together = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, alone)]
    for step in range(4):
        inputs = torch.randn(2, 8, 6, generator=torch.Generator("cpu").manual_seed(step), device="cpu")
        inputs = inputs.to(next(model.parameters()).device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        together(inputs[rank]).square().mean().backward()
        alone(inputs.view(16, 6)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
        first = mine.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine)


# ---- memory


def sums_of(count: int) -> torch.Tensor:
    tensor = MADE[-1].tensor(count, torch.float32)
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor


def shared_tensors(rank: int) -> None:
    dist.all_reduce(torch.ones(1))
    memory = MADE[-1]
    for _ in range(3):
        tensor = sums_of(100_000)
        assert bool((tensor == 3.0).all())
    before = memory.mappings
    dist.all_reduce(tensor)
    dist.all_reduce(tensor[5:-3])
    assert memory.mappings == before, "a mapped allocation is not mapped again"
    assert bool((tensor[5:-3] == 12.0).all())
    assert bool((tensor[:5] == 6.0).all())
    device_links.MOST_MAPPED = 4
    for _ in range(10):
        assert bool((sums_of(1000) == 3.0).all())
    group: Any = dist.group.WORLD
    assert len(group._routes._by_type["cpu"][1]._device_links._mapped) == 4
    dist.all_reduce(tensor)
    assert bool((tensor[:5] == 12.0).all()), "what was unmapped is mapped again"


def test_tensors_in_shareable_memory_are_used_in_place(run_on: RunOn) -> None:
    run_on(on_emulated, 2, shared_tensors)


def warned(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
    return [str(one.message) for one in caught if one.category is device_links.HostStagingWarning]


def test_the_way_through_the_host_is_announced_once(run_on: RunOn) -> None:
    first, second = run_on(through_host, 2, warned)
    assert len(first) == 1
    assert not second
    assert "two copies over the bus" in first[0]
    assert "cpu:hoop,cuda:nccl" in first[0]


class UnmappableMemory(EmulatedMemory):
    """Memory that one rank cannot map."""

    def map(self, handle: bytes, size: int) -> int:
        raise InvalidArgument("no peer access between the GPUs")


def on_unmappable(rank: int) -> None:
    device_memory.MEMORIES["cpu"] = UnmappableMemory if rank == 1 else EmulatedMemory


def test_ranks_that_cannot_map_memory_go_through_the_host(run_on: RunOn) -> None:
    first, _, _ = run_on(on_unmappable, 3, warned)
    assert "no peer access between the GPUs" in first[0]


# ---- other backends


def beside_gloo(rank: int) -> list[str]:
    group = dist.new_group([0, 1], backend="cuda:hoop,cpu:gloo")
    assert group is not None
    assert isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    assert group._get_backend(torch.device("cuda")) is group
    tensor = torch.full((3,), rank + 1.0, device="cpu")
    for _ in range(2):
        dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [6.0] * 3
    rows = [torch.zeros(2, device="cpu") for _ in range(2)]
    dist.all_gather(rows, torch.full((2,), float(rank), device="cpu"), group)
    if rank:
        dist.send(rows[1], 0, group)
    else:
        dist.recv(rows[0], 1, group)
        assert rows[0].tolist() == [1.0, 1.0]
    dist.barrier(group)
    dist.destroy_process_group(group)
    return [str(row.tolist()) for row in rows]


@pytest.mark.parametrize("before", [pytest.param(on_cpu, id="cpu"), CUDA])
def test_another_backend_takes_the_other_device(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, beside_gloo)


def beside_unknown(rank: int) -> str:
    group = dist.new_group([0, 1], backend="cpu:mpi,cuda:hoop" if dist.is_mpi_available() else "cuda:hoop,cpu:ucc")
    with pytest.raises(ValueError, match="beside hoop") as raised:
        dist.all_reduce(torch.ones(1, device="cpu"), group=group)
    return str(raised.value)


def test_a_backend_that_cannot_stand_beside_hoop(run_on: RunOn) -> None:
    assert "nccl where PyTorch is built with it" in run_on(on_cpu, 2, beside_unknown)[0]


def two_devices(rank: int) -> None:
    with pytest.raises(ValueError, match="tensors are on cpu and cuda:0"):
        dist.all_gather([torch.zeros(1, device="cuda:0")] * 2, torch.zeros(1, device="cpu"))
    tensor = torch.ones(4)
    dist.all_reduce(tensor.cpu())
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 4


@pytest.mark.parametrize("before", [CUDA])
def test_tensors_of_one_call_are_on_one_device(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, two_devices)


def streams(rank: int) -> None:
    """A call waits for the kernels that its stream had to do, and a later kernel sees the result."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    matrix = torch.randn(3000, 3000)
    tensor = torch.zeros(1 << 20)
    for asynchronous in (False, True):
        with torch.cuda.stream(side):
            tensor.zero_()
            for _ in range(20):
                matrix = torch.tanh(matrix @ matrix)  # keeps the GPU busy
            tensor += rank + 1
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is not None:
                work.wait()
            doubled = 2 * tensor
        side.synchronize()
        assert bool((doubled == 6.0).all())


@pytest.mark.parametrize("before", [CUDA])
def test_operations_are_ordered_with_streams(run_on: RunOn, before: Callable[[int], None]) -> None:
    run_on(before, 2, streams)
