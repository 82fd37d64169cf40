"""``hoop simulate``: a job on devices that are not here."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop.cli import options
from hoop.config import parse_size
from hoop.errors import InvalidArgument
from hoop.files import make_folder

if TYPE_CHECKING:
    from hoop.simulate.cluster import Cluster
    from hoop.simulate.result import SimulationResult


def simulate(
    job: Annotated[str, typer.Argument(help="A recipe, or your own job: file.py:name.")] = "mnist",
    devices: Annotated[int, typer.Option("--devices", "-n", metavar="N", min=1, help="How many devices.")] = 4,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="As for hoop train; several to compare them.", show_default="data"),
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="Between hosts, e.g. 1Gbps,0.5ms. Without it all devices are on one host.")
    ] = None,
    per_host: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Devices a host.", show_default="1 with --link, else all")
    ] = None,
    cores: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Cores a host; devices share them.", show_default="one a device"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="A device's memory, e.g. 2GiB.", show_default="enough")] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="A cluster in TOML instead (docs/simulator.md); --devices of it are used.")
    ] = None,
    costs: options.StoredCosts = None,
    batch_size: options.BatchSize = None,
    shards: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Parts of a batch.", show_default="the job's, at least one a device"),
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many are simulated.")] = None,
    all_reduce: Annotated[
        str, typer.Option(help="How gradients are added up: ordered (the engine's), ring, tree, …")
    ] = "ordered",
    stragglers: Annotated[
        str | None, typer.Option(help="Chance and factor of a slow computation, e.g. 0.05,3.")
    ] = None,
    failures: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, help="Failures per device and hour (adds the expected goodput to the output)."
        ),
    ] = None,
    replicate: Annotated[
        bool,
        typer.Option(
            "--replicate/--no-replicate",
            help="Each device's part of a model is copied to another as steps end, as hoop train does.",
        ),
    ] = True,
    replicas: options.Replicas = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of stragglers and failures.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Keep report.html, the table and traces in this folder.")] = None,
    json: options.Json = False,
) -> None:
    """Simulate a step of a job: time, speed-up, idle time, bytes and memory, on a cluster of your choice.

    The very plans of [bold]hoop train[/bold] run in virtual time; try
    [bold]hoop simulate mnist -n 64 --link 1Gbps,0.5ms[/bold].
    """
    from hoop.report.page_files import NEEDS_BOKEH, can_draw, write_page
    from hoop.runs.simulation_report import costs_of, simulation_page, sizes, table_of, write_trace
    from hoop.simulate.cluster import read_cluster
    from hoop.simulate.rank import SimulatedStragglers
    from hoop.simulate.simulation import simulate as run
    from hoop.strategies.catalog import parse

    if out is not None:
        make_folder(out, "--out")
    where = read_cluster(cluster) if cluster else _cluster(devices, link, per_host, cores, memory)
    if cluster and devices != 4:
        where = where.first(devices)
    wanted = [parse(one) for one in strategy or ["data"]]
    priced = costs_of(job, costs)
    if priced.gpu is not None:
        where = where.on_gpus(priced.gpu.memory)
    batch, num_microbatches = sizes(priced, batch_size, shards, where.size)
    priced = priced.with_rows(-(-batch // num_microbatches))
    slow = _stragglers(stragglers)
    chance = SimulatedStragglers(*slow, seed) if slow else None
    found: list[SimulationResult] = []
    for one in wanted:
        typer.echo(f"simulating {one.spec} …", err=True)
        found.append(
            run(
                one,
                priced,
                where,
                num_microbatches=num_microbatches,
                steps=steps,
                all_reduce=all_reduce,
                stragglers=chance,
                trace=True if out is not None else None,
                replicate=replicate,
                replicas=replicas,
            )
        )
    good = [_goodput(one, failures, seed, replicate) for one in found]
    table = table_of(found, f"{job}, batch {batch}, on {where.describe()}")
    files: list[Path] = []
    if out is not None:
        files = [path for one in found for path in write_trace(one, out, job)]
        facts = {"cluster": where.describe(), "batch": str(batch), "costs": priced.source}
        files = [*write_page(simulation_page(found, table, job, facts), out), *files]
        if not can_draw():
            typer.echo(NEEDS_BOKEH, err=True)
    if json:
        rows = [
            one.to_dict() | ({"goodput": share} if share is not None else {})
            for one, share in zip(found, good, strict=True)
        ]
        typer.echo(json_module.dumps({"job": job, "costs": priced.source, "cluster": where.describe(), "rows": rows}))
        return
    typer.echo(f"{table.title}\n\n{table.markdown()}")
    for outcome, share in zip(found, good, strict=True):
        if share is not None:
            typer.echo(f"{outcome.strategy}: goodput {share:.1%} with {failures:g} failures per device and hour")
    typer.echo(f"costs: {priced.source}")
    if files:
        typer.echo(f"written to {out}: {', '.join(path.name for path in files)}")


def _cluster(devices: int, link: str | None, per_host: int | None, cores: int | None, memory: str | None) -> Cluster:
    from hoop.simulate.cluster import Cluster, Link

    host: dict[str, Any] = {"cores": cores, "memory": parse_size(memory, "--memory") if memory else None}
    if link is None:
        return Cluster.even(devices, per_host or devices, **host)
    return Cluster.even(devices, per_host or 1, Link.parse(link, "--link"), **host)


def _stragglers(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        chance, factor = (float(one) for one in text.split(","))
    except ValueError:
        raise InvalidArgument(f"--stragglers: {text!r} is not chance,factor, e.g. 0.05,3") from None
    return chance, factor


def _goodput(outcome: SimulationResult, rate: float | None, seed: int, replicated: bool) -> float | None:
    from hoop.simulate.failure_model import Failures
    from hoop.simulate.search import goodput_with_failures

    if rate is None:
        return None
    return goodput_with_failures(outcome, Failures(per_hour=rate, seed=seed), replicated=replicated).useful
