"""Why the engine computes chains of Linear and ReLU by hand: forward and backward of a shard, by several kernels.

    python benchmarks/training/kernels.py

The MLP 784-128-64-10 on one core, without loss and update, which are the same for all. Every kernel leaves the
gradients in one flat vector, where the all-reduce needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"  # before PyTorch is loaded

import torch
from race import environment, numbers, table
from torch import Tensor, nn

from hoop.engine.stage.autograd import AutogradStage, Stage
from hoop.engine.stage.linear_chain import ChainStage, layers_of
from hoop.models.catalog import build

Kernel = Callable[[Tensor, Tensor], None]


def by_stage(make: Callable[[nn.Sequential], Stage]) -> Kernel:
    """As in the engine: a stage that writes the gradients to views of a vector."""
    model = build("mlp", 0)
    stage, views = make(model), flat_views(model)

    def run(images: Tensor, gradient: Tensor) -> None:
        stage.forward(0, images, 0)
        stage.backward(0, gradient.clone(), views, False)

    return run


def by_autograd(model: nn.Sequential) -> Stage:
    parameters = list(model.parameters())
    return AutogradStage([(list(model), len(parameters))], 0, parameters)


def by_hand(model: nn.Sequential) -> Stage:
    layers = layers_of(list(model))
    assert layers is not None, "the MLP is a chain of Linear and ReLU"
    return ChainStage(layers)


def plain_backward() -> Kernel:
    """Plain PyTorch: ``.grad`` are views of a vector, and gradients are accumulated into them."""
    model = build("mlp", 0)
    for parameter, view in zip(model.parameters(), flat_views(model), strict=True):
        parameter.grad = view

    def run(images: Tensor, gradient: Tensor) -> None:
        for parameter in model.parameters():
            parameter.grad.zero_()  # type: ignore[union-attr]
        model(images).backward(gradient)

    return run


def without_onednn(kernel: Kernel) -> Kernel:
    def run(images: Tensor, gradient: Tensor) -> None:
        with torch.backends.mkldnn.flags(enabled=False):
            kernel(images, gradient)

    return run


def flat_views(model: nn.Sequential) -> list[Tensor]:
    parameters = list(model.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters))
    parts = flat.split([one.numel() for one in parameters])
    return [part.view_as(one) for part, one in zip(parts, parameters, strict=True)]


def measure(kernels: dict[str, Kernel], rows: int, seconds: float) -> dict[str, float]:
    """Median seconds; the kernels take turns, so that noise affects all of them."""
    images, gradient = torch.randn(rows, 1, 28, 28), torch.randn(rows, 10) / rows
    times: dict[str, list[float]] = {name: [] for name in kernels}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(kernels))]) < 20:
        for name, kernel in kernels.items():
            started = time.perf_counter()
            kernel(images, gradient)
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(one[5:]) for name, one in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=numbers, default=[16, 32, 64, 128, 256, 512, 1024], help="samples of a shard")
    parser.add_argument("--seconds", type=float, default=2.0, help="a size")
    parser.add_argument("--quick", action="store_true", help="a fifth of a second a size")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = environment()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kernels = {
        "loss.backward()": plain_backward(),
        "autograd stage": by_stage(by_autograd),
        "autograd stage, oneDNN off": without_onednn(by_stage(by_autograd)),
        "by hand": by_stage(by_hand),
    }
    found = {rows: measure(kernels, rows, 0.2 if options.quick else options.seconds) for rows in options.rows}
    if options.json:
        print(json.dumps({"environment": machine, "seconds": found}))
        return
    rows = [
        [
            size,
            *(f"{1000 * times[name]:.2f}" for name in kernels),
            f"{times['loss.backward()'] / times['by hand']:.2f}x",
        ]
        for size, times in found.items()
    ]
    print(table(["samples", *(f"{name}, ms" for name in kernels), "by hand is faster by"], rows), end="\n\n")
    print(machine)


if __name__ == "__main__":
    main()
