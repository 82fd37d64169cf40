"""The simulator's predictions beside measurements: steps of every strategy, and all-reduce, on this machine.

    python benchmarks/prediction/predict.py            under 5 minutes
    python benchmarks/prediction/predict.py --quick    under 90 seconds

Every row of the first table is a run of ``hoop train``, which predicts its step from measurements before the first
step; the rows take turns and show medians. A run during which other processes used the cores is made again. ``by first
steps`` is the error of a prediction that knows the first steps of the run itself: how much the speed of the machine
changes within a run, which no prediction can know. The second table predicts all-reduce from the measured cost of a
meeting, a copy and a sum, and measures it as ``hoop bench`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hoop.config import format_size
from hoop.engine.cost_probe import measure_memory
from hoop.errors import HoopError
from hoop.job_events import Started, Steps
from hoop.lab.bench.contest import Contest
from hoop.lab.bench.links import link_seconds, run_in_parallel
from hoop.report.tables import Column, Table
from hoop.resources import available_cores
from hoop.runs.job_lookup import load_job, with_absolute_path
from hoop.runs.training import Launch, Training
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import FREE_MACHINE, Costs, Machine, Points
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

PARTS = ("pipeline:gpipe", "pipeline:1f1b", "ring", "ps:bsp")
CASES = {
    1: ("data",),
    2: ("data", *PARTS),
    3: ("data", *PARTS),
    4: ("data", "ps:bsp", "hybrid:replicas=2"),
    8: ("data", "ps:bsp", "hybrid:replicas=4"),
    16: ("data", "ps:bsp", "hybrid:replicas=8"),
}
"""Strategies by number of devices; mnist has three blocks, so a pipeline has at most three stages."""
QUICK = {1: ("data",), 2: ("data", "pipeline:1f1b", "ring", "ps:bsp"), 4: ("data", "hybrid:replicas=2")}
SIZES = (437_544, 4 << 20, 16 << 20)
MEMORY = (1 << 18, 1 << 20, 1 << 22, 1 << 24)
FIRST, LATER = slice(10, 40), slice(40, None)
"""Steps of a run: the first ones after its warm-up, and those that follow."""
FAR = 0.25
"""No row should be further off."""
DISTURBANCE, TRIES = 0.08, 2
"""Processor time of other processes, as a share of a core, above which a run is made again; runs of a row at most."""
Case = tuple[int, str]


def foreign_seconds() -> float:
    """Processor time of this machine so far that neither this process nor its ended children used; 0 without /proc."""
    if not os.path.exists("/proc/stat"):
        return 0.0
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    mine = os.times()
    used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return used - mine.user - mine.system - mine.children_user - mine.children_system


def undisturbed_run(job: str, devices: int, spec: str, further: dict[str, int]) -> dict[str, Any]:
    """``one_run``, again if other processes used more than ``DISTURBANCE`` of a core meanwhile; then the quietest."""
    tried: list[tuple[float, dict[str, Any]]] = []
    while len(tried) < TRIES and (not tried or tried[-1][0] > DISTURBANCE):
        began, others = time.monotonic(), foreign_seconds()
        result = one_run(job, devices, spec, further)
        tried.append(((foreign_seconds() - others) / (time.monotonic() - began), result))
    disturbance, found = min(tried, key=lambda one: one[0])
    return {**found, "disturbance": disturbance}


def one_run(job: str, devices: int, spec: str, further: dict[str, int]) -> dict[str, Any]:
    """The result of ``hoop train`` with ``further`` settings.

    ``drift``: by how much later steps take longer; ``started_s``: seconds of a device until its first step, with
    everything that is measured before it.
    """
    changes = {"strategy": spec, "evaluate_every": 0, "checkpoint_every": 0, "trace_steps": 0, **further}
    settings = load_job(with_absolute_path(job), load=True).defaults(with_absolute_path(job)).replaced(changes).check()
    seconds: list[float] = []
    started = 0.0
    for observed in Training(Launch(settings, devices)).events():
        if isinstance(observed.event, Steps):
            seconds += observed.event.seconds
        elif isinstance(observed.event, Started):
            started = observed.event.seconds
    drift = median(seconds[LATER]) / median(seconds[FIRST]) - 1 if len(seconds) > 2 * FIRST.stop else None
    return {**observed.to_fields(), "drift": drift, "started_s": started}


def steps_table(job: str, cases: Sequence[Case], further: dict[str, int], repeats: int) -> tuple[Table, list[float]]:
    """Predicted and measured step times, each the median over repeats in turns."""
    results_by_case: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for repeat in range(repeats):
        for devices, spec in cases:
            print(f"repeat {repeat + 1} of {repeats}: {spec} on {devices} …", file=sys.stderr)
            try:
                result = undisturbed_run(job, devices, spec, further)
            except HoopError as error:
                print(f"{spec} on {devices}: {error}", file=sys.stderr)
                continue
            if result.get("prediction_error") is not None:
                results_by_case[devices, spec].append(result)
                times = [1e3 * result[name] for name in ("predicted_step_seconds", "step_seconds")]
                others = f"others used {result['disturbance']:.0%} of a core"
                print(f"    predicted {times[0]:.2f} ms, measured {times[1]:.2f} ms; {others}", file=sys.stderr)
    rows: list[list[Any]] = []
    errors = []
    for (devices, spec), results in results_by_case.items():
        if not results:
            rows.append([spec, devices, None, None, None, None, None])
            continue
        expected = median(one["predicted_step_seconds"] for one in results)
        measured = median(one["step_seconds"] for one in results)
        errors.append(measured / expected - 1)
        drifts = [one["drift"] for one in results if one["drift"] is not None]
        drift = 100 * median(drifts) if drifts else None
        rows.append(
            [
                spec,
                devices,
                1e3 * expected,
                1e3 * measured,
                100 * errors[-1],
                drift,
                median(one["started_s"] for one in results),
            ]
        )
    names = [Column("strategy"), Column("devices"), Column("predicted", "ms"), Column("measured", "ms")]
    names += [Column("error", "%", digits=0), Column("by first steps", "%", digits=0), Column("started", "s")]
    return Table(names, rows), errors


def machine_for(ranks: int) -> Machine:
    """The measured cost of a meeting of ``ranks`` ranks, of a copy and of a sum while all cores are busy."""
    sharing = min(available_cores(), ranks)
    measured = run_in_parallel(lambda: measure_memory(MEMORY), sharing)

    def points(name: str) -> Points:
        return tuple(
            (float(size), sum(one[name][at][1] for one in measured) / sharing) for at, size in enumerate(MEMORY)
        )

    meeting = link_seconds("shm", ranks)["meeting_s"] * sharing / ranks
    return replace(FREE_MACHINE, meeting_s=meeting, copy_at=points("copy_at"), add_at=points("add_at"))


def all_reduce_table(ranks: Sequence[int], sizes: Sequence[int], seconds: float) -> tuple[Table, list[float]]:
    rows, errors = [], []
    for count in ranks:
        print(f"all-reduce of {count} ranks …", file=sys.stderr)
        machine = machine_for(count)
        for row in Contest(["arena"], [count], sizes, seconds).run():
            costs = Costs.uniform(1, 0.0, 0.0, weight_bytes=row.bytes, machine=machine)
            cluster = Cluster.even(count, count, cores=available_cores())
            expected = simulate(parse("data"), costs, cluster, num_microbatches=count).step_seconds
            errors.append(row.seconds / expected - 1)
            size = format_size(row.bytes)
            rows.append([count, size, 1e6 * expected, 1e6 * row.seconds, 100 * errors[-1]])
    names = [Column("ranks"), Column("size"), Column("predicted", "us"), Column("measured", "us")]
    return Table([*names, Column("error", "%", digits=0)], rows), errors


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--devices", type=numbers, default=[1, 2, 3, 4], help="e.g. 1,2,16")
    parser.add_argument("--only", default="", help="strategies that begin so, e.g. data,pipeline")
    parser.add_argument("--steps", type=int, help="of each run [default: 120, quick 60]")
    parser.add_argument("--shards", type=int, help="of a batch; at least as many as devices [default: the job's]")
    parser.add_argument("--batch-size", type=int, help="[default: the job's]")
    parser.add_argument("--repeats", type=int, help="of each row, by turns [default: 3, quick 1]")
    parser.add_argument("--quick", action="store_true", help="fewer strategies, steps, repeats and sizes")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of tables")
    options = parser.parse_args()
    started, load = time.monotonic(), os.getloadavg()
    known = QUICK if options.quick else CASES
    only = tuple(options.only.split(","))
    cases = [(count, spec) for count in options.devices for spec in known.get(count, ()) if spec.startswith(only)]
    repeats = options.repeats or (1 if options.quick else 3)
    further = {"max_steps": options.steps or (60 if options.quick else 120), "epochs": 1_000_000}
    further |= {name: given for name in ("shards", "batch_size") if (given := getattr(options, name))}
    steps, step_errors = steps_table(options.job, cases, further, repeats)
    rank_counts = [count for count in options.devices if count > 1 and (count == 2 or not options.quick)]
    all_reduce, all_reduce_errors = all_reduce_table(rank_counts, SIZES[:2] if options.quick else SIZES, 0.3)
    medians = {"steps": _median_error(step_errors), "all_reduce": _median_error(all_reduce_errors)}
    facts = {
        "machine": f"{platform.machine()}, {available_cores()} cores, Python {platform.python_version()}",
        "load_before": load[0],
        "load_after": os.getloadavg()[0],
        "seconds": time.monotonic() - started,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if options.json:
        print(json.dumps({"steps": steps.plain(), "all_reduce": all_reduce.plain(), "median_error": medians, **facts}))
        return
    print(steps.markdown())
    worst, far = max(map(abs, step_errors), default=0.0), sum(abs(one) > FAR for one in step_errors)
    print(f"median error of a step: {medians['steps']:.0%}; the worst {worst:.0%}; {far} above {FAR:.0%}\n")
    print(all_reduce.markdown())
    print(f"median error of all-reduce: {medians['all_reduce']:.0%}\n")
    print(f"{facts['machine']}; load {load[0]:.1f} before, {facts['load_after']:.1f} after; {facts['seconds']:.0f} s")


def _median_error(errors: Sequence[float]) -> float:
    return median(map(abs, errors)) if errors else float("nan")


if __name__ == "__main__":
    main()
