"""Is the planner's first choice the fastest? Every case of a grid: the choice beside the measured best.

    python benchmarks/prediction/planner.py                                 2 and 4 devices, about 20 minutes on 2 cores
    python benchmarks/prediction/planner.py --devices 2,8 --jobs mnist:256  a part of the grid, other devices

A case is a job, a global batch and a number of devices; ``planner_jobs.py`` has models for which several strategies
come near. ``hoop calibrate`` measures the job's costs on as many devices, ``hoop plan`` ranks the candidates by them,
and ``hoop train`` measures, in turns, the first candidates by their predicted steps, and the best one of each other
kind of strategy. Only synchronous strategies count: a step of the others is not worth the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hoop.cli.main import main as hoop
from hoop.engine.recipes import RECIPES
from hoop.errors import HoopError
from hoop.report.tables import Column, Table
from hoop.resources import available_cores
from hoop.runs.job_lookup import load_job, with_absolute_path
from hoop.runs.training import Launch, Training
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs, read_costs
from hoop.simulate.search import Candidate, search
from hoop.strategies.data_parallel import DataParallel

JOBS = ("wide:16", "wide:128", "deep:32", "deep:1024", "text:16", "mnist:256", "lenet:64")
OWN_JOBS = Path(__file__).with_name("planner_jobs.py")
FIRST = 3
"""The best candidates by prediction, which are measured; then the best one of each other kind."""
NEAR = 0.05
"""A choice that takes this much longer than the measured best counts as right."""


@dataclass
class Measured:
    """One candidate of a case: its prediction and its measured runs."""

    candidate: Candidate
    seconds: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.candidate.strategy.spec}, {self.candidate.num_microbatches} shards"

    def describe(self) -> str:
        assert self.candidate.result is not None
        expected, measured = 1e3 * self.candidate.result.step_seconds, 1e3 * median(self.seconds)
        return f"    {self.label}: predicted {expected:.2f} ms, measured {measured:.2f} ms"


def named(job: str) -> str:
    """The job's full name: a recipe's, or that of a job of ``planner_jobs.py``."""
    return job if job in RECIPES else f"{OWN_JOBS}:{job}"


def calibrated(job: str, batch_size: int, devices: int, folder: Path) -> Costs:
    """The job's costs, as ``hoop calibrate`` measures them on that number of devices."""
    path = folder / f"{job}-{batch_size}-{devices}.json"
    sys.argv = ["hoop", "calibrate", named(job), "--batch-size", str(batch_size), "--devices", str(devices)]
    sys.argv += ["--out", str(path)]
    with open(os.devnull, "w") as nowhere:
        stdout, sys.stdout = sys.stdout, nowhere
        try:
            hoop()
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.stdout = stdout
    return read_costs(path)


def chosen(costs: Costs, devices: int, batch_size: int) -> list[Candidate]:
    """The candidates to measure, the planner's first choice first."""
    cluster = Cluster.even(devices, devices, cores=available_cores())
    found = search(costs, cluster, batch_size, replicate=True)
    running = [one for one in found if one.result is not None and one.strategy.synchronous]
    kinds: dict[str, Candidate] = {}
    for one in running:
        kinds.setdefault(_kind(one), one)
    first = running[:FIRST]
    return first + [one for one in kinds.values() if not any(one is other for other in first)]


def _kind(candidate: Candidate) -> str:
    """Data parallel with a sharded update is one of its own; the schedules of a pipeline are one kind."""
    strategy = candidate.strategy
    return strategy.spec if isinstance(strategy, DataParallel) else strategy.name


def step_seconds(job: str, batch_size: int, devices: int, candidate: Candidate, seconds: float) -> float:
    """The median step of a run of about ``seconds``."""
    assert candidate.result is not None
    changes: dict[str, Any] = {
        "strategy": candidate.strategy.spec,
        "shards": candidate.num_microbatches,
        "batch_size": batch_size,
        "max_steps": max(30, min(2000, int(seconds / candidate.result.step_seconds))),
        "epochs": 1000,
        "evaluate_every": 0,
        "checkpoint_every": 0,
        "trace_steps": 0,
    }
    if isinstance(candidate.strategy, DataParallel):
        changes["sharded_update"] = "on" if candidate.strategy.sharded else "off"
        changes["strategy"] = "data"
    name = with_absolute_path(named(job))
    settings = load_job(name, load=True).defaults(name).replaced(changes).check()
    *_, result = Training(Launch(settings, devices)).events()
    return float(result.to_fields()["step_seconds"])


def measure_case(job: str, batch_size: int, devices: int, costs: Costs, options: argparse.Namespace) -> list[Measured]:
    found = [Measured(one) for one in chosen(costs, devices, batch_size)]
    for turn in range(options.turns):
        for one in found:
            print(f"{job}, batch {batch_size}, {devices} devices, turn {turn + 1}: {one.label} …", file=sys.stderr)
            try:
                one.seconds.append(step_seconds(job, batch_size, devices, one.candidate, options.seconds))
            except HoopError as error:
                print(f"{one.label}: {error}", file=sys.stderr)
    return [one for one in found if one.seconds]


def row_of(job: str, batch_size: int, devices: int, found: Sequence[Measured]) -> list[Any]:
    first, best = found[0], min(found, key=lambda one: median(one.seconds))
    assert first.candidate.result is not None
    longer = median(first.seconds) / median(best.seconds) - 1
    error = median(first.seconds) / first.candidate.result.step_seconds - 1
    expected, measured, least = first.candidate.result.step_seconds, median(first.seconds), median(best.seconds)
    case = f"{job}, batch {batch_size}"
    return [
        case,
        devices,
        first.label,
        1e3 * expected,
        1e3 * measured,
        100 * error,
        best.label,
        1e3 * least,
        100 * longer,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="JOB:BATCH, … [default: %(default)s]")
    parser.add_argument("--devices", default="2,4", help="numbers of devices [default: %(default)s]")
    parser.add_argument("--turns", type=int, default=2, help="runs of each candidate [default: %(default)s]")
    parser.add_argument("--seconds", type=float, default=1.5, help="of training a run [default: %(default)s]")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args()
    started, load = time.monotonic(), os.getloadavg()[0]
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="hoop-planner-") as folder:
        for text in options.jobs.split(","):
            job, _, size = text.partition(":")
            for devices in map(int, options.devices.split(",")):
                costs = calibrated(job, int(size), devices, Path(folder))
                found = measure_case(job, int(size), devices, costs, options)
                for one in found:
                    print(one.describe(), file=sys.stderr)
                rows.append(row_of(job, int(size), devices, found))
    columns = [
        Column("case"),
        Column("devices"),
        Column("first choice"),
        Column("predicted", "ms"),
        Column("measured", "ms"),
    ]
    columns += [Column("error", "%", digits=0), Column("fastest measured"), Column("it took", "ms")]
    table = Table([*columns, Column("choice longer by", "%", digits=0)], rows)
    right = sum(row[-1] <= 100 * NEAR for row in rows)
    facts = {
        "cases": len(rows),
        "within_5_percent": right,
        "machine": f"{platform.machine()}, {available_cores()} cores, Python {platform.python_version()}",
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "seconds": time.monotonic() - started,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if options.json:
        print(json.dumps({"rows": table.plain(), **facts}))
        return
    print(table.markdown())
    print(f"{right} of {len(rows)} choices within 5 % of the measured best")
    print(f"{facts['machine']}; load {load:.1f} before, {facts['load_after']:.1f} after; {facts['seconds']:.0f} s")


if __name__ == "__main__":
    main()
