"""``hoop chaos``: trains under random faults and compares the result with an undisturbed run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.config import parse_duration
from hoop.errors import InternalError
from hoop.files import make_folder, write_text


def chaos(
    faults: Annotated[int, typer.Option(metavar="N", min=0, help="Number of faults.")] = 20,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the kinds, times and victims of the faults.")
    ] = 0,
    strategy: Annotated[str, typer.Option("--strategy", "-s", help="As hoop train's.")] = "data",
    devices: Annotated[int, typer.Option("--devices", "-n", metavar="N", min=2, help="How many devices.")] = 4,
    job: Annotated[str, typer.Option(help="Job to train.")] = "mnist",
    kinds: Annotated[
        str, typer.Option(help="Kinds of faults: kill, stop, slow, join, leave, coordinator.")
    ] = "kill,stop,slow,join,leave,coordinator",
    pace: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Slow every device down by this factor, so that faults hit during training."
        ),
    ] = 8,
    every: Annotated[
        str, typer.Option(help="Least time between two faults, like 15s; 0: the next follows when the last is over.")
    ] = "0",
    out: Annotated[Path | None, typer.Option(help="File for all results, as JSON.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    json: options.Json = False,
) -> None:
    """Train while devices are killed, stopped, slowed down, joined and sent away, and the coordinator restarted.

    Lost devices are replaced. At the end weights and losses are compared with those of the same number of steps without
    any fault, and the ledger is audited: exit code 0 means that they are equal to the bit and the audit holds. The same
    seed gives the same faults. Goodput is the share of the time in which steps went on as usual: it depends on how
    often something happens (--every 15s).
    """
    from hoop.lab.chaos.run import ChaosConfig, table, verdict
    from hoop.lab.chaos.run import chaos as run
    from hoop.strategies.catalog import parse

    parse(strategy)
    wanted = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    if out is not None:
        make_folder(out.parent, "--out")
    config = ChaosConfig(faults, seed, job, strategy, devices, pace, wanted, parse_duration(every, "--every"))
    found = run(config, lambda text: typer.echo(text, err=True))
    if out is not None:
        write_text(out, json_module.dumps(found.as_dict(), indent=2) + "\n")
    if json:
        typer.echo(json_module.dumps(found.as_dict()))
    elif markdown:
        typer.echo(f"{table(found).markdown()}\n{verdict(found)}.")
    else:
        from rich.console import Console

        Console().print(table(found).rich())
        typer.echo(verdict(found))
    if found.failed:
        raise InternalError(f"after {len(found.outcomes)} faults: {found.failed}")
    if not found.equal:
        raise InternalError("the weights are not those of the undisturbed run")
    if found.violation:
        raise InternalError(f"the weights are those of the undisturbed run, the record is not: {found.violation}")
