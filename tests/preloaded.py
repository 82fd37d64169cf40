"""``python …`` as a process that is forked with its imports, which take 0.5 s, and 3 s with PyTorch.

``Popen`` and ``run`` have the parameters of ``subprocess``'s. The commands are ``python -m hoop``, ``python -c CODE``
and ``python FILE.py``, each possibly after ``ip netns exec NAME``. Another command, or one whose environment changes
what an import does, is started by ``subprocess`` as usual. So is every command on a system without ``pidfd_open``. A
test of the start itself calls ``subprocess``.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preload_server import control_sockets, forkable, inherited, read_at_import, report, send, started

PROGRAM, CLIENT = (Path(__file__).with_name(name) for name in ("preload_server.py", "preload_client.py"))
HOOP = [sys.executable, "-m", "hoop"]


class Server:
    """``preload_server.py`` as a child of this process, from the first command to the exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._control: socket.socket | None = None
        self._environment: dict[str, str] = {}

    @property
    def inode(self) -> str:
        """Of the control socket; empty before the first command."""
        return str(os.fstat(self._control.fileno()).st_ino) if self._control is not None else ""

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether the imports of a command with this environment are those of the server."""
        if environment.get("OMP_NUM_THREADS") != "1":
            return False  # NumPy may start threads when it is imported
        with self._lock:
            if self._owner != os.getpid():
                self._start()
        return read_at_import(environment) == self._environment

    def program(self, environment: Mapping[str, str]) -> tuple[list[str], tuple[int, ...]]:
        """``python`` for a shell, forked where it can be, and the descriptors that it must inherit."""
        if not hasattr(os, "pidfd_open") or not self.serves(environment):
            return [sys.executable], ()
        assert self._control is not None
        given = json.dumps({"control": self._control.fileno(), "environment": self._environment})
        return [sys.executable, "-I", "-S", str(CLIENT), given], (self._control.fileno(),)

    def start_command(self, *request: Any) -> tuple[int, int]:
        """The pid of a new command, and the read end of its status pipe; ``request``: see ``preload_server.send``."""
        assert self._control is not None
        with self._lock:
            status = send(self._control, *request)
        return started(status), status

    def _start(self) -> None:
        self._owner = os.getpid()
        # Hoop's settings are a test's, and in the environment of its command.
        kept = {name: text for name, text in os.environ.items() if name[:5] != "HOOP_" or name == "HOOP_TEST_SESSION"}
        self._environment = read_at_import(kept)
        self._control, theirs = control_sockets()
        with theirs:
            command = [sys.executable, "-P", str(PROGRAM), str(theirs.fileno())]
            nothing = subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=nothing, stdout=nothing, env=kept, pass_fds=[theirs.fileno()])
        atexit.register(self._end, os.getpid(), process)

    def _end(self, owner: int, process: subprocess.Popen[bytes]) -> None:
        if os.getpid() == owner and self._control is not None:
            self._control.close()
            process.wait()


SERVER = Server()


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` of a command that the server forks and waits for."""

    _status: int | None = None
    """Read end of its status pipe; None: a real start."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *others: Any) -> None:
        """Called by ``subprocess`` with checked parameters and open pipes."""
        pass_fds, cwd, env, _, _, shell, *pipes, _, _, _, _, _, start_new_session, _ = others
        words = [os.fsdecode(word) for word in args] if isinstance(args, list | tuple) else []
        unusual = executable is not None or preexec_fn is not None or pass_fds or shell or not hasattr(os, "pidfd_open")
        streams = inherited(pipes)
        if (
            not forkable(words)
            or unusual
            or any(map(os.isatty, streams))
            or not SERVER.serves(os.environ if env is None else env)
        ):
            super()._execute_child(args, executable, preexec_fn, close_fds, *others)  # type: ignore[misc]
            return
        self.pid, self._status = SERVER.start_command(words, cwd, env, start_new_session, streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As ``os.waitpid``: the process and its status, or zeros."""
        if self._status is None:
            pid, status = super()._try_wait(wait_flags)  # type: ignore[misc]
            return pid, status
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = int(report(self._status).removeprefix("ended "))
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._status is None:
            code: int | None = super()._internal_poll(_deadstate)  # type: ignore[misc]
            return code
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    command: list[str],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """``subprocess.run``."""
    given = options.pop("input", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, errors = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    completed = subprocess.CompletedProcess(command, process.returncode, out, errors)
    if check:
        completed.check_returncode()
    return completed
