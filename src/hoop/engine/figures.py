"""The figures of steps, told a few at a time by the rank that tells, and remembered a while by the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hoop.collectives.reduction import Array
from hoop.engine.stages.evidence import KEPT, Evidence

Emit = Callable[[Mapping[str, Any]], None]
TELL_S = 0.25
"""How often they are told."""


class Figures:
    """Losses and times of the last steps."""

    def __init__(self, emit: Emit, evidence: Evidence) -> None:
        self._emit = emit
        self._evidence = evidence
        self._told = time.perf_counter()
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def add(self, losses: list[float], seconds: float) -> None:
        """Steps that took so long together."""
        self._losses += losses
        self._seconds += [seconds / max(1, len(losses))] * len(losses)

    def tell(self, done: int, rate: float, tells: bool, force: bool = False) -> None:
        """What is not told yet, up to step ``done``; if this rank ``tells``, and it is time or it is asked for."""
        if not tells:
            if len(self._losses) > 2 * KEPT:
                self._losses, self._seconds = self._losses[-KEPT:], self._seconds[-KEPT:]
            return
        now = time.perf_counter()
        if not self._losses or not (force or now - self._told > TELL_S):
            return
        self._told = now
        first = done - len(self._losses)
        self._emit(
            {
                "kind": "steps",
                "first": first,
                "loss": self._losses,
                "seconds": self._seconds,
                "rate": rate,
                "fed": self._evidence.told(first, len(self._losses)),
            }
        )
        self._losses, self._seconds = [], []

    def remember(self, done: int, losses: list[float], evidence: Iterable[Array]) -> None:
        """The steps before ``done``, as they were written down before all began again."""
        self._evidence.adopt(done - len(losses), evidence)
        self.add(losses, 0.0)

    def forget(self, steps: int) -> None:
        """The last steps are done again, and told then."""
        if steps > 0:
            del self._losses[-steps:], self._seconds[-steps:]
