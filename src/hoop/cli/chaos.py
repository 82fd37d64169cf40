"""``hoop chaos``: trains under random faults and compares the result with an undisturbed run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.config import parse_duration
from hoop.errors import InternalError, InvalidArgument
from hoop.files import make_folder, write_text

if TYPE_CHECKING:
    from hoop.lab.chaos.campaign import CampaignConfig

DEFAULT_FAULTS = 20


ONE_LONG_RUN = {"strategy": "--strategies", "kinds": "--faults", "job": "", "pace": "", "every": ""}
"""Options that have no effect with --runs, each with the option to use instead; empty: none."""
SHORT_RUNS = ("strategies", "steps", "keep")
"""Options that have no effect without --runs."""


def chaos(
    context: typer.Context,
    faults: Annotated[
        str,
        typer.Option(
            help="Number of faults; with --runs: kinds of faults, like kill,disk-full.", show_default="20, or all"
        ),
    ] = "",
    runs: Annotated[
        int, typer.Option(metavar="N", min=0, help="Run this many short trainings, one fault each.", show_default=False)
    ] = 0,
    strategies: Annotated[
        str, typer.Option(help="With --runs: strategies to draw from.", show_default="all synchronous")
    ] = "",
    steps: Annotated[int, typer.Option(metavar="N", min=30, help="With --runs: steps of each training.")] = 200,
    keep: Annotated[
        Path | None, typer.Option(help="With --runs: folder for journal, logs and files of runs that fail.")
    ] = None,
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

    With --runs it is a series of short trainings instead, on a cluster each: strategy, fault, moment and victims are
    drawn from seed, seed + 1, … Besides the faults above there are kills of several processes at once, in the first
    second, in the last step and during a checkpoint, deleted arenas, full disks, lost packets, cut links, and 30 jobs
    on one cluster. Each run must end with the same weights, or with code 3 where its state is lost and the same weights
    after --resume, and leave no process, port or file. docs/chaos.md has the list.
    """
    _check_options(context, runs)
    if runs:
        from hoop.lab.chaos.campaign import CampaignConfig

        campaign = CampaignConfig(runs, seed, _names(faults), _names(strategies), devices, steps, keep)
        _scenarios(campaign, out, markdown, json)
        return
    count = _fault_count(faults)
    from hoop.lab.chaos.run import ChaosConfig, table, verdict
    from hoop.lab.chaos.run import chaos as run
    from hoop.strategies.catalog import parse

    parse(strategy)
    wanted = _names(kinds)
    if out is not None:
        make_folder(out.parent, "--out")
    config = ChaosConfig(count, seed, job, strategy, devices, pace, wanted, parse_duration(every, "--every"))
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


def _check_options(context: typer.Context, runs: int) -> None:
    """Raises InvalidArgument if an option was given that has no effect."""
    given = {name for name in (*ONE_LONG_RUN, *SHORT_RUNS) if _was_given(context, name)}
    for name in sorted(given & set(ONE_LONG_RUN) if runs else given & set(SHORT_RUNS)):
        instead = f"; use {ONE_LONG_RUN[name]}" if runs and ONE_LONG_RUN[name] else ""
        raise InvalidArgument(f"--{name}: it has no effect {'with' if runs else 'without'} --runs{instead}")


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _fault_count(text: str) -> int:
    if text and not text.isdecimal():
        raise InvalidArgument(f"--faults: {text!r} is not a number of faults; kinds of faults need --runs N")
    return int(text or DEFAULT_FAULTS)


def _scenarios(config: CampaignConfig, out: Path | None, markdown: bool, json: bool) -> None:
    """``hoop chaos --runs N``: prints a line a run to stderr, and the summary."""
    from hoop.lab.chaos.campaign import Campaign, run_campaign, summary, tables

    for folder in (config.keep, out.parent if out is not None else None):
        if folder is not None:
            make_folder(folder, "--keep" if folder is config.keep else "--out")
    found = Campaign(config)
    try:
        run_campaign(config, lambda text: typer.echo(text, err=True), found)
    finally:  # after Ctrl-C too: the runs so far
        if out is not None:
            write_text(out, json_module.dumps(found.as_dict(), indent=2) + "\n")
        if found.outcomes and not json:
            for table in tables(found):
                if markdown:
                    typer.echo(table.markdown())
                else:
                    from rich.console import Console

                    Console().print(table.rich())
            typer.echo(summary(found))
    if json:
        typer.echo(json_module.dumps(found.as_dict()))
    if found.failures:
        raise InternalError(f"{len(found.failures)} of {len(found.outcomes)} runs failed")
