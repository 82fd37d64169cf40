"""What a simulation found, as tables, pictures and traces; and where its costs come from."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hoop.errors import NotFound
from hoop.files import write_text
from hoop.report.spans import Span
from hoop.report.tables import Column, Table
from hoop.report.timeline import Timeline
from hoop.report.trace import Trace
from hoop.simulate import shipped
from hoop.simulate.costs import Costs, read_costs
from hoop.simulate.outcome import Outcome

MIB = 1024 * 1024


def costs_of(job: str, file: Path | None) -> Costs:
    """From a calibration file, or those that come with Hoop, or measured here and now."""
    if file is not None:
        return read_costs(file)
    try:
        return shipped.shipped(job)
    except NotFound:
        if ":" not in job:
            raise
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.launch.calibrating import calibrated
    from hoop.launch.named import job_named, resolved
    from hoop.simulate.costs import Machine

    found = job_named(resolved(job), load=False)
    return calibrated(found, found.defaults(resolved(job)).check(), Machine())


def sizes(costs: Costs, batch_size: int | None, shards: int | None, devices: int) -> tuple[int, int]:
    """The global batch and its shards: as given, as the job has them, or at least a shard for each device."""
    batch = batch_size or int(costs.about.get("batch_size", costs.rows))
    micros = shards or max(int(costs.about.get("shards", 1)), devices)
    return batch, max(1, min(micros, batch))


def table_of(outcomes: Sequence[Outcome], title: str = "") -> Table:
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


def spans_of(outcome: Outcome) -> list[Span]:
    """What every device did, for a picture or a trace; empty where the simulation kept no spans."""
    return [
        Span(f"device {rank}", str(one.what), one.category, 1e6 * one.start, 1e6 * one.seconds)
        for rank, account in enumerate(outcome.accounts)
        for one in account.spans
    ]


def write_outcome(outcome: Outcome, out: Path, job: str) -> list[Path]:
    """A timeline and a trace of it, named after the strategy; nothing where no spans were kept."""
    spans = spans_of(outcome)
    if not spans:
        return []
    name = re.sub(r"[^a-z0-9]+", "-", outcome.strategy.lower()).strip("-")
    picture, traced = out / f"timeline-{name}.svg", out / f"trace-{name}.json"
    title = f"{job}, {outcome.devices} devices, {outcome.strategy}, simulated"
    write_text(picture, Timeline(title, spans).svg())
    with Trace() as trace:
        trace.spans(spans)
        trace.write(traced, {"job": job, "simulated": True})
    return [picture, traced]
