"""Logging: one logger a room (``hoop.servers``, ``hoop.transport`` …), switched on by the variable ``HOOP_LOG``.

    HOOP_LOG=debug                           every room, to standard error
    HOOP_LOG=info,transport=debug,wire=off   a level for all rooms, and others for some

Without ``HOOP_LOG`` Hoop installs no handler: a program configures the logger ``hoop`` as it likes. Processes that Hoop
starts inherit the variable. ``hoop/__init__.py`` calls ``configure`` when ``hoop`` is imported.
"""

from __future__ import annotations

import logging
import sys

VARIABLE = "HOOP_LOG"
_FORMAT = "%(asctime)s.%(msecs)03d %(process)d %(name)s %(levelname)s: %(message)s"
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL + 1,
}


def parse_levels(text: str) -> dict[str, int]:
    """Maps a room to its level; the empty name is the level of all rooms. A mistake is a ValueError with the remedy."""
    levels: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        room, equals, level = part.rpartition("=")
        if level.lower() not in _LEVELS or bool(equals) != bool(room):
            raise ValueError(
                f"{VARIABLE}={text!r}: {part!r} is neither a level ({', '.join(_LEVELS)}) nor room=level, as in "
                f"{VARIABLE}=info,transport=debug"
            )
        levels[room] = _LEVELS[level.lower()]
    return levels


class _StandardError(logging.Handler):
    """Writes to what is standard error now: a command replaces it as it starts (``standard_streams``)."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.write(self.format(record) + "\n")
        except Exception:
            self.handleError(record)


def configure(text: str) -> None:
    """Sends the rooms' log records to standard error; an unreadable ``text`` is reported there and changes nothing."""
    try:
        levels = parse_levels(text)
    except ValueError as error:
        if sys.stderr is not None:
            sys.stderr.write(f"hoop: {error}\n")
        return
    root = logging.getLogger("hoop")
    if not root.handlers:
        handler = _StandardError()
        handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(levels.pop("", logging.WARNING))
    for room, level in levels.items():
        logging.getLogger(f"hoop.{room}").setLevel(level)
