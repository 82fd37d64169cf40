"""Data of any form that a program gives to ``hoop.train``: what it becomes, and what is refused with which remedy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import hoop
from hoop.data.dataset import Splits
from hoop.data.structured import NestedData, SampleData
from hoop.data.tensors import MapData, TensorData
from hoop.data.user_data import TrainAndTest, user_data
from hoop.engine.custom.loss import COUNTED, CustomLoss
from hoop.engine.job import Job
from hoop.engine.loss_reduction import with_criterion
from hoop.engine.stage.autograd import Criterion
from hoop.errors import InvalidArgument

X, Y = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3
SAMPLES = [{"ids": [1, 2, index], "label": index % 3} for index in range(12)]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def rows(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def test_nested_arrays_are_batches_of_the_same_nesting() -> None:
    data = user_data({"x": X.numpy().astype(np.float64), "more": (Y, {"z": X})}).splits.train
    assert isinstance(data, NestedData)
    batch = data.load(rows(3, 1), epoch=0, seed=0)
    assert torch.equal(batch["x"], X[[3, 1]])
    assert batch["x"].dtype == torch.float32
    assert torch.equal(batch["more"][0], Y[[3, 1]])
    assert torch.equal(batch["more"][1]["z"], X[[3, 1]])


def test_a_dict_of_inputs_with_targets_is_a_pair_and_two_dicts_are_training_and_test_data() -> None:
    pair = user_data(({"a": X, "b": X}, Y)).splits
    assert pair.evaluated_split == "train"
    assert torch.equal(pair.train.load(rows(2), epoch=0, seed=0)[1], Y[[2]])
    both = user_data(({"a": X}, {"a": X[:5]})).splits
    assert (len(both.train), len(both.test)) == (12, 5)


def test_test_data_of_any_form_are_given_by_themselves() -> None:
    for train, test in (((X, Y), (X[:5], Y[:5])), (X, X[:5]), (SAMPLES, SAMPLES[:5])):
        splits = user_data(TrainAndTest(train, test)).splits
        assert (len(splits.train), len(splits.test), splits.evaluated_split) == (12, 5, "test")


def test_data_for_a_job_that_has_its_own_are_refused() -> None:
    either: list[dict[str, Any]] = [{"data": (X, Y)}, {"test_data": (X, Y)}]
    for given in either:
        with pytest.raises(InvalidArgument, match="a job has its own data"):
            hoop.train("mnist", **given)


@pytest.mark.parametrize(
    ("name", "meant"), [("batchsize", "batch_size"), ("learning_rate", "lr"), ("max_epochs", "epochs")]
)
def test_an_unknown_setting_is_answered_with_the_one_that_is_meant(name: str, meant: str) -> None:
    setting: dict[str, Any] = {name: 3}
    with pytest.raises(InvalidArgument, match=rf"{name}: no such setting; do you mean {meant}\? There are job, "):
        hoop.train("mnist", **setting)


def test_samples_of_lists_and_numbers_are_collated() -> None:
    data = user_data(SAMPLES).splits.train
    assert isinstance(data, SampleData)
    batch = data.load(rows(4, 5), epoch=0, seed=0)
    assert batch["ids"].tolist() == [[1, 2, 4], [1, 2, 5]]
    assert batch["label"].tolist() == [1, 2]


def test_samples_of_other_lengths_need_a_collate_function() -> None:
    uneven = [{"ids": [1] * (1 + index)} for index in range(4)]
    with pytest.raises(InvalidArgument, match=r"2 samples do not make a batch .* give collate_fn"):
        user_data(uneven).splits.train.load(rows(0, 3), epoch=0, seed=0)
    padded = user_data(uneven, collate_fn=lambda items: [len(one["ids"]) for one in items]).splits.train
    assert padded.load(rows(0, 3), epoch=0, seed=0) == [1, 4]


def test_random_transforms_depend_on_the_sample_and_not_on_the_batch() -> None:
    class Noisy(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return {"noise": torch.rand(2), "more": float(np.random.rand())}

    data = user_data(Noisy(range(6)), num_workers=0).splits.train
    alone = data.load(rows(4), epoch=1, seed=7)
    among = data.load(rows(2, 4, 5), epoch=1, seed=7)
    assert torch.equal(alone["noise"][0], among["noise"][1])
    assert alone["more"][0] == among["more"][1]
    assert not torch.equal(alone["noise"], data.load(rows(4), epoch=2, seed=7)["noise"])


def test_a_loader_states_batch_size_order_and_workers() -> None:
    dataset = TensorDataset(X, Y)
    loader = DataLoader(dataset, batch_size=5, shuffle=True, num_workers=2, drop_last=True)
    found = user_data(loader)
    assert found.settings == {"batch_size": 5, "shuffle": True, "drop_last": True}
    assert found.splits.train.num_workers == 2
    assert user_data(DataLoader(dataset, batch_size=5)).settings["shuffle"] is False
    assert isinstance(user_data(dataset).splits.train, MapData)
    assert isinstance(user_data((X, Y)).splits.train, TensorData)


def test_a_setting_that_differs_from_the_loaders_is_refused() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    with pytest.raises(InvalidArgument, match="batch_size: 4 is given, and the DataLoader has 5; leave one of them"):
        hoop.train(nn.Linear(2, 3), loader, batch_size=4)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (Stream(), "data: Stream is an IterableDataset: its samples have no numbers"),
        (DataLoader(Stream()), "data: Stream is an IterableDataset"),
        (
            DataLoader(TensorDataset(X, Y), sampler=WeightedRandomSampler([1.0] * 12, 12)),
            "data: the DataLoader has a sampler of its own, WeightedRandomSampler",
        ),
        (DataLoader(TensorDataset(X, Y), batch_size=None), "data: the DataLoader has no batch_size"),
        ({"x": X, "y": Y[:3]}, "data: its arrays have 3, 12 rows; each needs a row a sample"),
        ({"x": X, "y": "text"}, "data: dict is neither arrays nor a dataset"),
        ("mnist", "data: str is neither arrays nor a dataset"),
        ([], "data: the dataset has no samples"),
    ],
)
def test_what_cannot_be_split_exactly_is_refused_with_the_remedy(data: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        user_data(data)
    assert str(caught.value).startswith(sentence)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs


def found_loss(loss: Any, data: Any = None) -> CustomLoss:
    splits = user_data({"x": X, "y": Y} if data is None else data).splits
    job = Job(lambda seed: Net(), lambda: splits, loss)
    found = with_criterion(job, splits.train, 0).loss
    assert isinstance(found, CustomLoss)
    return found


def cross_entropy(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction)


def test_the_reduction_of_a_loss_is_found_out() -> None:
    assert found_loss(cross_entropy).returns == "mean"
    assert found_loss(lambda model, batch: cross_entropy(model, batch, "sum")).returns == "sum"
    assert found_loss(lambda model, batch: cross_entropy(model, batch, "none")).returns == "none"
    counted = found_loss(lambda model, batch: {"loss": (cross_entropy(model, batch, "sum"), 12), "seen": 1.0})
    assert (counted.returns, counted.metric_names) == (COUNTED, ("seen",))


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, batch: 0.5, "returned float; return the loss as a scalar tensor"),
        (lambda model, batch: {"accuracy": 1.0}, "returned a dict with 'accuracy'; it needs 'loss'"),
        (lambda model, batch: model(batch["x"]).detach().sum(), "no gradient goes from what"),
        (lambda model, batch: model(batch["x"]).std(), "last operation, Std, does not say of what it is the mean"),
        (lambda model, batch: model(batch["x"])[:5, 0], r"returned a tensor of shape \[5\] for 6 samples"),
        (lambda model, batch: (model(batch["x"]).sum(), -1), "returned the count -1.0, which is not 0 or more"),
        (
            lambda model, batch: {"loss": cross_entropy(model, batch), "who": "me"},
            "the metric 'who' is str; give a number or a scalar tensor",
        ),
        (
            "cross_entropy",
            "is a dict with 'x', 'y', not a pair of inputs and targets; give a loss that takes",
        ),
    ],
)
def test_a_loss_that_shards_cannot_add_up_is_refused_with_the_remedy(loss: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        found_loss(loss)


def test_ignored_targets_are_counted_by_the_graph_of_a_mean() -> None:
    data = {"x": X, "y": torch.where(torch.arange(12) % 5 == 0, -100, Y)}

    def mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)

    def counted(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        total = F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100, reduction="sum")
        return total, (batch["y"] >= 0).sum()

    assert found_loss(counted, data).returns == COUNTED
    shards = [found_loss(loss, data)(Net(), data, 12) for loss in (mean, counted)]
    assert [one.weight for one in shards] == [9, 9]


@pytest.mark.parametrize("loss", [lambda m, b: cross_entropy(m, b), lambda *both: cross_entropy(*both)])
def test_no_name_decides_what_a_loss_takes(loss: Any) -> None:
    assert found_loss(loss).takes_model


def test_a_loss_of_pairs_is_called_as_it_can_be() -> None:
    def of_outputs(model: Tensor, y: Tensor) -> Tensor:  # named so on purpose
        return F.cross_entropy(model, y)

    class OfModel:
        def method(self, net: nn.Module, batch: Any) -> Tensor:
            return F.cross_entropy(net(batch[0]), batch[1])

        __call__ = method

    def pairs(model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for loss, takes_model in ((pairs, True), (OfModel(), True), (OfModel().method, True), (partial(pairs), True)):
        found = found_loss(loss, (X, Y))
        assert isinstance(found, CustomLoss)
        assert found.takes_model == takes_model
    job = Job(lambda seed: Net(), lambda: user_data((X, Y)).splits, of_outputs)
    assert isinstance(with_criterion(job, job.data().train, 0).loss, Criterion)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda batch: 0.5, r"loss: .*<lambda>\(batch\) is called with two arguments, \(outputs, targets\) or"),
        (lambda model, batch, scale: 0.5, r"is called with two arguments"),
    ],
)
def test_a_loss_of_other_arguments_is_refused(loss: Any, sentence: str) -> None:
    for data in (None, (X, Y)):
        with pytest.raises(InvalidArgument, match=sentence):
            found_loss(loss, data)


def test_a_model_of_bfloat16_trains_with_a_loss_of_pytorch() -> None:
    """Its values round differently for all samples and for parts of them, and are not compared."""
    classes, numbers = Y, torch.randn(12, 3).bfloat16()
    for loss, targets in (
        (nn.CrossEntropyLoss(), classes),
        (lambda outputs, targets: F.cross_entropy(outputs, targets), classes),
        (nn.MSELoss(), numbers),
    ):
        splits = user_data((X.bfloat16(), targets)).splits
        job = Job(lambda seed: Net().bfloat16(), lambda given=splits: given, loss)  # type: ignore[misc]
        assert isinstance(with_criterion(job, splits.train, 0).loss, CustomLoss)


class Large(nn.Module):
    """A model above ``LARGE`` that notes whether it was called with values."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.layer, self.head, self.looks = nn.Linear(2000, 500), nn.Linear(500, 3), looks
        self.computed: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).relu()
        if not hidden.is_meta:
            self.computed.append(len(x))
        if self.looks and hidden.sum().item() < 0:
            hidden = -hidden
        outputs: Tensor = self.head(hidden)
        return outputs


@pytest.mark.parametrize(("looks", "computed"), [(False, set[int]()), (True, {1, 2})])
def test_a_large_model_is_tried_without_computing(looks: bool, computed: set[int]) -> None:
    """Unless it looks at its values: then with two samples."""
    model, y = Large(looks), torch.where(torch.arange(12) % 2 == 0, -100, Y)
    splits = user_data({"x": torch.randn(12, 2000), "y": y}).splits
    for loss, returns in ((cross_entropy, "mean"), (lambda m, b: (cross_entropy(m, b, "sum"), 3), COUNTED)):
        found = with_criterion(Job(lambda seed: model, lambda: splits, loss), splits.train, 0, model).loss
        assert isinstance(found, CustomLoss)
        assert (found.returns, found.takes_model) == (returns, True)
        assert set(model.computed) <= computed
        assert bool(model.computed) == looks
        batch = splits.train.load(rows(0, 1, 3), epoch=0, seed=0)
        assert found(model, batch, 3).weight == (2 if found.basis else 3)
        model.computed.clear()


def test_splits_are_taken_as_they_are() -> None:
    splits = Splits(NestedData({"x": X}), NestedData({"x": X[:3]}))
    assert user_data(splits).splits is splits
