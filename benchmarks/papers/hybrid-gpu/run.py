"""Paper 5's experiment on a GPU: MobileNetV2 on CIFAR-10 by strategy, and two other jobs on CUDA and on the CPU.

    python run.py single:10 hybrid-2x2:10 data-2:2 --out DIR

Each name is followed by its number of epochs (0.15: 30 steps). The learning-rate schedule is always that of ten epochs
(``--epochs``), so a run that ends earlier equals the first part of a whole one. Each run writes a JSON file: accuracy
by epoch, seconds, and the sha256 of the weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hoop
from hoop.engine.job import Job
from hoop.engine.recipes import RECIPES, softmax

MOBILENET = {
    "single": {"devices": 1},
    "data-2": {"devices": 2},
    "data-4": {"devices": 4},
    "pipeline-2": {"devices": 2, "strategy": "pipeline"},
    "pipeline-4": {"devices": 4, "strategy": "pipeline"},
    "hybrid-2x2": {"devices": 4, "strategy": "hybrid:replicas=2"},
}
OTHERS: dict[str, tuple[str, Job, dict[str, Any]]] = {
    "mnist": ("mnist", RECIPES["mnist"], {"devices": 1}),
    "softmax": ("softmax of 112x112 pixels", softmax(112), {"devices": 1, "memory": "1GiB"}),
}


class OutOfTime(Exception):
    """The time budget is spent."""


def measure(name: str, job: Job, deadline: float, changes: dict[str, Any]) -> dict[str, Any]:
    """Train, and return accuracy and time by epoch."""
    by_epoch: list[dict[str, float]] = []
    steps: list[float] = []
    started: dict[str, Any] = {}

    def on_event(event: dict[str, Any]) -> None:
        if time.monotonic() > deadline:
            raise OutOfTime(name)
        if event["kind"] == "started":
            started.update(event, at=time.monotonic())
        elif event["kind"] == "steps":
            steps.extend(event["seconds"])
        elif event["kind"] == "evaluated":
            elapsed = time.monotonic() - started["at"]
            by_epoch.append(
                {
                    "epoch": event["epoch"],
                    "accuracy": event["accuracy"],
                    "loss": event["loss"],
                    "seconds": elapsed,
                }
            )
            print(f"{name}: {by_epoch[-1]}", file=sys.stderr, flush=True)

    result = hoop.train(job, progress=on_event, **changes)
    ordered = sorted(steps[20:] or steps)
    return {
        "epochs": by_epoch,
        "stages": started["stages"],
        "start_seconds": started["seconds"],
        "median_step_ms": 1e3 * ordered[len(ordered) // 2],
        "result": dict(result.summary),
    }


def command(job: str, changes: dict[str, Any]) -> str:
    """The equivalent command line."""
    words = [f"hoop train {job}"]
    for key, value in changes.items():
        option = key in ("devices", "memory", "strategy", "shards", "accelerator", "epochs")
        words.append(f"--{key} {value}" if option else f"--set {key}={json.dumps(value)}")
    return " ".join(words)


def chosen(name: str, accelerator: str) -> tuple[str, Job, dict[str, Any]]:
    """The name of the job, the job, and its settings."""
    if name in MOBILENET:
        job = "mobilenet-cifar10"
        return job, RECIPES[job], {**MOBILENET[name], "accelerator": accelerator}
    base, _, suffix = name.rpartition("-")
    job_name, found, changes = OTHERS[base]
    return job_name, found, {**changes, "accelerator": suffix}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MOBILENET, *(f"{name}-{where}" for name in OTHERS for where in ("cuda", "cpu"))]
    parser.add_argument("runs", nargs="+", metavar="NAME:EPOCHS", help=", ".join(names))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=10, help="of the schedule")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no more is done")
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    for run in options.runs:
        name, _, epochs = run.partition(":")
        job_name, job, changes = chosen(name, options.accelerator)
        settings = {"epochs": options.epochs} if name in MOBILENET else {}
        settings |= {key: json.loads(value) for key, value in (one.split("=") for one in options.set)}
        batch_size = job.defaults(job_name).replaced(settings).batch_size
        settings["max_steps"] = math.ceil(float(epochs) * math.ceil(len(job.data().train) / batch_size))
        changes |= settings
        record = {
            "name": name,
            "command": command(job_name, changes),
            "date": time.strftime("%Y-%m-%d"),
            "machine": options.machine,
        }
        try:
            record |= measure(name, job, deadline, changes)
        except (OutOfTime, hoop.HoopError) as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        (options.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {record['median_step_ms']:.1f} ms a step, {record['result']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
