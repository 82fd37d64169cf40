"""Paper 4's job, softmax regression on 60 000 images in one batch, small and enlarged: the time of an epoch.

python benchmarks/training/softmax.py
"""

from __future__ import annotations

import argparse
import json

from race import Contender, as_json, environment, numbers, race, table

MEMORY = "--memory=4GiB"
"""A shard of the largest images takes 376 MB of a device's memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", type=numbers, default=[28, 56, 112], help="of the images; 784, 3 136, 12 544 pixels")
    parser.add_argument("--devices", type=numbers, default=[1, 2], help="numbers of devices of Hoop")
    parser.add_argument("--threads", type=numbers, default=[1, 2], help="numbers of threads of plain PyTorch")
    parser.add_argument("--epochs", type=int, default=4, help="in one go, the first as a warm-up")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of all contenders, in turn")
    parser.add_argument("--quick", action="store_true", help="one round of two epochs, small images")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    if options.quick:
        options.sides, options.repeats, options.epochs = options.sides[:1], 1, 2
    rows, results = [], []
    for side in options.sides:
        found = [
            *(
                Contender(f"Hoop, {count} device{'s'[: count > 1]}", ["hoop", f"--devices={count}", MEMORY])
                for count in options.devices
            ),
            *(
                Contender(f"PyTorch, {count} thread{'s'[: count > 1]}", ["torch", f"--threads={count}"], count)
                for count in options.threads
            ),
        ]
        race(found, options.repeats, [f"--job=softmax:{side}", f"--laps={options.epochs}"])
        results += [{"pixels": side * side, **one} for one in as_json(found)]
        best = min((one.step for one in found if one.seconds), default=0.0)
        for one in found:
            mark = "**" if one.seconds and one.step == best else ""
            loss = one.last("loss")
            rows.append(
                [
                    side * side,
                    one.name,
                    one.failure or f"{mark}{one.step:.3f}{mark}",
                    "" if one.failure else f"{one.spread[0]:.3f} – {one.spread[1]:.3f}",
                    "" if loss is None else f"{loss:.4f}",
                ]
            )
    if options.json:
        print(json.dumps({"environment": environment(), "contenders": results}))
        return
    print(table(["pixels", "", "an epoch, s", "all, s", "test loss"], rows), end="\n\n")
    print(environment())


if __name__ == "__main__":
    main()
