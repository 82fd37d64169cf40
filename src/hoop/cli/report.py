"""``hoop report``: makes one HTML page of a run's files."""

from __future__ import annotations

import importlib.util
import json as json_module
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.errors import FailedPrecondition


def report(
    run: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder: what --out named.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default="DIR/report.html", help="Where to write the page.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: options.Json = False,
) -> None:
    """Make one page of a run: curves, faults and recoveries, where the time went, timeline, settings, weights' hash.

    The page works offline, in light and dark. Drag in a chart to zoom, hover for details, click on a legend's entry to
    hide it.

    hoop train --out writes report.html itself when a run ends. Use this command for a run that still trains, that was
    killed, or that is of an older version: the page has a section for each file that is there, and says what is
    missing. Nothing else in the folder is changed. Needs Bokeh: pip install 'hoop\\[dashboard]'.
    """
    if importlib.util.find_spec("bokeh") is None:
        raise FailedPrecondition("hoop report needs Bokeh, which is not installed: pip install 'hoop[dashboard]'")
    from hoop.report.run_report import write_run_report

    path = write_run_report(run, output)
    if json:
        typer.echo(json_module.dumps({"file": str(path), "bytes": path.stat().st_size}))
    else:
        echo(path)
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        echo(f"--open: no browser was found; open {path} yourself", err=True)
