"""Custom training: any batch, loss and optimizer; the same bits on 1, 2 and 3 ranks, plain PyTorch up to rounding.

The last batch of an epoch has 6 samples for 8 shards: two shards are empty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from forked_ranks import checkpoint, differing, tensors_in, train
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.sampler import SampleOrder
from hoop.data.structured import NestedData, SampleData
from hoop.data.tensors import TensorData
from hoop.engine.job import Job
from hoop.engine.settings import Settings

SAMPLES, BATCH, SHARDS, EPOCHS = 90, 42, 8, 2
FEATURES, CLASSES = 6, 4
ATOL = 2e-5


def arrays(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


class Net(nn.Module):
    """A tied, a frozen and an unused parameter; a buffer that counts; a dict as output."""

    forwards: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.second = nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.forwards = self.forwards + 1  # another tensor, not in place
        return {"logits": self.head(self.second(torch.tanh(self.first(self.frozen(x)))))}


def make(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return Net().to(dtype)


def dict_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"].float(), targets)


def batch_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"])["logits"], batch["y"])


def weighted_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """A class weight of its own: the mean over a batch divides by the weights of its targets."""
    logits, weight = model(batch["x"])["logits"], torch.tensor([1.0, 2.0, 0.0, 5.0])
    total = F.cross_entropy(logits, batch["y"], weight=weight, reduction="sum")
    right = (logits.argmax(1) == batch["y"]).float().mean()
    return {"loss": (total, weight[batch["y"]].sum()), "right": right}


class Dicts(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples that are dicts of lists and numbers, as Hugging Face's datasets have them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._inputs, self._targets = arrays(dtype)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self._inputs[index].tolist(), "y": int(self._targets[index])}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [one for name, one in named if "weight" in name and one.requires_grad], "weight_decay": 0.1},
        {"params": [one for name, one in named if "bias" in name and one.requires_grad], "weight_decay": 0.0},
    ]


class Halving(torch.optim.Optimizer):
    """A user's optimizer: numbers as state, and gradients that it changes in place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    state = self.state[one]
                    state["count"] = state.get("count", 0) + 1
                    one.grad.mul_(group["lr"] / state["count"])
                    one.sub_(one.grad)


PLAIN = Splits(TensorData(*arrays()), TensorData(*arrays()))
NESTED = NestedData({"x": arrays()[0].numpy(), "y": arrays()[1]})
LISTS = SampleData(Dicts())
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "halving": functools.partial(Halving, lr=0.5),
}
JOBS: dict[str, Job] = {
    "dict output": Job(make, lambda: PLAIN, dict_loss),
    "nested": Job(make, lambda: Splits(NESTED, NESTED), batch_loss, ema=0.9),
    "weighted": Job(make, lambda: Splits(LISTS, LISTS), weighted_loss, optimizer=OPTIMIZERS["adamw"]),
    "groups": Job(
        make,
        lambda: Splits(NESTED, NESTED),
        batch_loss,
        optimizer=OPTIMIZERS["adamw"],
        parameter_groups=groups,
        lr_scheduler=lambda one: torch.optim.lr_scheduler.OneCycleLR(one, 0.02, total_steps=20),
    ),
    "plateau": Job(
        make,
        lambda: Splits(NESTED, NESTED),
        batch_loss,
        optimizer=OPTIMIZERS["momentum"],
        lr_scheduler=lambda one: torch.optim.lr_scheduler.ReduceLROnPlateau(one, patience=0, threshold=10.0),
    ),
    **{
        name: Job(make, lambda: Splits(NESTED, NESTED), batch_loss, optimizer=factory)
        for name, factory in OPTIMIZERS.items()
        if name != "adamw"
    },
    "bfloat16": Job(
        functools.partial(make, dtype=torch.bfloat16),
        lambda: Splits(TensorData(*arrays(torch.bfloat16)), TensorData(*arrays(torch.bfloat16))),
        dict_loss,
    ),
    "float64": Job(
        functools.partial(make, dtype=torch.float64),
        lambda: Splits(TensorData(*arrays(torch.float64)), TensorData(*arrays(torch.float64))),
        lambda outputs, targets: F.cross_entropy(outputs["logits"], targets, reduction="none"),
    ),
}


def settings(**changes: Any) -> Settings:
    base = Settings(epochs=EPOCHS, batch_size=BATCH, shards=SHARDS, trace_steps=0, timeout_s=90.0, accelerator="cpu")
    return base.replaced(changes)


@functools.cache
def trained(name: str, ranks: int, clip: float = 0.0) -> dict[str, Tensor]:
    outcomes = train("shm", ranks, settings(clip=clip), JOBS[name])
    assert len({one.held["test.stage0.weights"] for one in outcomes}) == 1, "every rank has the same state"
    return tensors_in(checkpoint(outcomes))


@pytest.mark.slow_if(when=lambda params: params["ranks"] == 2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_weights_and_optimizer_state_do_not_depend_on_the_number_of_ranks(name: str, ranks: int) -> None:
    assert differing(trained(name, ranks), trained(name, 1)) == []


def reference(name: str, clip: float = 0.0) -> nn.Module:
    """The same training in plain PyTorch, a whole batch at a time."""
    job = JOBS[name]
    model = job.model(0)
    inputs, targets = arrays(next(model.parameters()).dtype)
    order = SampleOrder(0, SAMPLES)
    trained_parameters = [one for one in model.parameters() if one.requires_grad]
    parameters: Any = job.parameter_groups(model) if job.parameter_groups else trained_parameters
    optimizer = job.optimizer(parameters) if job.optimizer else torch.optim.Adam(parameters, lr=1e-3)
    scheduler = job.lr_scheduler(optimizer) if job.lr_scheduler else None
    for epoch in range(EPOCHS):
        for step in range(order.steps(BATCH)):
            rows = torch.from_numpy(order.indices(epoch, step, BATCH).copy())
            loss = F.cross_entropy(model(inputs[rows])["logits"], targets[rows])
            if name == "weighted":
                weight = torch.tensor([1.0, 2.0, 0.0, 5.0])
                loss = F.cross_entropy(model(inputs[rows])["logits"], targets[rows], weight=weight)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if clip:
                nn.utils.clip_grad_norm_(trained_parameters, clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return model


@pytest.mark.parametrize(
    ("name", "clip"),
    [
        ("dict output", 0.0),
        ("nested", 0.0),
        ("weighted", 0.0),
        ("weighted", 0.05),
        ("groups", 0.05),
        ("momentum", 0.0),
        ("adagrad", 0.0),
        ("nadam", 0.0),
        ("halving", 0.0),
        ("float64", 0.0),
    ],
)
def test_it_trains_as_plain_pytorch_does(name: str, clip: float) -> None:
    found = trained(name, 2 if clip else 3, clip)  # on three ranks it has been trained already
    expected = reference(name, clip).state_dict()
    # A forward of each shard counts once a step, as a forward of the batch does.
    steps = EPOCHS * -(-SAMPLES // BATCH)
    assert int(found["forwards"]) == steps
    for key, value in expected.items():
        if value.is_floating_point() and key in found:
            assert torch.allclose(found[key], value, rtol=0, atol=ATOL), key
    assert torch.equal(found["unused.weight"], expected["unused.weight"]), "no gradient, no weight decay"


def test_bfloat16_weights_stay_bfloat16_and_learn() -> None:
    found = trained("bfloat16", 2)
    assert found["first.weight"].dtype == torch.bfloat16
    assert not torch.equal(found["first.weight"], make(0, torch.bfloat16).state_dict()["first.weight"])


def test_metrics_and_averages_are_exact() -> None:
    outcome = train("shm", 3, settings(), JOBS["weighted"])[0]
    evaluated = outcome.of("evaluated")[-1]
    model = reference("weighted")
    inputs, targets = arrays()
    with torch.no_grad():
        right = (model(inputs)["logits"].argmax(1) == targets).float().mean()
    assert evaluated["metrics"]["right"] == pytest.approx(float(right), abs=1e-6)
    assert evaluated["accuracy"] is None
    assert all(len(one["metrics"]["right"]) == len(one["loss"]) for one in outcome.of("steps"))
    average = trained("nested", 1)["hoop.average.head.weight"]
    assert not torch.equal(average, trained("nested", 1)["head.weight"])


def test_a_run_resumes_to_the_bit() -> None:
    for name in ("groups", "plateau", "halving"):
        first = train("shm", 2, settings(epochs=1), JOBS[name])
        both = train("shm", 3, settings(), JOBS[name], resume=checkpoint(first))
        assert differing(tensors_in(checkpoint(both)), trained(name, 1)) == [], name


def test_training_stops_early_after_the_same_evaluation_everywhere() -> None:
    stops = settings(epochs=9, patience=2, min_delta=100.0)
    ends = {train("shm", ranks, stops, JOBS["nested"])[0].account["done"] for ranks in (1, 3)}
    assert ends == {3 * 3}  # the first evaluation is the best, and two more are waited for


def test_shuffle_and_drop_last() -> None:
    whole = settings(epochs=1, shuffle=False, drop_last=True, max_steps=0)
    outcome = train("shm", 2, whole, JOBS["nested"])[0]
    assert outcome.account["done"] == SAMPLES // BATCH
    model = make(0)
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    inputs, targets = arrays()
    for step in range(SAMPLES // BATCH):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[rows])["logits"], targets[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = tensors_in(checkpoint([outcome]))
    assert torch.allclose(found["head.weight"], model.state_dict()["head.weight"], rtol=0, atol=ATOL)
