"""What the benchmarks train: the recipes, and models whose speed is asked for on made-up images.

The speed of a step does not depend on what is in the images, so MobileNetV2 needs no download here; what is learnt
from real ones is the recipes' matter.
"""

from __future__ import annotations

import torch

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.job import Job
from hoop.engine.recipes import RECIPES, softmax
from hoop.models.catalog import build

TESTED = 16
"""Made-up images that a model is measured on after an epoch: next to nothing, because it is not timed."""


def job_named(name: str, samples: int) -> Job:
    """``mnist``, ``softmax:56`` (images of 56 x 56), or ``mobilenetv2`` on so many made-up images."""
    kind, _, option = name.partition(":")
    if kind == "softmax":
        return softmax(int(option or 28))
    if kind == "mobilenetv2":
        return Job(lambda seed: build("mobilenetv2", seed), lambda: _images(samples))
    return RECIPES[kind]


def _images(samples: int) -> Splits:
    generator = torch.Generator().manual_seed(0)

    def part(count: int, name: str) -> TensorData:
        images = torch.randn(count, 3, 32, 32, generator=generator)
        return TensorData(images, torch.randint(0, 10, (count,), generator=generator), name=name)

    return Splits(part(samples, "made-up/train"), part(TESTED, "made-up/test"))
