"""``python -m hoop …`` in the background, ended whatever happens, and what it says."""

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
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from interrupts import interrupts

HOOP = (sys.executable, "-m", "hoop")
START_S = 30.0
"""Until something that starts must be up, on a machine that is busy with other tests."""
END_S = 10.0
GRPC_NOISE = re.compile(
    r'Traceback \(most recent call last\):\n  File "src/python/grpcio[^\n]*\nasyncio.exceptions.CancelledError\n'
)
"""What grpc.aio sometimes prints when a server stops while somebody has a stream open."""
_serial = itertools.count(1)


class Running:
    """A command in the background; whatever it writes is kept, and a stack trace in it fails the test."""

    def __init__(self, arguments: tuple[object, ...], folder: Path, ignoring: bool = False) -> None:
        """``ignoring``: it is started with SIGINT ignored, as in the background of a shell."""
        self.arguments = tuple(map(str, arguments))
        self._log = folder / f"{next(_serial)}-{self.arguments[0]}.err"
        self._heard = b""
        with open(self._log, "wb") as errors, interrupts(ignored=ignoring):
            # A session of its own: a signal to its group is what a terminal sends at Ctrl-C.
            self.process = subprocess.Popen(
                [*HOOP, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._first = ""

    def __repr__(self) -> str:
        return f"hoop {' '.join(self.arguments)}"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        """What it wrote to standard error so far."""
        return self._log.read_text(errors="replace")

    def line(self, within: float = START_S) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                what = "closed its output" if ready else f"said nothing for {within:g} s"
                raise AssertionError(f"{self} {what} after {self._heard!r}; its errors:\n{self.errors}")
            self._heard += data
        text, _, self._heard = self._heard.partition(b"\n")
        return text.decode()

    @property
    def first(self) -> str:
        """The first line: that it is up, and where."""
        self._first = self._first or self.line()
        return self._first

    @property
    def address(self) -> str:
        return self.first.split()[-1]

    @property
    def id(self) -> int:
        """A device's."""
        return int(self.first.split()[1])

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)

    def wait(self, within: float = END_S) -> int:
        """Its exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} did not end within {within:g} s; its errors:\n{self.errors}") from None

    def kill(self) -> None:
        """As the kernel would when memory is short: no goodbye."""
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
        if self.process.returncode == -signal.SIGKILL:  # it could not delete its memory
            for folder in ("/dev/shm", tempfile.gettempdir()):
                for arena in Path(folder).glob(f"hoop-{self.pid}-*.arena"):
                    arena.unlink()
        errors = GRPC_NOISE.sub("", self.errors)
        for complaint in ("Traceback", "never awaited", "never retrieved", "a bug in Hoop"):
            assert complaint not in errors, f"{self}: {errors}"


@contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Running]]:
    """Starts commands, and ends what is left of them, the last first."""
    with ExitStack() as ended:

        def start(*arguments: object, ignoring: bool = False) -> Running:
            running = Running(arguments, folder, ignoring)
            ended.callback(running.end)
            return running

        yield start
