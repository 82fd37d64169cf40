"""``hoop``: the command line, its commands and its exit codes.

Exit codes: 0 done · 1 a bug, or an audit that does not hold · 2 a mistake in what was asked · 3 a peer failed or
did not answer · 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from hoop import __version__
from hoop.cli.running import end_by_signals
from hoop.errors import HoopError, PeerError, UserError
from hoop.texts import printable

COMMANDS = (
    "train",
    "attach",
    "evaluate",
    "export",
    "audit",
    "up",
    "coordinator",
    "device",
    "status",
    "events",
    "token",
    "certs",
    "bench",
    "calibrate",
    "simulate",
    "plan",
    "chaos",
    "reproduce",
)
"""In the order of ``hoop --help``. Each is the function of this name in the module of this name."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hoop {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line with the command that these arguments name; with all for ``--help``, a mistyped name or none.

    A command that is not run is not imported, because the imports of all take longer than most commands.
    """
    app = typer.Typer(
        name="hoop",
        help="Train a PyTorch model across whatever devices you have; no failure changes what comes out.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    named = [name for name in COMMANDS if name in arguments[:1]]
    for name in named or COMMANDS:
        app.command()(getattr(importlib.import_module(f"hoop.cli.{name}"), name))
    return app


def main() -> None:
    """The entry point."""
    end_by_signals()
    # gRPC's own log repeats what a peer sent, escape characters included. Errors come back with the call.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        command_line(sys.argv[1:])()
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
