"""A LeNet-style convolutional network for 28x28 images: 61 706 parameters."""

from __future__ import annotations

from torch import nn

from hoop.models.seeding import seeded


def lenet(seed: int, *, channels: int = 1, classes: int = 10) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling: two convolutions, then linear layers 400-120-84-classes.

    The first convolution pads 28x28 images by two, to the 32x32 that LeNet-5 expects.
    """
    with seeded(seed):
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
            nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, classes),
        )
