"""A process that has not run a user's code, from which the processes of a training are forked.

    program ── exec, or fork ──▶ clean process: imports what devices need, once
    program ── a request: the run, and the job by value or by name ──▶ clean process ── fork ──▶ head
    head: loads the job. Did that start threads, or open a GPU?
        no    it forks the coordinator and the devices, which share the job and its data
        yes   it ends, and the clean process forks another one, whose devices load the job by themselves: each executes
              the code that the job imports; tensors and arrays are shared nevertheless

A fork of a process that has computed (OpenMP's threads), has used CUDA or gRPC, or has other threads hangs or fails.
``hoop.train`` starts the clean process by exec, with the same interpreter and ``sys.path``, before it imports anything
else, and keeps it for the program's next training (``lent_process``): only heads see a job. A command of Hoop's is
clean itself until it executes a job's file: before that it forks a clean process (``LoadWatch``).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoop.errors import PeerLost

# A program must have started its clean process before it imports what both need.
if TYPE_CHECKING:
    from hoop.launch.forked import HeadPipes
    from hoop.runs.training import Launch, Training

STAYS, LEAVES = b"+", b"-"
"""What a head writes after it has loaded the job: it forks the devices (STAYS), or another head must (LEAVES)."""
HEAD, OPTIMIZERS = b"h", b"o"
"""Requests: HEAD asks for a head, and passes descriptors of the run's file, of the two pipes, of a third pipe that the
head keeps open, and of the program's standard error; OPTIMIZERS asks for an import."""
END_S = 20.0
"""Seconds that the clean process, and heads that still run then, have to end before they are killed."""
PROGRAM_S = 1.0
"""Seconds between two checks whether the program has died. Its end of the socket may live on in a child of it."""
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
        importlib.invalidate_caches()  # folders may have changed since this process has seen them
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
class _Inherited:
    """What a process has from the one that started it, and what imports have read of that.

    Only a clean process that has the same as the program now is used again. The rest of the program's state comes with
    each request: ``_Program``.
    """

    environment: dict[str, str]
    cores: frozenset[int]
    limits: tuple[tuple[int, int], ...]
    user: tuple[str, ...]
    """User, groups and umask, as Linux shows them."""

    @classmethod
    def here(cls) -> _Inherited:
        status: list[str] = []
        with contextlib.suppress(OSError):
            status = Path("/proc/self/status").read_text(errors="replace").splitlines()
        return cls(
            {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
            frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()),
            tuple(resource.getrlimit(getattr(resource, name)) for name in _LIMITS),
            tuple(line for line in status if line.startswith(("Uid:", "Gid:", "Groups:", "Umask:"))),
        )


_NOT_INHERITED = {"PYTEST_CURRENT_TEST"}
"""Variables that change without meaning anything: pytest sets this one before each test."""
_LIMITS = sorted(name for name in vars(resource) if name.startswith("RLIMIT_"))


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
    """The program's handle of its clean process. Used by one thread at a time."""

    def __init__(self, pid: int, requests: socket.socket, end: Callable[[bool], object], loaded: bool) -> None:
        """``requests``: the program's end of a pair. ``end(now)`` waits for the process, and kills it first if ``now``.

        ``loaded``: the program has loaded the job itself, which has left traces.
        """
        self.pid = pid
        self._requests: socket.socket | None = requests
        self._end, self._loaded = end, loaded
        self._heads = 0
        """Number of heads that have not ended."""
        self.note_inherited()
        _handles.add(self)

    @classmethod
    def execute(cls) -> CleanProcess:
        """Starts one by exec; returns at once."""
        if not sys.executable:
            raise PeerLost("sys.executable is empty: this interpreter does not know how to start another one")
        ours, theirs = socket.socketpair()
        path = json.dumps([folder for folder in sys.path if isinstance(folder, str)])
        flags = [flag for flag in subprocess._args_from_interpreter_flags() if flag != "-P"]  # type: ignore[attr-defined]
        command = [sys.executable, "-P", *flags, "-c", _CODE, path]
        with theirs, _standard_error() as errors:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=errors,
                stderr=errors,
                env={"OMP_NUM_THREADS": "1", **os.environ},  # a device must own its cores
                start_new_session=True,  # Ctrl-C is for the program
            )

        def end(now: bool) -> None:
            try:
                process.wait(0 if now else 2 * END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        return cls(process.pid, ours, end, loaded=False)

    @classmethod
    def fork(cls, loaded: bool) -> CleanProcess:
        """Forks one from this process, which must be clean. ``loaded``: this process will load the job itself."""
        from hoop.launch.forked import fork, wait_for_child

        ours, theirs = socket.socketpair()

        def work() -> None:
            os.setsid()
            _serve(theirs)

        pid = fork(work, {ours.fileno()})
        theirs.close()
        return cls(pid, ours, lambda now: wait_for_child(pid, 0 if now else 2 * END_S), loaded)

    def note_inherited(self) -> None:
        """Notes what the program has now: the process has the same."""
        self._inherited = _Inherited.here()

    def can_be_used_again(self) -> bool:
        """Whether the process is alive, has no head, and has what a new one would inherit from the program now."""
        if self._requests is None or self._heads or self._inherited != _Inherited.here():
            return False
        poll = select.poll()
        poll.register(self._requests, 0)
        return not poll.poll(0)

    def import_optimizers(self) -> None:
        """Lets the process import what a ``torch.optim.Optimizer`` needs, which takes seconds; returns at once."""
        assert self._requests is not None, "it is not closed"
        with contextlib.suppress(OSError):  # ``start_head`` finds that it has died
            self._requests.send(OPTIMIZERS)

    def start_head(self, training: Training, processes: int, pipes: HeadPipes, others: set[int]) -> Callable[[], None]:
        """As ``HeadStarter`` in ``training.py``. ``others`` are not inherited: the program does not fork the head."""
        from hoop.launch.forked import HEAD_END_S
        from hoop.runs.by_value import encode, write_shared

        assert self._requests is not None, "it is not closed"
        request = _Request(training.launch, training.save, processes, _Program.here(), self._loaded)
        file = write_shared(encode(request))
        mine, theirs = os.pipe()
        try:
            with _standard_error() as errors:
                socket.send_fds(self._requests, [HEAD], [file, pipes.events, pipes.control, theirs, errors])
        except OSError:
            os.close(mine)
            raise PeerLost("the process that starts the devices died; what it printed is above") from None
        finally:
            os.close(file)
            os.close(theirs)
        self._heads += 1

        def wait() -> None:
            poll = select.poll()
            poll.register(mine, 0)  # an event when no head has the other end
            ended = poll.poll(1e3 * HEAD_END_S)
            os.close(mine)
            if ended:
                self._heads -= 1
                return
            self.close()
            text = (
                f"the process that leads the devices had not ended {HEAD_END_S:g} s after the training; it was killed"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)

        return wait

    def close(self) -> None:
        """Ends the process, and a head that still loads its job."""
        if self._requests is not None:
            with contextlib.suppress(OSError):  # not close() alone: a child of the program may have a copy
                self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
            self._requests = None
            self._end(not self._heads)

    def fileno(self) -> int:
        """The descriptor of the program's end of the socket; -1: it is closed."""
        return -1 if self._requests is None else self._requests.fileno()

    def forget(self) -> None:
        """In a child that the program has forked: the process is the program's."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None


_handles: weakref.WeakSet[CleanProcess] = weakref.WeakSet()
_idle: list[CleanProcess] = []
"""The clean process that waits for this program's next training, if there is one."""


@contextlib.contextmanager
def lent_process() -> Iterator[CleanProcess]:
    """A clean process for one training: that of the last one if it can be used again, else a new one.

    Afterwards it is kept, without anything of the job, until the program ends.
    """
    process = _taken() or CleanProcess.execute()
    try:
        yield process
    finally:
        process.note_inherited()  # imports that a training needs set variables, in both processes
        _idle.append(process)
        while len(_idle) > 1:  # another thread trains
            _idle.pop(0).close()


def _taken() -> CleanProcess | None:
    while _idle:
        with contextlib.suppress(IndexError):  # another thread was faster
            process = _idle.pop()
            if process.can_be_used_again():
                return process
            process.close()
    return None


def idle_process() -> CleanProcess | None:
    """The clean process that waits for this program's next training."""
    return _idle[-1] if _idle else None


def _end_idle() -> None:
    while _idle:
        _idle.pop().close()


def _forget_all() -> None:
    _idle.clear()
    for handle in list(_handles):
        handle.forget()


atexit.register(_end_idle)
os.register_at_fork(after_in_child=_forget_all)


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


@contextlib.contextmanager
def _standard_error() -> Iterator[int]:
    """A descriptor for what the processes of a training print: standard output is the program's."""
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = os.dup(stream.fileno())  # type: ignore[union-attr]
            break
    else:
        descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


# ---- the clean process


def main() -> None:
    """The clean process that was started by exec: its standard input is the socket for requests."""
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the program
        signal.signal(number, signal.SIG_IGN)
    requests = socket.socket(fileno=os.dup(0))
    _leave(0)
    _import()
    _leave(1, 2)
    _serve(requests)
    os._exit(0)  # at once: the program may wait


def _leave(*streams: int) -> None:
    """Closes standard streams: what the program has there may be waiting for the end of all who have it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)
    os.close(nothing)


def _import(optimizers: bool = False) -> None:
    from hoop.runs.job_lookup import preload

    gc.disable()  # nearly all that imports make stays: collections take a seventh of the time
    preload(optimizers)
    importlib.import_module("hoop.runs.by_value")
    importlib.import_module("hoop.runs.training")
    gc.freeze()
    gc.enable()


def _serve(requests: socket.socket) -> None:
    """Forks a head for each request, until the program closes its end, or dies."""
    program = os.getppid()
    heads: list[int] = []
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        heads = [pid for pid in heads if not os.waitpid(pid, os.WNOHANG)[0]]
        if not poll.poll(1e3 * PROGRAM_S):
            if os.getppid() != program:
                break
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 5)
        if not message:
            break
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if descriptors:
            os.dup2(descriptors[-1], 1)
            os.dup2(descriptors[-1], 2)
        _import(message == OPTIMIZERS)
        if message == HEAD:
            heads += _fork_head(requests, *descriptors[:-1])
            _leave(1, 2)
        for descriptor in descriptors:
            os.close(descriptor)
    _end_heads(heads)


def _end_heads(heads: list[int]) -> None:
    from hoop.launch.forked import wait_for_child

    deadline = time.monotonic() + END_S
    for pid in heads:
        wait_for_child(pid, max(0.0, deadline - time.monotonic()))


def _fork_head(requests: socket.socket, file: int, events: int, control: int, alive: int) -> list[int]:
    """Forks a head, and another one if the first has loaded what cannot be forked; returns their pids."""
    from hoop.launch.forked import HeadPipes, fork

    pipes = HeadPipes(events, control, alive)
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
    from hoop.runs.training import Training

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
