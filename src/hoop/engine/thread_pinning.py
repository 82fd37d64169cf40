"""Binds a device's threads to its own cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hoop.collectives.rank_context import RankContext


def pin_threads(context: RankContext, threads: int, pin: bool) -> None:
    """Limits PyTorch to ``threads`` threads; with ``pin``, binds the calling thread to this device's own cores.

    Devices of one host get different cores as long as there are enough.
    """
    torch.set_num_threads(threads)
    if not pin or not hasattr(os, "sched_setaffinity"):
        return
    index, count = context.local_rank_and_size
    cores = spread_cores(sorted(os.sched_getaffinity(0)))
    if count * threads > len(cores) and threads > 1:
        return  # more threads than cores: leave placement to the scheduler
    mine = {cores[(index * threads + offset) % len(cores)] for offset in range(threads)}
    os.sched_setaffinity(0, mine)


def spread_cores(cores: Sequence[int]) -> list[int]:
    """Orders logical cores so that the first ones are on different physical cores; hyper-thread siblings come last."""
    seen: dict[str, int] = {}
    order = []
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            siblings = path.read_text()
        except OSError:
            siblings = str(core)
        seen[siblings] = seen.get(siblings, 0) + 1
        order.append((seen[siblings], core))
    return [core for _, core in sorted(order)]
