"""Reports the steps of a run: one rank emits them, and every other rank keeps them in case that rank is lost.

    every step    add         every rank appends a row: loss, seconds, provenance (which device computed which samples)
                  report      the reporting rank emits the rows that it has not emitted yet, four times a second
    membership    take_over   every rank gets the same rows; the new reporting rank emits those that it has not
    change                    emitted itself

So the new reporting rank also emits rows that the old one had not emitted, or had emitted just before it was killed.
Each rank's own events are without a gap, so the receiver needs no order between ranks: it drops rows of steps that it
has seen (``runs/job_follower.py``). Every rank keeps the last ``KEPT_ROWS`` rows at most. A row is lost only if the
reporting rank is killed after its events were not read (the coordinator was away) for more steps than that.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.engine.early_stopping import EarlyStoppingState
from hoop.engine.stage.provenance import Provenance
from hoop.job_events import Emit, Evaluated, Steps
from hoop.memory.dtypes import dtype

EMIT_S = 0.25
"""Seconds between emissions."""
EMIT_ROWS = 128
"""Number of rows that are emitted at once, without waiting: half of the step log, which remains if all devices die."""
EVENT_ROWS = 256
"""Maximum number of rows in one event."""
KEPT_ROWS = 2048
"""Maximum number of rows that a rank keeps, if ``KEPT_BYTES`` do not allow fewer."""
KEPT_BYTES = 4 << 20
"""Maximum bytes of the rows that a rank keeps: a row grows with the number of shards."""
_NO_EVALUATION = -1


@dataclass(frozen=True)
class Evaluation:
    """Loss, accuracy and metrics on the evaluation data after ``steps`` steps, with the state of early stopping."""

    steps: int = _NO_EVALUATION
    epoch: int = 0
    loss: float = 0.0
    accuracy: float | None = None
    stopping: EarlyStoppingState = field(default_factory=EarlyStoppingState)
    stopping_before: EarlyStoppingState = field(default_factory=EarlyStoppingState)
    """State of early stopping before this evaluation: after a recovery the same step may be evaluated again."""
    metrics: tuple[float, ...] = ()
    """Values of the further metrics, in the order of their names."""

    def to_row(self) -> list[float]:
        """The fields as numbers, of which NaN is None."""
        accuracy = math.nan if self.accuracy is None else self.accuracy
        return [self.steps, self.epoch, self.loss, accuracy, *self.stopping, *self.stopping_before, *self.metrics]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> Evaluation:
        steps, epoch, loss, accuracy, best, waited, best_before, waited_before, *metrics = row
        return cls(
            int(steps),
            int(epoch),
            loss,
            None if math.isnan(accuracy) else accuracy,
            EarlyStoppingState(best, int(waited)),
            EarlyStoppingState(best_before, int(waited_before)),
            tuple(metrics),
        )


class ProgressReporter:
    """One rank's rows of the last steps, and which of them it has emitted."""

    def __init__(
        self, emit: Emit, provenance: Provenance, split: str = "test", metric_names: Sequence[str] = ()
    ) -> None:
        """``split``: name of the evaluation data. ``metric_names``: of the metrics beside the loss."""
        self._metric_names = list(metric_names)
        self._emit = emit
        self._provenance = provenance
        self._split = split
        width = 2 + len(self._metric_names) + provenance.width
        self._rows: deque[tuple[float, ...]] = deque(maxlen=min(KEPT_ROWS, max(256, KEPT_BYTES // width // 8)))
        """Loss, seconds, metrics and provenance of the last steps; the last row is that of step ``_done``."""
        self._done = 0
        self._emitted = 0
        """Last step whose row this rank has emitted, or need not emit."""
        self._last_emit = time.perf_counter()
        self.evaluation = Evaluation()
        """Newest evaluation, of this rank or another one."""
        self._emitted_evaluation = _NO_EVALUATION

    def add(self, done: int, losses: Sequence[float], seconds: float, metrics: Sequence[float] = ()) -> None:
        """Appends the rows of the last ``len(losses)`` steps up to ``done``, which took ``seconds`` together.

        ``metrics``: those of the last step, in the order of their names.
        """
        metrics = metrics or [0.0] * len(self._metric_names)
        if self._done != done - len(losses):
            self._rows.clear()  # rows between are missing here; take_over brings them
        self._done = done
        self._rows.extend((loss, seconds / len(losses), *metrics) for loss in losses)

    def add_evaluation(self, evaluation: Evaluation, rate: float, is_reporter: bool) -> None:
        """Every rank calls it after an evaluation; the reporting rank emits it."""
        self.evaluation = evaluation
        self.report(rate, is_reporter, force=True)

    def report(self, rate: float, is_reporter: bool, force: bool = False) -> None:
        """Emits new rows and a new evaluation, if this rank ``is_reporter`` and it is time, or ``force``.

        ``rate``: learning rate of the last step.
        """
        unsent = self._done - max(self._emitted, self._done - len(self._rows))
        now = time.perf_counter()
        if not is_reporter or not (force or unsent >= EMIT_ROWS or now - self._last_emit > EMIT_S):
            return
        if unsent:
            self._last_emit = now
        for first in range(self._done - unsent, self._done, EVENT_ROWS):
            count = min(EVENT_ROWS, self._done - first)
            start = len(self._rows) - (self._done - first)
            rows = list(islice(self._rows, start, start + count))
            self._emit(
                Steps(
                    first=first,
                    loss=[row[0] for row in rows],
                    seconds=[row[1] for row in rows],
                    rate=rate,
                    fed=self._provenance.as_events(first, count),
                    metrics={name: [row[2 + at] for row in rows] for at, name in enumerate(self._metric_names)},
                )
            )
        self._emitted = self._done
        found = self.evaluation
        if found.steps > self._emitted_evaluation:
            self._emitted_evaluation = found.steps
            metrics = dict(zip(self._metric_names, found.metrics, strict=True))
            self._emit(
                Evaluated(
                    found.steps,
                    found.epoch,
                    found.loss,
                    found.accuracy,
                    self._split,
                    metrics,
                    best=not found.stopping.waited,
                )
            )

    def resume(self, evaluation: Evaluation) -> None:
        """The run resumes from a checkpoint, whose last evaluation was reported before."""
        if len(evaluation.metrics) == len(self._metric_names):
            self.evaluation, self._emitted_evaluation = evaluation, evaluation.steps

    # ---- membership changes

    def forget(self) -> None:
        """Drops all rows: this rank's state is about to be overwritten with another rank's."""
        self._rows.clear()

    def load_rows(self, step: int, rows: Mapping[int, Sequence[float]]) -> None:
        """Takes rows of a step log (``local_persistence.py``) that reach ``step``, if there are more than here."""
        known = 0
        while step - known in rows:
            known += 1
        if known > (len(self._rows) if self._done == step else 0):
            newest = [rows[one] for one in range(step - known + 1, step + 1)]
            metrics = [0.0] * len(self._metric_names)
            table = np.array([[row[0], 0.0, *metrics, *row[1:]] for row in newest])
            self._replace(step, table)

    def take_over(self, communicator: Communicator, step: int, timeout: float) -> None:
        """Collective. Gives every rank the rows up to ``step``, where all continue; rank numbers may have changed.

        The rank with the most rows that reach ``step`` broadcasts them. Rows of later steps are dropped: these steps
        will be run again. After an error it can be called again.
        """
        while self._done > step and self._rows:
            self._rows.pop()
            self._done -= 1
        if self._done != step:
            self._rows.clear()
        self._done, self._emitted = step, min(self._emitted, step)
        if self.evaluation.steps > step:
            self.evaluation = Evaluation(metrics=(0.0,) * len(self._metric_names))
        self._emitted_evaluation = min(self._emitted_evaluation, step)
        if communicator.size == 1:
            return
        known = self.evaluation if self.evaluation.steps >= 0 else Evaluation(metrics=(0.0,) * len(self._metric_names))
        mine = np.array([len(self._rows), *known.to_row()], np.float64)
        gathered = np.zeros((communicator.size, mine.size), np.float64)
        gather = Operation("all_gather", mine.size, dtype("float64"))
        communicator.run(gather, mine, gathered.reshape(-1), timeout)
        root = int(gathered[:, 0].argmax())
        own = 2 + len(self._metric_names)
        table = np.zeros((int(gathered[root, 0]), own + self._provenance.width))
        if communicator.rank == root:
            table[:, :own] = np.array(self._rows).reshape(-1, own)
            table[:, own:] = self._provenance.rows(step - len(table), len(table))
        if table.size:
            flat = table.reshape(-1)
            give = Operation("broadcast", flat.size, dtype("float64"), root=root)
            communicator.run(give, flat, flat, timeout)
        if len(self._rows) < len(table):
            self._replace(step, table)
        self.evaluation = Evaluation.from_row(gathered[int(gathered[:, 1].argmax()), 1:].tolist())

    def _replace(self, step: int, table: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Sets the rows of the last steps up to ``step``: loss, seconds, metrics, provenance."""
        first, own = step - len(table), 2 + len(self._metric_names)
        self._rows.clear()
        self._rows.extend(map(tuple, table[:, :own].tolist()))
        self._done = step
        self._provenance.forget(first)
        self._provenance.set_rows(first, table[:, own:].astype(np.float32))
