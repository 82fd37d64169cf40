"""Types the commands of a page as a reader does: in one folder, from top to bottom, each block in a shell of its own.

A command that runs until Ctrl-C (``hoop up``) gets a terminal of its own and stays until the page ends. Its address
replaces the placeholders in later commands.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import preloaded
from interrupts import interrupts

ROOT = Path(__file__).resolve().parents[2]
READY_S, COMMAND_S, END_S = 240.0, 400.0, 120.0
PROGRAMS = {
    "hoop": ["-m", "hoop"],
    "python": [],
    "python3": [],
    "pytest": ["-m", "pytest"],
    "torchrun": ["-m", "torch.distributed.run"],
}
"""The programs of the environment that a reader has activated, as arguments of this Python."""
LINKED = ("benchmarks", "docs", "scripts", "tests", "pyproject.toml")
"""What commands name in the repository and do not write to."""
HOSTS = re.compile(r"\b10\.0\.0\.(\d+)\b")
PLACEHOLDER = re.compile(r"\b(?:HOST|127\.0\.0\.\d+):(PORT|4021)\b")
PORT = re.compile(r"--port (\d+)(?!\S)")
ETCD = re.compile(r"etcd://[^/\s]+")


class Terminal:
    """A command that runs until Ctrl-C."""

    def __init__(
        self, command: str, folder: Path, environment: dict[str, str], inherited: tuple[int, ...], log: Path
    ) -> None:
        self._command, self._log, self._unread = command, log, b""
        with log.open("wb") as errors, interrupts():
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=inherited,
                start_new_session=True,
            )

    def first_line(self) -> str:
        """The first line of its standard output; fails if it ends before."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + READY_S
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            assert data, f"it {'ended' if ready else f'printed nothing for {READY_S:g} s'}: {self._log.read_text()}"
            self._unread += data
        return self._unread.partition(b"\n")[0].decode()

    def interrupt(self) -> int:
        """Ctrl-C; its exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise AssertionError(f"{self._command} goes on {END_S:g} s after Ctrl-C: {self._log.read_text()}") from None
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
        return code


class Shell:
    """One bash, which executes command after command: folder, variables and background jobs stay."""

    def __init__(self, folder: Path, environment: dict[str, str], inherited: tuple[int, ...], log: Path) -> None:
        self._log = log
        self._codes, codes = os.pipe()
        self._report = f'printf "%s\\n" "$?" >&{codes}\n'
        with log.open("wb") as output, interrupts():
            self._process = subprocess.Popen(
                ["bash", "--norc", "--noprofile"],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(codes, *inherited),
                start_new_session=True,
            )
        os.close(codes)

    def run(self, command: str) -> tuple[int, str]:
        """The exit code, and what it printed."""
        assert self._process.stdin is not None
        printed = self._log.stat().st_size
        self._process.stdin.write(f"{{\n{command}\n}} </dev/null\n{self._report}".encode())
        self._process.stdin.flush()
        ready, _, _ = select.select([self._codes], [], [], COMMAND_S)
        answer = os.read(self._codes, 64).decode() if ready else ""
        output = self._log.read_bytes()[printed:].decode(errors="replace")
        assert answer, f"{'the shell ended' if ready else f'it did not end within {COMMAND_S:g} s'}: {output}"
        return int(answer), output

    def close(self) -> None:
        """Ends what still runs in the background, and the shell."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
            # Background jobs have the pipe open too: its end is theirs.
            ready, _, _ = select.select([self._codes], [], [], END_S)
            assert ready, f"a background job goes on {END_S:g} s after SIGTERM: {self._log.read_text()}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            os.close(self._codes)


class PageSession:
    """A folder with what a reader has there, and the servers that the page has started."""

    def __init__(self, folder: Path, stack: ExitStack, etcd: str = "", real_start: bool = False) -> None:
        """``etcd``: the address of a server that takes the place of those in the page.

        ``real_start``: every command starts Python, instead of a fork with the imports (``tests/preloaded.py``).
        """
        self.folder, self._stack, self._etcd = folder / "hoop", stack, etcd
        self._logs = folder
        self._addresses: dict[str, str] = {}
        """Addresses of running coordinators by the port in the page: ``4021``, or ``PORT`` for any."""
        self._environment, self._inherited = _environment(folder, real_start)
        self._serial = 0
        self.folder.mkdir()
        shutil.copytree(ROOT / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        for name in LINKED:
            (self.folder / name).symlink_to(ROOT / name)

    @property
    def has_etcd(self) -> bool:
        return bool(self._etcd)

    def _log(self) -> Path:
        self._serial += 1
        return self._logs / f"{self._serial}.log"

    def filled(self, command: str, shared: str = "") -> str:
        """The command with the addresses of this session; ``shared``: of a cluster, if the page starts none."""

        def address(match: re.Match[str]) -> str:
            return self._addresses.get(match[1]) or shared or match[0]

        command = ETCD.sub(f"etcd://{self._etcd}", command)
        command = HOSTS.sub(r"127.0.0.\1", command)  # every address of 127/8 is this machine's
        return PORT.sub("--port 0", PLACEHOLDER.sub(address, command))

    @contextmanager
    def shell(self) -> Iterator[Shell]:
        shell = Shell(self.folder, self._environment, self._inherited, self._log())
        try:
            yield shell
        finally:
            shell.close()

    def serve(self, command: str, stands_by: bool = False) -> None:
        """Starts a server, waits until it is up, and ends it with the page: its exit code must be 0.

        ``stands_by``: it prints no address, only a message for people.
        """
        port = PORT.search(command)
        shown = " 2>&1" if stands_by else ""
        terminal = Terminal(self.filled(command) + shown, self.folder, self._environment, self._inherited, self._log())

        def end() -> None:
            code = terminal.interrupt()
            assert code == 0, f"{command}: exit code {code} after Ctrl-C"

        try:
            line = terminal.first_line()
        except AssertionError:
            terminal.interrupt()
            raise
        self._stack.callback(end)
        if line.startswith("coordinator "):
            self._addresses[port[1] if port else "PORT"] = line.split()[1]

    def follow(self, command: str) -> None:
        """Runs a command that would go on for ever until it has printed a line, and ends it: exit code 130."""
        terminal = Terminal(command, self.folder, self._environment, self._inherited, self._log())
        try:
            terminal.first_line()
        finally:
            code = terminal.interrupt()
        assert code == 130, f"exit code {code} after Ctrl-C"


def _environment(folder: Path, real_start: bool) -> tuple[dict[str, str], tuple[int, ...]]:
    """This process's environment without Hoop's settings, and with ``hoop``, ``python`` … of this Python first.

    Also the descriptors that these programs inherit.
    """
    kept = {"HOOP_DATA", "HOOP_TEST_SESSION"}
    if not real_start:
        kept.add("HOOP_NO_REPORT")  # 2 s a run
    rest = {name: value for name, value in os.environ.items() if not name.startswith("HOOP_") or name in kept}
    python, descriptors = ([sys.executable], ()) if real_start else preloaded.SERVER.program(rest)
    (folder / "bin").mkdir()
    for name, arguments in PROGRAMS.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join([*python, *arguments])} "$@"\n')
        program.chmod(0o755)
    return {**rest, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}, descriptors


@contextmanager
def page_session(folder: Path, etcd: str = "", real_start: bool = False) -> Iterator[PageSession]:
    """At the end its servers are ended by Ctrl-C, the last started first."""
    with ExitStack() as stack:
        yield PageSession(folder, stack, etcd, real_start)
