"""Signals: blocks of code that a handler must not interrupt, and processes that end with their parent.

How SIGTERM makes a device leave a job: ``cli/device.py``, then ``servers/drains.py``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Sends this process the signal ``number`` when the thread that forked it ends. On Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def dying_with_parent(command: Sequence[str], number: signal.Signals) -> list[str]:
    """A command that on Linux gets the signal ``number`` when this process dies.

    The command begins as another one that arranges that: ``preexec_fn`` would run Python in a fork of this process,
    which may have threads.
    """
    if sys.platform != "linux":
        return list(command)
    program = (
        "import ctypes, os, sys\n"
        f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(number)})\n"  # exec keeps it
        "if os.getppid() != int(sys.argv[1]): sys.exit(143)\n"
        "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
        "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}')\n"
    )
    return [sys.executable, "-I", "-S", "-c", program, str(os.getpid()), *command]


@contextmanager
def defer_signals() -> Iterator[None]:
    """Run the Python handlers of SIGINT, SIGTERM and SIGHUP after the block instead of inside it.

    A handler that raises could otherwise do so at any line: after a process was started and before it was recorded, or
    inside gRPC's bookkeeping of a new call, for which closing the channel would then wait forever. The signals are not
    blocked, because a process that the block starts would inherit the mask. Python runs handlers in the main thread
    only, so in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[int] = []
    with_handler = [one for one in _TERMINATING if callable(signal.getsignal(one))]
    handlers = {one: signal.signal(one, lambda number, _: deferred.append(number)) for one in with_handler}
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        if deferred:
            signal.raise_signal(deferred[0])
