"""The processes of a cluster under fault injection: a coordinator with a journal, and devices.

Each process holds a pipe from its owner and leaves when the pipe closes, so none outlives the owner.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

from hoop.errors import DeadlineExceeded, InternalError
from hoop.launch.processes import LEAVE_WITH_STDIN, start_process
from hoop.resources import TRAINING, Request, admit
from hoop.signals import defer_signals
from hoop.topology import Address

START_S = 60.0
END_S = 10.0


class ClusterProcesses:
    """A coordinator and its devices, each a separate process. A context manager."""

    def __init__(self, folder: Path, devices: int, memory: int) -> None:
        """``folder``: for the journal and the stderr files. ``memory``: bytes of each device's arena."""
        self._folder, self._memory = folder, memory
        self._port, self._initial_devices = 0, devices
        self.devices: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self.unresponsive: list[int] = []
        """Pids of the processes that did not leave at the end and were killed."""

    def start_coordinator(self) -> None:
        """Start the coordinator. A later one uses the port and the journal of the first."""
        journal = str(self._folder / "journal")
        port = str(self._port)
        with defer_signals():
            self.coordinator = self.start("coordinator", "--journal", journal, "--port", port, LEAVE_WITH_STDIN)
        self.address = Address.parse(_first_line(self.coordinator).split()[-1])
        self._port = self.address.port

    def start_device(self) -> subprocess.Popen[str]:
        options = "--join", str(self.address), "--memory", str(self._memory), "--quiet", LEAVE_WITH_STDIN
        self.devices = [one for one in self.devices if one.poll() is None]
        self.devices.append(self.start("device", *options))
        return self.devices[-1]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start ``hoop ARGUMENTS``; its stderr goes to a file in the folder."""
        with defer_signals():  # a signal that ends this process must not come before the new process is recorded
            return self._start(*arguments)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        with open(self._folder / f"{arguments[0]}.err", "ab") as errors:
            process = start_process(
                *arguments, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        for one in self._all:
            if one.stdin is not None and one.poll() is not None:  # its pipes would stay open
                one.communicate()
        self._all = [one for one in self._all if one.poll() is None]
        self._all.append(process)
        return process

    def stderr_tails(self) -> str:
        """The end of each command's stderr."""
        found = [f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in self._folder.glob("*.err")]
        return "\n".join(found)

    def __enter__(self) -> ClusterProcesses:
        admit(Request(self._initial_devices, self._memory, TRAINING, options=("--devices", "memory")))
        try:
            self.start_coordinator()
            for _ in range(self._initial_devices):
                self.start_device()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alive = [one for one in self._all if one.poll() is None]
        for one in alive:
            with contextlib.suppress(ProcessLookupError):
                one.send_signal(signal.SIGCONT)
                # A client is killed: after SIGTERM it would wait for its coordinator, which leaves as well.
                one.terminate() if one is self.coordinator or one in self.devices else one.kill()
        deadline = time.monotonic() + END_S
        for one in self._all:
            try:
                one.communicate(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.unresponsive.append(one.pid)
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
