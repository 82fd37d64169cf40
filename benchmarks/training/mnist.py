"""The MNIST MLP with Hoop, plain PyTorch and DDP at the same global batch: the time of a step.

python benchmarks/training/mnist.py                      the time of a step, a few minutes
python benchmarks/training/mnist.py --full               10 epochs each, and the accuracy
python benchmarks/training/mnist.py --devices 1,2,4,8,16 --shards 16 --batch-size 4096 --ddp 2,16
"""

from __future__ import annotations

import argparse
import json
import os

from race import Contender, as_json, environment, numbers, race, table

AIM_ONE_CORE, AIM_DDP, AIM_CROWDED = 1.7, 2.0, 1.15


def contenders(options: argparse.Namespace) -> dict[str, Contender]:
    """Contenders by short name, in the order of the table."""
    found = {
        f"hoop {n}": Contender(f"Hoop, {n} device{'s'[: n > 1]}", ["hoop", f"--devices={n}"]) for n in options.devices
    }
    if options.shards:
        for one in found.values():
            one.arguments.append(f"--shards={options.shards}")
    for threads in options.threads:
        cores = "one core" if threads == 1 else f"{threads} cores"
        for fused in (False, True):
            found[f"torch {threads}{' fused' if fused else ''}"] = Contender(
                f"PyTorch on {cores}{', fused Adam' if fused else ''}",
                ["torch", f"--threads={threads}", *(["--fused"] if fused else [])],
                threads,
            )
    for ranks in options.ddp:
        for backend in ("gloo", "hoop"):
            for fused in (False, True):
                found[f"ddp {backend} {ranks}{' fused' if fused else ''}"] = Contender(
                    f"DDP, {ranks} processes, {backend}{', fused Adam' if fused else ''}",
                    ["torch", f"--ranks={ranks}", f"--backend={backend}", *(["--fused"] if fused else [])],
                )
    return {name: one for name, one in found.items() if any(name.startswith(part) for part in options.only.split(","))}


def aims(found: dict[str, Contender], cores: int) -> list[list[str]]:
    """Each target with the measured ratio and whether it was met; only for contenders that were measured."""

    def speed_up(baseline: str, contender: str, target: float, label: str) -> list[list[str]]:
        if (
            baseline not in found
            or contender not in found
            or not (found[baseline].seconds and found[contender].seconds)
        ):
            return []
        ratio = found[baseline].step / found[contender].step
        return [[label, f">= {target:.2f}x", f"{ratio:.2f}x", "yes" if ratio >= target else "**no**"]]

    rows: list[list[str]] = []
    for fused in ("", " fused"):
        kind = ", fused" if fused else ""
        rows += speed_up(f"torch 1{fused}", "hoop 1", 1.0, f"1 device against PyTorch on one core{kind}")
        rows += speed_up(f"torch 1{fused}", "hoop 2", AIM_ONE_CORE, f"2 devices against PyTorch on one core{kind}")
        rows += speed_up(
            f"torch {cores}{fused}",
            f"hoop {cores}",
            1.0,
            f"{cores} devices against PyTorch on {cores} cores{kind}",
        )
        rows += speed_up(f"ddp gloo 2{fused}", "hoop 2", AIM_DDP, f"2 devices against DDP, 2 processes, Gloo{kind}")
    if cores == 2:
        rows += speed_up("hoop 2", "hoop 4", 1 / AIM_CROWDED, "4 devices against 2, on 2 cores")
    return rows


def main() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=numbers, default=[1, 2, 4], help="numbers of devices of Hoop, e.g. 1,2,4")
    parser.add_argument(
        "--threads", type=numbers, default=sorted({1, cores}), help="numbers of threads of plain PyTorch"
    )
    parser.add_argument("--ddp", type=numbers, default=[2], help="numbers of DDP processes; empty: none")
    parser.add_argument("--only", default="", help="those that begin so, e.g. 'hoop,torch 1,ddp gloo'")
    parser.add_argument("--batch-size", type=int, help="the global batch [default: the recipe's]")
    parser.add_argument("--shards", type=int, help="of Hoop's batch [default: the recipe's]")
    parser.add_argument("--laps", type=int, default=4, help="timed in one go, the first as a warm-up")
    parser.add_argument("--lap", type=int, default=1, help="epochs of a lap")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of all contenders, in turn")
    parser.add_argument("--full", action="store_true", help="the recipe's 10 epochs, once, with accuracies")
    parser.add_argument("--quick", action="store_true", help="one round of two laps")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    options = parser.parse_args()
    if options.full:
        options.repeats, options.laps, options.lap = 1, 10, 1
    if options.quick:
        options.repeats, options.laps = 1, 2
    found = contenders(options)
    arguments = ["--job=mnist", f"--laps={options.laps}", f"--lap={options.lap}"]
    arguments += [f"--batch-size={options.batch_size}"] if options.batch_size else []
    race(list(found.values()), options.repeats, arguments)
    reached = aims(found, cores)
    if options.json:
        print(json.dumps({"environment": environment(), "contenders": as_json(found.values()), "aims": reached}))
        return
    base = next((found[name] for name in ("torch 1", *found) if name in found and found[name].seconds), None)
    rows = []
    for one in found.values():
        low, high = (f"{1000 * value:.2f}" for value in one.spread)
        ratio = f"{base.step / one.step:.2f}x" if base and one.seconds else ""
        accuracy = f"{100 * one.last('accuracy'):.2f} %" if options.full and one.figures else ""
        cells = [
            one.name,
            f"{1000 * one.step:.2f}",
            f"{low} – {high}",
            ratio,
            *([accuracy] if options.full else []),
        ]
        rows.append([one.name, one.failure, *[""] * (len(cells) - 2)] if one.failure else cells)
    header = ["", "a step, ms", "laps, ms", f"to {base.name if base else 'nothing'}"]
    print(table([*header, *(["test accuracy"] if options.full else [])], rows), end="\n\n")
    print(table(["aim", "", "reached", ""], reached), end="\n\n")
    print(environment())


if __name__ == "__main__":
    main()
