"""How many cores other work keeps busy here: times that are measured beside it decide nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

WINDOW_S = 0.5
_IDLE = (3, 4)
"""Which fields of the first line of /proc/stat are time in which nothing was done: idle, and waiting for a disk."""


def busy_cores() -> float:
    """Measured while this process waits; where there is no /proc/stat, the load average of the last minute."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return os.getloadavg()[0]
    began, before = time.monotonic(), _worked(stat)
    time.sleep(WINDOW_S)
    return (_worked(stat) - before) / (time.monotonic() - began)


def _worked(stat: Path) -> float:
    """Seconds that all cores have worked since the machine started."""
    fields = [int(word) for word in stat.read_text("ascii").split("\n", 1)[0].split()[1:9]]
    return sum(one for index, one in enumerate(fields) if index not in _IDLE) / os.sysconf("SC_CLK_TCK")
