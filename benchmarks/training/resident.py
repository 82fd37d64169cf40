"""The most memory that each device of a job held, from what Linux keeps of every process.

    this process ── head ── coordinator, device 1, device 2 …        as hoop.train forks them

A device begins with its parent's pages; what it held above those at its peak is its own: its arena, its activations,
PyTorch's scratch space. Elsewhere than on Linux nothing is known.
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
        self._most: dict[int, int] = {}

    def look(self) -> None:
        """Notes every device's peak so far; a few microseconds each, so do it as they tell something."""
        if not self._devices:
            parents = _parents()
            heads = {pid for pid, parent in parents.items() if parent == os.getpid()}
            _coordinator, *self._devices = sorted(pid for pid, parent in parents.items() if parent in heads) or [0]
        for pid in self._devices:
            self._most[pid] = max(self._most.get(pid, 0), _field(pid, "VmHWM"))

    @property
    def grown(self) -> list[int]:
        """Bytes above what it was forked with, a device; empty where that is not known."""
        return [max(0, most - self._before) for _, most in sorted(self._most.items()) if most]


def _parents() -> dict[int, int]:
    """Every process and its parent."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if os.path.isdir("/proc") else []
    return {pid: parent for pid in pids if (parent := _field(pid, "PPid", 1))}


def _field(pid: int, name: str, unit: int = 1024) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * unit
    return 0
