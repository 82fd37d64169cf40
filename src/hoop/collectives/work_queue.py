"""Runs the operations of one communicator one after the other, in the order in which they were called.

    caller ── try_acquire, run, release ──▶ done      (1) nothing is running or queued: no thread, no hand-over
    caller ── submit ──▶ the queue's thread           (2) asynchronous, or something is running or queued
    callback ── submit ──▶ the same thread, at once   (3) inside a callback of a finished job

The thread starts with the first submitted job. The callbacks of a finished job run on it too. They may submit
operations of the same communicator and wait for them: no other thread would run those, so ``submit`` does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from hoop.errors import DeadlineExceeded, PeerLost

CLOSING_SECONDS = 2.0


class PendingWork:
    """An operation that was started. The thread that ran it finishes it once."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._done = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []

    @property
    def done(self) -> bool:
        """Whether it has finished, with or without an error."""
        return self._done

    def finish(self, error: BaseException | None, result: Any = None) -> bool:
        """Sets the outcome and wakes the waiting threads; False if it had finished before."""
        with self._lock:
            if self._done:
                return False
            self._error, self._result = error, result
            self._done = True
            waiters = self._waiters
        for waiter in waiters:
            waiter.release()
        return True

    def _wait_done(self, seconds: float) -> bool:
        """Waits up to ``seconds`` (negative: for ever); returns whether it has finished."""
        if self._done:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self._done:
                return True
            self._waiters.append(waiter)
        return waiter.acquire(timeout=seconds) or self._done


class WorkHandle(PendingWork):
    """A started operation of a communicator."""

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the end and returns the operation's report or raises its error.

        After a DeadlineExceeded of the wait itself the operation goes on, and ``wait`` may be called again.
        """
        if not self._wait_done(-1 if timeout is None else timeout):
            raise DeadlineExceeded(
                f"{self.title} is not finished after the {timeout:g} s that wait was given; it goes on"
            )
        if self._error is not None:
            raise self._error
        return self._result


class WorkQueue:
    """A queue of jobs, the thread that runs them, and a lock that the thread running an operation holds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.jobs: deque[tuple[PendingWork, Callable[[], Any]]] = deque()
        """Those that are queued; callers only look whether there are any."""
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        """One item for each submitted job, and one for ``close``."""
        self.running = threading.Lock()
        """Held by the thread that runs an operation."""
        self.release = self.running.release
        """Ends what a successful ``try_acquire`` began. The lock's own method, to save a call."""
        self._lock = threading.Lock()
        self.closed = False
        self._thread: threading.Thread | None = None

    def try_acquire(self) -> bool:
        """Lets the caller run an operation in its own thread (1), if none is running or queued.

        A caller that gets True must call ``release``, or ``submit`` with ``acquired``.
        """
        return not (self.jobs or self.closed) and self.running.acquire(False)

    def submit(self, handle: PendingWork, job: Callable[[], Any], acquired: bool = False) -> None:
        """Queues a job and returns (2). The job's result or exception finishes ``handle``.

        ``acquired``: the caller holds the queue and cannot finish its operation. The job is the rest of it: it runs
        before all others, and the caller no longer holds the queue.
        """
        with self._lock:
            if self.closed and not acquired:
                raise PeerLost(f"{handle.title}: this communicator is closed")
            if acquired:
                self.jobs.appendleft((handle, job))
                self.running.release()
            else:
                self.jobs.append((handle, job))
            self._wakeups.put(None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        while threading.current_thread() is self._thread and not handle.done:  # (3)
            self._run_next()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the first job, on the queue's thread; returns False when the queue is closed and empty."""
        self._wakeups.get()
        # Before the job leaves the queue, so that no caller of ``try_acquire`` gets ahead of it.
        self.running.acquire()
        if not self.jobs:
            self.running.release()
            return False
        handle, job = self.jobs.popleft()
        error, result = None, None
        try:
            result = job()
        except Exception as raised:
            error = raised
        self.running.release()
        handle.finish(error, result)
        return True

    def close(self) -> None:
        """Refuses new jobs. Close the links first: then the queued jobs fail quickly."""
        with self._lock:
            self.closed = True
            self._wakeups.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(CLOSING_SECONDS)
