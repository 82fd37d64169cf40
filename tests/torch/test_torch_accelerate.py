"""Hugging Face's accelerate and Trainer use a process group of Hoop that was made first (docs/from-hugging-face.md).

On CPUs they refuse ``backend="hoop"`` as an argument: accelerate accepts only the names that it would choose itself.
``test_trainers.py`` has the other ways. Skipped where they are not installed: Hoop does not depend on them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RunRanks = Callable[..., list[Any]]
SAMPLES, FEATURES = 16, 4


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [one for one in packages if find_spec(one) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: pip install {' '.join(missing)}")


class Regression(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of a linear function."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= SAMPLES:
            raise IndexError(index)
        features = (torch.arange(FEATURES) + index).float() / SAMPLES
        return {"features": features, "labels": features.sum()}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self[index] for index in range(SAMPLES))


class Model(nn.Module):
    """A linear model with the signature that Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(FEATURES, 1)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.linear(features).squeeze(-1)
        return {"loss": (predicted - labels).square().mean(), "predicted": predicted}


def weights(model: nn.Module) -> list[float]:
    return [float(one) for parameter in model.parameters() for one in parameter.detach().flatten()]


def under_torchrun(rank: int) -> None:
    """Sets the variables that torchrun sets; the group exists already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def accelerated(rank: int) -> tuple[str, list[float]]:
    under_torchrun(rank)
    accelerator: Any = import_module("accelerate").Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(Regression(), batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    assert isinstance(model, DistributedDataParallel)
    for batch in batches:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
    assert accelerator.gather(torch.tensor([float(rank)])).tolist() == [0, 1]
    return dist.get_backend(), weights(model)


@needs("accelerate")
def test_accelerate_uses_the_group_of_the_program(run_ranks: RunRanks) -> None:
    (backend, first), (_, second) = run_ranks(2, accelerated)
    assert backend == "hoop"
    assert first == second
    expected = run_ranks(2, accelerated, backend="gloo")
    assert [("gloo", first)] * 2 == expected


def trained(rank: int, folder: str) -> tuple[str, list[float]]:
    under_torchrun(rank)
    transformers: Any = import_module("transformers")
    options = transformers.TrainingArguments(
        folder, use_cpu=True, num_train_epochs=1, per_device_train_batch_size=4, report_to=[], save_strategy="no"
    )
    model = Model()
    trainer = transformers.Trainer(model, options, train_dataset=Regression())
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return dist.get_backend(), weights(model)


@needs("accelerate", "transformers")
def test_trainer_uses_the_group_of_the_program(run_ranks: RunRanks, tmp_path: Path) -> None:
    (backend, first), (_, second) = run_ranks(2, trained, str(tmp_path))
    assert backend == "hoop"
    assert first == second
    assert first != weights(Model())
