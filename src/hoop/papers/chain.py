"""What paper 3's two systems train: a chain of linear layers, by plain SGD; and the two systems, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hoop.data.catalog import load
from hoop.engine.job import Job
from hoop.models.mlp import mlp
from hoop.papers.parts import part_of

STRATEGIES = {
    "RingTMP": "ring",
    "RingTMP, asynchronous": "ring:async",
    "server, BSP": "ps:bsp",
    "server, ASP": "ps:asp",
    "server, SSP": "ps:ssp",
}
RING, SERVER = "RingTMP", "server, BSP"
WIDTH, DEPTH = 256, 8
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05, "batch_size": 256, "shards": 8, "evaluate_every": 0}


def _built(seed: int, widths: list[int]) -> nn.Sequential:
    """Weights as large as ReLU wants them: with PyTorch's own, a chain this long does not learn by plain SGD."""
    model = mlp(seed, widths=widths)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(6**0.5)  # from 1 / 3n to 2 / n
    return model


def chain(width: int, depth: int, samples: int) -> Job:
    """An MLP of so many linear layers, each a block that the ring can cut before."""
    widths = [784, *[width] * (depth - 1), 10]
    return Job(lambda seed: _built(seed, widths), lambda: part_of(load("mnist"), samples, 1000))
