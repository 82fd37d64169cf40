"""Jobs one after the other on one cluster, with the memory, descriptors and threads of its processes after each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoop.engine.settings import Settings
from hoop.job_events import Finished
from hoop.runs.api import Launch, Training
from hoop.topology import Address

JOBS = 30
WARM_UP = 10
"""Jobs before the growth is measured: until then libraries are loaded and caches filled."""
MAX_MEMORY_GROWTH = 24 << 20
"""Bytes by which the resident memory of a process may grow from job 10 to job 30: event logs and the allocator's own
fragments, and not one job's arena buffers or links."""
MAX_DESCRIPTOR_GROWTH = 4
MAX_THREAD_GROWTH = 4


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    memory: int
    """Resident bytes."""
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
    """By name of the process."""

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
