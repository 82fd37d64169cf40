"""Training on several ranks gives the same model as training on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hoop.torch_backend import ddp_hooks as hoop_hooks

# torch.distributed.optim and fsdp are imported in the functions of the ranks: there torch's deprecation warnings are
# not errors.
RunRanks = Callable[..., list[Any]]
STEPS, BATCH = 4, 12


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> list[torch.Tensor]:
    share = BATCH // size
    for step in range(STEPS):
        inputs, targets = (data[rank * share : (rank + 1) * share] for data in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train_on_one_rank() -> list[torch.Tensor]:
    model = net()
    return train_model(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0, 1)


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor, expected_tensor, rtol=1e-4, atol=1e-5)


def data_parallel(rank: int, size: int, options: dict[str, Any]) -> None:
    # Every rank starts with other weights; DDP broadcasts those of rank 0.
    model = DistributedDataParallel(net(1 + rank), **options)
    assert_close(
        train_model(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, size), train_on_one_rank()
    )


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {"bucket_cap_mb": 0.0003}),  # many buckets
        (2, {"gradient_as_bucket_view": True, "static_graph": True}),
        (2, {"find_unused_parameters": True}),
    ],
)
def test_data_parallel_equals_training_on_one_rank(run_ranks: RunRanks, size: int, options: dict[str, Any]) -> None:
    run_ranks(size, data_parallel, size, options)


def compiled(rank: int, in_place: bool) -> None:
    """Dynamo looks at the methods that DDP's reducer calls in the compiled forward: from the second step on."""
    model = DistributedDataParallel(net())
    if in_place:
        model.compile(backend="eager")
    run: Any = model if in_place else torch.compile(model, backend="eager")
    trained = train_model(run, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, 2)
    assert_close(trained, train_on_one_rank())


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "ddp.compile"])
def test_compiled_data_parallel_equals_training_on_one_rank(run_ranks: RunRanks, in_place: bool) -> None:
    run_ranks(2, compiled, in_place)


def hooks(rank: int) -> None:
    for hook, state in (
        (default_hooks.allreduce_hook, None),
        (default_hooks.fp16_compress_hook, None),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)),
    ):
        model = DistributedDataParallel(net())
        model.register_comm_hook(state, hook)
        parameters = train_model(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 2)
        rank_0_parameters = [parameter.clone() for parameter in parameters]
        for tensor in rank_0_parameters:
            dist.broadcast(tensor, 0)
        assert_close(parameters, rank_0_parameters)


@pytest.mark.filterwarnings("ignore")
def test_communication_hooks(run_ranks: RunRanks) -> None:
    run_ranks(2, hooks)


def compressed_hooks(rank: int) -> dict[str, float]:
    """By compression: the distance to the model trained on one rank, relative to the distance that model moved."""
    distances = {}
    for name in ("float16", "bfloat16", "int8", "top_k:0.3", "powersgd:2"):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.0003)
        model.register_comm_hook(None, hoop_hooks.compressed(name))
        mine = train_model(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, 2)
        rank_0_parameters = [parameter.clone() for parameter in mine]
        for tensor in rank_0_parameters:
            dist.broadcast(tensor, 0)
        assert all(torch.equal(one, other) for one, other in zip(mine, rank_0_parameters, strict=True)), name
        pairs = zip(mine, train_on_one_rank(), net().parameters(), strict=True)
        squared_norms = [((one - exact).norm() ** 2, (exact - start).norm() ** 2) for one, exact, start in pairs]
        distances[name] = float((sum(one for one, _ in squared_norms) / sum(one for _, one in squared_norms)) ** 0.5)
    with pytest.raises(ValueError, match="compression: 'int4' is unknown"):
        hoop_hooks.compressed("int4")
    world: Any = dist.group.WORLD
    with pytest.raises(ValueError, match=r"float32 tensor on the CPU; this is sum of torch\.float64 on cpu"):
        world.allreduce_compressed(torch.ones(3, dtype=torch.float64), "int8")
    return distances


def test_compressed_gradients(run_ranks: RunRanks) -> None:
    for distances in run_ranks(2, compressed_hooks):
        bounds = {"float16": 1e-2, "bfloat16": 5e-2, "int8": 5e-2, "top_k:0.3": 1, "powersgd:2": 1}
        assert distances.keys() == bounds.keys()
        assert all(0 < distances[name] < bound for name, bound in bounds.items()), distances


class Branching(nn.Module):
    """Uses one of its two halves; ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.halves = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, inputs: torch.Tensor, which: int) -> torch.Tensor:
        outputs: torch.Tensor = self.halves[which](inputs)
        return outputs


def unused_and_no_sync(rank: int) -> None:
    model = DistributedDataParallel(Branching(), find_unused_parameters=True)
    local = copy.deepcopy(model.module)
    inputs = batch(0)[0]
    model(inputs, rank).sum().backward()
    for which in (0, 1):
        local(inputs, which).sum().backward()
    for mine, theirs in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad / 2)
    model.zero_grad()
    with model.no_sync():
        model(inputs * (rank + 1), 0).sum().backward()
    before = model.module.halves[0].weight.grad.clone()
    torch.testing.assert_close(before, (inputs * (rank + 1)).sum(0).expand(3, 6))
    model(inputs, 0).sum().backward()  # the gradients accumulated without sync are reduced as well
    torch.testing.assert_close(model.module.halves[0].weight.grad, (inputs * 2.5).sum(0).expand(3, 6))


def test_unused_parameters_and_no_sync(run_ranks: RunRanks) -> None:
    run_ranks(2, unused_and_no_sync)


def uneven_inputs(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):  # rank 1 has more steps
            optimizer.zero_grad()
            inputs, targets = batch(step)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    for parameter in model.parameters():
        rank_0_parameter = parameter.detach().clone()
        dist.broadcast(rank_0_parameter, 0)
        torch.testing.assert_close(parameter.detach(), rank_0_parameter)


@pytest.mark.filterwarnings("ignore")
def test_uneven_inputs_with_join(run_ranks: RunRanks) -> None:
    run_ranks(2, uneven_inputs)


def sharded_optimizer(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    assert_close(train_model(model, optimizer, rank, 2), train_on_one_rank())
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_zero_redundancy_optimizer(run_ranks: RunRanks) -> None:
    run_ranks(2, sharded_optimizer)


def fully_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = train_model(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, 2)
    assert_close([parameter.full_tensor() for parameter in parameters], train_on_one_rank())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
def test_fully_sharded(run_ranks: RunRanks) -> None:
    run_ranks(2, fully_sharded)
