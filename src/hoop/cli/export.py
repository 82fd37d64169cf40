"""``hoop export``: writes a trained model in a format of other programs."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.cli.evaluate import JobName, Run
from hoop.cli.output import echo
from hoop.config import format_size


def export(
    run: Run,
    to: Annotated[
        Path,
        typer.Option(
            help="model.safetensors (a plain state_dict), model.npz (for NumPy), or model.pt2 (torch.export)."
        ),
    ],
    job: JobName = None,
    json: options.Json = False,
) -> None:
    """Write a trained model's weights, without optimizer state and position, for other programs."""
    from hoop.runs.export import export as write
    from hoop.runs.export import load_trained

    one = load_trained(run, job)
    for warning in one.found.warnings:
        echo(f"warning: {warning}", err=True)
    write(one, to)
    written = {"file": str(to), "bytes": to.stat().st_size, "weights_sha256": one.weights_sha256}
    if json:
        typer.echo(json_module.dumps(written))
    else:
        echo(f"{to}  {format_size(to.stat().st_size)}  {one.settings.job} after {one.steps} steps")
