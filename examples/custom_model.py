"""Your own model on several devices, from Python and from the command line.

    python examples/custom_model.py                               trains it on 1, 2 and 4 devices: the same weights
    hoop train examples/custom_model.py:job -n 3 -s pipeline      the same job, its three blocks on three devices

A model is any ``nn.Module``; an ``nn.Sequential`` can also be cut between its blocks, for pipelines and rings.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import hoop


def spirals(samples: int, seed: int) -> hoop.TensorData:
    """Points on three interleaved spirals; the label is the number of the spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (samples,), generator=generator)
    radius = torch.rand(samples, generator=generator)
    angle = 5 * radius + labels * (2 * torch.pi / 3) + 0.15 * torch.randn(samples, generator=generator)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return hoop.TensorData(points, labels, name=f"spirals-{seed}")


def build(seed: int) -> nn.Module:
    """The model, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, 64), nn.Tanh()),
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh()),
        nn.Linear(64, 3),
    )


# The job of the command line: a model, its data, and suitable settings.
job = hoop.Job(
    model=build,
    data=lambda: hoop.Splits(spirals(6000, seed=1), spirals(1000, seed=2)),
    settings={"epochs": 10, "batch_size": 200, "shards": 8, "lr": 3e-3},
    about="three spirals",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="The same model on 1, 2 and 4 devices.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()

    checksums = set()
    for devices in options.devices:
        model = build(seed=0)
        data = ((spirals(6000, seed=1)), (spirals(1000, seed=2)))
        result = hoop.train(
            model,
            data,
            devices=devices,
            strategy=hoop.DataParallel(),
            epochs=options.epochs,
            batch_size=200,
            lr=3e-3,
        )
        checksums.add(result.weights_sha256)
        print(f"{devices} devices: accuracy {result.accuracy:.1%}, weights {result.weights_sha256[:16]}")

        # The module passed to hoop.train now has the trained weights.
        points, labels = spirals(1000, seed=3).inputs, spirals(1000, seed=3).targets
        accuracy = (model(points).argmax(1) == labels).float().mean().item()
        print(f"  on other points: {accuracy:.1%}")
    print("the same weights, to the bit" if len(checksums) == 1 else "the weights differ")


if __name__ == "__main__":
    main()
