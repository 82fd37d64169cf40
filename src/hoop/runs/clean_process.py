"""A process that has not run a user's code, from which the processes of a training are forked.

    program ── exec, or fork ──▶ clean process: imports what devices need, once
    program ── a request: the run, and the job by value or by name ──▶ clean process ── fork ──▶ head
    head: loads the job. Did that start threads, or open a GPU?
        no    it forks the coordinator and the devices, which share the job and its data
        yes   it ends, and the clean process forks another one, whose devices load the job by themselves: each executes
              the code that the job imports; tensors and arrays are shared nevertheless

A fork of a process that has computed (OpenMP's threads), has used CUDA or gRPC, or has other threads hangs or fails.
``hoop.train`` starts the clean process by exec, with the same interpreter and ``sys.path``, while it checks the job. A
command of Hoop's is clean itself until it executes a job's file: before that it forks a clean process (``LoadWatch``).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hoop.errors import PeerLost
from hoop.launch.forked import HeadPipes, fork
from hoop.runs.training import Launch, Training

STAYS, LEAVES = b"+", b"-"
"""What a head writes after it has loaded the job: it forks the devices (STAYS), or another head must (LEAVES)."""
HEAD, OPTIMIZERS = b"h", b"o"
"""Requests: HEAD asks for a head, and passes descriptors of the run's file, of the two pipes, and of a third pipe
that the head keeps open; OPTIMIZERS asks for an import."""
END_S = 20.0
"""Seconds that the clean process has to end after the heads."""
ENDING_S = 0.5
"""Seconds for which a thread that has been joined may still be there."""
POLL_S = 0.005
_CODE = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from hoop.runs.clean_process import main; main()"
)
_THREADS, _DESCRIPTORS = "/proc/self/task", "/proc/self/fd"
_GPU = "/dev/nvidia"


# ---- whether a process can be forked


@dataclass(frozen=True)
class _Traces:
    """What code leaves in a process that makes it impossible to fork."""

    threads: int
    gpus: frozenset[str]

    @classmethod
    def here(cls) -> _Traces:
        if not os.path.isdir(_THREADS):
            return cls(threading.active_count(), frozenset())
        files = set[str]()
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                files.add(os.readlink(f"{_DESCRIPTORS}/{name}"))
        return cls(len(os.listdir(_THREADS)), frozenset(path for path in files if path.startswith(_GPU)))

    def have_grown(self) -> bool:
        """Whether this process has more threads, or GPUs, than these. Waits a little for threads that are ending."""
        deadline = time.monotonic() + ENDING_S
        while (now := self.here()).threads > self.threads and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return now.threads > self.threads or bool(now.gpus - self.gpus)


# ---- the program's side


@dataclass(frozen=True)
class _Program:
    """What code may find in the program's process, beside its objects."""

    path: list[str]
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    dtype: Any
    precision: str
    """Precision of products of float32 matrices."""
    random_states: tuple[Any, ...]
    """Of Python, NumPy and PyTorch: a function that makes the model may draw random numbers."""

    @classmethod
    def here(cls) -> _Program:
        import numpy as np
        import torch

        return cls(
            [folder for folder in sys.path if isinstance(folder, str)],
            list(getattr(sys, "argv", [])),
            os.getcwd(),
            dict(os.environ),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        )

    def adopt(self) -> None:
        """Gives this process the state of the program's."""
        import numpy as np
        import torch

        sys.path[:], sys.argv = self.path, self.arguments
        os.chdir(self.folder)
        os.environ.update(self.environment)
        for name in set(os.environ) - set(self.environment) - {"OMP_NUM_THREADS"}:
            del os.environ[name]
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        own, numpy, pytorch = self.random_states
        random.setstate(own)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)


@dataclass(frozen=True)
class _Request:
    """A head that the program wants."""

    launch: Launch
    save: Path | None
    processes: int
    program: _Program
    loaded: bool
    """Whether the program has loaded the job already, and found that it cannot be forked."""


class CleanProcess:
    """The program's handle of its clean process. Used by one thread."""

    def __init__(self, requests: socket.socket, end: Callable[[bool], object], loaded: bool) -> None:
        """``requests``: the program's end of a pair. ``end(now)`` waits for the process, and kills it first if ``now``.

        ``loaded``: the program has loaded the job itself, which has left traces.
        """
        self._requests: socket.socket | None = requests
        self._end, self._loaded, self._used = end, loaded, False

    @classmethod
    def execute(cls) -> CleanProcess:
        """Starts one by exec; returns at once."""
        if not sys.executable:
            raise PeerLost("sys.executable is empty: this interpreter does not know how to start another one")
        ours, theirs = socket.socketpair()
        path = json.dumps([folder for folder in sys.path if isinstance(folder, str)])
        flags = [flag for flag in subprocess._args_from_interpreter_flags() if flag != "-P"]  # type: ignore[attr-defined]
        command = [sys.executable, "-P", *flags, "-c", _CODE, path]
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=_standard_error(),
                env={"OMP_NUM_THREADS": "1", **os.environ},  # a device must own its cores
                start_new_session=True,  # Ctrl-C is for the program
            )

        def end(now: bool) -> None:
            try:
                process.wait(0 if now else END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        return cls(ours, end, loaded=False)

    @classmethod
    def fork(cls, loaded: bool) -> CleanProcess:
        """Forks one from this process, which must be clean. ``loaded``: this process will load the job itself."""
        ours, theirs = socket.socketpair()

        def work() -> None:
            os.setsid()
            _serve(theirs)

        pid = fork(work, {ours.fileno()})
        theirs.close()

        def end(now: bool) -> None:
            if now:
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

        return cls(ours, end, loaded)

    def import_optimizers(self) -> None:
        """Lets the process import what a ``torch.optim.Optimizer`` needs, which takes seconds; returns at once."""
        assert self._requests is not None, "it is not closed"
        with contextlib.suppress(OSError):  # ``start_head`` finds that it has died
            self._requests.send(OPTIMIZERS)

    def start_head(self, training: Training, processes: int, pipes: HeadPipes, others: set[int]) -> Callable[[], None]:
        """As ``HeadStarter`` in ``training.py``. ``others`` are not inherited: the program does not fork the head."""
        from hoop.runs.by_value import encode, write_shared

        assert self._requests is not None, "it is not closed"
        request = _Request(training.launch, training.save, processes, _Program.here(), self._loaded)
        file = write_shared(encode(request))
        mine, theirs = os.pipe()
        self._used = True
        try:
            socket.send_fds(self._requests, [HEAD], [file, pipes.events, pipes.control, theirs])
        except OSError:
            os.close(mine)
            raise PeerLost("the process that starts the devices died; what it printed is above") from None
        finally:
            os.close(file)
            os.close(theirs)

        def wait() -> None:
            with contextlib.suppress(OSError):
                os.read(mine, 1)  # returns when no head has the other end
            os.close(mine)

        return wait

    def close(self) -> None:
        """Ends the process, and a head that still loads its job."""
        if self._requests is not None:
            with contextlib.suppress(OSError):  # not close() alone: a child of the program may have a copy
                self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
            self._requests = None
            self._end(not self._used)


class LoadWatch:
    """For a command of Hoop's that loads a job: finds out whether devices can be forked from it after that."""

    def __init__(self, executes: bool) -> None:
        """``executes``: loading may execute a user's file. Then this forks a clean process beforehand, and keeps it."""
        self._clean = CleanProcess.fork(loaded=True) if executes else None
        self._before: _Traces | None = None

    def begin(self) -> None:
        """Called before the job is loaded, and after Hoop's own imports."""
        self._before = _Traces.here()

    def choose(self) -> CleanProcess | None:
        """Where to fork devices, after the job was loaded; None: from this process."""
        if self._clean is not None and self._before is not None and not self._before.have_grown():
            self.close()
        return self._clean

    def close(self) -> None:
        if self._clean is not None:
            self._clean.close()
            self._clean = None


def _standard_error() -> int:
    """What the processes of a training print goes there, as standard output is the program's."""
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()  # type: ignore[union-attr]
            os.fstat(descriptor)
            return descriptor
    return subprocess.DEVNULL


# ---- the clean process


def main() -> None:
    """The clean process that was started by exec: its standard input is the socket for requests."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the program
        signal.signal(number, signal.SIG_IGN)
    requests = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    _import()
    _serve(requests)


def _import(optimizers: bool = False) -> None:
    from hoop.runs.job_lookup import preload

    gc.disable()  # nearly all that imports make stays: collections take a seventh of the time
    preload(optimizers)
    importlib.import_module("hoop.runs.by_value")
    gc.freeze()
    gc.enable()


def _serve(requests: socket.socket) -> None:
    """Forks a head for each request, until the program closes its end."""
    heads: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 4)
        if not message:
            break
        _import(message == OPTIMIZERS)
        if message == OPTIMIZERS:
            continue
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        file, events, control, alive = descriptors
        heads += _fork_head(requests, file, HeadPipes(events, control, alive))
        for descriptor in descriptors:
            os.close(descriptor)
        heads = [pid for pid in heads if not os.waitpid(pid, os.WNOHANG)[0]]
    for pid in heads:
        os.waitpid(pid, 0)


def _fork_head(requests: socket.socket, file: int, pipes: HeadPipes) -> list[int]:
    """Forks a head, and another one if the first has loaded what cannot be forked; returns their pids."""
    pids: list[int] = []
    for load_on_device in (False, True):
        mine, theirs = os.pipe()
        pid = fork(partial(_lead, file, pipes, theirs, load_on_device), {mine, requests.fileno()})
        pids.append(pid)
        os.close(theirs)
        verdict = _verdict(mine, requests.fileno(), pipes.control)
        os.close(mine)
        if verdict is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if verdict != LEAVES:
            break
    return pids


def _verdict(pipe: int, requests: int, control: int) -> bytes | None:
    """What a head writes; empty if it failed, which the program learns from its pipe. None: the program left."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    poll.register(control, 0)
    poll.register(requests, 0)
    while True:
        ready = dict(poll.poll())
        if pipe in ready:
            return os.read(pipe, 1)
        if ready:
            return None


def _lead(file: int, pipes: HeadPipes, verdict: int, load_on_device: bool) -> None:
    """The work of a head."""
    from hoop.runs.by_value import decode, read_shared
    from hoop.runs.job_lookup import load_for_devices

    request: _Request = decode(read_shared(file))
    os.close(file)
    launch = request.launch
    on_device = load_on_device or request.loaded
    load_job = partial(load_for_devices, launch.settings.job, launch.job)

    def load() -> None:
        request.program.adopt()
        before = _Traces.here()
        if not on_device:
            load_job()
        leaves = before.have_grown()
        os.write(verdict, LEAVES if leaves else STAYS)
        if leaves:
            os._exit(0)
        os.close(verdict)

    Training(launch, request.save).lead(request.processes, pipes, load, load_job if on_device else None)
