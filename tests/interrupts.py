"""Starting processes whose SIGINT and SIGHUP do not depend on how the tests were started.

A shell without job control (``make test &`` in a script) starts them with SIGINT ignored, ``nohup make test`` with
SIGHUP ignored. A process inherits that, Python leaves it so, and the Ctrl-C or the hang-up of a test would do nothing.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts(ignored: bool = False) -> Iterator[None]:
    """Processes started meanwhile have SIGINT ignored, or its default, and SIGHUP's default, whatever this one has."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.signal(signal.SIGHUP, hangup)


def interruptible(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """A process that ends at SIGINT, if it does nothing else about it. For every child that a test sends SIGINT."""
    with interrupts():
        return subprocess.Popen(command, **options)
