"""How far a job is, from the events of its log: for metrics. Events are kept as text and parsed when asked for."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field

from hoop import job_events as ev
from hoop.job_events import JobEvent

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds, in seconds, of the buckets of ``PauseHistogram``; the last bucket has none."""
MAX_PAUSE_S = 1e9
STALLED_S = 10.0
"""Seconds without a reported step after which a job makes no progress, if they are also three times its last step."""
NEWEST = {one.kind: one for one in (ev.Steps, ev.Evaluated)}
"""Classes of the events of which the newest is kept, by kind."""


@dataclass(frozen=True)
class StepsReport:
    """The newest steps that a job reported."""

    done: int
    """Number of steps done in the whole run."""
    loss: float
    step_s: float
    """Mean seconds of these steps."""


@dataclass
class JobProgress:
    """The newest events of one job. One thread adds events, any thread asks."""

    _newest: dict[type[JobEvent], tuple[str, float]] = field(default_factory=dict)
    """JSON text of the newest event of each class, and the time when it came (monotonic clock)."""
    _done: int = 0

    def add(self, kind: str, text: str) -> None:
        """An event of the job. The cost is one look-up: the job's events pass through here."""
        if (found := NEWEST.get(kind)) is not None:
            self._newest[found] = text, time.monotonic()

    def steps(self) -> StepsReport | None:
        """The newest report of steps; None before the first, or if it cannot be read.

        ``done`` never falls: after a recovery the new reporting rank may report steps again.
        """
        event = self._parse(ev.Steps)
        try:
            if not isinstance(event, ev.Steps) or not event.loss:
                return None
            seconds = [float(one) for one in event.seconds]
            self._done = max(self._done, int(event.first) + len(event.loss))
            return StepsReport(self._done, float(event.loss[-1]), sum(seconds) / max(1, len(seconds)))
        except (TypeError, ValueError, OverflowError):  # another process wrote it
            return None

    def steps_per_second(self, now: float) -> float:
        """Steps per second in the newest report; 0 if none came for long."""
        report = self.steps()
        if report is None or not report.step_s > 0:
            return 0.0
        silent_s = now - self._newest[ev.Steps][1]
        return 0.0 if silent_s > max(STALLED_S, 3 * report.step_s) else 1 / report.step_s

    def evaluated(self) -> tuple[float, float | None] | None:
        """Loss and accuracy (None if there is none) of the newest evaluation; None before the first."""
        event = self._parse(ev.Evaluated)
        try:
            if not isinstance(event, ev.Evaluated):
                return None
            return float(event.loss), None if event.accuracy is None else float(event.accuracy)
        except (TypeError, ValueError, OverflowError):
            return None

    def _parse(self, kind: type[JobEvent]) -> JobEvent | None:
        text, _ = self._newest.get(kind, ("", 0.0))
        try:
            return ev.from_json(kind.kind, text) if text else None
        except (TypeError, ValueError):
            return None


class PauseHistogram:
    """How often ranks paused for a change of membership, and for how long."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        """Sum of all pauses in seconds."""

    def add(self, seconds: object) -> None:
        """A device reported a pause; a value that is no number of seconds is counted as 0."""
        found = 0.0
        if isinstance(seconds, int | float) and 0 <= seconds <= MAX_PAUSE_S:  # NaN is not
            found = float(seconds)
        self._counts[bisect.bisect_left(BUCKETS, found)] += 1
        self.seconds += found

    def cumulative(self) -> list[tuple[str, float]]:
        """The upper bound of each bucket, as Prometheus writes it, and how many pauses were at most that long."""
        total, found = 0, list[tuple[str, float]]()
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), tuple(self._counts), strict=True):
            total += count
            found.append((bound, total))
        return found
