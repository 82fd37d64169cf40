"""A counting semaphore that processes of one host share: how they wake each other and order their memory.

Stores to shared memory carry no order on ARM: "write the data, then set a flag" is a race there. Posting a
POSIX semaphore releases everything written before it, and taking it acquires that, on every machine; nothing
here or above reads what a peer wrote without having taken a post that the peer made afterwards.

CPython's own semaphore object (the one under ``multiprocessing``) is used directly, because a call of it costs
a quarter of one through ctypes.

With glibc the semaphore lies in the shared memory segment of the rank that made it (``sem_init``). It has no name, so
the kernel frees it with the last process that maps the segment, also after SIGKILL. Elsewhere (macOS has no
``sem_init``) it has a name, which is removed as soon as every peer has opened it.
"""

from __future__ import annotations

import _multiprocessing
import contextlib
import ctypes
import os
import time

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SEMAPHORE_BYTES = 64
"""The space of one semaphore in a segment: a cache line, so that two semaphores do not slow each other down."""
_COUNTING = 1
_MOST = 2**31 - 1
_SLICE_S = 0.5
"""Longest sleep in one go: the semaphore's own time-out follows the wall clock, which may jump."""
YIELDS = 100


def _in_segment() -> bool:
    """Whether semaphores can lie in a segment without a name.

    CPython closes every semaphore object with ``sem_close``. glibc refuses that for a semaphore that ``sem_open`` did
    not return, and nothing happens; other C libraries leave it undefined.
    """
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        return False


_LIBC = ctypes.CDLL(None, use_errno=True) if _in_segment() else None
"""None: semaphores have names."""


class Semaphore:
    """One semaphore, made by the rank that owns the segment and opened by a peer that maps it.

    ``place`` is its ``SEMAPHORE_BYTES`` in the segment; the object keeps the mapping alive. ``name`` is used only where
    semaphores cannot lie in a segment.
    """

    def __init__(self, lock: _multiprocessing.SemLock, name: str, place: Bytes | None) -> None:
        self.name = name
        self.ring = lock.release
        self.take = lock.acquire
        """``take(False)``: whether there was a post to take."""
        self._place = place

    @classmethod
    def create(cls, place: Bytes, name: str) -> Semaphore:
        if _LIBC is None:
            return cls(_multiprocessing.SemLock(_COUNTING, 0, _MOST, name, False), name, None)
        if _LIBC.sem_init(ctypes.c_void_p(_address(place)), 1, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"sem_init: {os.strerror(number)}")
        return cls.open(place, name)

    @classmethod
    def open(cls, place: Bytes, name: str) -> Semaphore:
        if _LIBC is None:
            return cls(_multiprocessing.SemLock._rebuild(0, _COUNTING, _MOST, name), name, None)
        return cls(_multiprocessing.SemLock._rebuild(_address(place), _COUNTING, _MOST, None), "", place)

    def unlink(self) -> None:
        """Removes its name, if it has one."""
        if self.name:
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


def _address(place: Bytes) -> int:
    if place.nbytes < SEMAPHORE_BYTES or place.ctypes.data % SEMAPHORE_BYTES:
        raise ValueError(
            f"a semaphore needs {SEMAPHORE_BYTES} aligned bytes, not {place.nbytes} at {place.ctypes.data:#x}"
        )
    return int(place.ctypes.data)


def spins_for(ranks: int) -> int:
    """How often to look before each yield: not at all where ranks share cores anyway."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return 20 if ranks <= cores else 0
