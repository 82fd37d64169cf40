"""Leaks: what a run has left behind, and what the processes of a cluster keep after each of many jobs.

``Footprint`` finds processes, listening ports, files in shared memory and in the temporary folder. Every process of a
run inherits an environment variable with the run's mark. So a process that the run forgot is found, no matter which its
parent is now, and processes of other runs on this machine do not count.

``run_jobs`` trains jobs one after the other on one cluster, and measures the memory, descriptors and threads of its
processes after each.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoop.engine.settings import Settings
from hoop.job_events import Finished
from hoop.runs.training import Launch, Training
from hoop.topology import Address

MARK = "HOOP_CHAOS_RUN"
"""Environment variable by which the processes of a run are found."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is only listed
GRACE_S = 10.0
"""Seconds that a process that has been ended may take to disappear, and its files with it."""
_PERIOD_S = 0.05
JOBS = 30
WARM_UP = 10
"""Number of jobs before the growth is measured: until then libraries are loaded and caches filled."""
MAX_MEMORY_GROWTH = 24 << 20
"""Bytes by which the resident memory of a process may grow from job 10 to job 30: event logs and the allocator's own
fragments, and not one job's arena buffers or links."""
MAX_DESCRIPTOR_GROWTH = 4
MAX_THREAD_GROWTH = 4


class Footprint:
    """The processes and ports of a run that have been seen so far."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}"
        self._pids: set[int] = set()
        self._listeners: dict[str, int] = {}
        """Ports of the listening sockets, by inode."""

    @property
    def environment(self) -> dict[str, str]:
        """The variable that the run's processes need."""
        name, _, mark = self._mark.partition("=")
        return {name: mark}

    def observe(self, pids: set[int]) -> None:
        """Record the run's processes and their ports. ``pids``: processes that have ended meanwhile."""
        alive = self._alive()
        self._pids |= pids | alive
        for pid in alive:
            self._listeners |= _listeners(pid)

    def leftovers(self, temporary: Path, grace_s: float = GRACE_S) -> list[str]:
        """One sentence for each thing that is still there. ``temporary``: the temporary folder of the run alone."""
        deadline = time.monotonic() + grace_s
        while (found := list(self._remaining(temporary))) and time.monotonic() < deadline:
            threading.Event().wait(_PERIOD_S)
        return found

    def _alive(self) -> set[int]:
        found = set()
        for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
            if name.isdigit() and self._mark in _read(f"/proc/{name}/environ").split("\0"):
                found.add(int(name))
        return found

    def _remaining(self, temporary: Path) -> Iterator[str]:
        for pid in sorted(self._alive()):
            command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            yield f"process {pid} ({command[:80]})"
        listening = {inode for inode, _ in _listening("self")}
        yield from (f"port {port}" for inode, port in self._listeners.items() if inode in listening)
        for pid in sorted(self._pids):
            for pattern in (f"sem.hoop-{pid:08x}*", f"hoop-{pid}-*"):
                yield from (f"file {path}" for path in SHARED_MEMORY.glob(pattern))
        yield from (f"file {path}" for path in sorted(temporary.iterdir()))


def _read(path: str) -> str:
    """A file of /proc; empty if its process is gone."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _listening(process: str) -> list[tuple[str, int]]:
    """Inode and port of every listening TCP socket in this process's network namespace."""
    found = []
    for protocol in ("tcp", "tcp6"):
        for line in _read(f"/proc/{process}/net/{protocol}").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.append((fields[9], int(fields[1].rpartition(":")[2], 16)))
    return found


def _listeners(pid: int) -> dict[str, int]:
    """The listening sockets that this process has open: inode to port."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:  # closed meanwhile
            continue
    return {inode: port for inode, port in _listening(str(pid)) if inode in inodes}


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    memory: int
    """Resident memory in bytes."""
    descriptors: int
    threads: int


def usage(pid: int) -> Usage:
    """What this process uses now. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")), int(fields[17]))


@dataclass
class ManyJobs:
    """The results of the jobs, and the usage of each process after each job."""

    weights: list[str] = field(default_factory=list)
    usages: dict[str, list[Usage]] = field(default_factory=dict)
    """Usage of each process after each job, by the name of the process."""

    def note(self, name: str, found: Usage) -> None:
        self.usages.setdefault(name, []).append(found)

    def growth(self, name: str) -> tuple[int, int, int]:
        """Growth of memory, descriptors and threads of a process, from the tenth job (or the first) to the last."""
        found = self.usages[name]
        first, last = found[min(WARM_UP, len(found)) - 1], found[-1]
        return last.memory - first.memory, last.descriptors - first.descriptors, last.threads - first.threads

    def problem(self) -> str:
        """The first process that grew by more than its bound; empty if there is none."""
        for name in self.usages:
            growth = self.growth(name)
            bounds = MAX_MEMORY_GROWTH, MAX_DESCRIPTOR_GROWTH, MAX_THREAD_GROWTH
            for value, bound, what in zip(growth, bounds, ("bytes", "descriptors", "threads"), strict=True):
                if value > bound:
                    jobs = f"from job {WARM_UP} to job {len(self.weights)}"
                    return f"the {name} grew by {value} {what} {jobs}, above {bound}"
        return ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "jobs": len(self.weights),
            "usage": {name: [vars(one) for one in found] for name, found in self.usages.items()},
            "growth": {name: self.growth(name) for name in self.usages},
        }


def run_jobs(
    address: Address,
    settings: Settings,
    strategies: Sequence[str],
    pids: Callable[[], dict[str, int]],
    jobs: int = JOBS,
) -> ManyJobs:
    """Train ``jobs`` jobs, the strategies in turn. ``pids``: the processes to measure, by name."""
    found = ManyJobs()
    for number in range(jobs):
        chosen = settings.replaced({"strategy": strategies[number % len(strategies)]})
        for observed in Training(Launch(chosen, coordinator=address)).events():
            if isinstance(observed.event, Finished):
                found.weights.append(observed.event.result["weights_sha256"])
        for name, pid in pids().items():
            found.note(name, usage(pid))
    return found
