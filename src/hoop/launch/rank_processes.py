"""The ranks of a user's program as processes on this machine. Used by ``hoop run``.

Each rank runs the same command in a session of its own, with the variables that PyTorch's ``env://`` reads. This
process reads their output line by line, notices when one ends, and ends the others when a rank has failed for good. No
rank outlives it: on Linux the kernel kills the ranks when it dies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO

from hoop.errors import InvalidArgument
from hoop.files import make_folder
from hoop.signals import defer_signals, dying_with_parent

LOOPBACK = "127.0.0.1"
RESTART_COUNT = "HOOP_RESTART_COUNT"
"""Environment variable of a rank: the number of times that it was started again."""
GRACE_S = 5.0
"""Seconds that a rank has to end after SIGTERM before it is killed."""
POLL_S = 0.1
DRAIN_S = 1.0
"""Seconds for which output is read after a rank has ended, if a process that it started keeps the pipe open."""
LAST_LINES = 20
MAX_LINE_BYTES = 1 << 16
"""Maximum bytes of a line of output; a longer one is passed on in parts."""


class Stream(Enum):
    """An output of a rank."""

    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True)
class RankExit:
    """A process of a rank has ended."""

    rank: int
    code: int
    """Exit code of the process; 128 + N if signal N ended it."""
    restarts: int
    """Number of times that this rank had been started again before."""
    last_lines: tuple[str, ...] = ()
    """Last lines of its output, both streams."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    exits: tuple[RankExit, ...]
    """The last exit of each rank, in rank order."""
    failure: RankExit | None
    """Exit that ended the run; None: every rank that was needed ended with 0."""

    @property
    def code(self) -> int:
        return 0 if self.failure is None else self.failure.code


@dataclass(frozen=True)
class RunConfig:
    """The ranks of a run."""

    command: Sequence[str]
    size: int
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every rank besides this process's own."""
    min_size: int | None = None
    """Minimum number of ranks with which a failed rank does not end the others; None: every failure does."""
    max_restarts: int = 0
    """Maximum number of failed ranks that are started again, all ranks together; only with ``min_size``."""
    grace_s: float = GRACE_S
    output_folder: Path | None = None
    """Folder in which the output of rank R is also written to ``rank.R/stdout`` and ``rank.R/stderr``; None: it is
    not."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidArgument(f"--devices: {self.size} processes; start at least 1")
        if self.min_size is not None and not 1 <= self.min_size <= self.size:
            raise InvalidArgument(f"--min-np: {self.min_size} is not in 1..{self.size} (--devices)")
        if self.max_restarts < 0:
            raise InvalidArgument(f"--max-restarts: {self.max_restarts} is negative")
        if self.max_restarts and self.min_size is None:
            raise InvalidArgument(
                f"--max-restarts: {self.max_restarts} has no effect without --min-np, the number of processes with "
                "which the others go on meanwhile"
            )


class _Copy:
    """The file that gets a copy of an output. A disk that is full ends the copy, and not the run."""

    def __init__(self, path: Path, again: bool) -> None:
        """``again``: it goes on behind what is there."""
        self._path = path
        self._file: IO[bytes] | None = None
        self.problem = ""
        """Why the copy has ended, until it is said."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab" if again else "wb", buffering=0)  # noqa: SIM115 - closed with the output
        except OSError as error:
            self._fail(error)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.close()
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.problem = (
            f"hoop: {self._path} gets no more output: {error.strerror}; the rank goes on. Free space there, or name "
            "another folder (--output-filename)"
        )

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


@dataclass
class _Output:
    """One stream of one rank: the pipe, an unfinished line, and the file that gets a copy."""

    rank: int
    stream: Stream
    pipe: IO[bytes]
    copy: _Copy | None
    unfinished: bytes = b""


class _Rank:
    """A process of a rank, from its start to the end of its output."""

    def __init__(self, process: subprocess.Popen[bytes], restarts: int) -> None:
        self.process, self.restarts = process, restarts
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.outputs: list[_Output] = []

    def has_exited(self) -> bool:
        """Leaves the process a zombie where the system can: its process group then keeps its number."""
        if self.process.returncode is not None:
            return True
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return self.process.poll() is not None

    def signal(self, number: int) -> None:
        """Sends a signal to the rank and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def reap(self) -> int:
        """Ends what the rank has left running in its process group; returns its exit code."""
        self.signal(signal.SIGKILL)
        code = self.process.wait()
        return code if code >= 0 else 128 - code


class RankProcesses:
    """Starts the ranks of a program, follows them to their end, and ends them. ``run`` does all of it."""

    def __init__(
        self,
        config: RunConfig,
        on_line: Callable[[int, Stream, bytes], None],
        on_exit: Callable[[RankExit, bool], None] | None = None,
        on_start: Callable[[int, int, int], None] | None = None,
    ) -> None:
        """``on_line(rank, stream, line)``: a line of output, without its end.

        ``on_exit(exit, replaced)``: a process of a rank has ended, and is started again or not.
        ``on_start(rank, pid, restarts)``: a process was started.
        """
        self.config = config
        self._on_line, self._on_exit, self._on_start = on_line, on_exit, on_start
        self._ranks: dict[int, _Rank] = {}
        """Ranks whose process has not been waited for."""
        self._exits: dict[int, RankExit] = {}
        self._selector = selectors.DefaultSelector()
        self._restarts_left = config.max_restarts if config.min_size is not None else 0
        self._port = _reserve_port()

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that is running."""
        return {number: rank.process.pid for number, rank in self._ranks.items()}

    def run(self) -> RunOutcome:
        """Starts the ranks and returns when all have ended. An exception, such as Ctrl-C, ends them first."""
        failure: RankExit | None = None
        try:
            if self.config.output_folder is not None:
                make_folder(self.config.output_folder, "--output-filename")
            for number in range(self.config.size):
                self._start(number, 0)
            while self._ranks and failure is None:
                self._read_outputs(POLL_S)
                failure = self._take_exits()
        finally:
            self._end_all()
            self._port.close()
            self._selector.close()
        return RunOutcome(tuple(self._exits[number] for number in sorted(self._exits)), failure)

    # ---- starting

    def _start(self, number: int, restarts: int) -> None:
        config = self.config
        folder = config.output_folder and config.output_folder / f"rank.{number}"
        with defer_signals():  # a process that is started is also recorded
            process = subprocess.Popen(
                dying_with_parent(config.command, signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **self._variables(number, restarts), **config.env},
                start_new_session=True,
            )
            rank = self._ranks[number] = _Rank(process, restarts)
        for stream, pipe in ((Stream.STDOUT, process.stdout), (Stream.STDERR, process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            copy = None if folder is None else _Copy(folder / stream.value, again=bool(restarts))
            output = _Output(number, stream, pipe, copy)
            rank.outputs.append(output)
            self._selector.register(pipe, selectors.EVENT_READ, (rank, output))
        if self._on_start is not None:
            self._on_start(number, process.pid, restarts)

    def _variables(self, number: int, restarts: int) -> dict[str, str]:
        size = self.config.size
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // size))
        return {
            "RANK": str(number),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(size),
            "GROUP_RANK": "0",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port.getsockname()[1]),
            RESTART_COUNT: str(restarts),
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }

    # ---- following

    def _read_outputs(self, timeout_s: float) -> None:
        """Passes on the lines that the ranks have written; waits up to ``timeout_s`` for the first."""
        for key, _ in self._selector.select(timeout_s):
            rank, output = key.data
            self._read(rank, output)

    def _read(self, rank: _Rank, output: _Output) -> None:
        try:
            data = os.read(output.pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._close(rank, output)
            return
        if output.copy is not None:
            output.copy.write(data)
            self._say_problem(output.rank, output.copy)
        # A carriage return, with which progress bars overwrite their line, ends a line too.
        *lines, output.unfinished = (
            (output.unfinished + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        )
        while len(output.unfinished) > MAX_LINE_BYTES:
            lines.append(output.unfinished[:MAX_LINE_BYTES])
            output.unfinished = output.unfinished[MAX_LINE_BYTES:]
        for line in lines:
            self._pass_on(rank, output, line)

    def _say_problem(self, rank: int, copy: _Copy) -> None:
        if copy.problem:
            self._on_line(rank, Stream.STDERR, copy.problem.encode())
            copy.problem = ""

    def _pass_on(self, rank: _Rank, output: _Output, line: bytes) -> None:
        rank.last_lines.append(line.decode(errors="replace"))
        self._on_line(output.rank, output.stream, line)

    def _close(self, rank: _Rank, output: _Output) -> None:
        rank.outputs.remove(output)
        self._selector.unregister(output.pipe)
        output.pipe.close()
        if output.unfinished:
            self._pass_on(rank, output, output.unfinished)
        if output.copy is not None:
            output.copy.close()

    def _take_exits(self) -> RankExit | None:
        """Takes note of the ranks that have ended; returns the first exit that ends the run."""
        for number in [number for number, rank in self._ranks.items() if rank.has_exited()]:
            ended = self._finish(number)
            left = len(self._ranks) + sum(one.code == 0 for one in self._exits.values())
            failed = ended.code != 0
            survives = failed and self.config.min_size is not None and left >= self.config.min_size
            finished = any(one.code == 0 for one in self._exits.values())  # nothing is left for a rank that comes now
            replaced = survives and self._restarts_left > 0 and not finished
            if self._on_exit is not None:
                self._on_exit(ended, replaced)
            if failed and not survives:
                return ended
            if replaced:
                self._restarts_left -= 1
                self._start(number, ended.restarts + 1)
        return None

    def _finish(self, number: int) -> RankExit:
        """Waits for the process of a rank that has exited, and reads the rest of its output."""
        rank = self._ranks[number]
        with defer_signals():
            code = rank.reap()
            del self._ranks[number]
        deadline = time.monotonic() + DRAIN_S
        while rank.outputs and time.monotonic() < deadline:
            self._read_outputs(POLL_S)
        for output in list(rank.outputs):
            self._close(rank, output)
        ended = self._exits[number] = RankExit(number, code, rank.restarts, tuple(rank.last_lines))
        return ended

    # ---- ending

    def _end_all(self) -> None:
        """SIGTERM to all ranks, SIGKILL to those that are there after the grace period. A second Ctrl-C kills them."""
        try:
            for rank in self._ranks.values():
                rank.signal(signal.SIGTERM)
            deadline = time.monotonic() + self.config.grace_s
            while self._ranks and time.monotonic() < deadline:
                self._read_outputs(POLL_S)
                for number in [number for number, rank in self._ranks.items() if rank.has_exited()]:
                    self._finish(number)
        finally:
            with defer_signals():
                for rank in self._ranks.values():
                    rank.signal(signal.SIGKILL)
                for number in list(self._ranks):
                    self._finish(number)


def _reserve_port() -> socket.socket:
    """A socket that is bound to a free port and does not listen: rank 0 can listen there, and no other program gets it.

    (Both sides set SO_REUSEADDR, as PyTorch does.)
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((LOOPBACK, 0))
    return reserved


def program_command(program: str, arguments: Sequence[str]) -> list[str]:
    """The command of a rank: a Python file, and ``python``, run in this Python; everything else is a program."""
    if program in ("python", "python3"):
        return [sys.executable, *arguments]  # the one on the path need not have Hoop
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise InvalidArgument(f"SCRIPT: there is no file {program}")
        return [sys.executable, program, *arguments]
    if shutil.which(program) is None:
        raise InvalidArgument(f"SCRIPT: {program} is neither a Python file (.py) nor a program that can be run")
    return [program, *arguments]
