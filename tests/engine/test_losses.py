"""A loss trains as in plain PyTorch on the whole batch, for all numbers of shards and devices and all strategies.

Results are bit-identical among devices and strategies, and equal to plain PyTorch within ``ATOL``, the rounding of
float32 over 8 steps. The last step of an epoch has 6 samples for 8 shards: two shards are empty.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from forked_ranks import Outcome, checkpoint, differing, tensors_in, train
from short_jobs import SAMPLES, STEPS, mnist
from small_jobs import BATCH, flat, settings
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.sampler import SampleOrder
from hoop.data.tensors import MapData, TensorData
from hoop.engine.evaluation import CHUNK
from hoop.engine.job import Job

ATOL = 1e-5
EPOCHS = 2
SHARDS = 8
Loss = Callable[[Tensor, Tensor], Tensor]


def flat_logs(seed: int) -> nn.Module:
    return nn.Sequential(*flat(seed), nn.LogSoftmax(1))


@lru_cache(maxsize=1)
def regression() -> Splits:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = (
        torch.randn(SAMPLES + 100, 6, generator=generator),
        torch.randn(SAMPLES + 100, 3, generator=generator),
    )
    return Splits(TensorData(inputs[:SAMPLES], targets[:SAMPLES]), TensorData(inputs[SAMPLES:], targets[SAMPLES:]))


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Sequential(nn.Linear(16, 8), nn.Tanh()), nn.Linear(8, 3))


def zero_head(seed: int) -> nn.Module:
    """A model whose samples all have the same loss at first."""
    model = flat(seed)
    last = [one for one in model.modules() if isinstance(one, nn.Linear)][-1]
    nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)
    return model


@lru_cache(maxsize=1)
def partly_ignored() -> Splits:
    """MNIST with every third target ignored, at least one of them in each shard."""
    ignored = []
    for data in (mnist().train, mnist().test):
        inputs, targets = data.batch(np.arange(len(data)), epoch=0, seed=0)
        ignored.append(TensorData(inputs, torch.where(torch.arange(len(targets)) % 3 == 0, -100, targets)))
    return Splits(*ignored)


def job_with(name: str, loss: Any, **more: Any) -> Job:
    model = {"logs": flat_logs, "numbers": small, "zero head": zero_head}.get(name, flat)
    data = {"numbers": regression, "ignored": partly_ignored}.get(name, mnist)
    return Job(model, data, loss, **more)


WEIGHTS = torch.linspace(0.5, 2, 10)


def of_model(net: Any, batch: Any) -> Tensor:
    """A loss of the model and a batch, whose parameters have names of their own."""
    return F.cross_entropy(net(batch[0]), batch[1])


LOSSES: dict[str, tuple[str, Loss, float]] = {
    "mean": ("classes", nn.CrossEntropyLoss(), 0.1),
    "sum": ("classes", nn.CrossEntropyLoss(reduction="sum"), 0.002),
    "none": ("classes", nn.CrossEntropyLoss(reduction="none"), 0.1),
    "functional": ("classes", F.cross_entropy, 0.1),
    "lambda": ("classes", lambda outputs, targets: F.cross_entropy(outputs, targets), 0.1),
    "a lambda of two parameters": ("classes", lambda m, b: of_model(m, b), 0.1),
    "class weights": ("classes", nn.CrossEntropyLoss(weight=WEIGHTS), 0.1),
    "class weights, a partial": ("zero head", partial(F.cross_entropy, weight=WEIGHTS), 0.1),
    "class weights, a lambda": ("zero head", lambda outputs, targets: F.cross_entropy(outputs, targets, WEIGHTS), 0.1),
    "ignored targets": ("ignored", nn.CrossEntropyLoss(), 0.1),
    "ignored targets, smoothed": ("ignored", nn.CrossEntropyLoss(label_smoothing=0.1), 0.1),
    "ignored targets, a lambda": ("ignored", lambda outputs, targets: F.cross_entropy(outputs, targets), 0.1),
    "ignored targets of a model": ("ignored", of_model, 0.1),
    "label smoothing": ("classes", nn.CrossEntropyLoss(label_smoothing=0.1), 0.1),
    "class weights, a value a sample": (
        "classes",
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10), reduction="none"),
        0.1,
    ),
    "class weights, the sum": (
        "classes",
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10), reduction="sum"),
        0.002,
    ),
    "NLLLoss": ("logs", nn.NLLLoss(), 0.1),
    "MSELoss": ("numbers", nn.MSELoss(), 0.1),
    "MSELoss, the sum": ("numbers", nn.MSELoss(reduction="sum"), 0.002),
    "MSELoss, a row a sample": ("numbers", nn.MSELoss(reduction="none"), 0.1),
    "in a tensor of one": ("numbers", lambda outputs, targets: F.l1_loss(outputs, targets).reshape(1), 0.1),
}


REDUCTIONS = ("mean", "sum", "none", "MSELoss")
"""The losses that also train on three devices, and with one shard; with the others that is slow. A loss is computed
per shard: the numbers of devices and shards matter only for how the losses of shards are added, which depends on the
reduction."""


@lru_cache
def trained_plain(name: str) -> tuple[nn.Module, list[float], float]:
    kind, loss, rate = LOSSES[name]
    return train_plain(job_with(kind, loss), rate)


def train_plain(job: Job, rate: float) -> tuple[nn.Module, list[float], float]:
    """SGD on whole batches in plain PyTorch: the model, the loss of each step, and the loss of all test samples."""
    model, order, loss = job.model(0), SampleOrder(0, SAMPLES), job.loss
    assert callable(loss)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for epoch in range(EPOCHS):
        for step in range(STEPS):
            inputs, targets = job.data().train.batch(order.indices(epoch, step, BATCH), epoch=0, seed=0)
            optimizer.zero_grad()
            value = call_plain(loss, model, inputs, targets).mean()  # the mean of a scalar is the scalar
            value.backward()
            optimizer.step()
            losses.append(value.item())
    test = job.data().test
    assert isinstance(test, TensorData)
    with torch.no_grad():
        test_loss = float(call_plain(loss, model, test.inputs, test.targets).mean())
    return model, losses, test_loss


def call_plain(loss: Any, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of the outputs and the targets, or, of the losses that call the model, of the model and the batch."""
    of_batch = loss is of_model or loss is LOSSES["a lambda of two parameters"][1]
    found: Tensor = loss(model, (inputs, targets)) if of_batch else loss(model(inputs), targets)
    return found


def train_hoop(job: Job, rate: float, size: int, strategy: str = "data", **changes: Any) -> list[Outcome]:
    changes = {"optimizer": "sgd", "lr": rate, "epochs": EPOCHS, "shards": SHARDS, **changes}
    return train("shm", size, settings(strategy, **changes), job)


def reported_losses(outcomes: list[Outcome]) -> tuple[list[float], list[float]]:
    """The losses of the steps, and those of the evaluations."""
    (losses,) = [one.losses for one in outcomes if one.losses]
    return losses, [event["loss"] for one in outcomes for event in one.of("evaluated")]


@pytest.mark.slow_if(
    when=lambda params: (params["shards"], params["size"]) != (SHARDS, 1) and params["name"] not in REDUCTIONS
)
@pytest.mark.parametrize(("shards", "size"), [(SHARDS, 1), (SHARDS, 3), (1, 1)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_trains_as_in_plain_pytorch(name: str, shards: int, size: int) -> None:
    kind, loss, rate = LOSSES[name]
    model, losses, test_loss = trained_plain(name)
    outcomes = train_hoop(job_with(kind, loss), rate, size, shards=shards)
    found = tensors_in(checkpoint(outcomes))
    for key, one in model.named_parameters():
        assert torch.allclose(found[key], one, atol=ATOL), key
    steps, evaluated = reported_losses(outcomes)
    assert steps == pytest.approx(losses, rel=1e-4)
    assert evaluated[-1] == pytest.approx(test_loss, rel=1e-4)


STRATEGIES = [
    ("data", 2),
    ("data", 3),
    ("data", 4),
    ("ps:bsp", 3),
    ("ring", 2),
    ("pipeline:1f1b", 3),
    ("pipeline:zero-bubble", 2),
    ("hybrid:replicas=2", 4),
]


@pytest.mark.slow_if(when=lambda params: params["name"] != "mean")
@pytest.mark.parametrize("name", ["mean", "sum", "none"])
def test_devices_and_strategies_give_the_same_bits(name: str) -> None:
    kind, loss, rate = LOSSES[name]
    expected = train_hoop(job_with(kind, loss), rate, 1)
    weights, (losses, evaluated) = tensors_in(checkpoint(expected)), reported_losses(expected)
    for strategy, size in STRATEGIES:
        outcomes = train_hoop(job_with(kind, loss), rate, size, strategy)
        assert differing(weights, tensors_in(checkpoint(outcomes))) == [], f"{strategy} on {size}"
        assert reported_losses(outcomes) == (losses, evaluated), f"{strategy} on {size}"


@pytest.mark.parametrize("name", ["mean", "sum", "none"])
def test_a_declared_reduction_equals_the_detected_one(name: str) -> None:
    kind, loss, rate = LOSSES[name]
    detected, declared = (
        train_hoop(job_with(kind, loss), rate, 1),
        train_hoop(job_with(kind, loss, reduction=name), rate, 1),
    )
    assert differing(tensors_in(checkpoint(detected)), tensors_in(checkpoint(declared))) == []


@pytest.mark.parametrize(("reduction", "loss"), [("mean", F.cross_entropy), ("sum", LOSSES["sum"][1])])
def test_a_loss_by_name_has_the_declared_reduction(reduction: str, loss: Loss) -> None:
    rate = 0.1 if reduction == "mean" else 0.002
    model, losses, test_loss = train_plain(job_with("classes", loss), rate)
    outcomes = train_hoop(job_with("classes", "cross_entropy", reduction=reduction), rate, 2)
    found = tensors_in(checkpoint(outcomes))
    assert all(torch.allclose(found[key], one, atol=ATOL) for key, one in model.named_parameters())
    steps, evaluated = reported_losses(outcomes)
    assert steps == pytest.approx(losses, rel=1e-4)
    assert evaluated[-1] == pytest.approx(test_loss, rel=1e-4)


def test_a_test_set_of_several_chunks_has_the_loss_of_all_its_samples() -> None:
    """A shorter last chunk has less weight."""
    test_data = TensorData(torch.randn(CHUNK + 7, 6), torch.randn(CHUNK + 7, 3), name="test")
    for reduction in ("mean", "sum"):
        loss = nn.MSELoss(reduction=reduction)
        job = Job(small, lambda: Splits(regression().train, test_data), loss)
        outcomes = train_hoop(job, 0.001, 2, epochs=1)
        model = small(0)
        found = tensors_in(checkpoint(outcomes))
        model.load_state_dict({key: found[key] for key in model.state_dict()})
        with torch.no_grad():
            test_loss = float(loss(model(test_data.inputs), test_data.targets))
        assert reported_losses(outcomes)[1][-1] == pytest.approx(test_loss, rel=1e-5)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda outputs, targets: F.cross_entropy(outputs, targets)])
def test_an_ignored_target_that_was_not_seen_is_refused_in_its_step(loss: Any) -> None:
    """It is in one sample of a dataset that loads them one by one: the mean of its shard is over fewer."""
    inputs, targets = mnist().train.batch(np.arange(SAMPLES), epoch=0, seed=0)
    targets[100] = -100
    data = MapData(list(zip(inputs, targets, strict=True)))
    with pytest.raises(
        AssertionError, match=r"which none of the samples that were tried .* had; .* return \(sum, count\)"
    ):
        train_hoop(Job(flat, lambda: Splits(data, mnist().test), loss), 0.1, 1)
    sum_loss = nn.CrossEntropyLoss(reduction="sum")
    job = Job(flat, lambda: Splits(data, mnist().test), sum_loss)
    assert train_hoop(job, 0.001, 1)[0].account["done"] == EPOCHS * STEPS


def test_a_mean_that_is_stated_and_is_not_over_the_samples_is_refused_in_its_step() -> None:
    """The class is rare, and a lambda hides the weights; also in shards of one sample."""
    weights = torch.linspace(1, 2, 10)
    job = Job(flat, mnist, lambda outputs, labels: F.cross_entropy(outputs, labels, weights), reduction="mean")
    with pytest.raises(AssertionError, match="reduction: 'mean' is stated, the mean over the samples, and"):
        train_hoop(job, 0.1, 1)


def test_hoops_cross_entropy_refuses_ignored_targets() -> None:
    with pytest.raises(
        AssertionError, match=r"some are -100, which PyTorch ignores; give loss=torch.nn.CrossEntropyLoss"
    ):
        train_hoop(job_with("ignored", "cross_entropy"), 0.1, 1)


def test_a_custom_loss_emits_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_hoop(job_with("numbers", nn.MSELoss()), 0.1, 1, epochs=1)
