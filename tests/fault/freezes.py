"""Freezes processes for random times, each independently of the others, as a machine does whose cores others take."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence

BETWEEN_S = (0.2, 2.0)


class Freezes:
    """The freezes of some processes."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """Freezes of each process so far."""
        self._ending = threading.Event()

    def _freeze(self, pid: int, seconds: tuple[float, float]) -> None:
        rng = random.Random(pid)
        while not self._ending.wait(rng.uniform(*BETWEEN_S)):
            os.kill(pid, signal.SIGSTOP)
            try:
                self._ending.wait(rng.uniform(*seconds))
            finally:
                os.kill(pid, signal.SIGCONT)
            self.counts[pid] += 1

    @contextlib.contextmanager
    def of(self, pids: Sequence[int], seconds: tuple[float, float]) -> Iterator[None]:
        """Freezes each of these processes again and again inside the block, for ``seconds`` (least, most) each time."""
        self.counts = dict.fromkeys(pids, 0)
        threads = [threading.Thread(target=self._freeze, args=(pid, seconds)) for pid in pids]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ending.set()
            for thread in threads:
                thread.join()
