"""One group's operations, one after the other, in the order in which they were called.

    caller ── enter, run, leave (1) ──▶ done     nothing is under way: no thread, no hand-over
    caller ── start ──▶ the lane's thread (2)     asynchronous, or something is under way

The thread starts with the first operation that needs it. What hangs on an operation's future runs on it too, and
may start operations of the same group and wait for them: those run in place (3), since nobody else would.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hoop.torch_backend.work import HoopWork

CLOSING_SECONDS = 2.0


class Lane:
    """A queue, and the thread that empties it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[HoopWork, Callable[[], None]]] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def enter(self) -> bool:
        """Takes the lane for the caller's thread if nothing is under way (1); whoever gets it must ``leave``."""
        with self._lock:
            if self._busy or self._jobs or self._closed:
                return False
            self._busy = True
            return True

    def leave(self) -> None:
        with self._lock:
            self._busy = False
            if self._jobs:
                self._changed.notify()

    def start(self, work: HoopWork, job: Callable[[], None]) -> None:
        """Queues a job and returns (2)."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{work.title}: this process group is destroyed")
            self._jobs.append((work, job))
            on_lane = threading.current_thread() is self._thread
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            elif not self._busy:
                self._changed.notify()
        while on_lane and not work.is_completed():  # (3)
            self._run_next()

    def _serve(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the job at the head of the queue, on the lane's thread; false when the lane is closed and empty."""
        with self._lock:
            self._changed.wait_for(lambda: not self._busy and (self._jobs or self._closed))
            if not self._jobs:
                return False
            work, job = self._jobs.popleft()
            self._busy = True
        error: Exception | None = None
        try:
            job()
        except Exception as raised:
            error = raised
        with self._lock:
            self._busy = False
        work.finish(error)
        return True

    def close(self) -> None:
        """Takes no more jobs; those in the queue end with the links, which are closed before."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(CLOSING_SECONDS)
