"""The jobs that come with Hoop; ``hoop train --list`` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hoop.data.catalog import load
from hoop.data.dataset import Splits
from hoop.engine.job import Job
from hoop.models.catalog import build


def _model(name: str, **options: Any) -> Callable[[int], nn.Module]:
    return lambda seed: build(name, seed, **options)


def _data(name: str, **options: Any) -> Callable[[], Splits]:
    return lambda: load(name, **options)


def softmax(size: int = 28) -> Job:
    """Paper 4's job for images of ``size`` x ``size``: the whole training set is one batch."""
    return Job(
        _model("softmax", inputs=size * size),
        _data("mnist", size=size),
        settings={
            "epochs": 100,
            "batch_size": 60_000,
            "lr": 0.1 * (28 / size) ** 2,  # an enlarged image repeats each pixel (size / 28)^2 times
            "optimizer": "sgd",
            "evaluate_every": 10,
        },
        about="softmax regression on MNIST, full batch (paper 4)",
    )


RECIPES: dict[str, Job] = {
    "softmax": softmax(),
    "mnist": Job(
        _model("mlp"),
        _data("mnist"),
        settings={
            "epochs": 10,
            "batch_size": 256,
            "shards": 4,
            "optimizer": "adam",
            "lr": 5e-3,  # not the best rate in benchmarks/training, but far from where training diverges
            "schedule": "cosine",
            "warmup": 100,
        },
        about="MLP 784-128-64-10 on MNIST, which ships with Hoop (papers 1 and 3)",
    ),
    "lenet": Job(
        _model("lenet"),
        _data("mnist"),
        settings={"epochs": 5, "batch_size": 256, "lr": 5e-3, "schedule": "cosine", "warmup": 100},
        about="LeNet-style CNN on MNIST",
    ),
    "mobilenet-cifar10": Job(
        _model("mobilenetv2"),
        _data("cifar10", augment=True),
        settings={
            "epochs": 10,
            "batch_size": 256,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 5e-4,
            "schedule": "cosine",
            "warmup": 200,
        },
        about="MobileNetV2 for 32x32 on CIFAR-10 (paper 5); looks for the data in HOOP_DATA",
    ),
    "gpt-tiny": Job(
        _model("gpt"),
        _data("tinyshakespeare"),
        settings={
            "epochs": 3,
            "batch_size": 64,
            "optimizer": "adamw",
            "lr": 2e-3,
            "weight_decay": 0.1,
            "clip": 1.0,
            "schedule": "cosine",
            "warmup": 50,
        },
        about="a small GPT on characters of Shakespeare; looks for the text in HOOP_DATA",
    ),
}
