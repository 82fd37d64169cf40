"""Injection of a scenario's fault into its cluster, and the evidence that it happened."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import DeadlineExceeded, InternalError, PeerLost
from hoop.job_events import DeviceLost, Recovered, Resized, SnapshotTaken
from hoop.lab.chaos.fault_actions import COORDINATOR_DOWN_S, PAUSE_S, RUN_S, SLOW_S
from hoop.lab.chaos.job_watch import JobWatch
from hoop.lab.chaos.network import Network
from hoop.lab.chaos.paced_job import STEPS_AN_EPOCH
from hoop.lab.chaos.processes import ClusterProcesses
from hoop.lab.chaos.scenario import Scenario
from hoop.lab.chaos.small_disk import SmallDisk

PATIENCE_S = 240.0
"""Seconds that a step or an event may take to come, on a machine with ten times more work than cores."""
LOST_PERCENT = 20
LOSS_STEPS = 15
"""Number of steps during which packets are lost."""
LOSS_S = 20.0
"""Maximum seconds during which packets are lost."""
CUT_S = 5.0
RETURN_S = 150.0
"""Seconds that devices that were started have to be in the job; the training is slowed down meanwhile."""
_PERIOD_S = 0.001


RESTARTING = frozenset(
    (
        "kill",
        "join",
        "kill-two",
        "kill-all",
        "coordinator-and-device",
        "first-second",
        "arena-deleted",
        "arena-disk-full",
    )
)
"""Kinds of faults after which devices are started, in the middle of the training."""


class FaultMissed(Exception):
    """The training was over before the fault could be injected."""


@dataclass
class RunningScenario:
    """The processes of a scenario, its job's events, and where its files are."""

    scenario: Scenario
    processes: ClusterProcesses
    watch: JobWatch
    client: subprocess.Popen[str]
    """Process of ``hoop train``."""
    out: Path
    hold: Path
    """File that makes the job slow while it exists, so that devices that load PyTorch find it still running."""
    network: Network | None = None
    disk: SmallDisk | None = None


class ScenarioFaults:
    """Injects the fault of one scenario."""

    def __init__(self, running: RunningScenario) -> None:
        self._running, self._scenario = running, running.scenario
        self._processes, self._watch = running.processes, running.watch
        self._started: list[int] = []
        """Ids of the devices that the fault has started in the middle of the training."""
        self._before_start = 0
        """Number of events before these devices were started."""

    def inject(self) -> str:
        """Inject the fault at its moment; returns the evidence that it happened.

        Devices and a coordinator that were killed are started again; the job is held until the devices are in it, or
        it has ended. Raises FaultMissed if the training was over before.
        """
        inject: Callable[[], str] = getattr(self, "_" + self._scenario.fault.replace("-", "_"))
        try:
            evidence = inject()
            return evidence + self._wait_for_started() if self._started else evidence
        finally:
            self._running.hold.unlink(missing_ok=True)

    def _wait_for_started(self) -> str:
        """Wait until the devices that were started are in the job; returns when, or that they did not come."""
        wanted = max(self._scenario.devices, *self._started)
        began, before = time.monotonic(), self._before_start

        def complete() -> bool:
            changes = (one.event for one in self._watch.events[before:])
            return any(isinstance(one, Recovered | Resized) and one.ranks >= wanted for one in changes)

        try:
            self._watch.wait_until(complete, f"{wanted} devices in the job", RETURN_S)
        except PeerLost:
            if self._scenario.fault == "join":
                raise FaultMissed("the training was over before the device had joined") from None
            return "; the job ended before it had all its devices again"
        except DeadlineExceeded:
            return f"; the job did not have {wanted} devices within {RETURN_S:g} s"
        return f"; {wanted} devices in the job after {time.monotonic() - began:.1f} s"

    # ---- moments

    def _wait_for_step(self, step: int) -> None:
        self._wait(lambda: self._watch.step >= step, f"step {step}")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self._watch.wait_until(condition, what, PATIENCE_S)
        except PeerLost as error:
            raise FaultMissed(str(error)) from None
        if self._running.client.poll() is not None:
            raise FaultMissed(f"hoop train ended with code {self._running.client.returncode} before: {what}")

    def _at_step(self) -> str:
        """Wait for the drawn step; returns it as text."""
        self._wait_for_step(self._scenario.step)
        self._hold()
        return f"at step {self._watch.step}"

    def _hold(self) -> None:
        """Slow the job down from now on, until the fault has been injected and the devices are back."""
        self._before_start = len(self._watch.events)
        if self._scenario.fault in RESTARTING:
            self._running.hold.touch()

    # ---- processes

    def _kill(self) -> str:
        moment = self._at_step()
        number = self._scenario.victims[0]
        self._kill_devices([number])
        self._restart_devices([number])
        return f"device {number} killed {moment}"

    def _kill_devices(self, numbers: Iterable[int]) -> None:
        """Kill all of them, then wait for each; raises FaultMissed if one had ended by itself."""
        processes = [self._processes.numbered[number] for number in numbers]
        for one in processes:
            one.kill()
        for one in processes:
            if (code := one.wait(PATIENCE_S)) != -signal.SIGKILL:
                raise FaultMissed(f"device process {one.pid} had ended with code {code} before it was killed")

    def _restart_devices(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._processes.start_device(number)
            self._started.append(number)

    def _all_numbers(self) -> list[int]:
        return list(range(1, self._scenario.devices + 1))

    def _stop(self) -> str:
        moment = self._at_step()
        number = self._scenario.victims[0]
        process, before = self._processes.numbered[number], len(self._watch.events)
        process.send_signal(signal.SIGSTOP)
        try:
            self._watch.wait_event(DeviceLost, before, PATIENCE_S, device=number)
        except PeerLost:
            pass  # the others finished without it
        finally:
            process.send_signal(signal.SIGCONT)
        return f"device {number} stopped {moment}"

    def _slow(self) -> str:
        moment = self._at_step()
        number = self._scenario.victims[0]
        process, timer = self._processes.numbered[number], threading.Event()
        for _ in range(int(SLOW_S / (RUN_S + PAUSE_S))):
            process.send_signal(signal.SIGSTOP)
            timer.wait(PAUSE_S)
            process.send_signal(signal.SIGCONT)
            timer.wait(RUN_S)
        return f"device {number} slowed down {moment}"

    def _join(self) -> str:
        moment = self._at_step()
        number = self._scenario.devices + 1
        self._restart_devices([number])
        return f"device {number} joins {moment}"

    def _leave(self) -> str:
        moment = self._at_step()
        number = self._scenario.victims[0]
        process = self._processes.numbered[number]
        process.terminate()
        if code := process.wait(PATIENCE_S):
            raise InternalError(f"device {number} was asked to leave {moment} and ended with code {code}")
        return f"device {number} left {moment}"

    def _coordinator(self) -> str:
        moment = self._at_step()
        self._kill_coordinator()
        self._restart_coordinator()
        return f"coordinator killed {moment}"

    def _kill_coordinator(self) -> None:
        self._processes.coordinator.kill()
        self._processes.coordinator.wait(PATIENCE_S)

    def _restart_coordinator(self) -> None:
        threading.Event().wait(COORDINATOR_DOWN_S)
        self._processes.start_coordinator()

    def _kill_two(self) -> str:
        moment = self._at_step()
        self._kill_devices(self._scenario.victims)
        self._restart_devices(self._scenario.victims)
        return f"devices {self._scenario.victims} killed {moment}"

    def _kill_all(self) -> str:
        moment = self._at_step()
        self._kill_devices(self._all_numbers())
        self._restart_devices(self._all_numbers())
        return f"all devices killed {moment}"

    def _stop_all(self) -> str:
        moment, seconds = self._at_step(), 2 + 3 * self._scenario.variant
        processes = [self._processes.numbered[number] for number in self._all_numbers()]
        for one in processes:
            one.send_signal(signal.SIGSTOP)
        threading.Event().wait(seconds)
        for one in processes:
            one.send_signal(signal.SIGCONT)
        return f"all devices stopped for {seconds:.1f} s {moment}"

    def _coordinator_and_device(self) -> str:
        moment = self._at_step()
        number = self._scenario.victims[0]
        self._processes.coordinator.kill()
        self._kill_devices([number])
        self._processes.coordinator.wait(PATIENCE_S)
        if self._scenario.variant < 0.5:  # the device is back before the coordinator is
            self._restart_devices([number])
            self._restart_coordinator()
        else:
            self._restart_coordinator()
            self._restart_devices([number])
        return f"coordinator and device {number} killed {moment}"

    def _first_second(self) -> str:
        self._wait(lambda: self._watch.job > 0, "the job is accepted")
        self._hold()
        threading.Event().wait(self._scenario.moment)
        moment = f"{self._scenario.moment:.2f} s after the job was accepted"
        if self._scenario.variant < 0.25:
            self._kill_coordinator()
            self._restart_coordinator()
            return f"coordinator killed {moment}"
        number = self._scenario.victims[0]
        self._kill_devices([number])
        self._restart_devices([number])
        return f"device {number} killed {moment}"

    def _last_step(self) -> str:
        number, steps = self._scenario.victims[0], self._scenario.steps
        if placed_fault(self._scenario):
            process = self._processes.numbered[number]
            if (code := process.wait(PATIENCE_S)) != -signal.SIGKILL:
                raise FaultMissed(f"device {number} ended with code {code}")
            self._processes.start_device(number)
            return f"device {number} killed in step {steps}"
        self._wait_for_step(steps)
        self._kill_devices([number])
        self._processes.start_device(number)
        return f"device {number} killed after step {steps} was reported"

    # ---- files

    def _checkpoint(self) -> str:
        moment = self._at_step()
        if self._scenario.variant < 0.5:
            before, number = len(self._watch.events), self._scenario.victims[0]
            self._wait(lambda: self._has_event(SnapshotTaken, before), "a snapshot")
            self._kill_devices([number])
            self._processes.start_device(number)
            return f"device {number} killed at the first snapshot after step {self._scenario.step}"
        folder, deadline = self._running.out / "checkpoints", time.monotonic() + PATIENCE_S
        while not (found := list(folder.glob(".*.part"))):
            if self._running.client.poll() is not None:
                raise FaultMissed("the training was over before a checkpoint was being written")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no checkpoint was being written within {PATIENCE_S:g} s")
            threading.Event().wait(_PERIOD_S)
        self._running.client.kill()
        if self._running.client.wait(PATIENCE_S) != -signal.SIGKILL:
            raise FaultMissed("the training was over before its client was killed")
        return f"client killed while it wrote {found[0].name}, after {moment}"

    def _has_event(self, kind: type, after: int) -> bool:
        return any(isinstance(one.event, kind) for one in self._watch.events[after:])

    def _arena_deleted(self) -> str:
        moment = self._at_step()
        number = self._scenario.victims[0]
        self._processes.arena(number).unlink()
        numbers = [number] if self._scenario.variant < 0.5 else self._all_numbers()
        self._wait_for_step(min(self._watch.step + 5, self._scenario.steps))
        self._kill_devices(numbers)
        self._restart_devices(numbers)
        return f"arena of device {number} deleted {moment}; then devices {numbers} killed"

    def _disk_full(self) -> str:
        moment, disk = self._at_step(), self._running.disk
        assert disk is not None, "the scenario has a small disk"
        filled = disk.fill()
        if self._scenario.variant < 0.5:
            return f"disk full {moment} ({filled} bytes), to the end"
        until = min(self._scenario.step + 2 * STEPS_AN_EPOCH, self._scenario.steps)
        self._wait_for_step(until)
        disk.free()
        return f"disk full {moment} ({filled} bytes), until step {until}"

    def _arena_disk_full(self) -> str:
        moment, disk, number = self._at_step(), self._running.disk, self._scenario.victims[0]
        assert disk is not None, "the scenario has a small disk"
        filled = disk.fill()
        if self._scenario.variant < 0.5:
            self._kill_devices([number])
            self._restart_devices([number])
            return f"disk full {moment} ({filled} bytes); device {number} killed and restarted on its arena"
        number = self._scenario.devices + 1
        refused = self._processes.start_device(number)
        if (code := refused.wait(PATIENCE_S)) != 2:
            raise InternalError(f"a device whose arena does not fit on the disk ended with code {code}, not 2")
        disk.free()
        self._restart_devices([number])
        return f"disk full {moment} ({filled} bytes); device {number} refused with code 2, then started with room"

    # ---- packets

    def _packet_loss(self) -> str:
        moment, network = self._at_step(), self._network()
        hosts = [self._scenario.victims[0] + 1] if self._scenario.variant < 0.5 else self._all_hosts()
        for host in hosts:
            network.lose(host, LOST_PERCENT)
        step = min(self._watch.step + LOSS_STEPS, self._scenario.steps)
        with contextlib.suppress(DeadlineExceeded, PeerLost):  # a slow step, or the job has ended: its result says how
            self._watch.wait_until(lambda: self._watch.step >= step, "steps in spite of packet loss", LOSS_S)
        return f"{self._heal(hosts)} packets of {'all hosts' if len(hosts) > 1 else f'host {hosts[0]}'} lost {moment}"

    def _cut_link(self) -> str:
        moment, network, variant = self._at_step(), self._network(), self._scenario.variant * 3
        host, other = (number + 1 for number in self._scenario.victims)
        peer = network.address(other)
        if variant < 1:
            network.cut(host, peer, peer)
            what = f"host {host} and host {other}, both ways"
        elif variant < 2:
            network.cut(host, "", peer)
            what = f"host {host} to host {other}"
        else:
            network.cut(host, "all", "all")
            what = f"host {host} and all others"
        if variant % 1 < 0.5:
            threading.Event().wait(CUT_S)
            dropped, how_long = self._heal([host]), f"for {CUT_S:g} s"
        else:
            steps = min(self._watch.step + LOSS_STEPS, self._scenario.steps)
            self._watch_only(steps)
            dropped, how_long = network.dropped(host), "for good"
        if not dropped:
            raise FaultMissed("no packet was sent on the link that was cut")
        return f"{dropped} packets dropped between {what} {moment}, {how_long}"

    def _watch_only(self, step: int) -> None:
        """Wait for a step that shows that the job goes on; the end of the job is as good."""
        with contextlib.suppress(PeerLost):
            self._watch.wait_until(lambda: self._watch.step >= step, f"step {step} without the link", PATIENCE_S)

    def _cut_coordinator(self) -> str:
        moment, seconds = self._at_step(), 1 + 5 * self._scenario.variant
        self._network().cut(1, "all", "all")
        threading.Event().wait(seconds)
        return f"{self._heal([1])} packets of the coordinator dropped for {seconds:.1f} s {moment}"

    def _network(self) -> Network:
        assert self._running.network is not None, "the scenario has a network"
        return self._running.network

    def _all_hosts(self) -> list[int]:
        return list(range(1, self._scenario.devices + 2))

    def _heal(self, hosts: Iterable[int]) -> int:
        """Drop nothing any more on these hosts; returns how many packets had been dropped."""
        network, dropped = self._network(), 0
        for host in hosts:
            dropped += network.dropped(host)
            network.heal(host)
        if not dropped:
            raise FaultMissed("no packet was dropped")
        return dropped


def placed_fault(scenario: Scenario) -> str:
    """The ``--fault`` of ``hoop train`` by which a device kills itself in the last step; empty: it is killed later."""
    if scenario.fault != "last-step" or scenario.variant >= 0.5:
        return ""
    return f"kill@rank={scenario.victims[0] - 1},step={scenario.steps}"
