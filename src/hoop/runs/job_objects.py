"""A job from the objects that a program gives to ``hoop.train``: a module, data, a loss. Weights back into a module.

Imports PyTorch; ``runs/api.py`` imports this module when it is called, after it has checked the version of PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hoop.data.user_data import user_data
from hoop.engine.custom.state import AVERAGE
from hoop.engine.fault_tolerance.checkpoint_format import deserialize
from hoop.engine.job import Job, check_model_function
from hoop.errors import FailedPrecondition, InvalidArgument


@dataclass(frozen=True)
class JobParts:
    """What a program may give to ``hoop.train`` beside the model and the data; the fields are those of ``Job``."""

    loss: str | Callable[..., Any] = "cross_entropy"
    reduction: str | None = None
    optimizer: Callable[[Any], Any] | None = None
    parameter_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    lr_scheduler: Callable[[Any], Any] | None = None
    scheduler_interval: Literal["step", "epoch"] = "step"
    ema: float = 0.0
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int | None = None

    def check_only_default(self) -> None:
        """Raises if a part is given: a ``Job`` or a recipe has its own."""
        for one in dataclasses.fields(self):
            if getattr(self, one.name) != one.default:
                raise InvalidArgument(
                    f"{one.name}: {getattr(self, one.name)!r:.80} is for a model that is given here; a job states its "
                    "own (dataclasses.replace makes another job of it)"
                )


def job_from(model: nn.Module | Callable[[int], nn.Module], data: Any, parts: JobParts) -> Job:
    """A job from a module, or a function of a seed that makes one, its data, and the other parts."""
    splits, settings = user_data(data, parts.collate_fn, parts.num_workers)
    if isinstance(model, nn.Module):
        module, make = model, lambda seed: module
    else:
        check_model_function(model)
        make = model
    return Job(
        make,
        lambda: splits,
        parts.loss,
        settings,
        reduction=parts.reduction,
        optimizer=parts.optimizer,
        parameter_groups=parts.parameter_groups,
        lr_scheduler=parts.lr_scheduler,
        scheduler_interval=parts.scheduler_interval,
        ema=parts.ema,
    )


def averages(weights: Path) -> dict[str, Tensor]:
    """The averaged weights in a file, by name; empty if there are none."""
    found = deserialize(weights.read_bytes(), weights)[0]
    return {name.removeprefix(AVERAGE): one for name, one in found.items() if name.startswith(AVERAGE)}


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
