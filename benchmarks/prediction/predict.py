"""The simulator beside what happens: steps of every strategy, and all-reduce, on this machine.

    python benchmarks/prediction/predict.py
    python benchmarks/prediction/predict.py --quick

Every row of the first table is a run of ``hoop train``, which predicts its step from what it profiles before the first
one. The second measures links and memory as ``hoop calibrate`` does, and all-reduce as ``hoop bench`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hoop.bench.contest import Contest
from hoop.bench.links import link_seconds
from hoop.config import format_size
from hoop.engine.pricing import cores, memory_seconds
from hoop.report.tables import Column, Table
from hoop.simulate.cluster import Cluster
from hoop.simulate.costs import Costs, Machine
from hoop.simulate.run import simulate
from hoop.strategies.catalog import every, parse

SIZES = (437_544, 4 << 20)


def one_run(job: str, devices: int, spec: str, steps: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "hoop",
        "train",
        job,
        f"--devices={devices}",
        f"--strategy={spec}",
        "--json",
    ]
    command += [f"--set=max_steps={steps}", "--set=evaluate_every=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout)


def steps_table(job: str, devices: list[int], only: list[str], steps: int) -> tuple[Table, list[float]]:
    rows, errors = [], []
    for count in devices:
        for strategy in every(count):
            if not any(strategy.spec.startswith(word) for word in only):
                continue
            found = one_run(job, count, strategy.spec, steps)
            error = found.get("prediction_error")
            if error is None:
                rows.append([strategy.spec, count, None, None, None])
                print(f"{strategy.spec} on {count}: {found.get('failure', 'no prediction')}", file=sys.stderr)
                continue
            errors.append(error)
            measured, expected = found["step_seconds"], found["predicted_step_seconds"]
            rows.append([strategy.spec, count, 1e3 * expected, 1e3 * measured, 100 * error])
    names = [Column("strategy"), Column("devices"), Column("predicted", "ms"), Column("measured", "ms")]
    return Table([*names, Column("error", "%", digits=0)], rows), errors


def all_reduce_table(ranks: list[int], seconds: float) -> tuple[Table, list[float]]:
    links, memory = link_seconds("shm"), memory_seconds()
    machine = Machine(0.0, links["message_s"], memory["copy_s"], memory["add_s"], links["meeting_s"], 0.0)
    rows, errors = [], []
    for row in Contest(["arena"], ranks, SIZES, seconds).run():
        costs = Costs.uniform(1, 0.0, 0.0, weight_bytes=row.bytes, machine=machine)
        here = Cluster.even(row.ranks, row.ranks, cores=cores())
        expected = simulate(parse("data"), costs, here, micros=row.ranks).step_seconds
        error = row.seconds / expected - 1
        errors.append(error)
        rows.append([row.ranks, format_size(row.bytes), 1e6 * expected, 1e6 * row.seconds, 100 * error])
    names = [Column("ranks"), Column("size"), Column("predicted", "us"), Column("measured", "us")]
    return Table([*names, Column("error", "%", digits=0)], rows), errors


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--devices", type=numbers, default=[1, 2, 4])
    parser.add_argument("--only", default="", help="strategies that begin so, e.g. data,pipeline")
    parser.add_argument("--steps", type=int, default=235, help="of each run")
    parser.add_argument("--quick", action="store_true", help="2 devices, 4 strategies, 60 steps")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    options = parser.parse_args()
    if options.quick:
        options.devices, options.only, options.steps = (
            [2],
            "data,ps:mode=bsp,ring:sync,pipeline:schedule=1f1b",
            60,
        )
    steps, of_steps = steps_table(options.job, options.devices, options.only.split(","), options.steps)
    sums, of_sums = all_reduce_table([count for count in options.devices if count > 1] or [2], 0.3)
    middle = {"steps": _middle(of_steps), "all_reduce": _middle(of_sums)}
    if options.json:
        print(json.dumps({"steps": steps.plain(), "all_reduce": sums.plain(), "median_error": middle}))
        return
    print(steps.markdown())
    print(f"median error of a step: {middle['steps']:.0%}\n")
    print(sums.markdown())
    print(f"median error of all-reduce: {middle['all_reduce']:.0%}\n")
    print(
        f"{platform.machine()}, {cores()} cores, Python {platform.python_version()}; load {os.getloadavg()[0]:.1f}"
    )


def _middle(errors: list[float]) -> float:
    return median(map(abs, errors)) if errors else float("nan")


if __name__ == "__main__":
    main()
