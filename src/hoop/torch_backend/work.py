"""What an operation returns: torch's Work, in Python."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from hoop.collectives.work_queue import PendingWork
from hoop.errors import DeadlineExceeded
from hoop.torch_backend.errors import for_torch

NO_TIMEOUT = timedelta(0)


class HoopWork(PendingWork, Work):
    """One operation, from its call to its end; finished once, by whichever thread ran it.

    The future is made when someone asks for it: an ordinary ``all_reduce`` never does.
    """

    def __init__(self, title: str, results: Any = None, apart: bool = False) -> None:
        Work.__init__(self)
        PendingWork.__init__(self, title)
        self._apart = apart
        self._results = results
        self._end: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self.on_end: Callable[[], None] | None = None

    # ---- from the thread that runs it

    def finish(self, error: BaseException | None = None, result: Any = -1) -> bool:
        """Ends it, with the rank that a message came from: wakes who waits, then runs what was hung on the future."""
        if self.on_end is not None:
            self.on_end()
        if not super().finish(error, result):
            return False
        with self._lock:
            end = self._end
        if end is None:
            return True
        if self._apart:  # what hangs on it may wait for the very thread that ends it
            threading.Thread(target=end.set_result, args=(None,), name="hoop-future", daemon=True).start()
        else:
            end.set_result(None)
        return True

    # ---- torch's side

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds()
        if not self._ended(seconds if seconds > 0 else -1):
            raise for_torch(
                DeadlineExceeded,
                f"{self.title} is not finished after the timeout of {seconds:g} s that wait was given; "
                "it goes on",
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        results = self._results
        if isinstance(results, torch.Tensor):
            return [results]
        return list(results) if results is not None else []

    def source_rank(self) -> int:
        return self._result if isinstance(self._result, int) else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            # An exception raised in ``then`` fails the future for C++ too; ``set_exception`` would hand DDP's reducer
            # the exception as if it were a tensor, and it crashes.
            if self._done and self._error is None:
                self._future = torch.futures.Future()
                self._future.set_result(self.result())
                return self._future
            end: torch.futures.Future[None] = torch.futures.Future()
            self._future = future = end.then(self._outcome)
            done = self._done
            self._end = None if done else end
        if done:
            end.set_result(None)
        return future

    def _outcome(self, end: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self.result()


class CoalescedWork(HoopWork):
    """Several works as one."""

    def __init__(self, title: str, works: Sequence[Work]) -> None:
        super().__init__(title)
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        self.finish()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all_of_them: [one for each in all_of_them.value() for one in each.value()])


DONE = HoopWork("done")
"""For whoever waited already: torch then only asks whether it is over."""
DONE.finish()
