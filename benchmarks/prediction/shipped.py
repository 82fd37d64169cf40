"""Measures the costs shipped with Hoop, recipe by recipe, and writes src/hoop/simulate/shipped.json.

    python benchmarks/prediction/shipped.py

Recipes whose data must be downloaded use random samples of the same shape: only loading differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.recipes import RECIPES
from hoop.lab.bench.links import contention_factor, link_seconds
from hoop.runs.calibration import between, calibrated, machine_of

OUT = Path(__file__).resolve().parents[2] / "src" / "hoop" / "simulate" / "shipped.json"
SAMPLES = 512


def random_samples(name: str) -> Splits:
    """Random samples of a recipe's shape."""
    torch.manual_seed(0)
    if name == "gpt-tiny":
        tokens = torch.randint(0, 65, (SAMPLES, 129))
        one = TensorData(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), name="made-up")
    else:
        one = TensorData(torch.randn(SAMPLES, 3, 32, 32), torch.randint(0, 10, (SAMPLES,)), name="made-up")
    return Splits(one, one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="recipes, separated by commas; the others stay as they are")
    options = parser.parse_args()
    machine = machine_of(link_seconds("shm", more=between))
    found = json.loads(OUT.read_text()) if OUT.is_file() else {}
    for name, job in RECIPES.items():
        if options.only and name not in options.only.split(","):
            continue
        if name in ("mobilenet-cifar10", "gpt-tiny"):
            splits = random_samples(name)
            job = dataclasses.replace(job, data=lambda splits=splits: splits)
        costs = calibrated(job, job.defaults(name), machine, contention_factor)
        print(f"{name}: {1e3 * sum(one.forward.at(costs.rows) for one in costs.blocks):.2f} ms forward")
        found[name] = json.loads(costs.to_json())
        OUT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
