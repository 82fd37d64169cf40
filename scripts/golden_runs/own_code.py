"""A program of scripts/golden: ``hoop.train`` with a model, batches, a loss and an optimizer of its own.

own_code.py OUT DEVICES [FAULT]        prints the result as JSON
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import golden_job
import torch
from torch import nn

import hoop


class TwoInputs(nn.Module):
    """A model of two inputs with a buffer, dropout, and a parameter that no shard uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(golden_job.INPUTS, 24), nn.Linear(1, 24)
        self.last = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, golden_job.CLASSES))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor, length: torch.Tensor) -> Any:
        return self.last(torch.tanh(self.first(inputs) + self.second(length)))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    outputs = model(batch["inputs"], batch["length"])
    counted = batch["targets"] != 0
    total = nn.functional.cross_entropy(outputs[counted], batch["targets"][counted], reduction="sum")
    return {"loss": (total, int(counted.sum())), "largest": outputs.detach().max(1).values.mean()}


def main(out: str, devices: str, fault: str = "") -> None:
    inputs, targets = golden_job.samples()
    torch.manual_seed(0)
    hoop.train(
        TwoInputs(),
        {"inputs": inputs, "length": inputs.norm(dim=1, keepdim=True), "targets": targets},
        loss=loss,
        optimizer=functools.partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7),
        clip=1.0,
        batch_size=16,
        shards=4,
        epochs=2,
        devices=int(devices),
        out=out,
        **({"faults": fault} if fault else {}),
    )
    print(Path(out, "result.json").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
