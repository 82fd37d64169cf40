"""Starts processes whose SIGINT and SIGHUP handling does not depend on how the tests were started.

A shell without job control (``make test &`` in a script) starts processes with SIGINT ignored, ``nohup make test`` with
SIGHUP ignored. Children inherit that and Python keeps it, so a SIGINT or SIGHUP that a test sends would have no effect.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import preloaded


@contextmanager
def interrupts(ignored: bool = False) -> Iterator[None]:
    """Processes started in this context get SIGHUP's default, and SIGINT's default or, if ``ignored``, SIG_IGN."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGHUP, hangup)


def interruptible(command: list[str], real_start: bool = False, **options: Any) -> subprocess.Popen[Any]:
    """Starts a process that SIGINT ends by default; for every child to which a test sends SIGINT."""
    with interrupts():
        return (subprocess.Popen if real_start else preloaded.Popen)(command, **options)
