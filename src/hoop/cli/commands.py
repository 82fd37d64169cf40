"""The commands of ``hoop`` and the options of the command itself; shell completion."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from hoop import __version__

COMMANDS = (
    "train",
    "run",
    "attach",
    "evaluate",
    "export",
    "audit",
    "report",
    "up",
    "coordinator",
    "device",
    "drain",
    "status",
    "events",
    "dashboard",
    "demo",
    "doctor",
    "token",
    "certs",
    "bench",
    "calibrate",
    "simulate",
    "plan",
    "chaos",
    "reproduce",
)
"""The commands in the order of ``hoop --help``. Each is the function of this name in the module of this name."""
PRINTING = ("evaluate", "audit", "drain", "status", "events", "doctor", "token", "bench", "simulate", "plan")
"""The commands whose result is what they print. They fail if it cannot be written; the others do their work anyway."""

DASHBOARD_PORT = "8787"


def with_default_port(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the usual port after a ``--dashboard`` of ``hoop train`` or ``hoop up`` that has none.

    Typer has no options whose value may be missing.
    """
    found = list(arguments)
    if found[:1] not in (["train"], ["up"]):
        return found
    for at in range(len(found) - 1, 0, -1):
        following = found[at + 1] if at + 1 < len(found) else ""
        if found[at] == "--dashboard" and not following.removeprefix("-").isdecimal():
            found.insert(at + 1, DASHBOARD_PORT)
    return found


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
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    app.callback()(_options)
    named = [name for name in COMMANDS if name in arguments[:1]]
    for name in named or COMMANDS:
        module = importlib.import_module(f"hoop.cli.{name}")
        function, settings = getattr(module, name), getattr(module, "CONTEXT_SETTINGS", None)
        app.command(help=_paragraphs(inspect.getdoc(function) or ""), context_settings=settings)(function)
    return app


def _paragraphs(text: str) -> str:
    """A docstring with one line a paragraph: Rich would keep the line breaks of the source."""
    return "\n\n".join(" ".join(one.split()) for one in text.split("\n\n"))


def completed_words() -> list[str]:
    """The words after ``hoop`` of a line that a shell wants to complete; empty if this is no completion.

    The shell's script, which ``hoop --install-completion`` writes, passes the line in one of these variables.
    """
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:] if "_HOOP_COMPLETE" in os.environ else []
