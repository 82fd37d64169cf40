"""What a job tells while faults happen to it, for whoever waits for something of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from hoop.client.cluster import Cluster
from hoop.client.jobs import JobEvent
from hoop.errors import DeadlineExceeded, HoopError, PeerLost

PATIENCE_S = 60.0


class ObservedEvent(NamedTuple):
    """An event, and when it was heard here, by a clock that does not jump."""

    event: JobEvent
    at: float

    @property
    def kind(self) -> str:
        return self.event.kind

    @property
    def told(self) -> dict[str, Any]:
        return self.event.told


class JobWatch:
    """Follows the cluster's next job on a thread of its own, to its end."""

    def __init__(self, cluster: Cluster, ranks: int) -> None:
        self.ranks = ranks
        """How many devices take part, as far as is known."""
        self.step = 0
        self.repeated = 0
        """Steps that were told of and done again."""
        self.events: list[ObservedEvent] = []
        self._seconds: list[float] = []
        self._changed = threading.Condition()
        self._over: str | None = None
        self._thread = threading.Thread(target=self._follow, args=(cluster,), daemon=True)
        self._thread.start()

    def _follow(self, cluster: Cluster) -> None:
        over = "the job has ended"
        try:
            started = next(one for one in cluster.events(follow=True) if one.kind == "job_started")
            for event in cluster.job(int(started.fields["job"])).events(patience=PATIENCE_S):
                with self._changed:
                    self._note(event)
                    self._changed.notify_all()
        except (HoopError, ValueError) as error:  # the latter from a cluster that was closed meanwhile
            over = str(error)
        self.end(over)

    def end(self, why: str) -> None:
        """Nothing more is to be waited for."""
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()

    def _note(self, event: JobEvent) -> None:
        self.events.append(ObservedEvent(event, time.monotonic()))
        told = event.told
        if event.kind == "steps":
            self.step = max(self.step, told["first"] + len(told["loss"]))
            self._seconds += told["seconds"]
        if event.kind in ("recovered", "moved"):
            self.ranks = told["ranks"]
            self.repeated += max(0, self.step - told["step"])

    def until(self, happened: Callable[[], bool], what: str, patience: float = PATIENCE_S) -> None:
        """Waits for something that an event may bring about."""
        deadline = time.monotonic() + patience
        with self._changed:
            while not happened():
                if self._over is not None:
                    raise PeerLost(f"{self._over}, while it was waited for: {what}")
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise DeadlineExceeded(
                        f"waited {patience:g} s for: {what} (step {self.step}, {self.ranks} ranks)"
                    )

    def event(self, kind: str, after: int, patience: float = PATIENCE_S, device: int = 0) -> ObservedEvent:
        """The first event of a kind after so many; of one device, where it is given."""

        def first() -> ObservedEvent | None:
            for one in self.events[after:]:
                if one.kind == kind and device in (0, one.told.get("device", one.event.device)):
                    return one
            return None

        self.until(lambda: first() is not None, f"{kind} of device {device}" if device else kind, patience)
        found = first()
        assert found is not None, "it was waited for"
        return found

    @property
    def usual_s(self) -> float:
        """What a step takes when nothing happens."""
        return median(self._seconds) if self._seconds else 0.0

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
