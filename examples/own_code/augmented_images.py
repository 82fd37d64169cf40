"""A small ResNet on images that two worker processes load and augment, from a ``DataLoader``.

python examples/own_code/augmented_images.py                   trains it on 1 and 2 devices: the same weights
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hoop

CLASSES, SIZE = 4, 12


class Residual(nn.Module):
    """Two convolutions with batch norm, around which the input goes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.layers(images))


def build(seed: int) -> nn.Module:
    """The model, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), Residual(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


class Stripes(Dataset[tuple[Tensor, int]]):
    """Stripes in one of four directions, flipped, shifted and with noise: random numbers of Python and of torch.

    Hoop seeds both for each sample and epoch, so that it does not matter which worker of which device loads it.
    """

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        kind = index % CLASSES
        rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
        along = (rows, columns, rows + columns, rows - columns)[kind] + random.randrange(4)
        image = ((along // 2) % 2).float().unsqueeze(0)
        return image + 0.1 * torch.randn(image.shape), kind


def train(devices: int, epochs: int = 2, **settings: Any) -> hoop.Result:
    """``DataLoader`` states batch size, order and workers; each device has two of them."""
    loader = DataLoader(Stripes(), batch_size=40, shuffle=True, num_workers=2)
    return hoop.train(
        build, loader, loss=nn.CrossEntropyLoss(), optimizer="sgd", lr=0.1, momentum=0.9, devices=devices,
        epochs=epochs, shards=4, **settings,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="A small ResNet on 1 and 2 devices.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    checksums = set()
    for devices in options.devices:
        result = train(devices, options.epochs)
        checksums.add(result.weights_sha256)
        print(f"{devices} devices: training accuracy {result.accuracy:.1%}")
    print("the same weights, to the bit" if len(checksums) == 1 else "the weights differ")


if __name__ == "__main__":
    main()
