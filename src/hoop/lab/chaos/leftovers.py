"""What a run has left behind: processes, listening ports, files in shared memory and in the temporary folder.

Every process of a run inherits an environment variable with the run's mark. So a process that the run forgot is found,
no matter which its parent is now, and processes of other runs on this machine do not count.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "HOOP_CHAOS_RUN"
"""The environment variable."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - it is only listed
GRACE_S = 10.0
"""How long a process that has been ended may take to disappear, and its files with it."""
_PERIOD_S = 0.05


class Footprint:
    """The processes and ports of a run that have been seen so far."""

    def __init__(self, mark: str) -> None:
        self._mark = f"{MARK}={mark}"
        self._pids: set[int] = set()
        self._listeners: dict[str, int] = {}
        """The inode of a listening socket, and its port."""

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
