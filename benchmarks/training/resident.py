"""The peak resident memory of each device of a job, read from /proc.

    this process ── head ── coordinator, device 1, device 2 …        as hoop.train forks them

A device starts with its parent's pages; its peak above those is its own memory: its arena, its activations and
PyTorch's scratch space. This works on Linux only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class Resident:
    """Watches the devices of the next ``hoop.train`` of this process."""

    def __init__(self) -> None:
        self._before = _field(os.getpid(), "VmRSS")
        self._devices: list[int] = []
        self._peak: dict[int, int] = {}

    def sample(self) -> None:
        """Record the peak of every device so far. It takes a few microseconds per device: call it at every event."""
        if not self._devices:
            parents = _parents()
            heads = {pid for pid, parent in parents.items() if parent == os.getpid()}
            _coordinator, *self._devices = sorted(pid for pid, parent in parents.items() if parent in heads) or [0]
        for pid in self._devices:
            self._peak[pid] = max(self._peak.get(pid, 0), _field(pid, "VmHWM"))

    @property
    def grown(self) -> list[int]:
        """Peak bytes above those at the fork, per device; empty where they are unknown."""
        return [max(0, peak - self._before) for _, peak in sorted(self._peak.items()) if peak]


def _parents() -> dict[int, int]:
    """The parent of every process."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if os.path.isdir("/proc") else []
    return {pid: parent for pid in pids if (parent := _field(pid, "PPid", 1))}


def _field(pid: int, name: str, unit: int = 1024) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * unit
    return 0
