"""Jobs with random samples in the shapes of CIFAR-10 and tinyshakespeare: for times, where the data is not at hand."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from torch import nn

from hoop.data.dataset import Splits
from hoop.data.images import Augment, ImageData
from hoop.data.text import TextData
from hoop.engine.job import Job
from hoop.engine.recipes import RECIPES
from hoop.models.catalog import build

IMAGES, CHARACTERS, VOCABULARY = 20_480, 1_000_000, 65


@lru_cache
def images() -> Splits:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (IMAGES, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, IMAGES)
    scale = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)}
    train = ImageData("random/train", pixels, labels, augment=Augment(flip=True, crop=4), **scale)
    return Splits(train, ImageData("random/test", pixels[:1000], labels[:1000], **scale))


@lru_cache
def text() -> Splits:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, CHARACTERS)
    vocabulary = "".join(map(chr, range(32, 32 + VOCABULARY)))
    parts = (("train", tokens), ("test", tokens[:20_000]))
    return Splits(*(TextData(f"random/{name}", part, vocabulary, context=128) for name, part in parts))


def mobilenet_model(seed: int) -> nn.Module:
    return build("mobilenetv2", seed)


def gpt_model(seed: int) -> nn.Module:
    return build("gpt", seed)


mobilenet = Job(mobilenet_model, images, settings=RECIPES["mobilenet-cifar10"].settings)
gpt = Job(gpt_model, text, settings=RECIPES["gpt-tiny"].settings)
