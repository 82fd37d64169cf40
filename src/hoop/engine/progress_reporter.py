"""Reports the steps of a run: one rank emits them, and every other rank keeps them in case that rank is lost.

    a step       add       every rank appends its row: loss, seconds, evidence (which device computed which samples)
                 report    the reporting rank emits the rows that it has not emitted, four times a second
    a change     take_over every rank gets the same rows; the new reporting rank emits those it has not emitted itself

Rows that the old reporting rank had not emitted, or had emitted and was killed before anybody read them, are therefore
emitted by the new one. A rank's own events have no gap, so the receiver needs no order between ranks: it drops a row
whose step it has seen (``runs/job_follower.py``). Rows of at most ``KEPT_ROWS`` steps are kept. One is lost only if
the reporting rank is killed when nobody (the coordinator was away) had read its events for more steps than that.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.engine.stage.provenance import Provenance
from hoop.memory.dtypes import dtype

Emit = Callable[[Mapping[str, Any]], None]
EMIT_S = 0.25
"""Rows are emitted this often."""
EMIT_ROWS = 128
"""They are emitted earlier if there are this many: half of what the diary has room for, should all devices die."""
EVENT_ROWS = 256
"""Rows in one event at most, so that its size is bounded."""
KEPT_ROWS = 2048
"""Rows that a rank keeps; fewer where a step has many shards: see ``KEPT_BYTES``."""
KEPT_BYTES = 4 << 20
_NO_EVALUATION = -1


class Evaluation(NamedTuple):
    """The model's figures on the data that it is evaluated on, after ``steps`` steps."""

    steps: int = _NO_EVALUATION
    epoch: int = 0
    loss: float = 0.0
    accuracy: float = 0.0


class ProgressReporter:
    """One rank's rows of the last steps, and which of them it has emitted."""

    def __init__(self, emit: Emit, evidence: Provenance, split: str = "test") -> None:
        """``split``: the name of the data that evaluations are made on."""
        self._emit = emit
        self._evidence = evidence
        self._split = split
        width = 2 + evidence.places
        self._rows: deque[tuple[float, float]] = deque(
            maxlen=min(KEPT_ROWS, max(256, KEPT_BYTES // width // 8))
        )
        """Loss and seconds of the last steps, the newest last: of the step ``_done`` and those before it."""
        self._done = 0
        self._emitted = 0
        """This rank has emitted the row of this step, or has nothing to do with it."""
        self._last_emit = time.perf_counter()
        self._evaluation = Evaluation()
        self._emitted_evaluation = _NO_EVALUATION

    def add(self, done: int, losses: Sequence[float], seconds: float) -> None:
        """Appends the rows of the last steps up to ``done``, which took ``seconds`` together."""
        if self._done != done - len(losses):
            self._rows.clear()  # the steps between are unknown here; take_over brings them
        self._done = done
        self._rows.extend((loss, seconds / len(losses)) for loss in losses)

    def evaluated(self, evaluation: Evaluation, rate: float, reports: bool) -> None:
        """Notes an evaluation, which every rank has; the reporting rank emits it."""
        self._evaluation = evaluation
        self.report(rate, reports, force=True)

    def report(self, rate: float, reports: bool, force: bool = False) -> None:
        """Emits what this rank has not emitted, if it is the one that ``reports`` and it is time, or ``force``.

        ``rate``: the learning rate of the last step.
        """
        waiting = self._done - max(self._emitted, self._done - len(self._rows))
        now = time.perf_counter()
        if not reports or not (force or waiting >= EMIT_ROWS or now - self._last_emit > EMIT_S):
            return
        if waiting:
            self._last_emit = now
        for first in range(self._done - waiting, self._done, EVENT_ROWS):
            count = min(EVENT_ROWS, self._done - first)
            start = len(self._rows) - (self._done - first)
            rows = list(islice(self._rows, start, start + count))
            self._emit(
                {
                    "kind": "steps",
                    "first": first,
                    "loss": [loss for loss, _ in rows],
                    "seconds": [seconds for _, seconds in rows],
                    "rate": rate,
                    "fed": self._evidence.told(first, count),
                }
            )
        self._emitted = self._done
        if self._evaluation.steps > self._emitted_evaluation:
            self._emitted_evaluation = self._evaluation.steps
            self._emit({"kind": "evaluated", **self._evaluation._asdict(), "split": self._split})

    # ---- when the ranks change

    def forget(self) -> None:
        """Drops the rows: this rank's state is about to be overwritten by that of another one."""
        self._rows.clear()

    def recall(self, step: int, rows: Mapping[int, Sequence[float]]) -> None:
        """Takes rows from this device's arena (``local_persistence.py``), if they reach ``step`` and are more."""
        known = 0
        while step - known in rows:
            known += 1
        if known > (len(self._rows) if self._done == step else 0):
            found = [rows[one] for one in range(step - known + 1, step + 1)]
            table = np.array([[row[0], 0.0, *row[1:]] for row in found])
            self._replace(step, table)

    def take_over(self, communicator: Communicator, step: int, timeout: float) -> None:
        """All ranks are at ``step``, and may have other numbers from now on: every rank gets the rows up to it.

        Collective. The rank with the most rows that reach ``step`` gives them; rows of later steps, which will be run
        again, are dropped. If it fails, it can be called again.
        """
        while self._done > step and self._rows:
            self._rows.pop()
            self._done -= 1
        if self._done != step:
            self._rows.clear()
        self._done, self._emitted = step, min(self._emitted, step)
        if self._evaluation.steps > step:
            self._evaluation = Evaluation()
        self._emitted_evaluation = min(self._emitted_evaluation, step)
        if communicator.size == 1:
            return
        mine = np.array([len(self._rows), *self._evaluation], np.float64)
        heard = np.zeros((communicator.size, mine.size), np.float64)
        gather = Operation("all_gather", mine.size, dtype("float64"))
        communicator.run(gather, mine, heard.reshape(-1), timeout)
        root = int(heard[:, 0].argmax())
        table = np.zeros((int(heard[root, 0]), 2 + self._evidence.places))
        if communicator.rank == root:
            table[:, :2] = np.array(self._rows).reshape(-1, 2)
            table[:, 2:] = self._evidence.rows(step - len(table), len(table))
        if table.size:
            flat = table.reshape(-1)
            give = Operation("broadcast", flat.size, dtype("float64"), root=root)
            communicator.run(give, flat, flat, timeout)
        if len(self._rows) < len(table):
            self._replace(step, table)
        steps, epoch, loss, accuracy = heard[int(heard[:, 1].argmax()), 1:].tolist()
        self._evaluation = Evaluation(int(steps), int(epoch), loss, accuracy)

    def _replace(self, step: int, table: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """The rows of the last steps up to ``step`` are these: loss, seconds, evidence."""
        first = step - len(table)
        self._rows.clear()
        self._rows.extend((loss, seconds) for loss, seconds in table[:, :2].tolist())
        self._done = step
        self._evidence.forget(first)
        self._evidence.adopt(first, table[:, 2:].astype(np.float32))
