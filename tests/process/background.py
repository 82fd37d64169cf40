"""Runs ``python -m hoop …`` in the background: captures its output, and terminates it at the end of the test."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import preloaded
from interrupts import interrupts

HOOP = (sys.executable, "-m", "hoop")
START_S = 120.0
"""Deadline for a process to start, on a machine that is busy with other tests."""
END_S = 120.0
RESTING = ("--set", "slowdown=[20, 20, 20, 20]")
"""Options of an endless training: its devices sleep most of the time, and leave the cores to other tests."""
GRPC_NOISE = re.compile(
    r'Traceback \(most recent call last\):\n  File "src/python/grpcio[^\n]*\nasyncio.exceptions.CancelledError\n'
)
"""What grpc.aio sometimes prints when a server stops while a stream is open."""
_serial = itertools.count(1)


class Running:
    """A command in the background. A stack trace in its standard error fails the test."""

    def __init__(
        self,
        arguments: tuple[object, ...],
        folder: Path,
        ignore_sigint: bool = False,
        real_start: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``ignore_sigint``: start it with SIGINT ignored, as a shell starts a background job.

        ``environment``: variables besides those of this process.

        ``real_start``: start Python and import all, instead of a fork with the imports (``tests/preloaded.py``).
        """
        self.arguments = tuple(map(str, arguments))
        self._log = folder / f"{next(_serial)}-{self.arguments[0]}.err"
        self._unread = b""
        with open(self._log, "wb") as errors, interrupts(ignored=ignore_sigint):
            # In its own session, so that a signal to its process group acts like Ctrl-C in a terminal.
            self.process = (subprocess.Popen if real_start else preloaded.Popen)(
                [*HOOP, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self._first_line = ""

    def __repr__(self) -> str:
        return f"hoop {' '.join(self.arguments)}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """Its standard error so far."""
        return self._log.read_text(errors="replace")

    def wait_for_error(self, text: str, within: float = END_S) -> None:
        """Waits until its standard error has this text."""
        deadline, pause = time.monotonic() + within, threading.Event()
        while text not in self.errors:
            assert time.monotonic() < deadline, f"{self} did not write {text!r} within {within:g} s:\n{self.errors}"
            pause.wait(0.01)

    def line(self, within: float = START_S) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                problem = "closed its output" if ready else f"said nothing for {within:g} s"
                raise AssertionError(f"{self} {problem} after {self._unread!r}; its errors:\n{self.errors}")
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\n")
        return text.decode()

    @property
    def first_line(self) -> str:
        """The first line of standard output, printed once it is up; it ends with the address."""
        self._first_line = self._first_line or self.line()
        return self._first_line

    @property
    def address(self) -> str:
        return self.first_line.split()[-1]

    @property
    def id(self) -> int:
        """The device id, if this is a device."""
        return int(self.first_line.split()[1])

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)

    def wait(self, within: float = END_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {within:g} s; its errors:\n{self.errors}") from None

    def kill(self) -> None:
        """SIGKILL, as from the kernel's out-of-memory killer."""
        self.process.kill()
        self.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.process.returncode == -signal.SIGKILL:  # it could not delete its arena
            for folder in ("/dev/shm", tempfile.gettempdir()):
                for arena in Path(folder).glob(f"hoop-{self.pid}-*.arena"):
                    arena.unlink()
        errors = GRPC_NOISE.sub("", self.errors)
        for pattern in ("Traceback", "never awaited", "never retrieved", "a bug in Hoop"):
            assert pattern not in errors, f"{self}: {errors}"


@contextmanager
def background_processes(folder: Path) -> Iterator[Callable[..., Running]]:
    """A function that starts commands. At the end those still running are terminated, last started first."""
    with ExitStack() as stack:

        def start(
            *arguments: object,
            ignore_sigint: bool = False,
            real_start: bool = False,
            environment: Mapping[str, str] | None = None,
        ) -> Running:
            running = Running(arguments, folder, ignore_sigint, real_start, environment)
            stack.callback(running.end)
            return running

        yield start
