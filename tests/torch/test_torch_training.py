"""Training on several ranks ends with the same model as training on one."""

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

from hoop.torch_backend import ddp_hooks as hooks_of_hoop

# torch.distributed.optim and fsdp are imported where they are used: in the ranks, where a deprecation of torch's own
# is no error.
Together = Callable[..., list[Any]]
STEPS, BATCH = 4, 12


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 3, generator=generator)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> list[torch.Tensor]:
    share = BATCH // size
    for step in range(STEPS):
        inputs, targets = (data[rank * share : (rank + 1) * share] for data in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def alone() -> list[torch.Tensor]:
    model = net()
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0, 1)


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def data_parallel(rank: int, size: int, options: dict[str, Any]) -> None:
    # A different start on every rank: rank 0's is broadcast.
    model = DistributedDataParallel(net(1 + rank), **options)
    same(trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, size), alone())


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (3, {"bucket_cap_mb": 0.0003}),  # many buckets
        (2, {"gradient_as_bucket_view": True, "static_graph": True}),
        (2, {"find_unused_parameters": True}),
    ],
)
def test_data_parallel_is_training_on_one(together: Together, size: int, options: dict[str, Any]) -> None:
    together(size, data_parallel, size, options)


def hooks(rank: int) -> None:
    for hook, state in (
        (default_hooks.allreduce_hook, None),
        (default_hooks.fp16_compress_hook, None),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)),
    ):
        model = DistributedDataParallel(net())
        model.register_comm_hook(state, hook)
        parameters = trained(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, 2)
        theirs = [parameter.clone() for parameter in parameters]
        for tensor in theirs:
            dist.broadcast(tensor, 0)
        same(parameters, theirs)


@pytest.mark.filterwarnings("ignore")
def test_communication_hooks(together: Together) -> None:
    together(2, hooks)


def compressed_hooks(rank: int) -> dict[str, float]:
    """How far a model ends from the one that was trained on one, for every compression."""
    found = {}
    for name in ("float16", "bfloat16", "int8", "top_k:0.3", "powersgd:2"):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.0003)
        model.register_comm_hook(None, hooks_of_hoop.compressed(name))
        mine = trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, 2)
        theirs = [parameter.clone() for parameter in mine]
        for tensor in theirs:
            dist.broadcast(tensor, 0)
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True)), name
        pairs = zip(mine, alone(), net().parameters(), strict=True)
        far = [((one - exact).norm() ** 2, (exact - start).norm() ** 2) for one, exact, start in pairs]
        found[name] = float((sum(one for one, _ in far) / sum(one for _, one in far)) ** 0.5)
    with pytest.raises(ValueError, match="compression: 'int4' is unknown"):
        hooks_of_hoop.compressed("int4")
    world: Any = dist.group.WORLD
    with pytest.raises(ValueError, match=r"contiguous float32 tensor; this is sum of torch\.float64"):
        world.allreduce_compressed(torch.ones(3, dtype=torch.float64), "int8")
    return found


def test_gradients_in_fewer_bytes(together: Together) -> None:
    """Of the way that training went, so much went elsewhere."""
    for found in together(2, compressed_hooks):
        bounds = {"float16": 1e-2, "bfloat16": 5e-2, "int8": 5e-2, "top_k:0.3": 1, "powersgd:2": 1}
        assert found.keys() == bounds.keys()
        assert all(0 < found[name] < bound for name, bound in bounds.items()), found


class Branching(nn.Module):
    """Uses one of its halves; which one depends on the rank."""

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
    model(inputs, 0).sum().backward()  # now what was gathered goes along
    torch.testing.assert_close(model.module.halves[0].weight.grad, (inputs * 2.5).sum(0).expand(3, 6))


def test_unused_parameters_and_no_sync(together: Together) -> None:
    together(2, unused_and_no_sync)


def uneven(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + 2 * rank):  # rank 1 has more to do
            optimizer.zero_grad()
            inputs, targets = batch(step)
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    for parameter in model.parameters():
        theirs = parameter.detach().clone()
        dist.broadcast(theirs, 0)
        torch.testing.assert_close(parameter.detach(), theirs)


@pytest.mark.filterwarnings("ignore")
def test_uneven_inputs_with_join(together: Together) -> None:
    together(2, uneven)


def sharded_optimizer(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    same(trained(model, optimizer, rank, 2), alone())
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_zero_redundancy_optimizer(together: Together) -> None:
    together(2, sharded_optimizer)


def fully_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rank, 2)
    same([parameter.full_tensor() for parameter in parameters], alone())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")
def test_fully_sharded(together: Together) -> None:
    together(2, fully_sharded)
