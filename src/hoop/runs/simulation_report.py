"""Output of ``hoop simulate`` and ``hoop plan``: results of simulations as tables, pictures and traces.

Imports PyTorch only where the costs of the user's own job must be measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hoop.errors import NotFound
from hoop.plan.instructions import COMMUNICATE, COMPUTE, IDLE
from hoop.report.chart import MAX_SPANS, OTHER, Bars, Chart, Timeline, TimeSplit
from hoop.report.page import Block, Page, Section
from hoop.report.spans import Span
from hoop.report.tables import Column, Table
from hoop.report.trace import Trace
from hoop.simulate import cost_model
from hoop.simulate.cost_model import Costs, Machine, read_costs
from hoop.simulate.result import RankAccount, SimulationResult

if TYPE_CHECKING:
    from hoop.simulate.search import Candidate

MIB = 1024 * 1024
_KINDS = (COMPUTE, COMMUNICATE, OTHER, IDLE)
_KINDS_TEXT = "other: what a step costs besides its instructions"


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

    from hoop.runs.calibration import calibrated
    from hoop.runs.job_lookup import load_job, with_absolute_path

    found = load_job(with_absolute_path(job), load=False)
    return calibrated(found, found.defaults(with_absolute_path(job)).check(), Machine())


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


def write_trace(outcome: SimulationResult, out: Path, job: str) -> list[Path]:
    """Writes a trace, named after the strategy; nothing if the simulation kept no spans."""
    if not (spans := spans_of(outcome)):
        return []
    path = out / f"trace-{_file_name(outcome.strategy)}.json"
    with Trace() as trace:
        trace.spans(spans)
        trace.write(path, {"job": job, "simulated": True})
    return [path]


def _file_name(strategy: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", strategy.lower()).strip("-")


def simulation_page(outcomes: Sequence[SimulationResult], table: Table, job: str, facts: dict[str, str]) -> Page:
    """The page of ``hoop simulate``: the strategies beside each other, then each with its devices and its timeline."""
    compared: list[Block] = [*_compared(outcomes, [one.strategy for one in outcomes]), table]
    sections = [Section("Strategies", compared), *(_devices_section(one) for one in outcomes)]
    return Page(f"{job}: simulated", sections, _SIMULATED, facts)


def plan_page(
    found: Sequence[Candidate], traced: Sequence[SimulationResult], table: Table, job: str, facts: dict[str, str]
) -> Page:
    """The page of ``hoop plan``: every candidate that runs, and the devices of those that were ``traced``."""
    outcomes = {f"{one.strategy.spec}, {one.num_microbatches} shards": one.result for one in found if one.result}
    sections = [Section("Candidates", [*_compared(list(outcomes.values()), list(outcomes)), table])]
    sections += [_devices_section(one) for one in traced]
    refused = [[one.strategy.spec, one.num_microbatches, one.reason] for one in found if one.result is None]
    if refused:
        columns = [Column("strategy"), Column("shards"), Column("why")]
        sections.append(Section("Cannot run here", [Table(columns, refused)]))
    return Page(f"{job}: strategies by predicted step time", sections, _SIMULATED, facts)


_SIMULATED = "The plans that devices execute, in virtual time. Nothing on this page was measured in a run."


def _compared(outcomes: Sequence[SimulationResult], names: Sequence[str]) -> list[Chart]:
    """Step time by share, and memory; a row a strategy."""
    if not outcomes:
        return []
    rows = []
    for name, one in zip(names, outcomes, strict=True):
        each = [_seconds(account, one) for account in one.accounts]
        means = {kind: sum(seconds[kind] for seconds in each) / one.devices for kind in _KINDS}
        rows.append({"device": name} | {kind: 1e3 * mean / one.steps for kind, mean in means.items()})
    memory = {"memory": [one.peak_memory / MIB for one in outcomes]}
    return [
        Chart(
            "step",
            "Where a step's time goes",
            [TimeSplit("step (ms)", rows, _KINDS)],
            subtitle=f"simulated; mean over the devices; {_KINDS_TEXT}",
        ),
        Chart(
            "memory",
            "Memory of the fullest device",
            [Bars("MiB a device", list(names), memory)],
            subtitle="simulated",
        ),
    ]


def _devices_section(outcome: SimulationResult) -> Section:
    """Time by device, and the timeline if the simulation kept spans."""
    rows = [
        {"device": f"device {rank}"} | {kind: 100 * part / (outcome.seconds or 1.0) for kind, part in each.items()}
        for rank, each in enumerate(_seconds(one, outcome) for one in outcome.accounts)
    ]
    name = _file_name(outcome.strategy)
    about = f"simulated: {outcome.devices} devices, {outcome.plan.num_microbatches} shards, "
    about += f"a step of {1e3 * outcome.step_seconds:.4g} ms, {100 * outcome.idle_fraction:.0f} % idle; {_KINDS_TEXT}"
    split = TimeSplit("share of its time (%)", rows, _KINDS)
    blocks: list[Chart | str] = [Chart(f"devices-{name}", "Time by device", [split], subtitle=about)]
    if spans := spans_of(outcome):
        cut = f"; the first {MAX_SPANS:,} of {len(spans):,} instructions" if len(spans) > MAX_SPANS else ""
        about = f"simulated: {outcome.steps} step{'s' * (outcome.steps > 1)}{cut}; drag to zoom, hover tells more"
        shown_ms = 1e3 * outcome.step_seconds if outcome.steps > 1 else None
        blocks.append(Chart(f"timeline-{name}", "Timeline", [Timeline(spans, shown_ms)], subtitle=about))
    else:
        blocks.append("No timeline: the simulation has too many instructions to keep them.")
    return Section(f"{outcome.strategy}, {outcome.plan.num_microbatches} shards", blocks)


def _seconds(account: RankAccount, outcome: SimulationResult) -> dict[str, float]:
    """A rank's time by kind; the kinds add up to the simulated time."""
    known = {kind: account.seconds[kind] for kind in (COMPUTE, COMMUNICATE, IDLE)}
    return {**known, OTHER: max(0.0, outcome.seconds - sum(known.values()))}
