"""Forked children that never outlive their parent."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hoop.errors import FailedPrecondition
from hoop.memory.backing import default_directory

POLL_S = 0.01
"""A child's end makes no event that can be awaited on every platform."""
REAP_S = 0.1
"""How long at most a child that has ended stays a zombie."""


def check_forkable(threads: str = "/proc/self/task") -> None:
    """Beside a GPU, PyTorch computes gradients in threads of its own, which a forked process lacks for good."""
    for comm in Path(threads).glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if comm.read_text().startswith("pt_autograd"):
                raise FailedPrecondition(
                    "this process has computed gradients on a machine with a GPU, and devices forked from it cannot: "
                    "train before that, or in a process of its own (`hoop train FILE.py:JOB`)"
                )


def fork(work: Callable[[], None], close: set[int]) -> int:
    """A child that does this and nothing else; these descriptors of the parent's are closed in it."""
    check_forkable()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for descriptor in close:
            os.close(descriptor)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Children:
    """Each keeps the end ``held`` of a pipe and leaves when ``hold`` closes; one that does not is killed."""

    def __init__(self) -> None:
        self.held, self.hold = os.pipe()
        self._pids: list[int] = []
        """Of children that have not been waited for."""
        self._reaping = threading.Lock()

    def start(self, work: Callable[[], None], close: set[int]) -> None:
        self._pids.append(fork(work, close))

    def reap(self) -> bool:
        """Waits for the children that have ended, and removes what they left; whether any still lives."""
        with self._reaping:
            for pid in [pid for pid in self._pids if _ended(pid)]:
                self._pids.remove(pid)
                _forget(pid)
            return bool(self._pids)

    def end(self, patience: float) -> None:
        """Lets them leave, and waits for it; those that have not left in time are killed together."""
        os.close(self.hold)
        os.close(self.held)
        deadline = time.monotonic() + patience
        while self.reap():
            if time.monotonic() > deadline:
                self._kill()
                deadline = float("inf")
            time.sleep(POLL_S)

    def _kill(self) -> None:
        with self._reaping:  # a process that was waited for has given up its number
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)


class Family:
    """Children of several kinds, which leave one kind after the other; any thread may ask, and all of them wait."""

    def __init__(self, *kinds: Children) -> None:
        self._all = kinds
        self._kinds = list(kinds)
        self._ending = threading.Lock()

    def end(self, patience: float) -> None:
        with self._ending:
            while self._kinds:
                self._kinds.pop(0).end(patience)

    def reap(self) -> None:
        """Waits for children that end, while any lives, so that none stays a zombie. Runs in a thread of its own."""
        while [kind for kind in self._all if kind.reap()]:
            time.sleep(REAP_S)


def _ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _forget(pid: int) -> None:
    """One that was killed could not delete its memory (on Linux it has no name)."""
    for folder in {default_directory(0), default_directory(sys.maxsize)}:
        for left in folder.glob(f"hoop-{pid}-*.arena"):
            left.unlink(missing_ok=True)
