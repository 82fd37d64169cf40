"""Code that a signal must not interrupt in the middle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Signals that end a command, and have a handler of Python's, are handled when the block is over.

    A handler that raises would otherwise do so at any line: after a process was started and before anybody knows of
    it, or within gRPC's own bookkeeping of a new call, for which the closing of its channel then waits for ever. The
    signals are not blocked, because a process that is started meanwhile would inherit that. Handlers run in the main
    thread only, so in other threads there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handled = [one for one in _ENDING if callable(signal.getsignal(one))]
    before = {one: signal.signal(one, lambda number, _: held.append(number)) for one in handled}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        if held:
            signal.raise_signal(held[0])
