"""A job from the objects that a program gives to ``hoop.train``: a module, data, a loss. Weights back into a module.

Imports PyTorch; ``runs/api.py`` imports this module when it is called, after it has checked the version of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.tensors import MapData, TensorData
from hoop.engine.fault_tolerance.checkpoint import deserialize
from hoop.engine.job import Job, check_model_function
from hoop.engine.stage.autograd import Loss
from hoop.errors import FailedPrecondition, InvalidArgument


def job_from(
    model: nn.Module | Callable[[int], nn.Module], data: Any, loss: str | Loss, reduction: str | None = None
) -> Job:
    """A job from a module, or a function of a seed that makes one, and data."""
    splits = splits_from(data)
    if isinstance(model, nn.Module):
        return Job(lambda seed: model, lambda: splits, loss, reduction=reduction)
    check_model_function(model)
    return Job(model, lambda: splits, loss, reduction=reduction)


def splits_from(data: Any) -> Splits:
    """Training and test data from a pair of datasets or of arrays; a single dataset is used for both."""
    if isinstance(data, Splits):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and not _is_array(data[0]):
        return Splits(_dataset(data[0], "train"), _dataset(data[1], "test"))
    one = _dataset(data, "train")
    return Splits(one, one)


def _dataset(data: Any, name: str) -> Any:
    if isinstance(data, tuple | list) and len(data) == 2 and _is_array(data[0]):
        return TensorData(_tensor(data[0], "inputs"), _tensor(data[1], "targets"), name=name)
    if hasattr(data, "batch") and hasattr(data, "checksum"):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapData(data, name=name)
    raise InvalidArgument(
        f"data: {type(data).__name__} is neither (inputs, targets) nor a dataset; give tensors or NumPy arrays, a "
        "map-style torch Dataset, or a pair of them for training and test"
    )


def _is_array(values: Any) -> bool:
    """Whether these are a tensor, or what NumPy takes for an array."""
    return isinstance(values, Tensor) or hasattr(values, "__array__")


def _tensor(values: Any, field: str) -> Tensor:
    """An array as a tensor. NumPy's default type, float64, becomes float32, the type of all weights."""
    if isinstance(values, Tensor):
        return values
    if not _is_array(values):
        raise InvalidArgument(f"data: {field} are {type(values).__name__}; give a tensor or a NumPy array")
    array = np.asarray(values)
    kind = np.dtype(np.float32) if array.dtype == np.float64 else array.dtype.newbyteorder("=")
    if kind.kind not in "biuf":
        raise InvalidArgument(f"data: {field} are an array of {array.dtype}; give an array of numbers")
    array = array.astype(kind, order="C", copy=not array.flags.writeable)  # torch takes no others
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InvalidArgument(f"data: {field} are an array that PyTorch does not take: {error}") from None


def load_into(model: nn.Module, weights: Path | Mapping[str, Tensor]) -> nn.Module:
    """Copies weights, of a file or by name, into a model; FailedPrecondition if a name or a shape differs."""
    found = deserialize(weights.read_bytes(), weights)[0] if isinstance(weights, Path) else weights
    with torch.no_grad():
        for name, into in [*model.named_parameters(), *model.named_buffers()]:
            if name not in found or found[name].shape != into.shape:
                there = f"{list(found[name].shape)}" if name in found else "not there"
                raise FailedPrecondition(
                    f"checkpoint: {name} is {there}, the model's is {list(into.shape)}; was the model changed?"
                )
            into.copy_(found[name])
    return model
