"""The reduction of a loss is known by its type or by its graph, or stated; else the error says what to write."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.job import Job
from hoop.engine.loss_reduction import find_criterion, with_criterion
from hoop.engine.loss_trial import SAMPLES, Decomposition
from hoop.engine.stage.autograd import Criterion, Objective, cross_entropy, num_correct
from hoop.errors import InvalidArgument

CLASSES = 5


def random_samples(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(SAMPLES, CLASSES, generator=generator)
    match kind:
        case "classes":
            return outputs, torch.arange(SAMPLES) % CLASSES
        case "positions":
            return torch.randn(SAMPLES, CLASSES, 7, generator=generator), torch.randint(
                1, CLASSES, (SAMPLES, 7), generator=generator
            )
        case "padded":  # samples of different lengths
            outputs, targets = random_samples("positions")
            return outputs, targets * (torch.arange(7) < torch.arange(SAMPLES).unsqueeze(1) % 7 + 1)
        case "shares":
            return outputs.sigmoid(), torch.rand(SAMPLES, CLASSES, generator=generator)
        case "one":
            return outputs[:, :1], torch.randn(SAMPLES, generator=generator)
    return outputs, torch.randn(SAMPLES, CLASSES, generator=generator)


def pairwise_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compare every sample with every other."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


WEIGHTS = torch.linspace(0.5, 2, CLASSES)
FOUND: list[tuple[str, str, Any]] = [
    ("mean", "classes", nn.CrossEntropyLoss()),
    ("mean", "classes", nn.CrossEntropyLoss(label_smoothing=0.1)),
    ("mean", "classes", F.cross_entropy),
    ("mean", "classes", lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets)),
    ("mean", "classes", lambda outputs, targets: F.cross_entropy(outputs, targets).reshape(1, 1)),
    ("mean", "classes", nn.MultiMarginLoss(weight=WEIGHTS)),
    ("mean", "positions", nn.CrossEntropyLoss()),
    ("mean", "positions", lambda outputs, targets: F.cross_entropy(outputs, targets)),
    ("mean", "numbers", lambda outputs, targets: (outputs - targets).abs().mean()),
    ("mean", "numbers", lambda outputs, targets: (outputs - targets).square().mean(1).mean().unsqueeze(0)),
    ("mean", "numbers", F.huber_loss),
    ("mean", "numbers", partial(F.mse_loss, reduction="mean")),
    ("mean", "shares", F.binary_cross_entropy),
    ("mean", "numbers", nn.MSELoss()),
    ("mean", "numbers", nn.HuberLoss()),
    ("mean", "numbers", nn.KLDivLoss(reduction="batchmean", log_target=True)),
    ("mean", "one", lambda outputs, targets: F.mse_loss(outputs.squeeze(1), targets)),
    ("mean", "shares", nn.BCELoss()),
    ("mean", "shares", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    ("mean", "shares", nn.CrossEntropyLoss(weight=WEIGHTS)),
    ("sum", "classes", nn.CrossEntropyLoss(reduction="sum")),
    ("sum", "classes", nn.CrossEntropyLoss(reduction="sum", weight=WEIGHTS)),
    ("sum", "classes", partial(F.cross_entropy, reduction="sum", ignore_index=2)),
    ("sum", "classes", cross_entropy),
    ("sum", "numbers", nn.MSELoss(reduction="sum")),
    ("sum", "numbers", lambda outputs, targets: (-outputs * targets).sum()),
    ("sum", "numbers", lambda outputs, targets: (outputs * targets).mean(1).sum()),
    ("none", "classes", nn.CrossEntropyLoss(reduction="none")),
    ("none", "classes", nn.CrossEntropyLoss(reduction="none", weight=WEIGHTS, ignore_index=1)),
    ("none", "positions", nn.CrossEntropyLoss(reduction="none")),
    ("none", "numbers", nn.MSELoss(reduction="none")),
]
COUNTED_TARGETS: list[tuple[str, Any]] = [
    ("classes", nn.CrossEntropyLoss(weight=WEIGHTS)),
    ("classes", nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)),
    ("classes", nn.CrossEntropyLoss(ignore_index=2)),
    ("classes", partial(F.cross_entropy, weight=WEIGHTS)),
    ("classes", lambda outputs, targets: F.cross_entropy(outputs, targets, WEIGHTS)),
    ("classes", lambda outputs, targets: F.nll_loss(outputs.log_softmax(1), targets, ignore_index=2)),
    ("padded", nn.CrossEntropyLoss(ignore_index=0)),
    ("padded", lambda outputs, targets: F.cross_entropy(outputs, targets, ignore_index=0)),
]
"""Means over the targets that count: they are trained as (sum, count)."""
REFUSED: list[tuple[str, str, Any]] = [
    (
        "its last operation, Sub, does not say",
        "classes",
        lambda outputs, targets: F.cross_entropy(outputs, targets) - 3,
    ),
    ("is the mean of 6 values of 6 classes", "numbers", pairwise_loss),
    ("its last operation, Sqrt, does not say", "numbers", lambda outputs, targets: F.mse_loss(outputs, targets).sqrt()),
    (
        "its last operation, Add, does not say",
        "numbers",
        lambda outputs, targets: F.mse_loss(outputs, targets) + 1 / len(targets),
    ),
    ("is the mean of 5 values for 6 samples", "numbers", lambda outputs, targets: outputs.mean(0).square().mean()),
    ("is the sum of 5 values for 6 samples", "numbers", lambda outputs, targets: (outputs - targets).mean(0).sum()),
    ("is the mean of 2 values", "classes", lambda o, t: torch.stack([F.cross_entropy(o, t)] * 2).mean()),
    ("is the mean of 36 values", "numbers", lambda outputs, targets: (outputs @ outputs.T).mean()),
    (
        "it compares samples with each other",
        "numbers",
        lambda outputs, targets: (outputs - outputs.mean(0)).abs().mean(),
    ),
    ("depend on the others", "numbers", lambda outputs, targets: outputs.sum(1) / outputs.sum()),
    ("last operation, Mul, does not say", "numbers", lambda outputs, targets: 0 * outputs.sum()),
    (
        "returned float, which is not a tensor",
        "numbers",
        lambda outputs, targets: F.mse_loss(outputs, targets).item(),
    ),
    ("returned NoneType, which is not a tensor", "numbers", lambda outputs, targets: None),
    ("returned tuple, which is not a tensor", "numbers", lambda outputs, targets: (outputs, targets)),
    (r"shape \[30\] for 6 samples", "numbers", lambda outputs, targets: (outputs - targets).flatten()),
    ("dist of .outputs, targets. failed", "classes", torch.dist),
]


def found_for(kind: str, loss: Any) -> Criterion | CustomLoss:
    """What a job with this loss, and a model that returns its inputs scaled by 1, is trained with."""
    inputs, targets = random_samples(kind)
    data = TensorData(inputs, targets)
    found = with_criterion(job(loss, Scaled(), data=data), data, 0).loss
    assert isinstance(found, Criterion | CustomLoss)
    return found


class Scaled(nn.Module):
    """A model that returns its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.factor


@pytest.mark.parametrize(("reduction", "kind", "loss"), FOUND)
def test_a_reduction_is_known(reduction: str, kind: str, loss: Any) -> None:
    found = found_for(kind, loss)
    assert isinstance(found, Criterion)
    assert found.returns == reduction


@pytest.mark.parametrize(("kind", "loss"), COUNTED_TARGETS)
def test_targets_that_count_are_counted(kind: str, loss: Any) -> None:
    """The sums of shards over the sum of their counts are the loss of the batch, by shards of any sizes."""
    found = found_for(kind, loss)
    assert isinstance(found, CustomLoss)
    model, (outputs, targets) = Scaled(), random_samples(kind)
    shards = [
        found(model, (outputs[low:high], targets[low:high]), high - low) for low, high in ((0, 1), (1, 4), (4, 6))
    ]
    total = sum(one.objective for one in shards) / sum(one.weight for one in shards)
    whole = loss(model(outputs), targets)
    assert isinstance(total, Tensor)
    assert total.item() == pytest.approx(whole.item(), rel=1e-6)
    (gradient,), (expected,) = torch.autograd.grad(total, model.factor), torch.autograd.grad(whole, model.factor)
    assert float(gradient) == pytest.approx(float(expected), rel=1e-5)
    with torch.no_grad():  # an evaluation
        assert found(model, (outputs, targets), SAMPLES).weight == pytest.approx(sum(one.weight for one in shards))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), lambda outputs, targets: F.cross_entropy(outputs, targets)])
def test_a_shard_whose_targets_are_all_ignored_adds_nothing(loss: Any) -> None:
    model, (outputs, targets) = Scaled(), random_samples("classes")
    targets[:4] = -100
    data = TensorData(outputs, targets)
    found = with_criterion(job(loss, model, data=data), data, 0).loss
    assert isinstance(found, CustomLoss)
    shard = found(model, (outputs[:4], targets[:4]), 4)
    assert (shard.objective.item(), shard.weight) == (0, 0)
    shard.objective.backward()  # type: ignore[no-untyped-call]
    assert model.factor.grad is None or float(model.factor.grad) == 0


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHTS), partial(F.cross_entropy, ignore_index=3)])
def test_a_head_of_zeros_does_not_hide_weights(loss: Any) -> None:
    """Every sample has the same loss then, and values say nothing."""
    model = nn.Linear(4, CLASSES)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    data = TensorData(torch.randn(9, 4), torch.arange(9) % CLASSES)
    for one in (loss, lambda outputs, targets: loss(outputs, targets)):
        assert isinstance(with_criterion(job(one, model, data=data), data, 0).loss, CustomLoss)


@pytest.mark.parametrize(("text", "kind", "loss"), REFUSED)
def test_a_loss_that_is_not_known_is_refused(text: str, kind: str, loss: Any) -> None:
    with pytest.raises(InvalidArgument, match=text) as refused:
        find_criterion(loss, None, *random_samples(kind))
    assert str(refused.value).startswith("loss: ")


def test_a_refusal_says_what_to_write() -> None:
    with pytest.raises(InvalidArgument) as refused:
        find_criterion(lambda outputs, targets: F.mse_loss(outputs, targets) * 2, None, *random_samples("numbers"))
    for remedy in ("return losses.sum(), losses.numel()", "write hoop.train(…, reduction='mean') or hoop.Job("):
        assert remedy in str(refused.value)


def test_parts_that_are_not_numbers_do_not_fit() -> None:
    assert not Decomposition(1.0, (2.0, float("nan"))).is_conclusive
    assert not Decomposition(1.0, (0.5, 0.6)).fits(torch.float32)
    assert Decomposition(1.5625, (1.0, 0.56396)).fits(torch.bfloat16)


# ---- in a job


class StatefulLoss(nn.Module):
    """A loss that draws from three random generators and counts its calls in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1), random.random(), np.random.rand()
        return F.mse_loss(outputs, targets.to(outputs.dtype))  # torch 2.11 requires one dtype


def job(loss: Any, model: nn.Module | None = None, data: Any = None, **more: Any) -> Job:
    inputs, targets = torch.randn(9, 4), torch.randn(9, 2)
    data = TensorData(inputs, targets) if data is None else data
    model = nn.Linear(4, 2) if model is None else model
    return Job(lambda seed: model, lambda: Splits(data, data), loss, **more)


def criterion_of(given: Job) -> Criterion:
    found = with_criterion(given, given.data().train, 0).criterion
    assert found is not None
    return found


def generator_states() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist()]


def test_a_trial_changes_no_state() -> None:
    loss = StatefulLoss()
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    given = job(loss, model)
    before, buffers = generator_states(), [one.clone() for one in [*model.buffers(), *loss.buffers()]]
    criterion = criterion_of(given)
    assert (criterion.returns, criterion.minimised) == ("mean", "mean")
    assert generator_states() == before
    assert all(map(torch.equal, buffers, [*model.buffers(), *loss.buffers()]))
    assert not any(one.grad is not None for one in model.parameters())
    assert model.training


def test_a_data_set_of_one_sample_is_enough() -> None:
    one = TensorData(torch.randn(1, 4), torch.randn(1, 2))
    model = nn.Linear(4, 2)
    for reduction in ("mean", "sum", "none"):
        given = Job(lambda seed: model, lambda: Splits(one, one), nn.MSELoss(reduction=reduction))
        assert criterion_of(given).returns == reduction


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("no gradient goes from what", lambda outputs, targets: F.mse_loss(outputs.detach(), targets)),
        ("no gradient goes from what", lambda outputs, targets: (1 + outputs.argmax(1)).float().mean()),
    ],
)
def test_a_loss_without_a_gradient_is_refused(text: str, loss: Any) -> None:
    with pytest.raises(InvalidArgument, match=text):
        criterion_of(job(loss))


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Named(nn.Linear):
        def forward(self, values: Tensor) -> Any:
            return {"logits": super().forward(values)}

    with pytest.raises(
        InvalidArgument, match=r"loss: MSELoss\(\) takes a tensor, and the model returned dict; give a function"
    ):
        criterion_of(job(nn.MSELoss(), Named(4, 2)))


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("loss: 'hinge' is unknown", {"loss": "hinge"}),
        ("loss: CrossEntropyLoss is a class", {"loss": nn.CrossEntropyLoss}),
        ("loss: 7 is neither a function", {"loss": 7}),
        ("reduction: 'average' is unknown", {"loss": F.mse_loss, "reduction": "average"}),
        (r"reduction: 'sum' is stated, MSELoss\(\) has 'mean'", {"loss": nn.MSELoss(), "reduction": "sum"}),
    ],
)
def test_invalid_losses_and_reductions_are_refused(text: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=text):
        job(**given)


def test_a_stated_reduction_is_accepted_but_the_shape_of_the_loss_is_checked() -> None:
    """The root of a mean is not a mean; if the user states that it is one, it is computed shard by shard."""
    root = criterion_of(job(lambda outputs, targets: F.mse_loss(outputs, targets).sqrt(), reduction="mean"))
    outputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    figure, _ = Objective(root)(outputs, targets, 8)
    assert figure == pytest.approx(4 * float(F.mse_loss(outputs, targets).sqrt()))
    rows = criterion_of(job(nn.MSELoss(reduction="none"), reduction=None))
    assert float(rows.value(outputs, targets)) == pytest.approx(4 * float(F.mse_loss(outputs, targets)))
    for reduction, loss in (("mean", lambda o, t: (o - t).sum(1)), ("none", lambda o, t: (o - t).sum())):
        with pytest.raises(InvalidArgument, match=f"its reduction is '{reduction}'"):
            criterion_of(job(loss, reduction=reduction)).value(outputs, targets)


def test_hits_of_every_shape() -> None:
    targets = torch.tensor([[0, 1], [1, 1], [0, 0]])
    scores = F.one_hot(targets, 2).float()
    assert num_correct(scores, targets) == 3
    longer = torch.tensor([[0, 1, 2], [1, 1, 0]])
    assert num_correct(F.one_hot(longer, 5).float().transpose(1, 2), longer) == 2
    assert num_correct(torch.randn(4, 3), torch.zeros(4, 3, dtype=torch.int64)) == 0
    assert num_correct(torch.randn(4), torch.zeros(4, dtype=torch.int64)) == 0
    assert num_correct(torch.randn(4, 3), torch.randn(4)) == 0
