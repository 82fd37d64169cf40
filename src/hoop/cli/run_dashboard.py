"""The dashboard of ``hoop train --dashboard``: ``hoop dashboard`` as a child process while the run lasts."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.launch.processes import LEAVE_WITH_STDIN, start_process, terminate_process

END_S = 10.0


def check_port(port: int) -> None:
    """Raises if ``--dashboard PORT`` cannot be served."""
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"--dashboard: {port} is no port; give one in 0..65535, 0 for any free one")
    if find_spec("bokeh") is None:
        raise FailedPrecondition("--dashboard: it needs Bokeh: pip install 'hoop[dashboard]'")


class RunDashboard:
    """Starts with the run's first event, when its coordinator is up, and ends with ``close``."""

    def __init__(self, port: int, address_file: Path | None, options: Sequence[str]) -> None:
        """``address_file``: where the run writes its coordinator's address; None: a file of its own.

        ``options``: further ones of ``hoop dashboard``, such as its token.
        """
        check_port(port)
        self._port, self._options = port, tuple(options)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if address_file is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hoop-dashboard-")
            address_file = Path(self._folder.name) / "address"
        self.address_file = address_file
        self._process: subprocess.Popen[str] | None = None
        self._failed = False

    def start(self, say: Callable[[str], None]) -> None:
        """Starts it if the coordinator is up and it does not run yet; ``say`` gets its address. Does not wait.

        Not before the devices are forked from this process: it has a thread from then on.
        """
        if self._failed or self._process is not None or not self.address_file.exists():
            return
        try:
            arguments = ["--coordinator", self.address_file.read_text().strip(), "--port", str(self._port)]
            self._process = start_process(
                "dashboard", *arguments, LEAVE_WITH_STDIN, *self._options, stdout=subprocess.PIPE
            )
        except OSError as error:  # no memory for a process, no descriptor: the run goes on
            self._failed = True
            say(f"the dashboard could not be started: {error}")
            return
        threading.Thread(target=self._show, args=(self._process, say), name="hoop-run-dashboard", daemon=True).start()

    def close(self) -> None:
        if self._process is not None:
            terminate_process(self._process, END_S)
        if self._folder is not None:
            self._folder.cleanup()

    @staticmethod
    def _show(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
        assert process.stdout is not None, "its output is a pipe"
        if line := process.stdout.readline().strip():
            say(line)
