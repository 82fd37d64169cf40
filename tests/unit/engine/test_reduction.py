"""The reduction of a loss is detected by calling the loss; if that fails, the error names the remedies."""

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
from hoop.engine.job import Job
from hoop.engine.loss_reduction import reduction_of, with_criterion
from hoop.engine.loss_trial import SAMPLES, Decomposition
from hoop.engine.stage.autograd import Criterion, Objective, cross_entropy, num_correct
from hoop.errors import InvalidArgument

CLASSES = 5


def random_samples(kind: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(SAMPLES, CLASSES, generator=generator)
    match kind:
        case "classes":
            return outputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)
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
    ("mean", "classes", lambda outputs, targets: 0.5 * F.cross_entropy(outputs, targets) - 3),
    ("mean", "classes", lambda outputs, targets: F.cross_entropy(outputs, targets).reshape(1, 1)),
    ("mean", "classes", nn.MultiMarginLoss(weight=WEIGHTS)),
    ("mean", "positions", nn.CrossEntropyLoss(ignore_index=0)),
    ("mean", "numbers", nn.MSELoss()),
    ("mean", "numbers", nn.HuberLoss()),
    ("mean", "numbers", nn.KLDivLoss(reduction="batchmean", log_target=True)),
    ("mean", "one", lambda outputs, targets: F.mse_loss(outputs.squeeze(), targets)),
    ("mean", "shares", nn.BCELoss()),
    ("mean", "shares", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    ("mean", "shares", nn.CrossEntropyLoss(weight=WEIGHTS)),
    ("sum", "classes", nn.CrossEntropyLoss(reduction="sum")),
    ("sum", "classes", nn.CrossEntropyLoss(reduction="sum", weight=WEIGHTS)),
    ("sum", "classes", partial(F.cross_entropy, reduction="sum", ignore_index=2)),
    ("sum", "classes", cross_entropy),
    ("sum", "numbers", nn.MSELoss(reduction="sum")),
    ("sum", "numbers", lambda outputs, targets: -(outputs * targets).sum()),
    ("none", "classes", nn.CrossEntropyLoss(reduction="none")),
    ("none", "classes", nn.CrossEntropyLoss(reduction="none", weight=WEIGHTS, ignore_index=1)),
    ("none", "positions", nn.CrossEntropyLoss(reduction="none")),
    ("none", "numbers", nn.MSELoss(reduction="none")),
]
REFUSED: list[tuple[str, str, Any]] = [
    ("has class weights", "classes", nn.CrossEntropyLoss(weight=WEIGHTS)),
    ("has class weights", "classes", nn.NLLLoss(weight=torch.ones(CLASSES))),
    ("neither the mean nor the sum", "classes", partial(F.cross_entropy, weight=WEIGHTS)),
    ("neither the mean nor the sum", "classes", nn.CrossEntropyLoss(ignore_index=2)),
    ("neither the mean nor the sum", "padded", nn.CrossEntropyLoss(ignore_index=0)),
    ("neither the mean nor the sum", "numbers", pairwise_loss),
    ("neither the mean nor the sum", "numbers", lambda outputs, targets: F.mse_loss(outputs, targets).sqrt()),
    (
        "neither the mean nor the sum",
        "numbers",
        lambda outputs, targets: F.mse_loss(outputs, targets) + 1 / len(targets),
    ),
    ("depend on the others", "numbers", lambda outputs, targets: outputs.sum(1) / outputs.sum()),
    ("cannot be found out", "numbers", lambda outputs, targets: 0 * outputs.sum()),
    ("cannot be found out", "numbers", lambda outputs, targets: outputs.sum() * float("nan")),
    (
        "returned float, which is not a tensor",
        "numbers",
        lambda outputs, targets: F.mse_loss(outputs, targets).item(),
    ),
    ("returned NoneType, which is not a tensor", "numbers", lambda outputs, targets: None),
    ("returned tuple, which is not a tensor", "numbers", lambda outputs, targets: (outputs, targets)),
    (r"shape \[160\] for 32 samples", "numbers", lambda outputs, targets: (outputs - targets).flatten()),
    ("dist of .outputs, targets. failed", "classes", torch.dist),
]


@pytest.mark.parametrize(("reduction", "kind", "loss"), FOUND)
def test_a_reduction_is_detected(reduction: str, kind: str, loss: Any) -> None:
    assert reduction_of(loss, *random_samples(kind)) == reduction


@pytest.mark.parametrize(("text", "kind", "loss"), REFUSED)
def test_a_loss_that_is_not_a_sum_over_shards_is_refused(text: str, kind: str, loss: Any) -> None:
    with pytest.raises(InvalidArgument, match=text) as refused:
        reduction_of(loss, *random_samples(kind))
    assert str(refused.value).startswith("loss: ")


def test_a_refusal_names_the_remedies() -> None:
    with pytest.raises(InvalidArgument) as refused:
        reduction_of(partial(F.cross_entropy, weight=WEIGHTS), *random_samples("classes"))
    for remedy in ("reduction='none' or 'sum'", "hoop.train or hoop.Job", "shards=1"):
        assert remedy in str(refused.value)


def test_outputs_that_are_not_finite_are_refused() -> None:
    """Some parts are finite and match by chance; the total is not finite."""
    outputs, targets = random_samples("numbers")
    outputs[3] = torch.inf
    with pytest.raises(InvalidArgument, match="cannot be found out"):
        reduction_of(nn.MSELoss(), outputs, targets)
    assert not Decomposition(1.0, [(2, 1.0), (2, float("nan"))]).fits("mean")


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


def job(loss: Any, model: nn.Module | None = None, **more: Any) -> Job:
    inputs, targets = torch.randn(9, 4), torch.randn(9, 2)
    data = TensorData(inputs, targets)
    model = nn.Linear(4, 2) if model is None else model
    return Job(lambda seed: model, lambda: Splits(data, data), loss, **more)


def criterion_of(given: Job) -> Criterion:
    found = with_criterion(given, given.data().train, 0).criterion
    assert found is not None
    return found


def generator_states() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist()]


def test_detection_changes_no_state() -> None:
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


def test_the_check_of_a_mean_changes_no_state() -> None:
    loss = StatefulLoss()
    labels = TensorData(torch.randn(9, 4), torch.zeros(9, 2, dtype=torch.int64))
    model = nn.Linear(4, 2)
    given = Job(lambda seed: model, lambda: Splits(labels, labels), loss)
    criterion = criterion_of(given)
    assert criterion.check is not None
    before = generator_states()
    criterion.check(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 0], [1, 0]] * 2))
    assert generator_states() == before
    assert not loss.calls.any()


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
