"""The general path of ``hoop.train`` (any batch, loss and optimizer) beside the flat one, in turns in one run.

    python benchmarks/training/own_code.py --rounds 5

Both train the same model on the same batches with the same optimizer: the flat path by names, the general one by
``loss(model, batch)`` and a function that makes the optimizer. The ratio is the median of the rounds' ratios of seconds
a step, general to flat; a round trains each once.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

import hoop
from hoop.data.dataset import Splits
from hoop.engine.recipes import RECIPES

STEPS = {"mnist": 400, "gpt-tiny": 12}


def mean_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The losses by name, written by a user: the sum over the samples, and their number."""
    inputs, targets = batch
    outputs = model(inputs)
    if outputs.dim() == 3:
        total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / outputs.shape[1]
    else:
        total = F.cross_entropy(outputs, targets, reduction="sum")
    return total, len(targets)


def short(data: Splits) -> Splits:
    """The same training data, and a few test samples: evaluations are not measured."""
    inputs, targets = data.test.batch(torch.arange(64).numpy(), epoch=0, seed=0)
    return Splits(data.train, hoop.TensorData(inputs.clone(), targets.clone()))


def jobs(recipe: str) -> dict[str, hoop.Job]:
    """The recipe for both paths, with the same optimizer."""
    base = RECIPES[recipe]
    data = short(base.data())
    kind = torch.optim.AdamW if base.settings["optimizer"] == "adamw" else torch.optim.Adam
    decay = {"weight_decay": base.settings["weight_decay"]} if "weight_decay" in base.settings else {}
    factory = functools.partial(kind, lr=base.settings["lr"], **decay)
    kept = ("batch_size", "shards", "clip", "schedule", "warmup")
    general = {name: base.settings[name] for name in kept if name in base.settings}
    return {
        "flat": hoop.Job(base.model, lambda: data, settings=base.settings),
        "general": hoop.Job(base.model, lambda: data, mean_cross_entropy, general, optimizer=factory),
    }


def step_seconds(job: hoop.Job, devices: int, steps: int) -> float:
    settings: dict[str, Any] = {"epochs": 1_000, "max_steps": steps, "trace_steps": 0, "checkpoint_every": 0}
    result = hoop.train(job, devices=devices, accelerator="cpu", evaluate_every=0, **settings)
    return result.seconds / result.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(STEPS), choices=list(STEPS))
    options = parser.parse_args()
    print("| recipe | devices | flat, ms a step | general, ms a step | ratio |")
    print("|---|---|---|---|---|")
    for recipe in options.recipes:
        both = jobs(recipe)
        for devices in options.devices:
            found: dict[str, list[float]] = {name: [] for name in both}
            for _ in range(options.rounds):
                for name, job in both.items():
                    found[name].append(step_seconds(job, devices, STEPS[recipe]))
            flat, general = (statistics.median(found[name]) * 1e3 for name in ("flat", "general"))
            ratio = statistics.median(
                second / first for first, second in zip(found["flat"], found["general"], strict=True)
            )
            print(f"| {recipe} | {devices} | {flat:.3f} | {general:.3f} | {ratio:.2f}x |", flush=True)


if __name__ == "__main__":
    main()
