"""The ``Work`` objects that a process group's operations return, and their events in torch's profiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _autograd
from torch.distributed import Work

from hoop.collectives.work_queue import PendingWork
from hoop.errors import DeadlineExceeded
from hoop.torch_backend.dynamo import never_compiled
from hoop.torch_backend.errors import torch_error

NO_TIMEOUT = timedelta(0)
profiler_enabled = _autograd._profiler_enabled
ENDS_IN_ANY_THREAD = torch.__version__ >= "2.12"  # TorchVersion compares as a version, not as text
"""Whether an event may end in another thread than it began in; torch before 2.12 drops such an event."""


@never_compiled
class HoopWork(PendingWork, Work):
    """One operation, from its call to its end. The thread that ran it finishes it once.

    The future is created on the first ``get_future``: an ordinary ``all_reduce`` never needs one.
    """

    def __init__(self, title: str, results: Any = None, future_thread: bool = False) -> None:
        """``results``: the value of the future. ``future_thread``: complete the future on a new thread."""
        Work.__init__(self)
        PendingWork.__init__(self, title)
        self._future_thread = future_thread
        self._results = results
        self._completion: torch.futures.Future[None] | None = None
        """Future that ``finish`` completes; ``_future`` is derived from it."""
        self._future: torch.futures.Future[Any] | None = None
        self.on_finish: Callable[[], None] | None = None

    # ---- called by the thread that runs the operation

    def finish(self, error: BaseException | None = None, result: Any = -1) -> bool:
        """Wakes the waiting threads, then runs the callbacks of the future; False if it was finished before.

        ``result``: for a receive, the rank of the sender.
        """
        if self.on_finish is not None:
            self.on_finish()
        if not super().finish(error, result):
            return False
        with self._lock:
            completion = self._completion
        if completion is None:
            return True
        if self._future_thread:  # a callback may wait for the very thread that runs this
            threading.Thread(target=completion.set_result, args=(None,), name="hoop-future", daemon=True).start()
        else:
            completion.set_result(None)
        return True

    # ---- torch.distributed.Work

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds()
        if not self._wait_done(seconds if seconds > 0 else -1):
            raise torch_error(
                DeadlineExceeded,
                f"{self.title} is not finished after the timeout of {seconds:g} s that wait was given; it goes on",
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
            # An exception raised in ``then`` fails the future for C++ too. ``set_exception`` would hand DDP's reducer
            # the exception as if it were a tensor, and the reducer would crash.
            if self._done and self._error is None:
                self._future = torch.futures.Future()
                self._future.set_result(self.result())
                return self._future
            completion: torch.futures.Future[None] = torch.futures.Future()
            self._future = future = completion.then(self._result_or_raise)
            done = self._done
            self._completion = None if done else completion
        if done:
            completion.set_result(None)
        return future

    def _result_or_raise(self, completion: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self.result()


@never_compiled
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
        return futures.then(lambda collected: [tensor for future in collected.value() for tensor in future.value()])


@never_compiled
class FinishedWork(HoopWork):
    """A synchronous operation that has finished without an error. torch waits for it after every call."""

    def __init__(self) -> None:
        super().__init__("done")
        self.finish()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True


DONE = FinishedWork()
"""Returned by all synchronous operations that the caller's thread has run."""


def record_in_profiler(work: HoopWork, title: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Begins an event of torch's profiler, with the shapes of the tensors, that ends when the work is finished.

    With torch before 2.12 it returns the function that ends the event. The caller's thread must call it when the
    operation has finished or has been queued.
    """
    handle = _autograd._record_function_with_args_enter(f"hoop:{title}", *tensors)

    def end() -> None:
        _autograd._record_function_with_args_exit(handle)

    if not ENDS_IN_ANY_THREAD:
        return end
    work.on_finish = end
    return None
