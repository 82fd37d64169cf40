"""Run several trainings in one process: PyTorch is imported once, the devices are forked for each training.

Reads a JSON list of jobs, the keyword arguments of ``hoop.train``, from standard input. Writes each result as a line of
JSON, or {"error": class, "text": message}.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import json
import sys
from collections.abc import Callable

import torch
from torch import nn

import hoop

SAMPLES, CLASSES = 203, 3


def data() -> hoop.Splits:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    targets = (inputs @ torch.randn(6, CLASSES, generator=generator)).argmax(1)
    return hoop.Splits(hoop.TensorData(inputs, targets), hoop.TensorData(inputs[:50], targets[:50]))


def chain(seed: int) -> nn.Module:
    """Four blocks to partition; dropout and batch norm, so that random draws and buffers matter."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.Sequential(nn.ReLU(), nn.BatchNorm1d(16)),
        nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)),
        nn.Linear(16, CLASSES),
    )


class Whole(nn.Module):
    """A module with tied weights, a buffer that is not saved, and no blocks to partition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.last = nn.Linear(6, CLASSES)
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.relu(self.again(self.first(values) * self.scale)))
        return outputs


def plain(seed: int) -> nn.Module:
    """No buffers; GELU keeps it off Hoop's hand-written path for Linear and ReLU chains."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, CLASSES))


LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "none": nn.CrossEntropyLoss(reduction="none"),
    "weighted": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
    "weighted lambda": lambda outputs, targets: nn.functional.cross_entropy(
        outputs, targets, torch.tensor([1.0, 2.0, 3.0])
    ),
    "doubled": lambda outputs, targets: 2 * nn.functional.cross_entropy(outputs, targets),
    "a number": lambda outputs, targets: 7.0,
}
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "chain": chain,
    "plain": plain,
    "whole": lambda seed: Whole(),
}
job = hoop.Job(chain, data, settings={"epochs": 2, "batch_size": 32, "shards": 4, "lr": 0.01})
"""What ``hoop train …/train_driver.py:job`` trains."""


def failing(seed: int) -> nn.Module:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(6, CLASSES), 0

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 20:
                raise ZeroDivisionError("on purpose")
            outputs: torch.Tensor = self.layer(values)
            return outputs

    torch.manual_seed(seed)
    return Failing()


broken = hoop.Job(failing, data, settings={"epochs": 50, "batch_size": 32})


class Exiting(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sys.exit("enough")


exiting = hoop.Job(lambda seed: Exiting(6, CLASSES), data)
nothing = hoop.Job(lambda seed: nn.Sequential(nn.Flatten(), nn.ReLU()), data)
"""Has no parameters."""
wrong_shapes = hoop.Job(lambda seed: nn.Sequential(nn.Linear(7, CLASSES)), data)
slow = hoop.Job(
    plain,
    data,
    settings={"epochs": 1_000_000, "batch_size": 8, "shards": 4, "evaluate_every": 0, "checkpoint_every": 0},
)
"""Runs until it is stopped."""
large = hoop.Job(
    lambda seed: nn.Sequential(nn.Linear(6, 4096), nn.Linear(4096, 4096), nn.Linear(4096, CLASSES)),
    data,
    settings={"epochs": 1, "batch_size": 32, "shards": 4, "max_steps": 1, "optimizer": "adam", "lr": 0.001},
)
"""Needs more than 256 MiB of a device's memory."""


def main() -> None:
    for arguments in json.load(sys.stdin):
        model = MODELS[arguments.pop("model", "chain")](0)
        arguments["loss"] = LOSSES.get(arguments.get("loss", ""), "cross_entropy")
        splits = data()
        assert isinstance(splits.train, hoop.TensorData)
        untested = splits.train.inputs, splits.train.targets
        try:
            result = hoop.train(model, untested if arguments.pop("untested", False) else splits, **arguments)
            test = data().test
            assert isinstance(test, hoop.TensorData)
            right = (result.model.eval()(test.inputs).argmax(1) == test.targets).float().mean()
            report = {**result.summary, "right": float(right), "same_module": result.model is model}
            report["repr"] = repr(result)
        except hoop.HoopError as error:
            report = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
