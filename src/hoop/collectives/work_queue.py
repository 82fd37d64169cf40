"""One communicator's operations, one after the other, in the order in which they were called.

    caller ── enter, run, leave (1) ──▶ done     nothing is under way: no thread, no hand-over
    caller ── start ──▶ the lane's thread (2)     asynchronous, or something is under way

The thread starts with the first operation that needs it. What is done when an operation ends runs on it too, and may
start operations of the same communicator and wait for them: those run in place (3), since nobody else would.
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
    """One operation that was started: finished once, by the thread that ran it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._done = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    def finish(self, error: BaseException | None, result: Any = None) -> bool:
        """Ends it and wakes who waits; false if it had ended before."""
        with self._lock:
            if self._done:
                return False
            self._error, self._result = error, result
            self._done = True
            waiters = self._waiters
        for waiter in waiters:
            waiter.release()
        return True

    def _ended(self, seconds: float) -> bool:
        """Waits (for ever, if negative); whether it has ended."""
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
    """An operation of a communicator that was started."""

    def wait(self, timeout: float | None = None) -> Any:
        """What it came to, when it has ended: its report, or its error. On a time-out it goes on."""
        if not self._ended(-1 if timeout is None else timeout):
            raise DeadlineExceeded(
                f"{self.title} is not finished after the {timeout:g} s that wait was given; it goes on"
            )
        if self._error is not None:
            raise self._error
        return self._result


class WorkQueue:
    """A queue, and the thread that empties it. Whoever runs an operation holds the turn."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[tuple[PendingWork, Callable[[], Any]]] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        """Rung for every job, and when the lane closes."""
        self._turn = threading.Lock()
        self.leave = self._turn.release
        """For whoever has entered."""
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def enter(self) -> bool:
        """Takes the turn for the caller's thread if nothing is under way (1); whoever gets it must ``leave``."""
        return not (self._jobs or self._closed) and self._turn.acquire(False)

    def start(self, handle: PendingWork, job: Callable[[], Any], entered: bool = False) -> None:
        """Queues a job and returns (2); what it returns or raises ends the handle.

        Whoever has entered and cannot finish hands the rest over, ahead of all others, and has left then.
        """
        with self._lock:
            if self._closed and not entered:
                raise PeerLost(f"{handle.title}: this communicator is closed")
            if entered:
                self._jobs.appendleft((handle, job))
                self._turn.release()
            else:
                self._jobs.append((handle, job))
            self._bell.put(None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        while threading.current_thread() is self._thread and not handle.done:  # (3)
            self._run_next()

    def _serve(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the job at the head of the queue, on the lane's thread; false when the lane is closed and empty."""
        self._bell.get()
        self._turn.acquire()  # before the job leaves the queue: nobody may come between
        if not self._jobs:
            self._turn.release()
            return False
        handle, job = self._jobs.popleft()
        error, result = None, None
        try:
            result = job()
        except Exception as raised:
            error = raised
        self._turn.release()
        handle.finish(error, result)
        return True

    def close(self) -> None:
        """Takes no more jobs; those in the queue end with the links, which are closed before."""
        with self._lock:
            self._closed = True
            self._bell.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(CLOSING_SECONDS)
