"""What denormal numbers cost: the MNIST job at a constant rate, with them counted as zero and kept.

    python benchmarks/training/denormals.py
    python benchmarks/training/denormals.py --devices 1 --epochs 50 --lap 10

Two runs of ``hoop.train``, one after the other, which differ only in ``flush_denormals``. A lap is some epochs and an
evaluation. The last line says whether the trained weights differ.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from race import environment, table

from hoop.runs.api import train


def laps(options: argparse.Namespace, flush: bool) -> tuple[list[float], int, str]:
    """Seconds of each lap, steps of a lap, and the hash of the weights."""
    found = list[float]()
    began = 0.0

    def on_event(event: dict[str, Any]) -> None:
        nonlocal began
        if event["kind"] == "evaluated":
            found.append(event["time"] - began)
        if event["kind"] in ("started", "evaluated"):
            began = event["time"]

    result = train(
        "mnist",
        devices=options.devices,
        progress=on_event,
        epochs=options.epochs,
        evaluate_every=options.lap,
        schedule="constant",
        checkpoint_every=0,
        trace_steps=0,
        flush_denormals=flush,
    )
    return found, result.summary["steps"] // len(found), result.summary["weights_sha256"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lap", type=int, default=20, help="epochs of a lap")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    if options.epochs % options.lap:
        parser.error(f"--lap: {options.lap} is not a divisor of {options.epochs} epochs")
    zero, steps, weights = laps(options, True)
    kept, _, other = laps(options, False)
    if options.json:
        seconds = {"flushed_s": zero, "kept_s": kept, "steps_a_lap": steps}
        print(json.dumps({"environment": environment(), **seconds, "weights_equal": weights == other}))
        return
    rows = [
        [f"{lap * options.lap + 1} to {(lap + 1) * options.lap}", *(f"{1e3 * one / steps:.2f}" for one in pair)]
        for lap, pair in enumerate(zip(zero, kept, strict=True))
    ]
    print(table(["epochs", "counted as zero, ms a step", "kept, ms a step"], rows))
    print(f"\nThe weights are {'equal' if weights == other else 'different'}.")


if __name__ == "__main__":
    main()
