"""Runs all-reduce contenders on the same sizes and ranks, one after the other, and returns their times."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hoop.collectives.registry import CATALOG
from hoop.errors import InvalidArgument, PeerLost
from hoop.lab.bench.links import fork_child
from hoop.launch.processes import python_module
from hoop.resources import STARTED, Request, admit

NATIVE = ("arena", "shm", "tcp")
TORCH = ("torch", "gloo")
MPI = ("openmpi", "mpich")
CONTENDERS = (*NATIVE, *TORCH, *MPI)


@dataclass(frozen=True)
class BenchResult:
    """One contender's time for one vector size and one number of ranks."""

    contender: str
    ranks: int
    bytes: int
    seconds: float
    algorithm: str = ""
    """Name of the algorithm that ran; only Hoop's own contenders report it."""

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: bytes of the vector per second."""
        return self.bytes / self.seconds

    @property
    def busbw(self) -> float:
        """Bus bandwidth as in nccl-tests: the load of a ring's slowest link, comparable across rank counts."""
        return self.algbw * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Contest:
    """The contenders, ranks and sizes of one benchmark."""

    contenders: Sequence[str]
    ranks: Sequence[int]
    sizes: Sequence[int]
    seconds: float = 0.5
    mpirun: dict[str, Path] | None = None
    """Path of each MPI's mpirun; a Python with mpi4py must be in the same folder."""
    algorithm: str = ""
    """Name of the algorithm of Hoop's own contenders; empty: they select one."""

    def __post_init__(self) -> None:
        for name in self.contenders:
            if name not in CONTENDERS:
                raise InvalidArgument(f"contender: {name!r} is unknown; known: {', '.join(CONTENDERS)}")
        for size in self.sizes:
            if size < 4 or size % 4:
                raise InvalidArgument(f"size: {size} bytes are not whole float32 elements")
        if self.algorithm:
            self._check_algorithm()

    def _check_algorithm(self) -> None:
        entry = CATALOG["all_reduce"]
        known = [*entry.algorithms, *entry.shared]
        if self.algorithm not in known:
            raise InvalidArgument(f"algorithm: {self.algorithm!r} is unknown; known: {', '.join(known)}")
        unable = {"flat": ("tcp",), "staged": ("tcp",), "direct": ("shm", "tcp")}.get(self.algorithm, ())
        for name in self.contenders:
            if name in unable:
                raise InvalidArgument(f"algorithm: {name} cannot run {self.algorithm}, which needs memory in common")

    def run(self) -> Iterator[BenchResult]:
        """Yield each result when it is measured. Contenders alternate, so that all see the same machine load."""
        arena = sum(self.sizes) + (1 << 20)
        admit(Request(max(self.ranks, default=0), arena, STARTED, options=("--ranks", "--sizes")))
        for ranks in self.ranks:
            for contender in self.contenders:
                start = _mpi if contender in MPI else _processes
                for answer in start(self, contender, ranks):
                    yield BenchResult(
                        contender,
                        ranks,
                        bytes=int(answer["bytes"]),
                        seconds=float(answer["seconds"]),
                        algorithm=str(answer.get("algorithm", "")),
                    )


def _processes(contest: Contest, contender: str, ranks: int) -> Iterator[dict[str, Any]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = python_module("hoop.lab.bench.rank")
    processes = [
        subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for _ in range(ranks)
    ]
    try:
        master = f"127.0.0.1:{_free_port()}"
        for rank, process in enumerate(processes):
            task = {"contender": contender, "rank": rank, "ranks": ranks, "sizes": list(contest.sizes)}
            task |= {"algorithm": contest.algorithm, "seconds": contest.seconds}
            _write(process, {**task, "master": master, "host": "127.0.0.1"})
        addresses = [json.loads(_read(process, contender)) for process in processes]
        for process in processes:
            _write(process, addresses)
        for _ in contest.sizes:
            yield json.loads(_read(processes[0], contender))
        for rank, process in enumerate(processes):
            if process.wait(60):
                raise PeerLost(f"{contender}: rank {rank} ended with code {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _mpi(contest: Contest, contender: str, ranks: int) -> Iterator[dict[str, Any]]:
    named = (contest.mpirun or {}).get(contender)
    mpirun = named or shutil.which("mpirun")
    if mpirun is None:
        raise InvalidArgument(f"{contender}: no mpirun is on the path; name one with --{contender} PATH")
    python = str(named.parent / "python") if named else sys.executable
    options = ["--oversubscribe", "--bind-to", "none"] if contender == "openmpi" else []
    if contender == "openmpi" and os.getuid() == 0:
        options.append("--allow-run-as-root")
    command = [str(mpirun), "-n", str(ranks), *options, python, str(Path(__file__).with_name("rank.py"))]
    command += [str(contest.seconds), *map(str, contest.sizes)]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise PeerLost(f"{contender}: mpirun ended with code {process.returncode}: {' '.join(command)}")


def copy_bandwidth(processes: int, size: int = 64 << 20, seconds: float = 0.5) -> float:
    """Bytes read and written per second when ``processes`` processes copy at once: the memory's limit."""
    readers: list[int] = []
    children: list[int] = []
    try:
        for _ in range(processes):
            reader, writer = os.pipe()
            readers.append(reader)
            children.append(fork_child(lambda writer=writer: _copy(writer, size, seconds)))  # type: ignore[misc]
            os.close(writer)
        found = [os.read(reader, 64) for reader in readers]
    except BaseException:  # Ctrl-C
        for child in children:
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        for reader in readers:
            os.close(reader)
        for child in children:
            os.waitpid(child, 0)
    return sum(float(one) for one in found)


def _copy(writer: int, size: int, seconds: float) -> None:
    """Child process: write its bytes read and written per second to the pipe."""
    source, target = np.ones(size // 8), np.empty(size // 8)
    np.copyto(target, source)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        np.copyto(target, source)
        count += 1
    os.write(writer, str(2 * size * count / (time.perf_counter() - started)).encode())


def _write(process: subprocess.Popen[str], value: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def _read(process: subprocess.Popen[str], contender: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise PeerLost(f"{contender}: a rank ended with code {process.wait()}")
    return line


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
