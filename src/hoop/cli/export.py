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
from hoop.texts import counted


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
    """Write a trained model's weights, without optimizer state and position, for other programs.

    model.safetensors and model.npz need no code of the job, also for a run of [bold]hoop.train[/bold] with objects of
    a program. With --job, and for recipes, they have all names of the model's state_dict; without it a weight that two
    modules share is there once, under its first name.
    """
    from hoop.runs.export import export as write
    from hoop.runs.export import load_weights

    weights = load_weights(run)
    for warning in weights.found.warnings:
        echo(f"warning: {warning}", err=True)
    write(weights, to, job)
    written = {"file": str(to), "bytes": to.stat().st_size, "weights_sha256": weights.weights_sha256}
    if json:
        typer.echo(json_module.dumps(written))
    else:
        steps = counted(weights.steps, "step")
        echo(f"{to}  {format_size(to.stat().st_size)}  {weights.settings.job} after {steps}")
