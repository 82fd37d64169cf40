"""Data parallel training with the update of the weights sharded and not, in turns: a step, and the devices' arenas.

    python benchmarks/training/sharded_update.py --rounds 3

``off``: every device updates all weights. ``on``: each updates its slice, and the replica of another slice. ``on``
without replicas: each updates its slice, and the loss of a device ends the run. A round trains each kind once, in
processes of its own; a figure is the median of the rounds. Ends with code 1 if the weights of two kinds differ.
CPU: processor time of all processes in a step, from the difference of two runs of different length; on a machine with
other work it says more than the time of a step. Arena: the bytes in use at the end, with the final snapshot, of the
device with the most and of all devices together.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
from functools import lru_cache
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

import hoop
from hoop.data.dataset import Splits
from hoop.data.text import TextData
from hoop.engine.recipes import RECIPES
from hoop.models.catalog import build

KINDS: dict[str, dict[str, Any]] = {
    "off": {"sharded_update": "off"},
    "on": {"sharded_update": "on"},
    "on, no replicas": {"sharded_update": "on", "replicate": False},
}
MIB = 1 << 20


@lru_cache
def tokens() -> Splits:
    """Random characters: the cost of a step does not depend on them."""
    drawn = np.random.default_rng(0).integers(64, size=64 * 64 + 1)
    letters = "".join(map(chr, range(32, 96)))
    return Splits(
        TextData("random", drawn, letters, context=64), TextData("random/few", drawn[: 8 * 64 + 1], letters, context=64)
    )


@lru_cache
def pixels() -> Splits:
    images = torch.randn(64, 784, generator=torch.Generator().manual_seed(1))
    data = hoop.TensorData(images, torch.arange(64) % 10)
    return Splits(data, data)


def gpt(seed: int) -> nn.Module:
    """The GPT of ``benchmarks/large`` with a quarter of its layers and a third of its width."""
    return build("gpt", seed, vocabulary=19_000, context=64, width=256, layers=3, heads=4)


def wide(seed: int) -> nn.Module:
    """An MLP of 13.3 million parameters."""
    return build("mlp", seed, widths=(784, 2048, 2048, 2048, 1600, 10))


SMALL_BATCH = {"batch_size": 8, "shards": 8, "optimizer": "adam", "lr": 1e-4}
JOBS = {
    "mnist": (RECIPES["mnist"], 400, "256MiB"),
    "wide MLP": (hoop.Job(wide, pixels, settings=SMALL_BATCH), 20, "1GiB"),
    "GPT": (hoop.Job(gpt, tokens, settings=SMALL_BATCH), 8, "1GiB"),
}
"""Job, steps, and the arena of a device."""
wide_job = JOBS["wide MLP"][0]
"""For ``hoop train benchmarks/training/sharded_update.py:wide_job``."""


class Figures(NamedTuple):
    """Of one run."""

    step_s: float
    cpu_s: float
    """Processor time of all processes in a step."""
    arenas: list[int]
    weights: str


def run(name: str, devices: int, kind: dict[str, Any]) -> Figures:
    """Train twice, for all steps and for one."""
    job, steps, memory = JOBS[name]
    settings = {"epochs": 1_000, "trace_steps": 0, "checkpoint_every": 0, "evaluate_every": 0}
    settings |= {"balance": False, "accelerator": "cpu"} | kind
    used = []
    for count in (1, steps):
        before = cpu_seconds()
        summary = hoop.train(job, devices=devices, memory=memory, max_steps=count, **settings).summary
        used.append(cpu_seconds() - before)
    cpu = (used[1] - used[0]) / (steps - 1)
    return Figures(summary["step_seconds"], cpu, summary["memory"], summary["weights_sha256"])


def cpu_seconds() -> float:
    """Processor time of all processes that this one started and that have ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def row(name: str, devices: int, kind: str, runs: list[Figures], off: list[Figures]) -> str:
    step, cpu = (statistics.median(one[index] for one in runs) for index in (0, 1))
    ratios = [
        statistics.median(one[index] for one in runs) / statistics.median(one[index] for one in off) for index in (0, 1)
    ]
    arenas = [size / MIB for size in runs[-1].arenas]
    cells = [name, devices, kind, f"{1e3 * step:.1f}", f"{ratios[0]:.2f}x", f"{1e3 * cpu:.1f}", f"{ratios[1]:.2f}x"]
    return f"| {' | '.join(map(str, [*cells, f'{max(arenas):.1f}', f'{sum(arenas):.1f}']))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    options = parser.parse_args()
    print("| job | devices | sharded | a step, ms | to off | CPU, ms | to off | arena, MiB | all arenas, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in options.jobs:
        for devices in options.devices:
            found: dict[str, list[Figures]] = {kind: [] for kind in KINDS}
            for number in range(options.rounds):
                for kind in list(KINDS) if number % 2 else reversed(KINDS):  # none is always first
                    found[kind].append(run(name, devices, KINDS[kind]))
            if len({one.weights for runs in found.values() for one in runs}) > 1:
                sys.exit(f"{name}, {devices} devices: the weights differ")
            for kind, runs in found.items():
                print(row(name, devices, kind, runs, found["off"]), flush=True)
    print(f"\nLoad {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
