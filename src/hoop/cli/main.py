"""``hoop``: the command line, its commands and its exit codes.

Exit codes: 0 done · 1 a bug, or an audit that does not hold · 2 a mistake in what was asked · 3 a peer failed or
did not answer · 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from hoop import __version__
from hoop.cli import (
    attach,
    audit,
    bench,
    calibrate,
    certs,
    chaos,
    coordinator,
    device,
    evaluate,
    events,
    export,
    plan,
    reproduce,
    simulate,
    status,
    token,
    train,
    up,
)
from hoop.cli.running import end_by_signals
from hoop.errors import HoopError, PeerError, UserError
from hoop.texts import printable

app = typer.Typer(
    name="hoop",
    help="Train a PyTorch model across whatever devices you have; no failure changes what comes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(train.train)
app.command()(attach.attach)
app.command()(evaluate.evaluate)
app.command()(export.export)
app.command()(audit.audit)
app.command()(up.up)
app.command()(coordinator.coordinator)
app.command()(device.device)
app.command()(status.status)
app.command()(events.events)
app.command()(token.token)
app.command()(certs.certs)
app.command()(bench.bench)
app.command()(calibrate.calibrate)
app.command()(simulate.simulate)
app.command()(plan.plan)
app.command()(chaos.chaos)
app.command()(reproduce.reproduce)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hoop {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The entry point."""
    end_by_signals()
    # gRPC's own log repeats what a peer sent, escape characters included. Errors come back with the call.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except HoopError as error:
        typer.echo(f"hoop: {error}", err=True)
        sys.exit(2 if isinstance(error, UserError) else 3 if isinstance(error, PeerError) else 1)
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(printable(f"hoop: {error.filename}: {error.strerror}"), err=True)  # a path that was given
        sys.exit(2)
