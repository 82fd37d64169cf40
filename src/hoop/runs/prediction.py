"""What a simulation found, as tables, pictures and traces; and where its costs come from.

What the simulator expects of a run, beside what happened.

Before the first step the rank that reports has profiled the blocks and the machine (engine/cost_probe.py) and told it.
From that a step is simulated here, while the job already runs; at the end both figures stand side by side.

A job's costs on this machine, for the simulator: every block at two sizes of micro-batch, and the rest.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from hoop.engine.cost_probe import SIZES, cores, measured_costs, profile, rehearsed_step
from hoop.engine.job import Job, blocks_of
from hoop.engine.settings import Settings
from hoop.errors import HoopError, NotFound
from hoop.files import write_text
from hoop.report.spans import Span
from hoop.report.tables import Column, Table
from hoop.report.timeline import TimelineChart
from hoop.report.trace import Trace
from hoop.runs.user_code import blaming_user_code
from hoop.simulate import cost_model
from hoop.simulate.cluster import Cluster, Host, Link
from hoop.simulate.cost_model import BlockCost, Costs, LinearCost, Machine, read_costs
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

MIB = 1024 * 1024


def costs_of(job: str, file: Path | None) -> Costs:
    """From a calibration file, or those that come with Hoop, or measured here and now."""
    if file is not None:
        return read_costs(file)
    try:
        return cost_model.shipped(job)
    except NotFound:
        if ":" not in job:
            raise
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from hoop.runs.job_lookup import job_named, resolved
    from hoop.simulate.cost_model import Machine

    found = job_named(resolved(job), load=False)
    return calibrated(found, found.defaults(resolved(job)).check(), Machine())


def sizes(costs: Costs, batch_size: int | None, shards: int | None, devices: int) -> tuple[int, int]:
    """The global batch and its shards: as given, as the job has them, or at least a shard for each device."""
    batch = batch_size or int(costs.about.get("batch_size", costs.rows))
    micros = shards or max(int(costs.about.get("shards", 1)), devices)
    return batch, max(1, min(micros, batch))


def table_of(outcomes: Sequence[SimulationResult], title: str = "") -> Table:
    """A row a simulation."""
    columns = [
        Column("strategy"),
        Column("devices"),
        Column("shards"),
        Column("step", "ms"),
        Column("speed-up", digits=2),
        Column("efficiency", "%", digits=0),
        Column("idle", "%", digits=0),
        Column("moved", "MiB a step"),
        Column("memory", "MiB a device"),
    ]
    rows = [
        [
            one.strategy,
            one.devices,
            one.plan.micros,
            1e3 * one.step_seconds,
            one.speedup,
            100 * one.efficiency,
            100 * one.idle_fraction,
            one.bytes / MIB,
            one.peak_memory / MIB,
        ]
        for one in outcomes
    ]
    return Table(columns, rows, title)


def spans_of(outcome: SimulationResult) -> list[Span]:
    """What every device did, for a picture or a trace; empty where the simulation kept no spans."""
    return [
        Span(f"device {rank}", str(one.what), one.category, 1e6 * one.start, 1e6 * one.seconds)
        for rank, account in enumerate(outcome.accounts)
        for one in account.spans
    ]


def write_outcome(outcome: SimulationResult, out: Path, job: str) -> list[Path]:
    """A timeline and a trace of it, named after the strategy; nothing where no spans were kept."""
    spans = spans_of(outcome)
    if not spans:
        return []
    name = re.sub(r"[^a-z0-9]+", "-", outcome.strategy.lower()).strip("-")
    picture, traced = out / f"timeline-{name}.svg", out / f"trace-{name}.json"
    title = f"{job}, {outcome.devices} devices, {outcome.strategy}, simulated"
    write_text(picture, TimelineChart(title, spans).svg())
    with Trace() as trace:
        trace.spans(spans)
        trace.write(traced, {"job": job, "simulated": True})
    return [picture, traced]


WARM_UP = 10
"""Steps at the beginning that are not compared, where there are enough."""
MOST_INSTRUCTIONS = 200_000
EventFields = Mapping[str, Any]


class Prediction:
    """A step as it was predicted, and steps as they were."""

    def __init__(self, settings: Settings, costs: Costs | None = None) -> None:
        """``costs``: what to predict from; None: what is profiled before the first step."""
        self._settings, self._costs = settings, costs
        self._expected: float | None = None
        self._seconds: list[float] = []

    def note(self, kind: str, told: EventFields) -> None:
        """An event of the job."""
        if kind == "started" and told.get("costs"):
            self._expected = predicted(told["costs"], self._settings, self._costs)
        elif kind == "steps":
            self._seconds += told["seconds"]

    def result(self) -> dict[str, float | None]:
        """For the run's summary; an error of 0.1 means that a step took 10 % longer than predicted."""
        warm = self._seconds[WARM_UP:] if len(self._seconds) > 3 * WARM_UP else self._seconds
        measured = median(warm) if warm else None
        both = self._expected is not None and measured
        return {
            "step_seconds": measured,
            "predicted_step_seconds": self._expected,
            "prediction_error": measured / self._expected - 1
            if both and measured and self._expected
            else None,
        }


def predicted(told: EventFields, settings: Settings, given: Costs | None = None) -> float | None:
    """Seconds of a step; None where there is nothing to simulate from, or too much.

    ``given``: costs to take instead of those that were told; where devices are is told in any case.
    """
    costs = costs_told(told) if given is None else given.of(told["rows"])
    cluster = cluster_told(told, settings)
    strategy = parse(settings.strategy)
    size = 6 * settings.micros * strategy.stages(cluster.size) * (1 if strategy.synchronous else 32)
    if size > MOST_INSTRUCTIONS:
        return None
    how: dict[str, Any] = {"micros": settings.micros, "cuts": settings.cut or None, "trace": False}
    how["mirror"] = settings.mirror
    try:
        even = simulate(strategy, costs, cluster, **how).step_seconds
        if strategy.name != "data" or not settings.balance or settings.slowdown:
            return even
        return min(even, simulate(strategy, costs, cluster, **how, dealt=_with_cores(cluster)).step_seconds)
    except HoopError:
        return None  # a prediction that cannot be made is no reason to fail


def _with_cores(cluster: Cluster) -> list[float] | None:
    """Where devices share cores: shards end up with as many as there are cores, once they follow measured speed."""
    if all(host.devices <= (host.cores or host.devices) for host in cluster.hosts):
        return None
    return [
        1.0 if index < (host.cores or host.devices) else 1e-9
        for host in cluster.hosts
        for index in range(host.devices)
    ]


def costs_told(told: EventFields, machine: Machine | None = None) -> Costs:
    """The simulator's costs of what ``engine/cost_probe.py`` measured."""
    rows, blocks = told["rows"], told["blocks"]
    fixed = fixed_share(blocks, told)
    return Costs(
        tuple(
            BlockCost(
                one["name"],
                _line(one["forward_s"], fixed, rows),
                _line(one["backward_s"], fixed, rows),
                one["weight_bytes"],
                one["optimizer_bytes"],
                one["gradient_bytes"],
                LinearCost(0.0, one["activation_bytes"] / rows),
                LinearCost(0.0, one["output_bytes"] / rows),
            )
            for one in blocks
        ),
        rows,
        machine_told(told, machine or Machine()),
        LinearCost.through(told["load"]),
        LinearCost.through(told["loss"]),
        told["update_s"],
        told["update_fixed_s"],
        joint=max(1, told["joint"]) if told["joint_s"] else 1,
        source="profiled before the first step",
    )


def machine_told(told: EventFields, usual: Machine) -> Machine:
    """What was measured of the machine, and the rest as usual."""
    measured = ("copy_s", "add_s", "message_s", "byte_s", "agree_s", "meeting_s")
    changes: dict[str, Any] = {name: told[name] for name in measured if name in told}
    for name in ("copy_at", "add_at"):
        changes[name] = tuple((float(size), float(seconds)) for size, seconds in told[name])
    return replace(usual, **changes)


def _line(seconds: float, fixed: float, rows: int) -> LinearCost:
    return LinearCost(fixed * seconds, (1 - fixed) * seconds / rows)


def fixed_share(blocks: Sequence[EventFields], told: EventFields) -> float:
    """What part of a shard's time a further shard, computed at once with it, does not pay again."""
    alone = float(sum(one["forward_s"] + one["backward_s"] for one in blocks))
    joint, together = int(told["joint"]), float(told["joint_s"])
    if joint < 2 or not together or not alone:
        return 0.0
    return min(1.0, max(0.0, 1 - (together - alone) / (joint - 1) / alone))


def cluster_told(told: EventFields, settings: Settings) -> Cluster:
    """Where the job runs: who shares a host, and how many cores each host has."""
    seats: Sequence[int] = told["hosts"]
    slow = [1 / one for one in settings.slowdown]
    speeds = [*slow, *[1.0] * len(seats)][: len(seats)]
    cores = max(1, told["cores"] // settings.threads_per_device)
    hosts = []
    for host in dict.fromkeys(seats):
        mine = tuple(speed for speed, seat in zip(speeds, seats, strict=True) if seat == host)
        hosts.append(Host(len(mine), cores, speeds=mine if slow else ()))
    return Cluster(tuple(hosts), Link(1e9, 20e-6))


JOINT = 4
REPEATS = 5
between = partial(rehearsed_step, shards=8, timeout=30.0)
"""What ranks cost each other: for whoever has two of them."""


def machine_of(links: Mapping[str, float]) -> Machine:
    """What was measured of links, and the rest as usual."""
    known = ("message_s", "byte_s", "agree_s", "meeting_s")
    found: dict[str, Any] = {name: links[name] for name in known if name in links}
    return dataclasses.replace(Machine(), **found)


def calibrated(
    job: Job,
    settings: Settings,
    machine: Machine,
    crowding: Callable[[Callable[[], float], int], float] | None = None,
) -> Costs:
    """Measured in this process, on one thread; ``crowding`` measures what cores at work cost each other."""
    torch.set_num_threads(1)
    rows = -(-settings.batch_size // settings.micros)
    with blaming_user_code(f"measuring {settings.job}"):
        low = _told(job, settings, max(1, rows // 4))
        high = _told(job, settings, rows, (*SIZES, 1 << 24))
    costs = costs_told(high, machine)
    if crowding is not None:
        machine = dataclasses.replace(
            costs.machine,
            crowding=crowding(
                lambda: sum(one["forward_s"] for one in _told(job, settings, rows)["blocks"]), cores()
            ),
        )
        costs = dataclasses.replace(costs, machine=machine)
    if low["rows"] < high["rows"]:
        costs = dataclasses.replace(
            costs,
            blocks=tuple(
                dataclasses.replace(
                    cost,
                    forward=_through(low, high, index, "forward_s"),
                    backward=_through(low, high, index, "backward_s"),
                )
                for index, cost in enumerate(costs.blocks)
            ),
        )
    return dataclasses.replace(costs, source="measured", about=_about(settings))


def _told(job: Job, settings: Settings, rows: int, sizes: Sequence[int] = SIZES) -> EventFields:
    data = job.data().train
    blocks = blocks_of(job.model(settings.seed))
    rows = min(rows, len(data))
    batch = data.batch(np.arange(rows, dtype=np.int64), epoch=0, seed=settings.seed)
    found = profile(blocks, batch, settings.optimizer, settings.micros, REPEATS)
    return measured_costs(found, blocks, data, job.loss_function, settings.optimizer, rows, JOINT, sizes)


def _through(low: EventFields, high: EventFields, index: int, name: str) -> LinearCost:
    points = [(one["rows"], one["blocks"][index][name]) for one in (low, high)]
    return LinearCost.through(points)


def _about(settings: Settings) -> dict[str, object]:
    return {
        "job": settings.job,
        "batch_size": settings.batch_size,
        "shards": settings.micros,
        "optimizer": settings.optimizer.name,
        "cores": cores(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
