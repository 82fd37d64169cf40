"""A job whose first device to find a mark dies on the spot, in the middle of a shard; the mark is renamed first."""

from __future__ import annotations

import os
import signal

import torch
from torch import nn

import hoop

MARK = os.environ.get("MORTAL_MARK", "")


class Mortal(nn.Module):
    """Passes on what it gets, as long as it lives."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        try:
            os.rename(MARK, MARK + ".fired")
        except OSError:
            return values
        os.kill(os.getpid(), signal.SIGKILL)
        return values


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), Mortal(), nn.Tanh(), nn.Linear(16, 3))


def data() -> hoop.Splits:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(203, 6, generator=draw)
    splits = hoop.TensorData(inputs, inputs.argmax(1) % 3)
    return hoop.Splits(splits, splits)


job = hoop.Job(
    model,
    data,
    settings={"epochs": 1_000_000, "batch_size": 8, "shards": 6, "evaluate_every": 0, "keep": 2},
)
