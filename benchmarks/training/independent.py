"""The most that data parallel can gain on a machine: jobs of one device, each on its own core, that exchange nothing.

    python benchmarks/training/independent.py --jobs 1,2,4,8,16
    python benchmarks/training/independent.py --jobs 1,2 --batch-size 128

Every job trains ``mnist`` with its part of a batch, as one shard, while the others do: what a step takes then, beside
what it takes alone, is what memory, caches, clocks and unlike cores cost. N jobs are to one device with a batch that is
N times as large as N devices would be if their sums cost nothing and none ever waited for another. The slowest job is
what a step would take if they waited and every step were alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from race import environment, numbers, table

CONTENDER = Path(__file__).with_name("contender.py")
TIMEOUT_S = 600.0
LAPS = 3
"""The first one warms up; the jobs end at different times, so in the last one a job may have fewer neighbours."""


def step_seconds(cores: list[int], batch_size: int, lap: int) -> list[float]:
    """The seconds of a step of each job, in the second lap, while all run."""
    job = ["hoop", "--job=mnist", "--devices=1", f"--laps={LAPS}", f"--lap={lap}"]
    command = [sys.executable, str(CONTENDER), *job, "--shards=1", f"--batch-size={batch_size}"]
    started = [
        subprocess.Popen(
            ["taskset", "--cpu-list", str(core), *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for core in cores
    ]
    try:
        written = [one.communicate(timeout=TIMEOUT_S) for one in started]
    finally:
        for one in started:
            one.kill()
    for one, (_, errors) in zip(started, written, strict=True):
        if one.returncode:
            raise SystemExit(f"a job failed: {errors[-2000:]}")
    found = [json.loads(out.splitlines()[-1]) for out, _ in written]
    return [one["lap_seconds"][1] / one["steps"] for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=numbers, default=[1, len(cores)], help="how many at once; a list")
    parser.add_argument("--batch-size", type=int, default=256, help="of each job")
    parser.add_argument("--lap", type=int, default=6, help="epochs of a lap")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    options = parser.parse_args()
    if max(options.jobs) > len(cores):
        parser.error(f"--jobs: {max(options.jobs)} jobs need a core each, and there are {len(cores)}")
    rows = []
    for count in options.jobs:
        seconds = step_seconds(cores[:count], options.batch_size, options.lap)
        rows.append({"jobs": count, "mean_s": statistics.mean(seconds), "slowest_s": max(seconds)})
        print(f"{count} jobs: {1e3 * rows[-1]['mean_s']:.2f} ms a step", file=sys.stderr)
    if options.json:
        print(json.dumps({"environment": environment(), "batch_size": options.batch_size, "rows": rows}))
        return
    cells = [[row["jobs"], f"{1e3 * row['mean_s']:.2f}", f"{1e3 * row['slowest_s']:.2f}"] for row in rows]
    print(table(["jobs at once", "a step of each, ms", "the slowest one's"], cells))


if __name__ == "__main__":
    main()
