"""The job of chaos scenarios: small, with eight blocks to partition, batch norm and dropout, and slow on purpose.

Each block sleeps in its forward, so that a run lasts long enough for a fault and for the devices that come back, also
on an idle machine. The environment variable ``HOOP_CHAOS_PACE`` has the seconds a block and shard; without it the job
runs as fast as it can, to the same weights. While the file that ``HOOP_CHAOS_HOLD`` names exists, it sleeps longer.
"""

from __future__ import annotations

import os
import time

import torch
from torch import nn

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.job import Job
from hoop.lab.chaos.scenario import SHARDS

NAME = "hoop.lab.chaos.paced_job:job"
PACE, HOLD = "HOOP_CHAOS_PACE", "HOOP_CHAOS_HOLD"
HELD_S = 0.1
"""Seconds for each block and shard while the job is held."""
WIDTH, CLASSES, BLOCKS = 32, 4, 8
SAMPLES, BATCH = 1600, 64
STEPS_AN_EPOCH = SAMPLES // BATCH
"""Number of steps of an epoch; a checkpoint is taken after each epoch."""


class Paced(nn.Module):
    """Identity that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds, self._hold = float(os.environ.get(PACE, "0")), os.environ.get(HOLD, "")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        seconds = HELD_S if self._hold and os.path.exists(self._hold) else self._seconds
        if seconds:
            time.sleep(seconds)
        return values


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    inner = [
        nn.Sequential(Paced(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.1))
        for _ in range(BLOCKS - 1)
    ]
    return nn.Sequential(*inner, nn.Sequential(Paced(), nn.Linear(WIDTH, CLASSES)))


def data() -> Splits:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
    targets = (inputs @ torch.randn(WIDTH, CLASSES, generator=generator)).argmax(1)
    return Splits(TensorData(inputs, targets), TensorData(inputs[:64], targets[:64]))


job = Job(
    model,
    data,
    settings={
        "epochs": 1_000_000,
        "batch_size": BATCH,
        "shards": SHARDS,
        "optimizer": "adam",
        "lr": 0.003,
        "evaluate_every": 0,
        "trace_steps": 0,
    },
)
