"""``hoop evaluate``: loss and accuracy of a trained model."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.texts import counted

Run = Annotated[Path, typer.Argument(help="A run's folder (what --out named), or one of its checkpoints.")]
JobName = Annotated[
    str | None,
    typer.Option(
        "--job",
        help="The run's job, file.py:name or module:name. Its code is run, which a checkpoint cannot choose.",
        show_default="the recipe that the checkpoint names",
    ),
]


def evaluate(run: Run, job: JobName = None, json: options.Json = False) -> None:
    """Evaluate a trained model on the test data, or on the training data if its job has no test data.

    In a run's folder it takes the newest checkpoint whose checksum holds.
    """
    from hoop.runs.export import load_weights, measure, with_model

    weights = load_weights(run)
    for warning in weights.found.warnings:
        echo(f"warning: {warning}", err=True)
    results = measure(with_model(weights, job))
    if json:
        typer.echo(json_module.dumps(results))
        return
    training = results["split"] == "train"
    kind = "training accuracy" if training else "accuracy"
    accuracy = "" if results["accuracy"] is None else f"{kind} {results['accuracy']:.2%}  "
    which = "training samples: the job has no test data" if training else "test samples"
    echo(f"{accuracy}loss {results['loss']:.4f}  on {results['samples']:,} {which}")
    echo(f"  {results['job']} after {counted(results['steps'], 'step')}, {results['checkpoint']}")
    echo(f"  weights sha256 {results['weights_sha256']}")
