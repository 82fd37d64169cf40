"""A counting semaphore that processes of one host share: how they wake each other and order their memory.

Stores to shared memory carry no order on ARM: "write the data, then set a flag" is a race there. Posting a
POSIX semaphore releases everything written before it, and taking it acquires that, on every machine; nothing
here or above reads what a peer wrote without having taken a post that the peer made afterwards.

CPython's own semaphore object (the one under ``multiprocessing``) is used directly, because a call of it costs
a quarter of one through ctypes.
"""

from __future__ import annotations

import _multiprocessing
import contextlib
import os
import time
from pathlib import Path

_COUNTING = 1
_MOST = 2**31 - 1
_SLICE_S = 0.5
"""Longest sleep in one go: the semaphore's own time-out follows the wall clock, which may jump."""
YIELDS = 100


class Bell:
    """One semaphore; its name is only needed until everybody has opened it."""

    def __init__(self, lock: _multiprocessing.SemLock, name: str) -> None:
        self.name = name
        self.ring = lock.release
        self.take = lock.acquire
        """``take(False)``: whether there was a post to take."""

    @classmethod
    def create(cls, name: str) -> Bell:
        return cls(_multiprocessing.SemLock(_COUNTING, 0, _MOST, name, False), name)

    @classmethod
    def open(cls, name: str) -> Bell:
        return cls(_multiprocessing.SemLock._rebuild(0, _COUNTING, _MOST, name), name)

    def unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            _multiprocessing.sem_unlink(self.name)

    def wait(self, deadline: float, spins: int) -> bool:
        """Takes a post, waiting for one until the deadline; false if none came.

        First it looks again and again (for peers that run on other cores), letting others run every few looks (for
        peers that need this one: whoever holds a core that its peer waits for waits for itself), then it sleeps.
        """
        take = self.take
        for _ in range(YIELDS):
            for _ in range(spins):
                if take(False):
                    return True
            if take(False):
                return True
            os.sched_yield()
        while (left := deadline - time.monotonic()) > 0:
            if take(True, min(left, _SLICE_S)):
                return True
        return bool(take(False))


def sweep() -> None:
    """Removes the names that processes left which were killed before their peers had opened their bells."""
    for left in Path("/dev/shm").glob("sem.hoop-*"):  # noqa: S108 - where Linux keeps them
        try:
            os.kill(int(left.name[len("sem.hoop-") :][:8], 16), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                left.unlink()
        except (ValueError, OverflowError, OSError):
            continue


def spins_for(ranks: int) -> int:
    """How often to look before each yield: not at all where ranks share cores anyway."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return 20 if ranks <= cores else 0
