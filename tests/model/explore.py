"""Runs many schedules of the recovery model and shrinks those that break an invariant: python tests/model/explore.py

``make nightly`` runs 100,000; ``make test`` the first 5,000 (test_recovery_model.py).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from random import Random

from recovery_model import find_violation, generate_setup, run_schedule, shrink

CHUNK = 250


def run_chunk(first: int) -> tuple[Counter[str], list[int]]:
    """Runs ``CHUNK`` schedules; returns the count of each outcome and the seeds that break an invariant."""
    outcomes: Counter[str] = Counter()
    broken = []
    for seed in range(first, first + CHUNK):
        try:
            outcomes[run_schedule(seed)] += 1
        except AssertionError:
            outcomes["broken"] += 1
            broken.append(seed)
    return outcomes, broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--processes", type=int, default=None, help="at a time; all cores if not given")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    broken: list[int] = []
    started = time.monotonic()
    with ProcessPoolExecutor(arguments.processes) as pool:
        starts = range(arguments.first, arguments.first + arguments.schedules, CHUNK)
        for number, (chunk_outcomes, more_broken) in enumerate(pool.map(run_chunk, starts), start=1):
            outcomes += chunk_outcomes
            broken += more_broken
            if sys.stdout.isatty() or number % 40 == 0:
                print(
                    f"{number * CHUNK:,} schedules, {time.monotonic() - started:.0f} s: {dict(outcomes)}",
                    flush=True,
                )
    for seed in broken[:5]:
        setup = shrink(generate_setup(Random(seed)), seed)
        print(f"schedule {seed}: {setup}\n    {find_violation(setup, seed)[:500]}")
    print(f"{sum(outcomes.values())} schedules: {dict(outcomes)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
