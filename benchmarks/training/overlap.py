"""Two versions of Hoop train MNIST in turns on the same machine: the cost of a step beside its arithmetic.

    git worktree add /tmp/before COMMIT
    python benchmarks/training/overlap.py --before /tmp/before --devices 16 --shards 16 --batch-size 4096 --epochs 20
    python benchmarks/training/overlap.py --before /tmp/before --devices 2,4 --shards 8

A turn is one run of each version with each number of devices, in alternating order. The output has medians over turns:
the median and the fastest tenth of the steps, CPU milliseconds of all processes a step (a run of 4 steps is subtracted,
for the start), and samples a second. Other load disturbs the CPU time and the fastest tenth least. The weights of all
runs must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
START_STEPS = 4


def run(tree: Path, options: list[str]) -> tuple[dict[str, object], list[float], float]:
    """A run's result, the milliseconds of each step, and the CPU milliseconds of its processes."""
    fixed = ["--set", "evaluate_every=0", "--set", "checkpoint_every=0", "--set", "trace_steps=0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "hoop", "train", "mnist", *options, *fixed, "--out", f"{folder}/run"]
        done = subprocess.run(
            command, cwd=folder, env=environment, check=True, timeout=TIMEOUT_S, stdout=subprocess.PIPE, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout), [1e3 * row["seconds"] for row in rows if row.get("seconds")], 1e3 * cpu


def measure(tree: Path, options: list[str], start_cpu: float) -> tuple[str, list[float]]:
    """The hash of the weights, and the columns of the table."""
    result, steps, cpu = run(tree, options)
    warm = sorted(steps[len(steps) // 10 :])
    columns = [statistics.median(warm), warm[len(warm) // 10], (cpu - start_cpu) / len(steps)]
    return str(result["weights_sha256"]), [*columns, float(str(result["samples_per_second"]))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the other version; without it only this one runs")
    parser.add_argument("--devices", default="2")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    options = ["--shards", str(given.shards), "--batch-size", str(given.batch_size), "--epochs", str(given.epochs)]
    trees = {"before": given.before, "now": ROOT} if given.before else {"now": ROOT}
    contenders = {
        (name, devices): (tree.resolve(), ["--devices", devices, *options])
        for devices in given.devices.split(",")
        for name, tree in trees.items()
    }
    start = {
        key: run(tree, [*wanted, "--set", f"max_steps={START_STEPS}"])[2] for key, (tree, wanted) in contenders.items()
    }
    found: dict[tuple[str, str], list[list[float]]] = {key: [] for key in contenders}
    hashes = set()
    for turn in range(given.turns):
        for key in list(contenders)[:: -1 if turn % 2 else 1]:
            weights, columns = measure(*contenders[key], start[key])
            hashes.add(weights)
            found[key].append(columns)
    print("| | devices | a step, ms | fastest tenth, ms | CPU a step, ms | samples a second |")
    print("|---|---|---|---|---|---|")
    for (name, devices), rows in found.items():
        step, fast, cpu, rate = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {devices} | {step:.2f} | {fast:.2f} | {cpu:.2f} | {rate:,.0f} |")
    print("same weights" if len(hashes) == 1 else f"DIFFERENT weights: {sorted(hashes)}")


if __name__ == "__main__":
    main()
