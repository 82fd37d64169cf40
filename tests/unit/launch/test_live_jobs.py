"""Jobs from live objects: a model, data and weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hoop
from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.data.user_data import user_data
from hoop.engine.cost_probe import profile_blocks
from hoop.engine.job import Job, build_model
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.settings import Settings
from hoop.engine.setup import check_stages
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.runs.job_objects import JobParts, job_from, load_into
from hoop.strategies.catalog import parse


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)), index


INPUTS, TARGETS = torch.randn(6, 2), torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("data", "sizes", "evaluated"),
    [
        ((INPUTS, TARGETS), (6, 6), "train"),
        (((INPUTS, TARGETS), (INPUTS[:2], TARGETS[:2])), (6, 2), "test"),
        (((INPUTS, TARGETS), (INPUTS.clone(), TARGETS.clone())), (6, 6), "train"),
        (((INPUTS, TARGETS), (INPUTS + 1, TARGETS)), (6, 6), "test"),
        (TensorData(INPUTS, TARGETS), (6, 6), "train"),
        (Rows(), (4, 4), "train"),
        ((Rows(), TensorData(INPUTS, TARGETS)), (4, 6), "test"),
        (Splits(TensorData(INPUTS, TARGETS), TensorData(INPUTS[:1], TARGETS[:1])), (6, 1), "test"),
    ],
)
def test_data_is_accepted_in_every_form(data: Any, sizes: tuple[int, int], evaluated: str) -> None:
    found = user_data(data).splits
    assert (len(found.train), len(found.test)) == sizes
    assert found.evaluated_split == evaluated


def test_numpy_arrays_are_accepted_and_floats_become_float32() -> None:
    inputs, targets = INPUTS.numpy().astype(np.float64), TARGETS.numpy()
    targets.flags.writeable = False
    splits = user_data(((inputs[::-1], targets), (inputs.astype(">f8"), TARGETS))).splits
    train, test = splits
    assert isinstance(train, TensorData)
    assert isinstance(test, TensorData)
    assert torch.equal(train.inputs, INPUTS.flip(0))
    assert torch.equal(test.inputs, INPUTS)
    assert train.targets.dtype == torch.int64
    assert len(user_data((inputs, targets)).splits.train) == len(INPUTS)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (7, "data: int is neither arrays nor a dataset; give tensors or NumPy arrays"),
        ((np.zeros((2, 3)), [0, 1]), "data: targets are list; give a tensor or a NumPy array"),
        ((np.array(["a", "b"]), np.zeros(2)), "data: inputs is an array of <U1; give an array of numbers"),
        ((np.zeros((2, 3)), np.zeros(4)), "inputs, targets: 2 and 4 rows"),
    ],
)
def test_unsupported_data_is_refused(data: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        user_data(data)
    assert str(caught.value).startswith(sentence)


def test_a_module_is_used_itself_and_a_function_creates_one() -> None:
    module = nn.Linear(2, 1)
    assert job_from(module, (INPUTS, TARGETS), JobParts("mse")).model(3) is module
    assert job_from(lambda seed: nn.Linear(seed, 1), (INPUTS, TARGETS), JobParts("mse")).model(3).in_features == 3


class Sized(nn.Module):
    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(2, hidden)


class Seeded(nn.Linear):
    def __init__(self, seed: int) -> None:
        super().__init__(2, 1)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Sized, "model: Sized is a class; give an object of it, Sized(…), or a function of the seed"),
        (nn.Linear, "model: Linear is a class; give an object of it"),
        (lambda: nn.Linear(2, 1), "model: <lambda>() is called with the seed; make it a function of that one argument"),
        (7, "model: 7 is neither a module nor a function of a seed"),
        (None, "model: None is neither a module nor a function of a seed"),
    ],
)
def test_what_makes_no_model_is_refused(model: Any, sentence: str) -> None:
    """A class whose first argument is not the seed trained with the seed in its place: with 0 hidden units."""
    with pytest.raises(InvalidArgument) as caught:
        job_from(model, (INPUTS, TARGETS), JobParts("mse"))
    assert str(caught.value).startswith(sentence)


def test_the_model_of_a_job_is_checked_when_it_is_made() -> None:
    splits = user_data((INPUTS, TARGETS)).splits
    assert isinstance(build_model(Job(Seeded, lambda: splits), 3), Seeded)
    for model, sentence in (
        (nn.Linear(2, 1), "model: Linear is a module; a Job takes a function of the seed"),
        (lambda seed: {"model": nn.Linear(2, 1)}, "model: for the seed 3 it returned dict"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            build_model(Job(model, lambda: splits), 3)  # type: ignore[arg-type]
        assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"devices": "four"}, "devices: 'four' is not a whole number of at least 1"),
        ({"devices": "8:4"}, "devices: 8:4 ends before it begins; write 4:8"),
        (
            {"devices": 2, "min_devices": 3},
            "min_devices (--min): 3 is more than the 2 devices that the job begins with",
        ),
        ({"devices": True}, "devices: True is not a whole number"),
        ({"devices": 0}, "devices: 0 is not a whole number"),
        ({"strategy": 3}, "strategy: 3 is neither a name, such as 'pipeline:1f1b', nor a strategy"),
        ({"strategy": hoop.Pipeline}, "strategy: <class"),
        ({"out": 7}, "out: 7 is not the path of a folder"),
        ({"progress": "yes"}, "progress: 'yes' is not a function of an event"),
        ({"memory": "lots"}, "memory: 'lots' is not a size"),
        (
            {"optimizer": torch.optim.RMSprop, "lr": 0.1},
            "lr: 0.1 has no effect, because optimizer is a function that has its own",
        ),
        (
            {"lr_scheduler": lambda one: None, "warmup": 5},
            "warmup: 5 has no effect, because lr_scheduler is a function that has its own",
        ),
        ({"lr_scheduler": "cosine"}, "lr_scheduler: 'cosine' is not a function; give a function of the optimizer"),
        ({"parameter_groups": []}, "parameter_groups: [] is not a function; give a function of the model"),
        ({"ema": 2}, "ema: 2 is not in 0..1; give a decay such as 0.999"),
        ({"scheduler_interval": "day"}, "scheduler_interval: 'day' is neither 'step' nor 'epoch'"),
        ({"callbacks": [print]}, "callbacks: builtin_function_or_method is not an object of a subclass of hoop.C"),
        ({"callbacks": [hoop.Callback]}, "callbacks: the class Callback is not an object of a subclass of hoop.C"),
        ({"num_workers": -1}, "num_workers: -1 is not a whole number of at least 0"),
        ({"collate_fn": 7}, "collate_fn: 7 is not a function of a list of samples"),
        ({"on": "127.0.0.1:1"}, "on: the devices at 127.0.0.1:1 are other processes, to which no object of this one"),
        ({"token": "x"}, "token, tls: they are for the cluster of on='HOST:PORT'; leave them out"),
        ({"patience": -1}, "patience: -1 is not a whole number of at least 0"),
        ({"monitor_mode": "low"}, "monitor_mode: 'low' is neither 'min' nor 'max'"),
        ({"drop_last": True, "batch_size": 7}, "drop_last: 6 samples are less than one batch of 7, so none is left"),
        (
            {"optimizer": lambda one: 7, "loss": lambda outputs, targets: outputs.sum()},
            "optimizer: it returned int; give a function of the parameters",
        ),
        (
            {"optimizer": torch.optim.LBFGS, "loss": lambda outputs, targets: outputs.sum()},
            "optimizer: LBFGS calls the loss by itself (step(closure))",
        ),
        (
            {"optimizer": torch.optim.Adagrad, "strategy": "pipeline", "loss": lambda outputs, targets: outputs.sum()},
            "strategy: pipeline:schedule=1f1b needs a float32 model",
        ),
        ({"optimizer": {"name": 7}}, "optimizer: 7 is not text"),
        ({"lr": 10**400}, "lr: 1000"),
    ],
)
def test_wrong_arguments_of_train_are_named(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        hoop.train(nn.Linear(2, 1), (INPUTS, TARGETS), **{"loss": "mse", **arguments})
    assert str(caught.value).startswith(sentence)


def test_an_optimizer_in_place_of_its_name_is_named() -> None:
    """Made here, not when tests are collected: PyTorch's first optimizer imports its compiler, which takes 3 s."""
    optimizer: Any = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(InvalidArgument) as caught:
        hoop.train(nn.Linear(2, 1), (INPUTS, TARGETS), loss="mse", optimizer=optimizer)
    assert str(caught.value).startswith(
        "optimizer: an object of the class SGD is not the name of an optimizer; known: sgd"
    )


def test_an_optimizer_that_hoop_has_is_suggested_by_its_name() -> None:
    model = nn.Linear(2, 1)
    for optimizer in (torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=0.1)):
        with pytest.raises(InvalidArgument, match=r"SGD is not the name .* e\.g\. optimizer='sgd', lr="):
            Settings().replaced({"optimizer": optimizer})


def test_numbers_of_numpy_are_settings() -> None:
    changed = Settings().replaced({"epochs": np.int64(3), "lr": np.float32(0.5)})
    assert (changed.epochs, changed.optimizer.lr) == (3, 0.5)
    assert type(changed.epochs) is int


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"outputs": self.layer(inputs)}


def test_an_output_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="model: Named returned dict, not a tensor; return one tensor"):
        profile_blocks([Named()], (INPUTS, TARGETS), OptimizerSettings())


def test_a_model_that_cannot_be_cut_is_refused_with_the_remedy() -> None:
    strategy = parse("pipeline")
    plan = strategy.plan(2, 4)
    with pytest.raises(InvalidArgument, match=r"needs 2 stages .* Sized, is 1 block; make it an nn.Sequential"):
        check_stages(strategy, plan, Sized(), 1)
    with pytest.raises(InvalidArgument, match=r"Sequential, is 1 block; use fewer devices, or an nn.Sequential of"):
        check_stages(strategy, plan, nn.Sequential(Sized()), 1)
    check_stages(strategy, plan, nn.Sequential(Sized(), Sized()), 2)


class Tied(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.ones(1), persistent=False)


def test_weights_are_loaded_into_the_model() -> None:
    """Tied weights occur once; non-persistent buffers are included."""
    model = Tied()
    load_into(model, {"one.weight": torch.full((2, 2), 3.0), "scale": torch.tensor([5.0])})
    assert model.two.weight is model.one.weight
    assert model.two.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert model.scale.tolist() == [5.0]


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"one.weight is \[3, 3\], the model's is \[2, 2\]"):
        load_into(Tied(), {"one.weight": torch.zeros(3, 3)})
    with pytest.raises(FailedPrecondition, match="scale is not there"):
        load_into(Tied(), {"one.weight": torch.zeros(2, 2)})
