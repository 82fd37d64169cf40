"""A job from live objects: what somebody hands to ``hoop.train``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.map_style import MapData
from hoop.data.tensors import TensorData
from hoop.engine.job import Job
from hoop.engine.stages.losses import Loss
from hoop.engine.survival.snapshot import unpacked
from hoop.errors import FailedPrecondition, InvalidArgument


def job_from(
    model: nn.Module | Callable[[int], nn.Module], data: Any, loss: str | Loss, reduction: str | None = None
) -> Job:
    """A module (or a function of a seed) and data as a job."""
    splits = splits_from(data)
    build = (lambda seed: model) if isinstance(model, nn.Module) else model
    return Job(build, lambda: splits, loss, reduction=reduction)


def splits_from(data: Any) -> Splits:
    """Two datasets, from a pair of them or of tensors; a single one is also what the model is measured on."""
    if isinstance(data, Splits):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data[0], Tensor):
        return Splits(_dataset(data[0], "train"), _dataset(data[1], "test"))
    one = _dataset(data, "train")
    return Splits(one, one)


def _dataset(data: Any, name: str) -> Any:
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(one, Tensor) for one in data):
        return TensorData(*data, name=name)
    if hasattr(data, "batch") and hasattr(data, "checksum"):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapData(data, name=name)
    raise InvalidArgument(
        f"data: {type(data).__name__} is neither (inputs, targets) nor a dataset; give tensors, a map-style "
        "torch Dataset, or a pair of them for training and test"
    )


def load_into(model: nn.Module, weights: Path | Mapping[str, Tensor]) -> nn.Module:
    """A model with the weights of a file; tensors that share memory, and buffers of every kind, are there once."""
    found = unpacked(weights.read_bytes(), weights)[0] if isinstance(weights, Path) else weights
    with torch.no_grad():
        for name, into in [*model.named_parameters(), *model.named_buffers()]:
            if name not in found or found[name].shape != into.shape:
                there = f"{list(found[name].shape)}" if name in found else "not there"
                raise FailedPrecondition(
                    f"checkpoint: {name} is {there}, the model's is {list(into.shape)}; was the model changed?"
                )
            into.copy_(found[name])
    return model
