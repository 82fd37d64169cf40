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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hoop.errors import DeadlineExceeded, InternalError
from hoop.lab.chaos.network import Network
from hoop.launch.processes import LEAVE_WITH_STDIN, start_process
from hoop.resources import TRAINING, Request, admit
from hoop.signals import defer_signals
from hoop.topology import Address

START_S = 120.0
END_S = 60.0
"""Seconds that all processes have to leave after SIGTERM, also on a machine with ten times more work than cores."""
LEASE = "1.5s"
"""The default between hosts: a stopped device is noticed sooner than with that of one machine."""
PORT = 4021
"""Port of the coordinator and of each device in a network, where every process has a host of its own; data links use
the next one."""


class ClusterProcesses:
    """A coordinator and its devices, each a separate process. A context manager."""

    def __init__(
        self,
        folder: Path,
        devices: int,
        memory: int,
        *,
        with_ids: bool = False,
        arenas: Path | None = None,
        network: Network | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``folder``: for the journal and the stderr files. ``memory``: bytes of each device's arena.

        ``with_ids``: the first devices get the ids 1, 2 …, and are in ``numbered``. ``arenas``: folder of arena files,
        which devices are restarted on. ``network``: the coordinator is on host 1, device n on host n + 1.
        ``environment``: variables of every process, beside those of this one.
        """
        self._folder, self._memory = folder, memory
        self._arenas, self._network, self._environment = arenas, network, dict(environment or {})
        self._with_ids = with_ids or arenas is not None or network is not None
        self._port, self._initial_devices = 0, devices
        self.devices: list[subprocess.Popen[str]] = []
        self.numbered: dict[int, subprocess.Popen[str]] = {}
        """The newest process of each device that was started with a number, by number."""
        self._all: list[subprocess.Popen[str]] = []
        self.pids: set[int] = set()
        """Pids of all processes that were started."""
        self.unresponsive: list[int] = []
        """Pids of the processes that did not leave at the end and were killed."""

    def start_coordinator(self) -> None:
        """Start the coordinator. A later one uses the port and the journal of the first."""
        options = ["--journal", str(self._folder / "journal"), "--lease", LEASE, LEAVE_WITH_STDIN]
        if self._network is None:
            options += ["--port", str(self._port)]
        else:
            options += ["--host", self._network.address(1), "--port", str(PORT), "--insecure"]
        with defer_signals():
            self.coordinator = self.start("coordinator", *options, host=1)
        self.address = Address.parse(_first_line(self.coordinator).split()[-1])
        self._port = self.address.port

    def start_device(self, number: int = 0) -> subprocess.Popen[str]:
        """Start a device. ``number``: its id, which also says its arena file and its host; 0: a new one."""
        options = ["--join", str(self.address), "--memory", str(self._memory), "--quiet", LEAVE_WITH_STDIN]
        if number:
            options += ["--id", str(number)]
        if number and self._arenas is not None:
            options += ["--arena", str(self.arena(number))]
        if number and self._network is not None:
            host = self._network.address(number + 1)
            # With an advertised address it has no shared memory: every link is a TCP connection.
            options += ["--host", host, "--port", str(PORT), "--insecure"]
            options += ["--data-port", str(PORT + 1), "--advertise-data", f"{host}:{PORT + 1}"]
        self.devices = [one for one in self.devices if one.poll() is None]
        process = self.start("device", *options, host=number + 1)
        self.devices.append(process)
        if number:
            self.numbered[number] = process
        return process

    def arena(self, number: int) -> Path:
        """The arena file of this device."""
        assert self._arenas is not None, "these devices have no arena files"
        return self._arenas / f"arena{number}"

    def start(self, *arguments: str, host: int = 0) -> subprocess.Popen[str]:
        """Start ``hoop ARGUMENTS``; its stderr goes to a file in the folder. ``host``: of the network; 0: this one."""
        with defer_signals():  # a signal that ends this process must not come before the new process is recorded
            return self._start(arguments, self._network.exec_prefix(host) if self._network and host else [])

    def _start(self, arguments: Sequence[str], prefix: Sequence[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self._environment}
        with open(self._folder / f"{arguments[0]}.err", "ab") as errors:
            process = start_process(*arguments, stdout=subprocess.PIPE, stderr=errors, env=environment, prefix=prefix)
        self.pids.add(process.pid)
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
            for number in range(1, self._initial_devices + 1):
                self.start_device(number if self._with_ids else 0)
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
