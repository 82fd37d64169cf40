"""Two devices, one of which computes several times slower: how close is Hoop to the ideal?

    python benchmarks/training/uneven.py            (docs and table: benchmarks/training/README.md)

In the ideal case both compute all the time: with speeds 1 and 1/f a batch takes f/(f+1) of the time of the fast device
alone. Shards follow the measured speeds; the script checks that the weights stay the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")


def step_ms(slowdown: list[int], shards: int, batch: int, epochs: int) -> tuple[float, str]:
    """Median milliseconds of a step once the assignment of shards has settled, and the hash of the weights."""
    import hoop

    seconds: list[float] = []

    def on_event(event: dict[str, object]) -> None:
        if event["kind"] == "steps":
            seconds.extend(event["seconds"])  # type: ignore[arg-type]

    result = hoop.train(
        "mnist",
        devices=len(slowdown),
        shards=shards,
        batch_size=batch,
        epochs=epochs,
        evaluate_every=0,
        slowdown=slowdown,
        progress=on_event,
    )
    return statistics.median(seconds[len(seconds) // 3 :]) * 1e3, str(result.weights_sha256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", default="2,3", help="how many times slower the second device is")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    options = parser.parse_args()
    alone, expected = step_ms([1], options.shards, options.batch_size, options.epochs)
    rows = []
    for factor in map(int, options.factors.split(",")):
        measured, weights = step_ms([1, factor], options.shards, options.batch_size, options.epochs)
        assert weights == expected, "the weights depend on the devices' speed"
        ideal = alone * factor / (factor + 1)
        rows.append(
            {
                "slower": factor,
                "alone_ms": alone,
                "took_ms": measured,
                "ideal_ms": ideal,
                "share_of_ideal": ideal / measured,
            }
        )
    if options.json:
        print(json.dumps(rows))
        return
    print("| second device | fast one alone, ms | both, ms | ideal, ms | of the ideal |\n|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['slower']}x slower | {row['alone_ms']:.2f} | {row['took_ms']:.2f} | {row['ideal_ms']:.2f} | "
            f"{row['share_of_ideal']:.0%} |"
        )


if __name__ == "__main__":
    main()
