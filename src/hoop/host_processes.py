"""Other processes of this host, as its kernel sees them: whether a device's process has ended, is stopped, or runs.

A device sends ``own_process()`` when it joins. A coordinator on the same host can then look at its process. Processes
in other namespaces count as those of another host: process ids mean nothing there, or a network is in between, which
may be cut. On systems without ``/proc`` nothing is known.
"""

from __future__ import annotations

import functools
import os
from enum import StrEnum
from pathlib import Path

_ENDED, _STOPPED = "ZX", "Tt"
_STATE, _START_TIME = 0, 19
"""Positions in /proc/PID/stat, behind the name of the program."""


class ProcessState(StrEnum):
    """What is known about a process."""

    RUNS = "runs"
    """It runs, waits for a core, or sleeps until something happens."""
    STOPPED = "stopped"
    """A signal (SIGSTOP) or a debugger has stopped it."""
    ENDED = "ended"
    UNKNOWN = "unknown"
    """It is a process of another host, or cannot be seen from here."""


def own_process() -> str:
    """The identity of this process: its host since the last boot, its namespaces, its start time.

    Empty where the system does not tell. Together with the process id nobody else ever has it.
    """
    try:
        return f"{_host()} {_stat(os.getpid())[_START_TIME]}"
    except (OSError, IndexError):
        return ""


def state_of(pid: int, process: str) -> ProcessState:
    """The state of the process with this id and identity (``own_process``)."""
    host, _, start_time = process.rpartition(" ")
    try:
        if not host or host != _host():
            return ProcessState.UNKNOWN
        fields = _stat(pid)
    except ProcessLookupError:
        return ProcessState.ENDED
    except FileNotFoundError:  # hidden from other users, unless the kernel does not know it either
        return _exists(pid)
    except OSError:
        return ProcessState.UNKNOWN
    if fields[_START_TIME] != start_time or fields[_STATE] in _ENDED:
        return ProcessState.ENDED
    return ProcessState.STOPPED if fields[_STATE] in _STOPPED else ProcessState.RUNS


def _exists(pid: int) -> ProcessState:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ProcessState.ENDED
    except OSError:
        pass
    return ProcessState.UNKNOWN


@functools.cache
def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join((boot, *(str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("pid", "net"))))


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
