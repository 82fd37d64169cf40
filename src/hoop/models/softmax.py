"""Softmax regression: one linear layer on the pixels."""

from __future__ import annotations

from torch import nn

from hoop.models.seeding import seeded


def softmax(seed: int, *, inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Softmax regression for images of any size; ``inputs`` is channels x height x width."""
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
