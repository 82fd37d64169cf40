"""A warning that names the ranks that others wait for, long before an operation runs into its time-out.

A rank that hangs (in its own code, in a debugger, stopped) keeps its links open, so the others just wait. A thread of
each group looks a few times within ``patience`` what this rank waits for, and warns once of a wait that is the same at
every look. Operations do nothing for that: the thread reads what endpoints and the P2P engine know anyway. It counts
looks and not seconds, so a process that is stopped itself does not blame others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping

log = logging.getLogger("hoop.torch_backend")
LEAST_PATIENCE_S, MOST_PATIENCE_S = 10.0, 30.0
_LOOKS = 4


def patience(timeout: float) -> float:
    """Seconds after which a wait is unusual in a group with this time-out: a tenth of it, from 10 to 30."""
    return min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, timeout / 10))


def warn_of_wait(waiting: str, seconds: float) -> None:
    """``waiting``: who waits for what, for example "rank 0: waiting for rank 1"."""
    log.warning(
        "%s for more than %g s; is it in other code, stopped, or does its program end earlier?", waiting, seconds
    )


class WaitWatch:
    """The thread of one group that warns of long waits."""

    def __init__(self, name: str, timeout: float, waits: Callable[[], Mapping[Hashable, str]]) -> None:
        """``waits``: the current waits of this rank as texts for ``warn_of_wait``. Their keys are equal as long as a
        wait makes no progress."""
        self._seconds, self._waits = patience(timeout), waits
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        looks: dict[Hashable, int] = {}
        while not self._closed.wait(self._seconds / _LOOKS):
            waits = self._waits()
            looks = {key: looks.get(key, 0) + 1 for key in waits}
            for key, text in waits.items():
                if looks[key] == _LOOKS + 1:
                    warn_of_wait(text, self._seconds)

    def close(self) -> None:
        self._closed.set()
