"""``hoop audit``: checks from a run's ledger that every sample went into exactly one step of every epoch."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.parameter_server import ParameterServer
from hoop.texts import counted


def audit(
    run: Annotated[Path, typer.Argument(help="A run's folder: what --out named.")], json: options.Json = False
) -> None:
    """Check a run's ledger: which samples went into which step, computed by which device.

    The order of the samples is computed again from the seed and compared with the fingerprints that the devices
    reported, shard by shard. The checksum of every checkpoint must hold, and its hash must be that of its step. The
    first violation is named, and the exit code is 1.
    """
    from hoop.runs.audit import audit as look

    found = look(run)
    if json:
        typer.echo(json_module.dumps({"holds": found.holds, **asdict(found)}))
    elif found.violation is not None:
        echo(f"does not hold: {found.violation}")
    else:
        echo(
            f"holds: {counted(found.steps, 'step')}, {counted(found.epochs, 'whole epoch')} of "
            f"{counted(found.samples, 'sample')}, each in exactly one step of an epoch"
        )
        shards = ", ".join(f"device {device} {count:,}" for device, count in found.shards.items())
        cut = found.strategy and not isinstance(parse(found.strategy), DataParallel | ParameterServer)
        how = f"by all stages of {found.strategy} in turn; the last was on" if cut else "by"
        echo(f"  shards computed {how}: {shards}")
        for one in found.taken_over:
            by = ", ".join(f"{shard} by device {device}" for shard, device in one["by"].items())
            lost = ", ".join(map(str, one["lost"])) or "none"
            echo(f"  step {one['step']}: device {lost} lost; shards computed again: {by}")
        if found.resumed:
            steps = ", ".join(map(str, found.resumed))
            echo(f"  went on after step {steps}; {counted(found.repeated, 'step')} were done again")
        echo(f"  checkpoints: {', '.join(reversed(found.checkpoints)) or 'none'}")
    if not found.holds:
        raise typer.Exit(1)
