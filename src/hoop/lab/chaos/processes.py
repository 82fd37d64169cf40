"""The processes that faults happen to: a coordinator with a journal, and devices. None outlives its owner.

Each holds a pipe from it and leaves when that closes, however the owner ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from hoop.errors import DeadlineExceeded, InternalError
from hoop.resources import TRAINING, Request, admit
from hoop.signals import signals_held
from hoop.topology import Address

START_S = 60.0
END_S = 10.0
_HELD = "--leave-with-stdin"


class ClusterProcesses:
    """A coordinator and so many devices."""

    def __init__(self, folder: Path, devices: int, memory: int) -> None:
        self._folder, self._memory = folder, memory
        self._port, self._first = 0, devices
        self.devices: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self.stubborn: list[int] = []
        """Those that did not leave when they were told to, at the end, and were killed."""

    def coordinate(self) -> None:
        """The coordinator; a later one is where the first one was, with what it knew."""
        journal = str(self._folder / "journal")
        port = str(self._port)
        with signals_held():
            self.coordinator = self.start("coordinator", "--journal", journal, "--port", port, _HELD)
        self.address = Address.parse(_first_line(self.coordinator).split()[-1])
        self._port = self.address.port

    def device(self) -> subprocess.Popen[str]:
        where = "--join", str(self.address), "--memory", str(self._memory), "--quiet", _HELD
        self.devices = [one for one in self.devices if one.poll() is None]
        self.devices.append(self.start("device", *where))
        return self.devices[-1]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of Hoop's; what it complains of is kept in the folder."""
        with signals_held():  # one that ends this process must not come before the new one is known
            return self._start(*arguments)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        with open(self._folder / f"{arguments[0]}.err", "ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "hoop", *arguments],
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE if _HELD in arguments else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for whoever leads
            )
        for one in self._all:
            if one.stdin is not None and one.poll() is not None:  # its pipes would stay open
                one.communicate()
        self._all = [one for one in self._all if one.poll() is None]
        self._all.append(process)
        return process

    def complaints(self) -> str:
        """The last lines that its processes printed."""
        found = [
            f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in self._folder.glob("*.err")
        ]
        return "\n".join(found)

    def __enter__(self) -> ClusterProcesses:
        admit(Request(self._first, self._memory, TRAINING, options=("--devices", "memory")))
        try:
            self.coordinate()
            for _ in range(self._first):
                self.device()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        living = [one for one in self._all if one.poll() is None]
        for one in living:
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGCONT)
                # A client that is told to end would wait for its coordinator, and that leaves as well.
                one.terminate() if one is self.coordinator or one in self.devices else one.kill()
        deadline = time.monotonic() + END_S
        for one in self._all:
            try:
                one.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.stubborn.append(one.pid)
                one.kill()
                one.communicate()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "its output is a pipe"
    if not select.select([process.stdout], [], [], START_S)[0]:
        raise DeadlineExceeded(f"the coordinator was not up within {START_S:g} s")
    line = process.stdout.readline()
    if not line:
        raise InternalError("the coordinator ended as it started")
    return line
