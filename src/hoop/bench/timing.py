"""How a call is timed: batches long enough for the clock, their median. Standard library only.

Every contender, in whatever interpreter it runs, times with this file.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

BATCHES = 15
BATCH_S = 0.01


def median_seconds(call: Callable[[], object], agree: Callable[[float], float], seconds: float) -> float:
    """The median time of one call. ``agree`` makes all ranks use rank 0's number of calls a batch."""
    call()
    started = time.perf_counter()
    call()
    once = agree(max(time.perf_counter() - started, 1e-7))
    batches = BATCHES if once * BATCHES < 2 * seconds else 3
    calls = max(1, int(min(seconds / batches, max(BATCH_S, seconds / batches)) / once))
    calls = min(calls, 2000)
    times = []
    for _ in range(batches):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)
