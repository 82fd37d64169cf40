"""``hvd.DistributedOptimizer`` trains as one process with all the data does; broadcasts of state; SyncBatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hoop.horovod as hvd
from hoop.errors import FailedPrecondition, InvalidArgument

Ranks = Callable[..., list[Any]]
close = torch.testing.assert_close
BATCH, STEPS = 6, 4
"""Samples of a rank in a step; steps."""


def in_run(rank: int, check: Callable[[int, int], Any]) -> Any:
    """The result of a check, with arrays for tensors: these would be shared with a process that has ended."""
    hvd.init()
    try:
        return as_arrays(check(rank, hvd.size()))
    finally:
        hvd.shutdown()


def as_arrays(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().copy()
    if isinstance(value, dict):
        return {key: as_arrays(one) for key, one in value.items()}
    return type(value)(map(as_arrays, value)) if isinstance(value, list | tuple) else value


def as_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: as_tensors(one) for key, one in value.items()}
    return type(value)(map(as_tensors, value)) if isinstance(value, list | tuple) else value


class Network(nn.Module):
    """With a parameter that the loss does not depend on."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5, sparse=sparse)
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, samples: torch.Tensor) -> Any:
        return self.layers(self.embedding(samples))


def network(seed: int, sparse: bool = False) -> Network:
    torch.manual_seed(seed)
    return Network(sparse).double()


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of all ranks in a step."""
    generator = torch.Generator().manual_seed(step)
    count = BATCH * size
    return torch.randint(20, (count,), generator=generator), torch.randint(3, (count,), generator=generator)


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if kind == "sparse" else 0.9)


def trained_alone(kind: str, size: int, clipped: bool = False) -> dict[str, torch.Tensor]:
    """One process with the samples of all ranks."""
    model = network(0)
    optimizer = make_optimizer(kind, model)
    for step in range(STEPS):
        samples, labels = batch(step, size)
        optimizer.zero_grad()
        cross_entropy(model(samples), labels).backward()
        model.unused.grad = torch.zeros_like(model.unused)
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict()


def train(rank: int, size: int, kind: str, **options: Any) -> dict[str, torch.Tensor]:
    """Begins with another network at each rank, which the broadcast replaces."""
    clipped, passes = options.pop("clipped", False), options.get("backward_passes_per_step", 1)
    model = network(rank, sparse=kind == "sparse")
    groups = options.get("groups")
    if groups == "lists":
        options["groups"] = [[model.layers[0].weight, model.layers[2].weight], [model.embedding.weight]]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(kind, model), named_parameters=model.named_parameters(), **options
    )
    assert issubclass(type(optimizer), torch.optim.Adam if kind == "adam" else torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for step in range(STEPS):
        samples, labels = batch(step, size)
        mine = slice(rank * BATCH, (rank + 1) * BATCH)
        parts = zip(samples[mine].chunk(passes), labels[mine].chunk(passes), strict=True)
        optimizer.zero_grad()
        for part, wanted in parts:
            (cross_entropy(model(part), wanted) / passes).backward()
        if clipped:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        scheduler.step()
    return model.state_dict()


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "adam": ("adam", {}),
    "two passes": ("sgd", {"backward_passes_per_step": 2}),
    "predivided": ("sgd", {"gradient_predivide_factor": 2.0}),
    "three groups": ("sgd", {"groups": 3}),
    "named groups": ("sgd", {"groups": "lists"}),
    "clipped": ("sgd", {"clipped": True}),
    "sparse": ("sparse", {}),
    "sparse as dense": ("sparse", {"sparse_as_dense": True}),
    "float16": ("sgd", {"compression": hvd.Compression.fp16}),
}


def all_variants(rank: int, size: int) -> dict[str, Any]:
    return {name: train(rank, size, kind, **options) for name, (kind, options) in VARIANTS.items()}


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_equals_that_of_one_process(run_ranks: Ranks, size: int) -> None:
    results = as_tensors(run_ranks(size, in_run, all_variants))
    for name, (kind, options) in VARIANTS.items():
        expected = trained_alone(kind, size, options.get("clipped", False))
        tolerance = 1e-3 if name == "float16" else 1e-10
        for rank, result in enumerate(results):
            close(result[name], expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}, {rank}: {text}")  # noqa: B023
            for key, value in result[name].items():
                assert torch.equal(value, results[0][name][key]), f"{name}: {key} of rank {rank} is not that of rank 0"


def misuse(rank: int, size: int) -> list[str]:
    model = network(0)
    plain = make_optimizer("sgd", model)
    messages = []

    def refused(kind: type[Exception], call: Callable[[], Any]) -> None:
        with pytest.raises(kind) as raised:
            call()
        messages.append(str(raised.value))

    refused(InvalidArgument, lambda: hvd.DistributedOptimizer(plain, op=hvd.Adasum))
    refused(InvalidArgument, lambda: hvd.DistributedOptimizer(plain, list(model.named_parameters())[1:]))
    refused(InvalidArgument, lambda: hvd.DistributedOptimizer(plain, [("a", one) for one in model.parameters()]))
    optimizer = hvd.DistributedOptimizer(plain)
    samples, labels = batch(0, 1)
    loss = cross_entropy(model(samples), labels) + model.unused.sum()
    loss.backward(retain_graph=True)
    refused(FailedPrecondition, optimizer.zero_grad)
    refused(FailedPrecondition, loss.backward)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="a second time"):
        optimizer.step()
    optimizer.zero_grad()
    return messages


def test_misuse_of_the_optimizer_is_refused(run_ranks: Ranks) -> None:
    parts = ["Adasum", "1 parameters of the optimizer", "a twice", "being reduced", "backward_passes_per_step"]
    for messages in run_ranks(2, in_run, misuse):
        for part, message in zip(parts, messages, strict=True):
            assert part in message


def broadcast_state(rank: int, size: int) -> tuple[Any, Any]:
    """The last rank has trained with other settings; the others have no state yet."""
    model = network(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
    if rank == size - 1:
        samples, labels = batch(0, 1)
        cross_entropy(model(samples), labels).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=size - 1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=size - 1)
    return model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_state_is_broadcast(run_ranks: Ranks, size: int) -> None:
    *others, root = as_tensors(run_ranks(size, in_run, broadcast_state))
    assert root[1]["param_groups"][0]["lr"] == 0.01 * size
    assert len(root[1]["state"]) == 5
    for model, optimizer in others:
        close(model, root[0])
        close(optimizer["state"], root[1]["state"])
        assert optimizer["param_groups"] == root[1]["param_groups"]


# ---- SyncBatchNorm


def images(size: int) -> list[torch.Tensor]:
    """Rank r has r + 2 images."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rank + 2, 3, 4, 4, generator=generator, dtype=torch.float64) + 50 for rank in range(size)]


def normalize(rank: int, size: int) -> dict[str, Any]:
    layer = hvd.SyncBatchNorm(3).double()
    mine = images(size)[rank].requires_grad_()
    output = layer(mine)
    (output**3).sum().backward()
    layer.eval()
    assert layer.weight.grad is not None
    return {
        "output": output.detach(),
        "gradient": mine.grad,
        "weight": hvd.allreduce(layer.weight.grad, op=hvd.Sum),
        "mean": layer.running_mean,
        "variance": layer.running_var,
        "evaluated": layer(mine).detach(),
    }


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_batch_normalization_over_all_ranks(run_ranks: Ranks, size: int) -> None:
    layer = nn.BatchNorm2d(3).double()
    everyones = torch.cat(images(size)).requires_grad_()
    output = layer(everyones)
    (output**3).sum().backward()
    assert everyones.grad is not None
    layer.eval()
    results = as_tensors(run_ranks(size, in_run, normalize))
    close(torch.cat([one["output"] for one in results]), output.detach())
    close(torch.cat([one["gradient"] for one in results]), everyones.grad)
    close(torch.cat([one["evaluated"] for one in results]), layer(everyones).detach())
    for one in results:
        close(one["weight"], layer.weight.grad)
        close(one["mean"], layer.running_mean)
        close(one["variance"], layer.running_var)


# ---- the sampler


def sample(rank: int, size: int) -> tuple[list[int], list[int], list[int]]:
    sampler = hvd.elastic.ElasticSampler(range(20), shuffle=True, seed=3)
    before = list(sampler)
    sampler.record_batch(0, 4)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.sync()
    after = list(sampler)
    saved = copy.deepcopy(sampler.state_dict())
    sampler.set_epoch(1)
    state.restore()
    assert sampler.state_dict() == saved
    sampler.set_epoch(1)
    return before, after, list(sampler)


@pytest.mark.parametrize("size", [1, 2])
def test_the_sampler_shares_out_what_is_left(run_ranks: Ranks, size: int) -> None:
    results = run_ranks(size, in_run, sample)
    before = [index for one, _, _ in results for index in one]
    assert sorted(before) == list(range(20))
    processed = {index for one, _, _ in results for index in one[:4]}
    assert sorted(index for _, one, _ in results for index in one) == sorted(set(range(20)) - processed)
    assert sorted(index for _, _, one in results for index in one) == list(range(20))
    assert [one for _, _, one in results] != [one for one, _, _ in results]
