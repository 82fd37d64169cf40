"""Every strategy on the MLP and on MobileNetV2: the time of a step, bytes, memory, idle time.

    python benchmarks/training/strategies.py
    python benchmarks/training/strategies.py --models mlp --only data,ring

The MLP trains on MNIST with the recipe's batch, MobileNetV2 on random images with a small batch. Each strategy runs in
a process of its own; a strategy that fails becomes a row with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json

from race import Contender, as_json, environment, numbers, race, table

from hoop.strategies.catalog import all_strategies

MODELS = {
    "mlp": ["--job=mnist", "--laps=2"],
    "mobilenetv2": ["--job=mobilenetv2", "--laps=2", "--shards=4", "--memory=1GiB"],
}
MIB = 1024 * 1024


def megabytes(values: list[int] | None) -> str:
    return f"{max(values) / MIB:.1f}" if values else ""


def row(model: str, one: Contender) -> list[str]:
    if one.failure:
        return [model, one.name, f"fails: {one.failure}", "", "", "", "", ""]
    return [
        model,
        one.name,
        f"{1000 * one.step:.1f}",
        f"{one.last('bytes_a_step') / 1000:,.0f}".replace(",", " "),
        megabytes(one.last("arena_bytes")),
        megabytes(one.last("resident_bytes")),
        f"{100 * one.last('idle'):.0f} %",
        f"{one.last('loss'):.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=numbers, default=[2, 4], help="the MLP has only three blocks to cut")
    parser.add_argument("--models", default="mlp,mobilenetv2", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--only", default="", help="strategies that begin so, e.g. data,pipeline")
    parser.add_argument("--batch-size", type=int, default=16, help="MobileNetV2's")
    parser.add_argument("--steps", type=int, default=3, help="MobileNetV2's, timed after as many to warm up")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="the MLP, one step of MobileNetV2")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    if options.quick:
        options.steps = 1
    prefixes = options.only.split(",")
    rows, results = [], []
    for model, devices in itertools.product(options.models.split(","), options.devices):
        specs = [one.spec for one in all_strategies(devices) if any(one.spec.startswith(prefix) for prefix in prefixes)]
        found = [Contender(spec, ["hoop", f"--devices={devices}", f"--strategy={spec}"]) for spec in specs]
        arguments = list(MODELS[model])
        if model != "mlp":
            samples = options.steps * options.batch_size
            arguments += [f"--batch-size={options.batch_size}", f"--samples={samples}"]
        race(found, options.repeats, arguments, timeout=180)
        rows += [row(f"{model} | {devices}", one) for one in found]
        results += [{"model": model, "devices": devices, **one} for one in as_json(found)]
    if options.json:
        print(json.dumps({"environment": environment(), "strategies": results}))
        return
    header = [
        "model",
        "devices",
        "strategy",
        "a step, ms",
        "kB a step",
        "arena, MiB",
        "resident, MiB",
        "idle",
        "test loss",
    ]
    print(table(header, rows), end="\n\n")
    print(f"Memory is that of the device with the most. {environment()}")


if __name__ == "__main__":
    main()
