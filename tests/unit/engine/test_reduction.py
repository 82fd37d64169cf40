"""Which reduction a loss has is found out by calling it; what cannot be found out is refused, with the remedy."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.job import Job
from hoop.engine.loss_reduction import SAMPLES, Decomposition, reduction_of, with_criterion
from hoop.engine.stage.autograd import Criterion, Objective, cross_entropy, hits
from hoop.errors import InvalidArgument

CLASSES = 5


def drawn(kind: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    outputs = torch.randn(SAMPLES, CLASSES, generator=draw)
    match kind:
        case "classes":
            return outputs, torch.randint(CLASSES, (SAMPLES,), generator=draw)
        case "positions":
            return torch.randn(SAMPLES, CLASSES, 7, generator=draw), torch.randint(
                1, CLASSES, (SAMPLES, 7), generator=draw
            )
        case "padded":  # each sample to another length
            outputs, targets = drawn("positions")
            return outputs, targets * (torch.arange(7) < torch.arange(SAMPLES).unsqueeze(1) % 7 + 1)
        case "shares":
            return outputs.sigmoid(), torch.rand(SAMPLES, CLASSES, generator=draw)
        case "one":
            return outputs[:, :1], torch.randn(SAMPLES, generator=draw)
    return outputs, torch.randn(SAMPLES, CLASSES, generator=draw)


def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every sample is compared with every other."""
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
    ("neither the mean nor the sum", "numbers", pairs),
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
def test_a_reduction_is_found(reduction: str, kind: str, loss: Any) -> None:
    assert reduction_of(loss, *drawn(kind)) == reduction


@pytest.mark.parametrize(("text", "kind", "loss"), REFUSED)
def test_what_shards_do_not_add_up_to_is_refused(text: str, kind: str, loss: Any) -> None:
    with pytest.raises(InvalidArgument, match=text) as refused:
        reduction_of(loss, *drawn(kind))
    assert str(refused.value).startswith("loss: ")


def test_a_refusal_names_the_remedies() -> None:
    with pytest.raises(InvalidArgument) as refused:
        reduction_of(partial(F.cross_entropy, weight=WEIGHTS), *drawn("classes"))
    for remedy in ("reduction='none' or 'sum'", "hoop.train or hoop.Job", "shards=1"):
        assert remedy in str(refused.value)


def test_outputs_that_are_no_numbers_decide_nothing() -> None:
    """Some of the parts are finite and fit by chance; the whole is not."""
    outputs, targets = drawn("numbers")
    outputs[3] = torch.inf
    with pytest.raises(InvalidArgument, match="cannot be found out"):
        reduction_of(nn.MSELoss(), outputs, targets)
    assert not Decomposition(1.0, [(2, 1.0), (2, float("nan"))]).fits("mean")


# ---- as a job


class Noted(nn.Module):
    """A loss that draws from three generators and keeps count in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(1), random.random(), np.random.rand()
        return F.mse_loss(outputs, targets.to(outputs.dtype))  # torch 2.11 wants one type


def job(loss: Any, model: nn.Module | None = None, **more: Any) -> Job:
    inputs, targets = torch.randn(9, 4), torch.randn(9, 2)
    data = TensorData(inputs, targets)
    model = nn.Linear(4, 2) if model is None else model
    return Job(lambda seed: model, lambda: Splits(data, data), loss, **more)


def resolved(given: Job) -> Criterion:
    found = with_criterion(given, given.data().train, 0).criterion
    assert found is not None
    return found


def states() -> list[Any]:
    of_numpy: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist()]


def test_trying_a_loss_changes_nothing() -> None:
    loss = Noted()
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    given = job(loss, model)
    before, buffers = states(), [one.clone() for one in [*model.buffers(), *loss.buffers()]]
    criterion = resolved(given)
    assert (criterion.returns, criterion.minimised) == ("mean", "mean")
    assert states() == before
    assert all(map(torch.equal, buffers, [*model.buffers(), *loss.buffers()]))
    assert not any(one.grad is not None for one in model.parameters())
    assert model.training


def test_a_watched_mean_changes_nothing_either() -> None:
    loss = Noted()
    labels = TensorData(torch.randn(9, 4), torch.zeros(9, 2, dtype=torch.int64))
    model = nn.Linear(4, 2)
    given = Job(lambda seed: model, lambda: Splits(labels, labels), loss)
    criterion = resolved(given)
    assert criterion.check is not None
    before = states()
    criterion.check(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 0], [1, 0]] * 2))
    assert states() == before
    assert not loss.calls.any()


def test_a_data_set_of_one_sample_is_enough() -> None:
    one = TensorData(torch.randn(1, 4), torch.randn(1, 2))
    model = nn.Linear(4, 2)
    for reduction in ("mean", "sum", "none"):
        given = Job(lambda seed: model, lambda: Splits(one, one), nn.MSELoss(reduction=reduction))
        assert resolved(given).returns == reduction


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("no gradient goes from what", lambda outputs, targets: F.mse_loss(outputs.detach(), targets)),
        ("no gradient goes from what", lambda outputs, targets: outputs.argmax(1).float().mean()),
    ],
)
def test_a_loss_without_a_gradient_is_refused(text: str, loss: Any) -> None:
    with pytest.raises(InvalidArgument, match=text):
        resolved(job(loss))


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Named(nn.Linear):
        def forward(self, values: Tensor) -> Any:
            return {"logits": super().forward(values)}

    with pytest.raises(InvalidArgument, match="model: it returned dict, not a tensor"):
        resolved(job(nn.MSELoss(), Named(4, 2)))


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
def test_what_is_stated_wrongly_is_refused(text: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=text):
        job(**given)


def test_a_stated_reduction_is_believed_and_the_form_of_a_loss_is_not() -> None:
    """The root of a mean is no mean; whoever states that it is one gets it shard by shard."""
    root = resolved(job(lambda outputs, targets: F.mse_loss(outputs, targets).sqrt(), reduction="mean"))
    outputs, targets = torch.randn(4, 2), torch.randn(4, 2)
    figure, _ = Objective(root)(outputs, targets, 8)
    assert figure == pytest.approx(4 * float(F.mse_loss(outputs, targets).sqrt()))
    rows = resolved(job(nn.MSELoss(reduction="none"), reduction=None))
    assert float(rows.value(outputs, targets)) == pytest.approx(4 * float(F.mse_loss(outputs, targets)))
    for reduction, loss in (("mean", lambda o, t: (o - t).sum(1)), ("none", lambda o, t: (o - t).sum())):
        with pytest.raises(InvalidArgument, match=f"its reduction is '{reduction}'"):
            resolved(job(loss, reduction=reduction)).value(outputs, targets)


def test_hits_of_every_shape() -> None:
    targets = torch.tensor([[0, 1], [1, 1], [0, 0]])
    scores = F.one_hot(targets, 2).float()
    assert hits(scores, targets) == 3
    longer = torch.tensor([[0, 1, 2], [1, 1, 0]])
    assert hits(F.one_hot(longer, 5).float().transpose(1, 2), longer) == 2
    assert hits(torch.randn(4, 3), torch.zeros(4, 3, dtype=torch.int64)) == 0
    assert hits(torch.randn(4), torch.zeros(4, dtype=torch.int64)) == 0
    assert hits(torch.randn(4, 3), torch.randn(4)) == 0
