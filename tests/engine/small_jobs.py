"""Jobs that train in a second, and their results on one device, which other runs are compared with.

Faults need steps before and after them; ``short_jobs`` has the same jobs with half the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from forked_ranks import Outcome, checkpoint, tensors_in, train
from torch import Tensor, nn

from hoop.data import catalog
from hoop.data.dataset import Batch, Indices, Splits
from hoop.data.tensors import TensorData
from hoop.engine.cost_probe import PROBE_EPOCH
from hoop.engine.job import Job
from hoop.engine.settings import Settings
from hoop.models.vision import mlp

SAMPLES = 300
BATCH = 42
"""The last step of an epoch has 6 samples: fewer than 8 shards, so some of them are empty."""
SHARDS = 8
STEPS = -(-SAMPLES // BATCH)


class RecordingData(TensorData):
    """Records the indices of the samples that training steps read, by epoch."""

    seen: dict[int, list[int]]

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        # Only in steps: measurements before the first step pass no ``out``, or an epoch of their own.
        if out is not None and epoch != PROBE_EPOCH:
            self.__dict__.setdefault("seen", {}).setdefault(epoch, []).extend(indices.tolist())
        return super().batch(indices, epoch=epoch, seed=seed, out=out)


@lru_cache
def first_of_mnist(samples: int) -> Splits:
    """The first ``samples`` images to train with, and the next 100 to test with."""
    full = catalog.load("mnist").train
    inputs, targets = full.batch(torch.arange(samples + 100).numpy(), epoch=0, seed=0)
    inputs, targets = inputs.clone(), targets.clone()
    return Splits(
        RecordingData(inputs[:samples], targets[:samples], name="train"),
        TensorData(inputs[samples:], targets[samples:], name="test"),
    )


def mnist() -> Splits:
    return first_of_mnist(SAMPLES)


def normed(seed: int) -> nn.Module:
    """Batch norm and dropout, in blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 3, 5, stride=3), nn.BatchNorm2d(3), nn.ReLU()),
        nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(192, 20), nn.ReLU()),
        nn.Linear(20, 10),
    )


def convolved(seed: int) -> nn.Module:
    """Batch norm, without random layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4)),
        nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU6()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)),
    )


def flat(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(784, 30), nn.ReLU()),
        nn.Sequential(nn.Linear(30, 20), nn.ReLU()),
        nn.Sequential(nn.Linear(20, 20), nn.ReLU()),
        nn.Linear(20, 10),
    )


def tiny(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4, 10))


JOBS = {
    "mlp": Job(mlp, mnist),
    "normed": Job(normed, mnist),
    "convolved": Job(convolved, mnist),
    "flat": Job(flat, mnist),
    "tiny": Job(tiny, mnist),
}


def settings(strategy: str, **changes: Any) -> Settings:
    base = Settings(strategy=strategy, epochs=2, batch_size=BATCH, shards=SHARDS, trace_steps=10_000, timeout_s=90.0)
    return base.replaced(changes)


@lru_cache
def trained_alone(job: str, data: Callable[[], Splits], changes: tuple[tuple[str, Any], ...]) -> Outcome:
    """Data parallel training on one device; once a process for all tests that compare with it."""
    return train("shm", 1, settings("data", **dict(changes)), replace(JOBS[job], data=data))[0]


def alone(job: str, changes: tuple[tuple[str, Any], ...] = ()) -> dict[str, Tensor]:
    """Weights and optimizer state after data parallel training on one device."""
    return tensors_in(checkpoint([trained_alone(job, mnist, changes)]))


def alone_losses(job: str, changes: tuple[tuple[str, Any], ...] = ()) -> list[float]:
    """The loss of each step of the same training."""
    return trained_alone(job, mnist, changes).losses
