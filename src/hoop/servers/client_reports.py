"""Reports for the operator about calls of the lab's clients that were refused: such clients often print no errors.

The number of reports is bounded, so that a client that polls, or a hostile one, cannot flood the log: the same text is
reported once a minute, and at most ``MAX_REPORTS`` texts in ``WINDOW_S`` seconds.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from hoop.texts import printable

WINDOW_S = 10.0
MAX_REPORTS = 20
REPEAT_S = 60.0
MAX_TEXT_BYTES = 1024
"""Longer texts are shortened."""


class ClientReports:
    """Passes texts on to ``report``, unless they repeat or come too fast."""

    def __init__(self, report: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._reported: OrderedDict[str, float] = OrderedDict()
        """By text, when it was last reported; the oldest first."""
        self._window_began = clock()
        self._in_window = 0

    def refused(self, method: str, caller: str, status: str, text: str) -> None:
        """A call was refused (``wire.service.OnRefused``)."""
        self.add(f"{method} of the client at {caller or 'an unknown address'} was refused: {status}: {text}")

    def add(self, text: str) -> None:
        now, text = self._clock(), printable(text, MAX_TEXT_BYTES)
        while self._reported and next(iter(self._reported.values())) <= now - REPEAT_S:
            self._reported.popitem(last=False)
        if text in self._reported:
            return
        if now - self._window_began >= WINDOW_S:
            self._window_began, self._in_window = now, 0
        self._in_window += 1
        if self._in_window == MAX_REPORTS:
            self._report(f"more calls of the lab's clients were refused; the rest of {WINDOW_S:g} s is not reported")
        elif self._in_window < MAX_REPORTS:
            self._reported[text] = now
            self._report(text)
