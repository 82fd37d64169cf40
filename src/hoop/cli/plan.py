"""``hoop plan``: which strategy suits a job on a cluster."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.files import make_folder
from hoop.report.tables import Column, Table

if TYPE_CHECKING:
    from hoop.simulate.cluster import Cluster
    from hoop.simulate.cost_model import Costs
    from hoop.simulate.result import SimulationResult
    from hoop.simulate.search import Candidate

MIB = 1024 * 1024
TRACED = 3
"""Number of strategies, the fastest ones, that have a timeline in the page."""


def plan(
    job: Annotated[str, typer.Argument(help="A recipe, or your own job: file.py:name.")] = "mnist",
    cluster: Annotated[Path | None, typer.Option(help="The cluster, in TOML (docs/simulator.md).")] = None,
    devices: Annotated[
        int, typer.Option("--devices", "-n", metavar="N", min=1, help="Without --cluster: devices of one host.")
    ] = 4,
    cores: Annotated[int | None, typer.Option(metavar="N", min=1, help="Without --cluster: that host's cores.")] = None,
    costs: options.StoredCosts = None,
    batch_size: options.BatchSize = None,
    failures: Annotated[
        float,
        typer.Option(
            metavar="N", min=0, help="Failures per device and hour; candidates are ranked by step time over goodput."
        ),
    ] = 0.0,
    replicate: Annotated[
        bool,
        typer.Option(
            "--replicate/--no-replicate",
            help="Whether parts of a model are copied to other devices as steps end; else a loss costs the steps "
            "since a checkpoint.",
        ),
    ] = True,
    replicas: options.Replicas = 1,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many are shown.")] = 12,
    out: Annotated[Path | None, typer.Option(help="Keep report.html with charts and the table in this folder.")] = None,
    json: options.Json = False,
) -> None:
    """Search strategies, meshes, micro-batches and schedules for a cluster, and rank them by predicted step time.

    Each is simulated with the engine's own plans; for each that loses, why. Asynchronous ones are marked: their
    weights are stale, and a step of theirs may be worth less.
    """
    from hoop.engine.gradient_slots import gradient_memory_for
    from hoop.report.page_files import NEEDS_BOKEH, can_draw, write_page
    from hoop.runs.simulation_report import costs_of, plan_page, sizes
    from hoop.simulate.cluster import Cluster, read_cluster
    from hoop.simulate.failure_model import Failures
    from hoop.simulate.search import search

    if out is not None:
        make_folder(out, "--out")
    where = read_cluster(cluster) if cluster else Cluster.even(devices, devices, cores=cores)
    priced = costs_of(job, costs)
    if priced.gpu is not None:
        where = where.on_gpus(priced.gpu.memory)
    batch, _ = sizes(priced, batch_size, None, where.size)
    room = gradient_memory_for(False)
    tried = 0

    def progress(text: str) -> None:
        nonlocal tried
        tried += 1
        if tried % 10 == 1:
            typer.echo(f"trying {text} …", err=True)

    losses = Failures(per_hour=failures) if failures else None
    found = search(priced, where, batch, losses, room, progress, replicate=replicate, replicas=replicas)
    running = [one for one in found if one.result is not None]
    files: list[Path] = []
    if out is not None:
        facts = {"cluster": where.describe(), "batch": str(batch), "costs": priced.source}
        fastest = {one.strategy.spec: one for one in reversed(running)}  # of each strategy
        shown = sorted(fastest.values(), key=running.index)[:TRACED]
        traced = [_traced(one, priced, where, batch, replicate, replicas) for one in shown]
        files = write_page(plan_page(found, traced, _table(running), job, facts), out)
        if not can_draw():
            typer.echo(NEEDS_BOKEH, err=True)
    if json:
        rows = [one.to_dict() for one in found]
        typer.echo(json_module.dumps({"job": job, "costs": priced.source, "cluster": where.describe(), "rows": rows}))
        return
    typer.echo(f"{job}, batch {batch}, on {where.describe()}; {len(found)} candidates\n")
    typer.echo(_table(running[:top]).markdown())
    refused: dict[str, list[str]] = {}
    for one in found:
        if one.result is None and one.strategy.spec not in refused.setdefault(one.reason, []):
            refused[one.reason].append(one.strategy.spec)
    for why, specs in refused.items():
        typer.echo(f"cannot run: {', '.join(specs)}: {why}")
    typer.echo(f"costs: {priced.source}")
    best = next((one for one in running if one.strategy.synchronous), None)
    if best is not None and best.result is not None:
        cuts = ",".join(map(str, best.result.cuts[1:]))
        cut = f" --set cut=[{cuts}]" if cuts else ""
        typer.echo(
            f"the fastest that is exactly SGD: hoop train {job} --devices {where.size} --strategy {best.strategy.spec} "
            f"--shards {best.num_microbatches}{cut}{'' if replicate else ' --no-replicate'}"
            f"{f' --replicas {replicas}' if replicas > 1 else ''}"
        )

    if files:
        typer.echo(f"written to {out}: {', '.join(path.name for path in files)}")


def _traced(
    one: Candidate, costs: Costs, where: Cluster, batch: int, replicate: bool, replicas: int
) -> SimulationResult:
    """Simulates a step of a candidate again, with its instructions: the search keeps none."""
    from hoop.simulate.simulation import simulate

    assert one.result is not None
    return simulate(
        one.strategy,
        costs.with_rows(-(-batch // one.num_microbatches)),
        where,
        num_microbatches=one.num_microbatches,
        steps=one.result.steps,
        replicate=replicate,
        replicas=replicas,
    )


def _table(found: list[Candidate]) -> Table:
    columns = [
        Column("strategy"),
        Column("shards"),
        Column("step", "ms"),
        Column("memory", "MiB a device"),
        Column("goodput", "%", digits=1),
        Column("why"),
    ]
    rows = []
    for one in found:
        assert one.result is not None
        useful = one.goodput.useful if one.goodput else 1.0
        memory = one.result.peak_memory / MIB
        rows.append(
            [one.strategy.spec, one.num_microbatches, 1e3 * one.result.step_seconds, memory, 100 * useful, one.reason]
        )
    return Table(columns, rows)
