"""A process group of PyTorch (NCCL, Gloo) between the ranks of a communicator, with Hoop's deadlines and errors.

A process group waits for a dead rank in code of its own, up to a timeout of minutes, or without one. So this rank never
waits inside the group. It starts a collective, polls whether it is done, and between polls looks at the deadline and at
the communicator's endpoint, which learns from its links or from the coordinator that a rank is lost. After any failure
the group is aborted: its kernels end, and the GPU can be used again. Another group is made in the next generation.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

from hoop.engine.stage.accelerator import DEVICE_ERRORS
from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.texts import printable
from hoop.transport.base import Endpoint

POLL_S = 5e-5
"""Seconds between two checks whether a collective has ended."""
WATCH_S = 0.01
"""Seconds between two checks of the endpoint meanwhile, which notices a lost peer."""
_MAX_TEXT = 400


class Work(Protocol):
    """A collective under way, as PyTorch's ``Work``."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...


class Backend(Protocol):
    """What is used of PyTorch's ``Backend``, which ``ProcessGroupNCCL`` and ``ProcessGroupGloo`` are."""

    def alltoall_base(self, output: Tensor, source: Tensor, received: list[int], sent: list[int], /) -> Any: ...

    def _allgather_base(self, output: Tensor, source: Tensor, /) -> Any: ...

    def abort(self) -> None: ...


class DeviceGroup:
    """One rank's process group. One thread uses it; after an error it can only be aborted."""

    def __init__(self, backend: Backend, endpoint: Endpoint, device: torch.device) -> None:
        """``endpoint``: of a communicator with the same ranks. ``device``: of the tensors."""
        self._backend, self._endpoint, self._device = backend, endpoint, device

    def start_all_to_all(self, output: Tensor, source: Tensor, received: list[int], sent: list[int]) -> Work:
        """Start to send ``sent[i]`` elements of ``source`` to rank i, and to receive ``received[i]`` from it."""
        work: Work = self._backend.alltoall_base(output, source, received, sent)
        return work

    def start_all_gather(self, output: Tensor, source: Tensor) -> Work:
        """Start to gather the vectors ``source`` of all ranks, which have equal lengths, in ``output``."""
        work: Work = self._backend._allgather_base(output, source)
        return work

    def run(self, start: Callable[[], list[Work]], deadline: float) -> None:
        """Call ``start``, which starts collectives, and wait until they are done.

        Raises a ``PeerError``, or the error of the endpoint; the group is aborted then.
        """
        try:
            for work in start():
                self._wait(work.is_completed, deadline)
                work.wait()  # does not wait any more: it raises the collective's error, and orders the streams
        except DEVICE_ERRORS:
            self.abort()
            raise
        except RuntimeError as error:
            self.abort()
            raise self._peer_error(error) from error
        except HoopError:
            self.abort()
            raise

    def run_on_thread(self, function: Callable[[], None], deadline: float) -> str:
        """Call a function that may block on another thread, and wait for it; returns why it failed, or "".

        At the deadline the thread is left behind: NCCL cannot be interrupted while it connects. Raises only the error
        of the endpoint. After a failure the group is aborted.
        """
        return self.wait_for_thread(self.start_on_thread(function), deadline)

    def start_on_thread(self, function: Callable[[], None]) -> Future[None]:
        """Call a function that may block on a thread that ends with the process."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                    function()
                future.set_result(None)
            except BaseException as error:  # the waiting thread handles it
                future.set_exception(error)

        threading.Thread(target=run, name="hoop-device-group", daemon=True).start()
        return future

    def wait_for_thread(self, future: Future[None], deadline: float) -> str:
        """``run_on_thread``, of a function that was started."""
        try:
            self._wait(future.done, deadline)
            future.result()
        except DeadlineExceeded:
            self.abort()
            return "it did not connect in time"
        except DEVICE_ERRORS:
            self.abort()
            raise
        except RuntimeError as error:
            self.abort()
            return _text(error)
        except HoopError:
            self.abort()
            raise
        return ""

    def _wait(self, done: Callable[[], bool], deadline: float) -> None:
        watch_at = 0.0
        while not done():
            now = time.monotonic()
            if now >= watch_at:
                self._endpoint.raise_failure()
                watch_at = now + WATCH_S
            if now >= deadline:
                raise DeadlineExceeded(
                    f"rank {self._endpoint.rank}: the exchange between {self._endpoint.size} GPUs passed its deadline "
                    f"(communicator {self._endpoint.communicator}, generation {self._endpoint.generation})"
                )
            time.sleep(POLL_S)

    def _peer_error(self, error: RuntimeError) -> HoopError:
        """Why a collective failed: the endpoint's error, if it has one, for it names the rank."""
        try:
            self._endpoint.raise_failure()
        except HoopError as failure:
            return failure
        return PeerLost(f"rank {self._endpoint.rank}: the exchange between GPUs failed: {_text(error)}")

    def abort(self) -> None:
        """End the collectives under way and close the connections; may be called again."""
        with contextlib.suppress(RuntimeError):  # a group that never connected, or was aborted
            self._backend.abort()


def _text(error: Exception) -> str:
    return printable(" ".join(str(error).split()))[:_MAX_TEXT]
