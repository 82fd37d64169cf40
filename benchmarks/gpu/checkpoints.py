"""What checkpoints cost a run on a GPU: a GPT with 1 GB of state, a checkpoint every 100 steps, in two ways.

    python benchmarks/gpu/checkpoints.py           some minutes on an H200
    python benchmarks/gpu/checkpoints.py --accelerator emulated --layers 2 --width 64 --memory 1GiB   tries the script

``waiting``: all ranks wait until the state is in the arena. ``beside``: it is copied on the GPU and read while steps go
on, which is what Hoop does. ``none``: no checkpoints but the last. The weights must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import numpy as np

import hoop
from hoop.data.text import TextData
from hoop.engine.roles.resident import ResidentRole
from hoop.models.catalog import build

BATCH, CONTEXT, VOCABULARY, STEPS_AN_EPOCH, EPOCHS = 8, 128, 65, 100, 3


def text(windows: int) -> TextData:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, windows * CONTEXT + 1)
    return TextData("random", tokens, "".join(map(chr, range(32, 32 + VOCABULARY))), context=CONTEXT)


def run(kind: str, options: argparse.Namespace) -> tuple[float, float, str]:
    """Seconds of the run, median milliseconds of a step, and the hash."""
    ResidentRole.reads_checkpoints_later = kind != "waiting"  # devices are forked from this process
    steps: list[float] = []

    def note(event: dict[str, object]) -> None:
        if event["kind"] == "steps":
            steps.extend(event["seconds"])  # type: ignore[arg-type]

    job = hoop.Job(
        lambda seed: build("gpt", seed, width=options.width, layers=options.layers, heads=options.heads),
        lambda: hoop.Splits(text(BATCH * STEPS_AN_EPOCH), text(BATCH)),
    )
    with tempfile.TemporaryDirectory() as out:
        result = hoop.train(
            job,
            devices=options.devices,
            memory=options.memory,
            accelerator=options.accelerator,
            batch_size=BATCH,
            shards=4,
            epochs=EPOCHS,
            evaluate_every=0,
            checkpoint_every=0 if kind == "none" else 1,
            out=out,
            keep=1,
            progress=note,
        )
    return result.summary["seconds"], 1e3 * statistics.median(steps), result.weights_sha256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--memory", default="12GiB")
    parser.add_argument("--accelerator", default="cuda")
    options = parser.parse_args()
    print(f"| checkpoints | seconds for {STEPS_AN_EPOCH * EPOCHS} steps | a step, ms (median) | weights |")
    print("|---|---|---|---|")
    for kind in ("none", "waiting", "beside", "none", "waiting", "beside"):
        seconds, step, weights = run(kind, options)
        print(f"| {kind} | {seconds:.2f} | {step:.2f} | {weights[:12]} |", flush=True)


if __name__ == "__main__":
    main()
