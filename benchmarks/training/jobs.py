"""The jobs of the benchmarks: the recipes, and MobileNetV2 on random images.

The speed of a step does not depend on the content of the images, so MobileNetV2 needs no download here.
"""

from __future__ import annotations

import torch

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.job import Job
from hoop.engine.recipes import RECIPES, softmax
from hoop.models.catalog import build

TEST_SAMPLES = 16
"""Random images for the evaluation after an epoch: few, because it is not timed."""


def job_named(name: str, samples: int) -> Job:
    """``mnist``, ``softmax:56`` (images of 56 x 56), or ``mobilenetv2`` on this many random images."""
    kind, _, option = name.partition(":")
    if kind == "softmax":
        return softmax(int(option or 28))
    if kind == "mobilenetv2":
        return Job(lambda seed: build("mobilenetv2", seed), lambda: _images(samples))
    return RECIPES[kind]


def _images(samples: int) -> Splits:
    generator = torch.Generator().manual_seed(0)

    def split(count: int, name: str) -> TensorData:
        images = torch.randn(count, 3, 32, 32, generator=generator)
        return TensorData(images, torch.randint(0, 10, (count,), generator=generator), name=name)

    return Splits(split(samples, "made-up/train"), split(TEST_SAMPLES, "made-up/test"))
