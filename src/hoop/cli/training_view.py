"""The output of ``hoop train`` and ``hoop attach``: a view of the run while it trains, and its result."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from hoop.cli.output import echo
from hoop.errors import FailedPrecondition
from hoop.report.progress_view import ProgressView, QuietView, WarningsView
from hoop.report.run_summary import summary_lines


def find_view(json: bool) -> QuietView:
    """The view of a run: for people, or with ``--json``."""
    return WarningsView() if json else ProgressView()


def show_result(result: Mapping[str, Any], out: Path | None, json: bool) -> None:
    """Prints the result on standard output."""
    if json:
        typer.echo(json_module.dumps(result))
        return
    for line in summary_lines(result, out):
        echo(line)


def check_kept(result: Mapping[str, Any], out: Path | None) -> None:
    """Raises if the folder of ``--out`` has not got the trained weights, or not the whole record of the run."""
    if out is None:
        return
    if result.get("checkpoint") is None:
        raise FailedPrecondition(f"--out: the trained weights are not kept in {out}; what is wrong is said above")
    if lost := result["lost_files"]:
        raise FailedPrecondition(
            f"--out: the trained weights are kept in {result['checkpoint']}, and the record of the run is not whole: "
            f"{', '.join(lost)} in {out} was deleted, moved or replaced during the run"
        )


def show_recipes(json: bool) -> None:
    """The recipes, with their main settings."""
    from hoop.engine.recipes import RECIPES

    if json:
        found = {name: {"about": job.about, "settings": dict(job.settings)} for name, job in RECIPES.items()}
        typer.echo(json_module.dumps(found))
        return
    for name, job in RECIPES.items():
        settings = ", ".join(f"{key}={value}" for key, value in job.settings.items())
        echo(f"{name:<18} {job.about}\n{'':<18} {settings}")
