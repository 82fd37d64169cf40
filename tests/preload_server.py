"""Forks ``python …`` from a process that has imported Hoop, gRPC and PyTorch already. Linux only.

    pytest ── request ──▶ this process ── fork ──▶ the command ("started PID")
    pytest ◀── status pipe: "ended STATUS" ── this process, which waits for the command

``tests/preloaded.py`` starts it, one for each pytest process. A request is one message of JSON, with the descriptors of
the command's standard streams and of its status pipe. Several processes may send (``tests/preload_client.py``). At the
end of the control socket this process exits. It never opens gRPC, runs PyTorch or starts a thread: none of them
survives a fork.

A training in a forked command measures briefly before its first step (``measure_briefly``), unless the variable
``HOOP_TEST_MEASURES`` is ``fully``.

``hoop up``, ``hoop run`` and others (``STARTERS``), and programs that call ``hoop.train``, start their processes in the
same way: from a fork of this process that was made before they opened gRPC.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import itertools
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, TextIO

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
LEFT_OUT = ("hoop.__main__", "hoop.lab.", "hoop.torch_backend")
"""Modules that act when they are imported, or that few commands need."""
LATE = (
    "grpc.aio",
    "grpc.experimental",
    "numpy.ma",
    "numpy.random",
    "pydantic.type_adapter",
    "resource",
    "torch._dynamo",
    "typer._adapters",
)
"""What packages import at the first use, where they have it."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REQUEST_BYTES = 1 << 20
MEASURES = "HOOP_TEST_MEASURES"
"""An environment variable. A command for which it is ``fully`` measures as one that Python started."""
CLONE_NEWNET = 0x40000000
NETNS = ["ip", "netns", "exec"]
"""A command in a network namespace begins so; its name follows."""
STARTERS = (["-m", "hoop", "up"], ["-m", "hoop", "chaos"], ["-m", "hoop", "run"])
"""Commands that start Hoop processes."""
DIES_WITH_PARENT = ["-I", "-S", "-c"]
"""A rank of ``hoop run`` begins so, after Python: then a program that lets the rank die with its parent, the pid of
that parent, and the command of the rank."""
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "GRPC_", "TORCH", "CUDA_", "LANG", "LC_", "HOOP_LOG")
"""Beginnings of the names of environment variables that are read by Python's start or by an import."""
READ_LATER = ("PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_DETERMINISTIC")
"""Those that need no real start: a forked command obeys the first; PyTorch's compiler and Hoop's engine set the others
in their own process, whatever it inherited."""


# ---- requests


def send(
    control: socket.socket,
    words: list[str],
    cwd: Any,
    environment: Mapping[Any, Any] | None,
    start_new_session: bool,
    streams: list[int],
    dies_with: int = 0,
) -> int:
    """Requests a command that inherits from this process as a child does; returns the read end of its status pipe.

    ``words``: what ``forkable`` accepts. ``dies_with``: the pid of its parent, if it is to be killed when that dies.
    """
    given = os.environ if environment is None else environment
    netns = words[3] if words[:3] == NETNS else ""
    request = {
        "arguments": _python_arguments(words),
        "netns": netns,
        "cwd": os.path.abspath(os.fsdecode(cwd or ".")),
        "env": {os.fsdecode(name): os.fsdecode(text) for name, text in given.items()},
        "start_new_session": start_new_session,
        "dies_with": dies_with,
        "ignored": [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
    }
    status, theirs = os.pipe()
    try:
        socket.send_fds(control, [json.dumps(request).encode()], [*streams, theirs])
    finally:
        os.close(theirs)
    return status


def _python_arguments(words: list[str]) -> list[str]:
    words = words[4:] if words[:3] == NETNS else words
    return list(itertools.dropwhile({"-P", "-B"}.__contains__, words[1:]))


def forkable(words: list[str]) -> bool:
    """Whether it is a command of this Python: ``-m hoop``, ``-c CODE`` or ``FILE.py``, possibly in a namespace."""
    program = words[4:5] if words[:3] == NETNS else words[:1]
    first, second, *_ = *_python_arguments(words), "", ""
    return program == [sys.executable] and (
        (first, second) == ("-m", "hoop") or first == "-c" or (first.endswith(".py") and first[0] != "-")
    )


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be the server's."""
    return {
        name: text for name, text in environment.items() if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }


def report(status: int) -> str:
    """The next line of a status pipe."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(status, 1)
        if not data:
            raise RuntimeError("the server that forks commands has ended: see tests/preload_server.py")
        line += data
    return line.decode().strip()


def started(status: int) -> int:
    """Waits until the command has what it inherits; returns its pid."""
    kind, _, number = report(status).partition(" ")
    if kind != "started":
        raise RuntimeError(f"a command did not start; its status: {number}")
    return int(number)


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors: stdin, stdout, stderr, status pipe. None at the end."""
    text, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, 4)
    return (json.loads(text), descriptors) if text else None


def control_sockets() -> tuple[socket.socket, socket.socket]:
    """A pair that keeps the messages of several senders apart."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


# ---- the server


def load() -> None:
    """Imports what commands import."""
    gc.disable()  # nearly all that imports make stays: collections took a seventh of the time
    os.environ["GRPC_VERBOSITY"] = "NONE"  # as hoop.cli.main, before gRPC reads it
    import hoop

    for module in pkgutil.walk_packages(hoop.__path__, "hoop."):
        if not module.name.startswith(LEFT_OUT):
            with contextlib.suppress(ImportError):  # of an extra that is not installed: commands say so themselves
                importlib.import_module(module.name)
    for name in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.path.append(os.path.join(os.path.dirname(__file__), "engine"))
    from forked_ranks import measure_briefly

    sys.path.pop()
    measure_briefly()
    hoop.environment.versions()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # PyTorch's take each command 0.06 s, to undo what ends with the process
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("an import has started a thread: no process can be forked from here")
    gc.collect()
    gc.freeze()
    gc.enable()


def serve(control: socket.socket, reparent: bool = False) -> list[str] | None:
    """Forks children. Returns in a child, with the arguments of its command; in this process None, at the end.

    ``reparent``: they become children of this process's parent, which waits for them itself.
    """
    poll, children = select.poll(), dict[int, tuple[int, int]]()
    poll.register(control, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                pid, status = children.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                _, ended = os.waitpid(pid, 0)
                if not reparent:
                    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
                        os.write(status, f"ended {ended}\n".encode())
                os.close(status)
            elif (received := receive(control)) is None:
                return None
            else:
                request, descriptors = received
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the child has its own handlers
                if not (pid := os.fork()):
                    if reparent:
                        _leave_parent()
                    control.detach()
                    return become(request, descriptors)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                for descriptor in descriptors[:3]:
                    os.close(descriptor)
                process = os.pidfd_open(pid)
                children[process] = pid, descriptors[3]
                poll.register(process, select.POLLIN)


def _leave_parent() -> None:
    """Goes on in a child whose parent exits; Linux gives it the nearest ancestor that adopts orphans."""
    before = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == before:
        time.sleep(0.001)


# ---- a command


def become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Gives this forked process what the command would have inherited; returns the arguments of its Python."""
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["env"].get(MEASURES) == "fully":
        from unittest import mock

        mock.patch.stopall()
    tempfile.tempdir = None
    for number in SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    *streams, status = descriptors
    for stream, descriptor in enumerate(streams):
        os.dup2(descriptor, stream)
    if request["dies_with"]:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != request["dies_with"]:
            os._exit(128 + signal.SIGTERM)
    if request["env"].get("PYTHONUNBUFFERED"):
        sys.stdout, sys.stderr = _unbuffered(sys.stdout), _unbuffered(sys.stderr)
    os.write(status, f"started {os.getpid()}\n".encode())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if request["netns"]:
        _enter(request["netns"])
    arguments: list[str] = request["arguments"]
    calls = arguments[0] != "-m" and not any("clean_process" in one for one in arguments)  # hoop.train, perhaps
    if arguments[:3] in STARTERS or calls:
        _fork_devices()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    return arguments


def _unbuffered(stream: TextIO) -> TextIO:
    raw = io.FileIO(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)


def _enter(netns: str) -> None:
    with open(f"/run/netns/{netns}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns: network namespace {netns}")


def _fork_devices() -> None:
    """Forks a server for this command: the Hoop processes that it starts are forked there, and are its children."""
    ours, theirs = control_sockets()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not (server := os.fork()):
        ours.close()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # else it would keep the command's pipes open
            os.dup2(nothing, stream)
        arguments = serve(theirs, reparent=True)
        if arguments is not None:
            run(arguments)
        os._exit(0)
    theirs.close()
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute_child(self: Any, args: Any, *others: Any) -> None:
        words, dies_with = list(map(os.fsdecode, args)) if isinstance(args, list | tuple) else [], 0
        if words[1:4] == DIES_WITH_PARENT and len(words) > 6:
            words, dies_with = words[6:], int(words[5])
        _, _, _, _, cwd, environment, _, _, _, *pipes, _, _, _, _, _, start_new_session, _ = others
        if not forkable(words) or read_at_import(environment or os.environ) != read_at_import(os.environ):
            start(self, args, *others)
            return
        status = send(ours, words, cwd, environment, start_new_session, inherited(pipes), dies_with)
        self._close_pipe_fds(*pipes)
        self.pid = started(status)
        self._child_created = True
        os.close(status)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]

    @atexit.register
    def end() -> None:
        ours.close()
        os.waitpid(server, 0)


def inherited(pipes: list[int]) -> list[int]:
    """The standard streams of a child, from ``subprocess``'s six descriptors: -1 is this process's own stream."""
    return [number if given == -1 else given for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]


def run(arguments: list[str]) -> None:
    """Runs the command and exits as Python does, but leaves the destruction of all modules, 0.3 s, to the kernel."""
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv = ["hoop", *arguments[2:]]
            runpy.run_module("hoop", run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *arguments[2:]], [""]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:0] = arguments, [os.path.dirname(os.path.abspath(arguments[0]))]
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as left:
        if not isinstance(left.code, int | None):
            raise
        code = left.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code & 0xFF)


def main() -> None:
    for number in SIGNALS:  # Ctrl-C is for pytest
        signal.signal(number, signal.SIG_IGN)
    load()
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        run(arguments)


if __name__ == "__main__":
    main()
