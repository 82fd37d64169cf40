"""The faults of a chaos run: a random schedule, the injection of each kind, and the measurement of its effect.

The schedule is drawn from a seed, so that a run can be repeated.

kill          kill a device (SIGKILL); another one is started
stop          stop a device (SIGSTOP) until it is declared dead, then continue it
slow          stop and continue a device so that it runs a third of the time; it must not be declared dead
join          start one more device
leave         ask a device to leave (SIGTERM); it hands over its state and exits with code 0
coordinator   kill the coordinator and start it again from its journal
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hoop.client.cluster import Cluster
from hoop.errors import DeadlineExceeded, InvalidArgument, PeerLost
from hoop.job_events import CoordinatorBack, CoordinatorLost, DeviceLost, Reassigned, Recovered, Resized, Straggler
from hoop.lab.chaos.job_watch import PATIENCE_S, JobWatch, TimedEvent
from hoop.lab.chaos.processes import ClusterProcesses

KINDS = ("kill", "stop", "slow", "join", "leave", "coordinator")
WEIGHTS = {"kill": 4, "stop": 2, "slow": 1, "join": 1, "leave": 2, "coordinator": 2}
GAP_STEPS = (3, 60)
"""Minimum and maximum of the steps between the end of one fault's recovery and the next fault."""
SLOW_S = 2.0
"""Seconds that a ``slow`` fault lasts."""
RUN_S = 0.02
"""Seconds that the device runs between two pauses of a ``slow`` fault."""
PAUSE_S = 0.04
"""Seconds of each pause of a ``slow`` fault."""
MAX_EXTRA_DEVICES = 2
"""Number of devices above the target with which a ``join`` becomes a ``leave``."""
COORDINATOR_DOWN_S = 0.3
"""Seconds between the kill of a coordinator and its restart."""
REJOIN_S = 20.0
"""Seconds that a stopped device has to be back in the job; after that it is killed and replaced."""


@dataclass(frozen=True)
class ScheduledFault:
    """One fault of the schedule."""

    number: int
    kind: str
    gap_steps: int
    """Number of steps between the previous fault and this one."""
    target_fraction: float
    """Position of the target, in [0, 1), in the sorted list of living devices."""

    def target(self, devices: Sequence[int]) -> int:
        """The target among the living devices."""
        return sorted(devices)[int(self.target_fraction * len(devices))]


def draw_schedule(faults: int, seed: int, kinds: Sequence[str] = KINDS) -> list[ScheduledFault]:
    """Draw ``faults`` faults of these kinds."""
    if unknown := sorted(set(kinds) - set(KINDS)) or not kinds:
        raise InvalidArgument(f"kinds: {unknown or 'none'}; there are {', '.join(KINDS)}")
    draw = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    return [
        ScheduledFault(number, draw.choices(list(kinds), weights)[0], draw.randint(*GAP_STEPS), draw.random())
        for number in range(1, faults + 1)
    ]


@dataclass
class FaultOutcome:
    """The measured effect of one fault. Times are seconds since the fault unless stated otherwise."""

    number: int
    kind: str
    device: int = 0
    step: int = 0
    detected_s: float | None = None
    """Seconds until detection: the device was reported lost or a straggler, or the client missed the coordinator."""
    pause_s: float | None = None
    """Seconds until the next step. For a joining or leaving device: the time for which the other ranks waited."""
    settled_s: float | None = None
    """Seconds until the job had all its devices again."""
    repeated: int = 0
    """Number of steps done again."""
    back_s: float | None = None
    """Seconds of the return. Stopped device: from SIGCONT until it was in the job again. Coordinator: from its restart
    until it had all devices and the job."""
    replaced: bool = False
    """True if a stopped device did not come back into the job and was replaced."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class FaultActions:
    """Injects faults into the processes of a cluster that runs a job."""

    def __init__(
        self, processes: ClusterProcesses, cluster: Cluster, watch: JobWatch, devices: int, every_s: float
    ) -> None:
        """``devices``: the number to restore after each fault. ``every_s``: minimum seconds between two faults."""
        self._processes, self._cluster, self._watch, self._wanted = processes, cluster, watch, devices
        self._every_s, self._next_at = every_s, 0.0

    def inject(self, fault: ScheduledFault) -> FaultOutcome:
        """Inject one fault; returns when the job has recovered and has all its devices."""
        watch = self._watch
        first_step = watch.step
        watch.wait_until(lambda: watch.step >= first_step + fault.gap_steps, f"{fault.gap_steps} more steps")
        watch.wait_until(lambda: time.monotonic() >= self._next_at, "the next fault's turn", self._every_s + PATIENCE_S)
        alive = self._alive_pids()
        kind = fault.kind
        if kind == "join" and len(alive) >= self._wanted + MAX_EXTRA_DEVICES:
            kind = "leave"
        outcome = FaultOutcome(fault.number, kind, step=watch.step)
        if kind not in ("join", "coordinator"):
            outcome.device = fault.target(list(alive))
        self._injected_at, self._events_before, repeated = time.monotonic(), len(watch.events), watch.repeated
        self._next_at = self._injected_at + self._every_s
        getattr(self, f"_{kind}")(outcome, alive.get(outcome.device, 0))
        self._restore_devices()
        outcome.settled_s = time.monotonic() - self._injected_at
        outcome.repeated = watch.repeated - repeated
        return outcome

    def _alive_pids(self) -> dict[int, int]:
        """Device id to pid, for the living devices."""
        found = self._cluster.status().devices
        return {one.device.device_id: one.device.pid for one in found if one.state == "alive"}

    def _restore_devices(self) -> None:
        """Start missing devices, and wait until all are in the job."""
        while len([one for one in self._processes.devices if one.poll() is None]) < self._wanted:
            self._processes.start_device()
        self._cluster.wait_for_devices(self._wanted, PATIENCE_S)
        self._watch.wait_until(lambda: self._watch.ranks >= self._wanted, f"{self._wanted} devices in the job")

    def _wait_lost_and_recovered(self, outcome: FaultOutcome) -> None:
        """Wait until the device is lost and the other ranks have recovered.

        Detection is the first ``DeviceLost`` or ``Reassigned`` event: either may come first.
        """
        self._watch.wait_event(DeviceLost, self._events_before, device=outcome.device)
        outcome.pause_s = self._watch.wait_event(Recovered, self._events_before).at - self._injected_at
        detections = (one for one in self._new_events() if isinstance(one.event, DeviceLost | Reassigned))
        outcome.detected_s = next(detections).at - self._injected_at

    def _new_events(self) -> list[TimedEvent]:
        """Events since the fault was injected."""
        return self._watch.events[self._events_before :]

    def _last_pause(self) -> float | None:
        """Pause of the last change of ranks since the fault; None if there was none."""
        changes = [one.event for one in self._new_events()]
        pauses = [event.pause_s for event in changes if isinstance(event, Recovered | Resized)]
        return pauses[-1] if pauses else None

    def _end_process(self, pid: int, number: signal.Signals) -> int:
        """Send a signal to a device's process and wait for its exit code."""
        process = next(one for one in self._processes.devices if one.pid == pid)
        process.send_signal(number)
        return process.wait(PATIENCE_S)

    def _kill(self, outcome: FaultOutcome, pid: int) -> None:
        self._end_process(pid, signal.SIGKILL)
        self._wait_lost_and_recovered(outcome)

    def _stop(self, outcome: FaultOutcome, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            self._wait_lost_and_recovered(outcome)
        finally:
            continued_at = time.monotonic()
            os.kill(pid, signal.SIGCONT)
        ranks = self._watch.ranks
        try:
            self._watch.wait_until(lambda: self._watch.ranks > ranks, "the device that was stopped", REJOIN_S)
            outcome.back_s = time.monotonic() - continued_at
        except DeadlineExceeded:
            outcome.replaced = True
            self._end_process(pid, signal.SIGKILL)

    def _slow(self, outcome: FaultOutcome, pid: int) -> None:
        timer = threading.Event()
        for _ in range(int(SLOW_S / (RUN_S + PAUSE_S))):
            os.kill(pid, signal.SIGSTOP)
            timer.wait(PAUSE_S)
            os.kill(pid, signal.SIGCONT)
            timer.wait(RUN_S)
        stragglers = [one for one in self._new_events() if isinstance(one.event, Straggler) and one.event.slow]
        outcome.detected_s = stragglers[0].at - self._injected_at if stragglers else None
        outcome.pause_s = 0.0

    def _join(self, outcome: FaultOutcome, _: int) -> None:
        ranks = self._watch.ranks
        self._processes.start_device()
        self._watch.wait_until(lambda: self._watch.ranks > ranks, "one device more in the job")
        outcome.pause_s = self._last_pause()

    def _leave(self, outcome: FaultOutcome, pid: int) -> None:
        code = self._end_process(pid, signal.SIGTERM)
        if code:
            raise PeerLost(f"device {outcome.device} was asked to leave and ended with code {code}")
        outcome.pause_s = self._last_pause()

    def _coordinator(self, outcome: FaultOutcome, _: int) -> None:
        self._processes.coordinator.kill()
        self._processes.coordinator.wait()
        threading.Event().wait(COORDINATOR_DOWN_S)
        started = time.monotonic()
        self._processes.start_coordinator()
        self._watch.wait_event(CoordinatorBack, self._events_before)
        lost = self._watch.wait_event(CoordinatorLost, self._events_before)
        outcome.detected_s = lost.at - self._injected_at
        step = self._watch.step
        self._watch.wait_until(lambda: self._watch.step > step, "steps after the coordinator is back")
        outcome.pause_s = 0.0  # steps need no coordinator
        self._cluster.wait_ready(PATIENCE_S)
        self._cluster.wait_for_devices(self._wanted, PATIENCE_S)
        outcome.back_s = time.monotonic() - started
