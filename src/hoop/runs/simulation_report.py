"""Output of ``hoop simulate`` and ``hoop plan``: results of simulations as tables, pictures and traces.

Imports PyTorch only where the costs of the user's own job must be measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoop.errors import FailedPrecondition, NotFound
from hoop.files import write_text
from hoop.job_events import Started
from hoop.report.spans import Span
from hoop.report.tables import Column, Table
from hoop.report.timeline import TimelineChart
from hoop.report.trace import Trace
from hoop.simulate import cost_model
from hoop.simulate.cost_model import Costs, Machine, read_costs
from hoop.simulate.result import SimulationResult

if TYPE_CHECKING:
    from hoop.engine.settings import Settings

MIB = 1024 * 1024


def costs_of(job: str, file: Path | None) -> Costs:
    """A job's costs: from a calibration file, from those that come with Hoop, or measured now."""
    if file is not None:
        return read_costs(file)
    try:
        return cost_model.shipped_costs(job)
    except NotFound:
        if ":" not in job:
            raise
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from hoop.runs.job_lookup import job_named, resolved
    from hoop.runs.prediction import calibrated

    found = job_named(resolved(job), load=False)
    return calibrated(found, found.defaults(resolved(job)).check(), Machine())


def calibrated_on_gpu(settings: Settings, memory: int) -> Costs:
    """Measures a data parallel step of a job on this machine's GPU: the costs of a run of one step on one device.

    ``memory``: bytes of the device's memory.
    """
    from hoop.runs.prediction import describe_measurement, measured_job_costs
    from hoop.runs.training import Launch, Training

    short = settings.replaced({"strategy": "data", "max_steps": 1, "checkpoint_every": 0})
    measured: Mapping[str, Any] = {}
    for observed in Training(Launch(short, devices=1, memory=memory)).events():
        if isinstance(observed.event, Started):
            measured = observed.event.costs or {}
    if "gpu" not in measured:
        raise FailedPrecondition("--accelerator: no GPU was used; look at nvidia-smi, or leave the option out")
    about = {**describe_measurement(settings), "gpu": measured["gpu"]["name"]}
    return replace(measured_job_costs(measured), source=f"measured on {about['gpu']}", about=about)


def sizes(costs: Costs, batch_size: int | None, shards: int | None, devices: int) -> tuple[int, int]:
    """Global batch size and number of shards: as given, else the job's, with at least one shard a device."""
    batch = batch_size or int(costs.about.get("batch_size", costs.rows))
    num_microbatches = shards or max(int(costs.about.get("shards", 1)), devices)
    return batch, max(1, min(num_microbatches, batch))


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
            one.plan.num_microbatches,
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
    """Spans of every device for a picture or a trace; empty if the simulation kept none."""
    return [
        Span(f"device {rank}", str(one.what), one.category, 1e6 * one.start, 1e6 * one.seconds)
        for rank, account in enumerate(outcome.accounts)
        for one in account.spans
    ]


def write_outcome(outcome: SimulationResult, out: Path, job: str) -> list[Path]:
    """Writes a timeline and a trace, named after the strategy; nothing if the simulation kept no spans."""
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
