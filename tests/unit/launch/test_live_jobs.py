"""Jobs from live objects: a model, data and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.runs.job_objects import job_from, load_into, splits_from


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
    found = splits_from(data)
    assert (len(found.train), len(found.test)) == sizes
    assert found.evaluated_split == evaluated


def test_unsupported_data_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="data: int is neither"):
        splits_from(7)


def test_a_module_is_used_itself_and_a_function_creates_one() -> None:
    module = nn.Linear(2, 1)
    assert job_from(module, (INPUTS, TARGETS), "mse").model(3) is module
    assert job_from(lambda seed: nn.Linear(seed, 1), (INPUTS, TARGETS), "mse").model(3).in_features == 3


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
