"""Output on a terminal: every text is shown as it is.

Names, paths, addresses and errors come from users, files and other processes. Square brackets in them are not markup
for Rich (``[fd00::7]:4021``, ``--out 'o[/a]'``), and a control character is shown as its escape, not sent to the
terminal.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from hoop.events import Event
from hoop.standard_streams import lost
from hoop.texts import printable

if TYPE_CHECKING:
    from rich.text import Text


def shown(text: object) -> str:
    """The text with escaped control characters, of any length."""
    return printable(str(text), sys.maxsize)


def echo(text: object, err: bool = False) -> None:
    """Prints a line on standard output, or on standard error."""
    typer.echo(shown(text), err=err)


def log_event(event: Event) -> None:
    """Prints an event of a coordinator on standard error. Raises if the log could not be written."""
    echo(event.text, err=True)
    if error := lost(sys.stderr):
        raise OSError(error.errno, f"standard error: {error.strerror}; what is printed there is not whole")


def plain(text: object, style: str = "") -> Text:
    """The text for a Rich console or table: without markup, emoji codes and highlighting."""
    from rich.text import Text

    return Text(shown(text), style=style)
