"""Processes that load batches of a dataset ahead of the training thread.

    training thread ── request(key, indices) ──▶ pipe of a worker ──▶ dataset.load
                    ◀── result(key) ── pipe ◀── batch, its tensors in shared memory

Workers are forked, so that a dataset that cannot be pickled works too, from a process that has no threads yet: gRPC's
would crash in them. They end with the process that made them.
"""

from __future__ import annotations

import os
import signal
import stat
import time
import traceback
from collections.abc import Hashable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing

from hoop.data.dataset import Indices
from hoop.data.structured import StructuredDataset
from hoop.errors import DeadlineExceeded, FailedPrecondition, UserError
from hoop.signals import end_with_parent

_STOP = None


class _Failure(NamedTuple):
    """A worker's answer instead of a batch: the traceback of the dataset's exception."""

    traceback: str


class WorkerPool:
    """The worker processes of one dataset. Used by one thread."""

    def __init__(self, data: StructuredDataset, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        self._next = 0
        self._worker_of: dict[Hashable, int] = {}
        self._done: dict[Hashable, Any] = {}
        for _ in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(data, there, here, os.getpid()), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def request(self, key: Hashable, indices: Indices, epoch: int, seed: int) -> None:
        """Asks a worker for a batch, unless it was asked for before."""
        if key in self._worker_of or key in self._done:
            return
        worker = self._worker_of[key] = self._next
        self._next = (self._next + 1) % len(self._pipes)
        try:
            self._pipes[worker].send((key, indices, epoch, seed))
        except OSError:
            raise self._ended(worker) from None

    def result(self, key: Hashable, deadline: float) -> Any:
        """The batch that was requested with this key; waits for it until ``deadline`` (``time.monotonic``)."""
        while key not in self._done:
            left = deadline - time.monotonic()
            if left <= 0 or not wait(self._pipes, left):
                raise DeadlineExceeded(f"num_workers: a worker has not loaded its batch {key} in time")
            self._receive()
        found = self._done.pop(key)
        if isinstance(found, _Failure):
            raise UserError(f"your code failed, in a worker that loads samples: {found.traceback}")
        return found

    def _receive(self) -> None:
        for pipe in wait(self._pipes, 0):
            assert isinstance(pipe, Connection)
            try:
                key, found = pipe.recv()
            except (EOFError, OSError):
                raise self._ended(self._pipes.index(pipe)) from None
            self._worker_of.pop(key, None)
            self._done[key] = found

    def _ended(self, worker: int) -> FailedPrecondition:
        process = self._processes[worker]
        process.join(1.0)
        return FailedPrecondition(
            f"num_workers: process {process.pid}, which loads samples, has ended (exit code {process.exitcode}; -9: it "
            "was killed, perhaps for lack of memory); use fewer workers, or num_workers=0"
        )

    def forget_except(self, keys: set[Hashable]) -> None:
        """Drops loaded batches that are not wanted any more."""
        for key in [one for one in self._done if one not in keys]:
            del self._done[key]

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(_STOP)
            except OSError:
                continue
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join(1.0)
        for pipe in self._pipes:
            pipe.close()


def _close_sockets(own: int) -> None:
    """Closes the sockets that a worker has inherited: open here, a link would not end when the device closes it.

    Other files may be the dataset's, and stay open.
    """
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number != own and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
        except OSError:
            continue


def _work(data: StructuredDataset, pipe: Connection, other_end: Connection, parent: int) -> None:
    """The loop of a worker."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    other_end.close()
    _close_sockets(pipe.fileno())
    torch.set_num_threads(1)
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        if request is _STOP:
            os._exit(0)
        key, indices, epoch, seed = request
        try:
            answer = data.load(indices, epoch=epoch, seed=seed)
        except Exception:
            answer = _Failure(traceback.format_exc())
        pipe.send((key, answer))
