"""Timing of a call: batches long enough for the clock, and their median. Standard library only.

Every contender times with this file. ``mpi_rank`` loads it by path, in a Python that may not have Hoop installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

BATCHES = 15
BATCH_S = 0.01


def median_seconds(call: Callable[[], object], agree: Callable[[float], float], seconds: float) -> float:
    """Median time of one call, measured for about ``seconds``.

    ``agree`` broadcasts rank 0's value, so that all ranks make the same number of calls a batch.
    """
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
