"""What Bokeh and tornado say about requests, on standard error: printable lines, a few of a kind, seldom a traceback.

Every user of the machine can send requests and frames. Both libraries log each one that they refuse, some with the
bytes as they came, and some with a traceback of their own code, which says no more than its last line. A traceback is
printed where code of Hoop has failed.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from bokeh.core.validation import silence
from bokeh.core.validation.warnings import EMPTY_LAYOUT
from bokeh.protocol.exceptions import MessageError, ProtocolError, ValidationError
from tornado.web import HTTPError

from hoop.errors import HoopError
from hoop.texts import printable

LOGGERS = ("bokeh", "tornado")
LINES = 5
"""Most lines that one statement of a library logs in ``PERIOD_S`` seconds."""
PERIOD_S = 60.0
MAX_LINE_BYTES = 400
_REFUSALS = (HTTPError, HoopError, MessageError, ProtocolError, ValidationError)
"""Errors that are answers: their text says all."""


@dataclass
class _Kind:
    """The lines that one statement has logged since a time."""

    since: float
    lines: int = 0


class RequestLog(logging.Handler):
    """The handler of the loggers of Bokeh and tornado."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._kinds: dict[tuple[str, int], _Kind] = {}
        """By the statement that logs: its file and line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if text := self._text(record):
                sys.stderr.write(f"{text}\n")
        except Exception:
            self.handleError(record)

    def _text(self, record: logging.LogRecord) -> str:
        """What is printed of a record; empty: nothing, there were enough of its kind."""
        now = self._clock()
        kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind(now))
        left_out = max(0, kind.lines - LINES)
        if now >= kind.since + PERIOD_S:
            kind.since, kind.lines = now, 0
        kind.lines += 1
        if kind.lines > LINES:
            return ""
        text = f"dashboard: {_message(record)}"
        if kind.lines == 1 and left_out:
            text += f" ({left_out} more like this were not shown)"
        error = record.exc_info[1] if record.exc_info is not None else None
        if error is None:
            return text
        if is_ours(error):
            return text + "\n" + printable("".join(traceback.format_exception(error)))
        return f"{text}: {type(error).__name__}: {_on_one_line(str(error))}"


def is_ours(error: BaseException) -> bool:
    """Whether code of Hoop has failed, and not a library, or a check of a request."""
    if isinstance(error, _REFUSALS):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__", "")).partition(".")[0] == "hoop" for frame in frames)


def _message(record: logging.LogRecord) -> str:
    """The text of a record; of one whose values cannot be shown, as some that a browser sent, its format."""
    try:
        return _on_one_line(record.getMessage())
    except Exception:
        return _on_one_line(str(record.msg))


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.split()), MAX_LINE_BYTES)


def print_requests() -> None:
    """From now on what Bokeh and tornado log is printed in this form. A box without data is hidden on purpose."""
    silence(EMPTY_LAYOUT)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [RequestLog()]
        logger.propagate = False
