"""Each kind of fault, carried out, and what came of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

from hoop.client.cluster import Cluster
from hoop.errors import DeadlineExceeded, PeerLost
from hoop.lab.chaos.job_watch import PATIENCE_S, JobWatch
from hoop.lab.chaos.processes import ClusterProcesses
from hoop.lab.chaos.schedule import ScheduledFault

SLOW_S, RUNS_S, RESTS_S = 2.0, 0.02, 0.04
MORE = 2
"""Devices more than there should be; then one leaves instead."""
AWAY_S = 0.3
"""How long nobody is there before a coordinator is started again."""
BACK_S = 20.0
"""For one that was stopped to be back in the job; then another takes its place."""


@dataclass
class FaultOutcome:
    """What came of one fault."""

    number: int
    kind: str
    device: int = 0
    step: int = 0
    detected_s: float | None = None
    """Until it was known: lost, a straggler, or (of a coordinator) missed."""
    pause_s: float | None = None
    """Until steps went on, from the fault; of a device that joins or leaves, how long it held up the others."""
    settled_s: float | None = None
    """Until the job had all its devices again."""
    repeated: int = 0
    """Steps done again."""
    back_s: float | None = None
    """Until one that was stopped was in the job again, from when it went on; until a new coordinator had all devices
    and the job, from its start."""
    replaced: bool = False
    """A device that was stopped did not come back into the job, and another took its place."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FaultActions:
    """Strikes at a fleet that a job runs on."""

    def __init__(
        self, fleet: ClusterProcesses, cluster: Cluster, watch: JobWatch, devices: int, every_s: float
    ) -> None:
        """A blow every so many seconds, or as soon as the one before is over."""
        self._fleet, self._cluster, self._watch, self._wanted = fleet, cluster, watch, devices
        self._every_s, self._due = every_s, 0.0

    def strike(self, chance: ScheduledFault) -> FaultOutcome:
        """One fault; returns when its consequences are over."""
        watch = self._watch
        begun = watch.step
        watch.until(lambda: watch.step >= begun + chance.gap, f"{chance.gap} more steps")
        watch.until(
            lambda: time.monotonic() >= self._due, "the next fault's turn", self._every_s + PATIENCE_S
        )
        alive = self._alive()
        kind = chance.kind
        if kind == "join" and len(alive) >= self._wanted + MORE:
            kind = "leave"
        outcome = FaultOutcome(chance.number, kind, step=watch.step)
        if kind not in ("join", "coordinator"):
            outcome.device = chance.of(list(alive))
        self._struck, self._seen, repeated = time.monotonic(), len(watch.events), watch.repeated
        self._due = self._struck + self._every_s
        getattr(self, f"_{kind}")(outcome, alive.get(outcome.device, 0))
        self._settle()
        outcome.settled_s = time.monotonic() - self._struck
        outcome.repeated = watch.repeated - repeated
        return outcome

    def _alive(self) -> dict[int, int]:
        """The devices that are there, with their processes."""
        found = self._cluster.status().devices
        return {one.device.device_id: one.device.pid for one in found if one.state == "alive"}

    def _settle(self) -> None:
        """As many devices as there should be, all of them in the job."""
        while len([one for one in self._fleet.devices if one.poll() is None]) < self._wanted:
            self._fleet.device()
        self._cluster.wait_for_devices(self._wanted, PATIENCE_S)
        self._watch.until(lambda: self._watch.ranks >= self._wanted, f"{self._wanted} devices in the job")

    def _lost(self, outcome: FaultOutcome) -> None:
        """Waits until a device is missed, and the others go on.

        It is known to be lost when the others get their new seats, or its end was told before.
        """
        self._watch.event("lost", self._seen, device=outcome.device)
        outcome.pause_s = self._watch.event("recovered", self._seen).at - self._struck
        known = (one for one in self._watch.events[self._seen :] if one.kind in ("lost", "reseated"))
        outcome.detected_s = next(known).at - self._struck

    def _end(self, pid: int, how: signal.Signals) -> int:
        """Ends a device's process; the code it ended with."""
        process = next(one for one in self._fleet.devices if one.pid == pid)
        process.send_signal(how)
        return process.wait(PATIENCE_S)

    def _kill(self, outcome: FaultOutcome, pid: int) -> None:
        self._end(pid, signal.SIGKILL)
        self._lost(outcome)

    def _stop(self, outcome: FaultOutcome, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            self._lost(outcome)
        finally:
            went_on = time.monotonic()
            os.kill(pid, signal.SIGCONT)
        ranks = self._watch.ranks
        try:
            self._watch.until(lambda: self._watch.ranks > ranks, "the one that was stopped", BACK_S)
            outcome.back_s = time.monotonic() - went_on
        except DeadlineExceeded:
            outcome.replaced = True
            self._end(pid, signal.SIGKILL)

    def _slow(self, outcome: FaultOutcome, pid: int) -> None:
        rests = threading.Event()
        for _ in range(int(SLOW_S / (RUNS_S + RESTS_S))):
            os.kill(pid, signal.SIGSTOP)
            rests.wait(RESTS_S)
            os.kill(pid, signal.SIGCONT)
            rests.wait(RUNS_S)
        named = [
            one for one in self._watch.events[self._seen :] if one.kind == "straggler" and one.told["slow"]
        ]
        outcome.detected_s = named[0].at - self._struck if named else None
        outcome.pause_s = 0.0

    def _join(self, outcome: FaultOutcome, _: int) -> None:
        ranks = self._watch.ranks
        self._fleet.device()
        self._watch.until(lambda: self._watch.ranks > ranks, "one device more in the job")
        moves = [one for one in self._watch.events[self._seen :] if one.kind in ("moved", "recovered")]
        outcome.pause_s = moves[-1].told["pause_s"]

    def _leave(self, outcome: FaultOutcome, pid: int) -> None:
        code = self._end(pid, signal.SIGTERM)
        if code:
            raise PeerLost(f"device {outcome.device} was told to leave and ended with code {code}")
        moves = [one for one in self._watch.events[self._seen :] if one.kind in ("moved", "recovered")]
        outcome.pause_s = moves[-1].told["pause_s"] if moves else None

    def _coordinator(self, outcome: FaultOutcome, _: int) -> None:
        self._fleet.coordinator.kill()
        self._fleet.coordinator.wait()
        threading.Event().wait(AWAY_S)
        started = time.monotonic()
        self._fleet.coordinate()
        self._watch.event("back", self._seen)
        outcome.detected_s = self._watch.event("away", self._seen).at - self._struck
        step = self._watch.step
        self._watch.until(lambda: self._watch.step > step, "steps after the coordinator is back")
        outcome.pause_s = 0.0  # steps need no coordinator
        self._cluster.knock(PATIENCE_S)
        self._cluster.wait_for_devices(self._wanted, PATIENCE_S)
        outcome.back_s = time.monotonic() - started
