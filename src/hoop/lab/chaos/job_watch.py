"""The events of a job under fault injection, and waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from hoop.client.cluster import Cluster
from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.job_events import JobEvent, Observed, Recovered, Resized, Steps

PATIENCE_S = 300.0


@dataclass(frozen=True)
class TimedEvent:
    """An event and the time of its arrival, on the monotonic clock."""

    observed: Observed
    at: float

    @property
    def event(self) -> JobEvent:
        return self.observed.event

    @property
    def device(self) -> int:
        """The device that the event is about, else the one that emitted it."""
        return int(getattr(self.event, "device", self.observed.device))


class JobWatch:
    """Follows the cluster's next job to its end, in a separate thread."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.ranks = ranks
        """World size, according to the latest event."""
        self.job = 0
        """The number of the job; 0 before it is known."""
        self.step = 0
        self.repeated = 0
        """Steps that were reported and then repeated."""
        self.events: list[TimedEvent] = []
        self._seconds: list[float] = []
        self._changed = threading.Condition()
        self._end_reason: str | None = None
        self._thread = threading.Thread(target=self._follow, args=(cluster,), daemon=True)
        self._thread.start()

    def _follow(self, cluster: Cluster) -> None:
        reason = "the job has ended"
        try:
            started = next(one for one in cluster.events(follow=True) if one.kind == "job_started")
            with self._changed:
                self.job = int(started.fields["job"])
                self._changed.notify_all()
            job = cluster.job(self.job)
            for observed in job.events(coordinator_timeout=PATIENCE_S):
                with self._changed:
                    self._note(observed)
                    self._changed.notify_all()
        except (HoopError, ValueError) as error:  # ValueError: the cluster was closed meanwhile
            reason = str(error)
        self.end(reason)

    def end(self, reason: str) -> None:
        """Make every current and later wait fail with ``reason``."""
        with self._changed:
            self._end_reason = self._end_reason or reason
            self._changed.notify_all()

    def _note(self, observed: Observed) -> None:
        self.events.append(TimedEvent(observed, time.monotonic()))
        event = observed.event
        if isinstance(event, Steps):
            self.step = max(self.step, event.first + len(event.loss))
            self._seconds += event.seconds
        if isinstance(event, Recovered | Resized):
            self.ranks = event.ranks
            self.repeated += max(0, self.step - event.step)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout: float = PATIENCE_S) -> None:
        """Wait until ``condition`` is true; it is evaluated after every event. ``what`` describes it in errors.

        Raises PeerLost if the job ends, DeadlineExceeded after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not condition():
                if self._end_reason is not None:
                    raise PeerLost(f"{self._end_reason}, while waiting for: {what}")
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"waited {timeout:g} s for: {what} (step {self.step}, {self.ranks} ranks)")

    def wait_event(self, kind: type[JobEvent], after: int, timeout: float = PATIENCE_S, device: int = 0) -> TimedEvent:
        """Wait for the first event of ``kind`` after the first ``after`` events; of ``device`` unless that is 0."""

        def first() -> TimedEvent | None:
            for one in self.events[after:]:
                if isinstance(one.event, kind) and device in (0, one.device):
                    return one
            return None

        what = f"{kind.__name__} of device {device}" if device else kind.__name__
        self.wait_until(lambda: first() is not None, what, timeout)
        found = first()
        assert found is not None, "it was waited for"
        return found

    @property
    def median_step_s(self) -> float:
        """Median seconds of a step."""
        return median(self._seconds) if self._seconds else 0.0

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
