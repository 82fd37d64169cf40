"""Models for ``planner.py`` for which other strategies than data parallel come near, on made-up samples.

wide    few blocks of many weights: summing and updating them takes as long as computing a small batch
deep    many small blocks: a step is many instructions
text    a transformer, computed by autograd: blocks of very different size
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import hoop
from hoop.models.gpt import gpt

SAMPLES, FEATURES, CLASSES = 8192, 256, 10
TOKENS, LENGTH = 64, 64


def vectors() -> hoop.Splits:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    data = hoop.TensorData(inputs, labels, name="made-up vectors")
    return hoop.Splits(data, data)


def tokens() -> hoop.Splits:
    found = torch.randint(TOKENS, (SAMPLES // 8, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    data = hoop.TensorData(found[:, :-1].contiguous(), found[:, 1:].contiguous(), name="made-up text")
    return hoop.Splits(data, data)


def chain(*widths: int) -> Callable[[int], nn.Module]:
    """A model of Linear and ReLU, one block for each pair of widths."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        blocks: list[nn.Module] = [nn.Sequential(nn.Linear(low, high), nn.ReLU()) for low, high in pairwise(widths)]
        return nn.Sequential(*blocks, nn.Linear(widths[-1], CLASSES))

    return build


def transformer(seed: int) -> nn.Module:
    return gpt(seed, vocabulary=TOKENS, width=96, heads=4, layers=4, context=LENGTH)


SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 64, "shards": 4, "lr": 1e-3}
wide = hoop.Job(chain(FEATURES, 1536, 1536), vectors, settings=SETTINGS, about="three blocks of many weights")
deep = hoop.Job(chain(*[FEATURES] * 9), vectors, settings=SETTINGS, about="nine small blocks")
text = hoop.Job(transformer, tokens, settings=SETTINGS, about="a small transformer")
