"""The jobs of scripts/golden: a small synthetic classification.

chain      runs on Hoop's own kernels
graph      on autograd, with buffers and dropout
rowwise    the same without batch norm, so that a shard may have one sample
paced      computes slowly as long as the file ``paced`` is beside this one, so that a fault happens while it trains
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hoop

SAMPLES, INPUTS, CLASSES = 203, 12, 5
PACE_FILE = Path(__file__).with_name("paced")
PACE_S = 0.05


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, INPUTS, generator=draw)
    return inputs, (inputs @ torch.randn(INPUTS, CLASSES, generator=draw)).argmax(1)


def data() -> hoop.Splits:
    inputs, targets = samples()
    return hoop.Splits(hoop.TensorData(inputs, targets), hoop.TensorData(inputs[:50], targets[:50]))


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(INPUTS, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(24, CLASSES))


def mixed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(INPUTS, 24),
        nn.Sequential(nn.ReLU(), nn.BatchNorm1d(24)),
        nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.LayerNorm(24)),
        nn.Linear(24, CLASSES),
    )


def dropped(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(INPUTS, 24), nn.GELU(), nn.LayerNorm(24), nn.Dropout(0.2), nn.Linear(24, CLASSES)]
    return nn.Sequential(*layers)


class Paced(nn.Module):
    """Passes its input on, slowly while ``PACE_FILE`` exists."""

    def forward(self, inputs: Any) -> Any:
        if PACE_FILE.exists():
            time.sleep(PACE_S)
        return inputs


def mixed_paced(seed: int) -> nn.Module:
    return nn.Sequential(Paced(), *mixed(seed))


SETTINGS: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 16,
    "shards": 4,
    "lr": 0.01,
    "optimizer": "adam",
    "clip": 1.0,
    "warmup": 5,
}
chain = hoop.Job(linear, data, settings=SETTINGS)
graph = hoop.Job(mixed, data, settings=SETTINGS)
rowwise = hoop.Job(dropped, data, settings=SETTINGS)
paced = hoop.Job(mixed_paced, data, settings={**SETTINGS, "epochs": 10})
