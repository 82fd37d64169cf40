"""A counting semaphore in memory that processes of one host share: they wake each other and order their memory with it.

Stores to shared memory carry no order on ARM: "write the data, then set a flag" is a race there. Posting a POSIX
semaphore releases everything written before it, and acquiring it acquires that, on every machine. No code here or above
reads a peer's memory without having acquired a post that the peer made after it wrote.

The semaphore object of CPython (the one under ``multiprocessing``) is used directly, because a call of it costs a
quarter of a call through ctypes.

With glibc the semaphore is stored in the shared-memory segment of the rank that made it (``sem_init``). It has no name,
so the kernel frees it with the last process that maps the segment, also after SIGKILL. Elsewhere (macOS has no
``sem_init``) it has a name, which is removed as soon as every peer has opened it.
"""

from __future__ import annotations

import _multiprocessing
import contextlib
import ctypes
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

SEMAPHORE_BYTES = 64
"""The space of one semaphore in a segment: a cache line, so that two semaphores do not slow each other down."""
_COUNTING = 1
_MAX_VALUE = 2**31 - 1
_MAX_SLEEP_S = 0.5
"""Longest sleep in one call: the semaphore's own timeout follows the wall clock, which may jump."""
YIELDS = 100
"""How often a rank that has a core of its own yields it before it sleeps."""
YIELDS_ON_SHARED_CORES = 10
"""The same where ranks share cores: there a yield costs the rank that computes a change of context, again and again."""


def _has_unnamed_semaphores() -> bool:
    """Whether semaphores can be stored in a segment, without a name.

    CPython closes every semaphore object with ``sem_close``. glibc refuses that, without effect, for a semaphore that
    ``sem_open`` did not return; other C libraries leave it undefined.
    """
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):
        return False


_LIBC = ctypes.CDLL(None, use_errno=True) if _has_unnamed_semaphores() else None
"""None: semaphores have names."""


class Semaphore:
    """One semaphore, created by the rank that owns the segment and opened by a peer that maps it.

    ``place`` is its ``SEMAPHORE_BYTES`` in the segment; the object keeps the mapping alive. ``name`` is used only where
    semaphores cannot be stored in a segment.
    """

    def __init__(self, lock: _multiprocessing.SemLock, name: str, place: Bytes | None) -> None:
        self.name = name
        self.post = lock.release
        self.acquire = lock.acquire
        """``acquire(False)``: does not wait; whether there was a post to acquire."""
        self._place = place

    @classmethod
    def create(cls, place: Bytes, name: str) -> Semaphore:
        if _LIBC is None:
            return cls(_multiprocessing.SemLock(_COUNTING, 0, _MAX_VALUE, name, False), name, None)
        if _LIBC.sem_init(ctypes.c_void_p(_address(place)), 1, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"sem_init: {os.strerror(number)}")
        return cls.open(place, name)

    @classmethod
    def open(cls, place: Bytes, name: str) -> Semaphore:
        if _LIBC is None:
            return cls(_multiprocessing.SemLock._rebuild(0, _COUNTING, _MAX_VALUE, name), name, None)
        return cls(_multiprocessing.SemLock._rebuild(_address(place), _COUNTING, _MAX_VALUE, None), "", place)

    def unlink(self) -> None:
        """Removes its name, if it has one."""
        if self.name:
            with contextlib.suppress(FileNotFoundError):
                _multiprocessing.sem_unlink(self.name)

    def wait(self, deadline: float, spins: int, work: Callable[[], bool] | None = None) -> bool:
        """Acquires a post, waiting for one until the deadline; false if there was none.

        ``work``: does a short piece of other work, which is called until there is a post or it returns false: none is
        left.

        It first spins, for peers that run on other cores. After every ``spins`` attempts it yields its core, for peers
        that need it: a rank that spins on the core of the peer it waits for would delay itself. Then it sleeps: after
        fewer yields where ranks share cores (``spins`` is 0).
        """
        acquire = self.acquire
        while work is not None and work():
            if acquire(False):
                return True
        for _ in range(yields_before_sleep(spins)):
            for _ in range(spins):
                if acquire(False):
                    return True
            if acquire(False):
                return True
            os.sched_yield()
        while (left := deadline - time.monotonic()) > 0:
            if acquire(True, min(left, _MAX_SLEEP_S)):
                return True
        return bool(acquire(False))


def _address(place: Bytes) -> int:
    if place.nbytes < SEMAPHORE_BYTES or place.ctypes.data % SEMAPHORE_BYTES:
        raise ValueError(
            f"a semaphore needs {SEMAPHORE_BYTES} aligned bytes, not {place.nbytes} at {place.ctypes.data:#x}"
        )
    return int(place.ctypes.data)


def in_segment() -> bool:
    """Whether semaphores are stored in segments; then the native core can use them."""
    return _LIBC is not None


def yields_before_sleep(spins: int) -> int:
    """How often a rank yields its core before it sleeps, by how often it polls before each yield."""
    return YIELDS if spins else YIELDS_ON_SHARED_CORES


def spins_before_yield(ranks: int) -> int:
    """How often a rank polls before each yield: 0 where the ranks of this host share cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return 20 if ranks <= cores else 0
