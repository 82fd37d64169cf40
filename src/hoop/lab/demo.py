"""``hoop demo``: a cluster of this machine to disturb from its dashboard, and a comparison of the weights at the end.

ClusterProcesses   coordinator, devices, and ``hoop train`` as their client
DemoActor          kills, stops, continues, slows, removes and adds devices: only processes that it has started
Demo               waits for the end of the job, then trains the same steps on one device without any fault
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import Any

from hoop.client.cluster import connect
from hoop.dashboard.actions import Action
from hoop.errors import DeadlineExceeded, FailedPrecondition, InternalError
from hoop.lab.chaos.processes import END_S, START_S, ClusterProcesses
from hoop.launch.processes import terminate_process
from hoop.resources import available_cores
from hoop.texts import counted
from hoop.topology import Address

MEMORY = 64 << 20
JOB = "mnist"
MAX_RANKS = 64
MAX_DEVICES = 16
"""Maximum number of devices at once: each is a process with PyTorch."""
SLOW_S = 20.0
"""Seconds that "slow" lasts."""
RUN_S = 0.02
"""Seconds that a slow device runs between two pauses, a quarter of the time."""
PAUSE_S = 0.06
"""Seconds of each pause of a slow device."""
POLL_S = 0.2


@dataclass(frozen=True)
class DemoConfig:
    """The demo's job and devices."""

    devices: int = 6
    steps: int = 4000
    """Maximum number of steps of the job."""
    pace: int = 20
    """Slowdown of each device, so that there is time to disturb it. The undisturbed run is not slowed down."""


def idle_reason(devices: int, cores: int) -> tuple[str, ...]:
    """The sentence that says why some of the devices compute nothing; none if all compute."""
    if devices <= cores:
        return ()
    return (
        f"This machine has {counted(cores, 'core')}, so after a few steps {counted(cores, 'device')} "
        f"{'computes' if cores == 1 else 'compute'} all shards, and the others wait: they only update their weights, "
        "and get shards again when a device is lost.",
    )


class DemoActor:
    """The buttons of the demo. The pids that it signals are those of its own child processes."""

    actions: tuple[Action, ...] = (
        Action.KILL,
        Action.STOP,
        Action.CONTINUE,
        Action.SLOW,
        Action.LEAVE,
        Action.ADD,
        Action.FINISH,
    )
    confirm = False

    def __init__(self, processes: ClusterProcesses) -> None:
        self._processes = processes
        self._stopped: set[int] = set()
        """Pids of devices that were stopped."""
        self._slowing: dict[int, threading.Event] = {}
        """Events that end the slowness of a device, by its pid."""
        self._closed = threading.Event()
        self.lines: tuple[str, ...] = ()
        """Lines that ``report`` returns; ``Demo`` sets them."""

    def report(self) -> tuple[str, ...]:
        return self.lines

    def act(self, action: Action, device: int) -> str:
        if self._closed.is_set():
            raise FailedPrecondition("the demo ends")
        if action is Action.ADD:
            return self._add()
        if action is Action.FINISH:
            return self._finish()
        process = self._process(device)
        match action:
            case Action.KILL:
                self._keep_one(process.pid)
                process.kill()
                return f"device {device} was killed (SIGKILL)"
            case Action.STOP:
                self._keep_one(process.pid)
                self._end_slowness(process.pid)
                os.kill(process.pid, signal.SIGSTOP)
                self._stopped.add(process.pid)
                return f"device {device} was stopped (SIGSTOP); continue it whenever you like"
            case Action.CONTINUE:
                self._end_slowness(process.pid)
                os.kill(process.pid, signal.SIGCONT)
                self._stopped.discard(process.pid)
                return f"device {device} continues (SIGCONT)"
            case Action.SLOW:
                return self._slow(device, process.pid)
            case Action.LEAVE:
                self._keep_one(process.pid)
                self._end_slowness(process.pid)
                os.kill(process.pid, signal.SIGCONT)  # a stopped process does not receive SIGTERM
                self._stopped.discard(process.pid)
                process.terminate()
                return f"device {device} was asked to leave (SIGTERM)"
        raise FailedPrecondition(f"{action}: the demo cannot do that")

    def close(self) -> None:
        """Ends the slowness of devices; no action is carried out afterwards."""
        self._closed.set()
        for event in self._slowing.values():
            event.set()

    def _alive(self) -> list[subprocess.Popen[str]]:
        return [one for one in self._processes.devices if one.poll() is None]

    def _process(self, device: int) -> subprocess.Popen[str]:
        """The process of a device, by its pid in the coordinator's status; never a process that is not ours."""
        with connect(self._processes.address) as cluster:
            pids = {one.device.device_id: one.device.pid for one in cluster.status().devices}
        found = next((one for one in self._alive() if one.pid == pids.get(device)), None)
        if found is None:
            raise FailedPrecondition(f"device {device} has no process any more")
        return found

    def _keep_one(self, pid: int) -> None:
        others = [one for one in self._alive() if one.pid != pid and one.pid not in self._stopped]
        if not others:
            raise FailedPrecondition("it is the last device, and has the only copy of the weights; add one first")

    def _add(self) -> str:
        if len(self._alive()) >= MAX_DEVICES:
            raise FailedPrecondition(f"{MAX_DEVICES} devices run already")
        process = self._processes.start_device()
        return f"a device starts (process {process.pid}); it joins when it has loaded the job"

    def _finish(self) -> str:
        with connect(self._processes.address) as cluster:
            running = [one.id for one in cluster.status().jobs if one.status == "running"]
            if not running:
                raise FailedPrecondition("the job has ended")
            cluster.job(running[-1]).stop()
        return "the job stops after this step"

    def _slow(self, device: int, pid: int) -> str:
        if pid in self._stopped:
            raise FailedPrecondition(f"device {device} is stopped; continue it first")
        self._end_slowness(pid)
        end = self._slowing[pid] = threading.Event()
        thread = threading.Thread(target=_run_slowly, args=(pid, end), name=f"hoop-demo-slow-{pid}", daemon=True)
        thread.start()
        return f"device {device} runs at a quarter of its speed for {SLOW_S:g} s"

    def _end_slowness(self, pid: int) -> None:
        if (event := self._slowing.pop(pid, None)) is not None:
            event.set()


def _run_slowly(pid: int, end: threading.Event) -> None:
    """Stops and continues a process in short turns."""
    until = time.monotonic() + SLOW_S
    try:
        while time.monotonic() < until and not end.is_set():
            os.kill(pid, signal.SIGSTOP)
            end.wait(PAUSE_S)
            os.kill(pid, signal.SIGCONT)
            end.wait(RUN_S)
    except ProcessLookupError:
        return


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo: the weights of the disturbed and of the undisturbed run."""

    steps: int
    weights: str
    """SHA-256 of the weights of the run that was disturbed."""
    undisturbed: str
    """SHA-256 of the weights of the undisturbed run."""

    @property
    def equal(self) -> bool:
        return self.weights == self.undisturbed

    def sentences(self) -> tuple[str, ...]:
        same = "They are the same, to the bit." if self.equal else "THEY DIFFER: please report this as a bug of Hoop."
        return (
            f"The job has ended after {counted(self.steps, 'step')}. Its weights: {self.weights}",
            f"The undisturbed run on one device has the weights: {self.undisturbed}",
            same,
        )


class Demo:
    """The demo's job: from its start to the comparison."""

    def __init__(self, config: DemoConfig, processes: ClusterProcesses, actor: DemoActor) -> None:
        self._config, self._processes, self._actor = config, processes, actor
        self._run: subprocess.Popen[str] | None = None
        self._undisturbed: subprocess.Popen[str] | None = None
        self._closing = threading.Event()

    @property
    def address(self) -> Address:
        return self._processes.address

    def start(self) -> None:
        """Starts the job when all devices are there."""
        config, address = self._config, str(self.address)
        with connect(self.address) as cluster:
            cluster.wait_for_devices(config.devices, START_S)
        slowdown = ["--set", f"slowdown={[config.pace] * MAX_RANKS}"]
        options = ["--coordinator", address, "--devices", str(config.devices), "--json"]
        self._run = self._processes.start("train", *self._job(config.steps), *slowdown, *options)
        self._actor.lines = (
            f"A model trains on {counted(config.devices, 'device')}, for {counted(config.steps, 'step')}. "
            "Disturb it: choose a device, and press a button. At the end the weights are compared with those of a run "
            "that nobody disturbed.",
            *idle_reason(config.devices, available_cores()),
        )

    def wait(self) -> DemoResult:
        """Waits for the job's end, and trains the same steps without any fault. ``close`` interrupts it."""
        assert self._run is not None, "started before"
        result = self._result(self._run, "the job")
        steps, weights = int(result["steps"]), str(result["weights_sha256"])
        self._actor.lines = (
            f"The job has ended after {counted(steps, 'step')}. Its weights: {weights}",
            "The same steps are now trained on one device, and nobody disturbs it …",
        )
        run = self._undisturbed = self._processes.start("train", *self._job(steps), "--devices", "1", "--json")
        undisturbed = str(self._result(run, "the undisturbed run")["weights_sha256"])
        verdict = DemoResult(steps, weights, undisturbed)
        self._actor.lines = verdict.sentences()
        return verdict

    def close(self) -> None:
        """Ends ``wait``, and the undisturbed run with its own devices."""
        self._closing.set()
        if self._undisturbed is not None and self._undisturbed.poll() is None:
            terminate_process(self._undisturbed, END_S)

    def _job(self, steps: int) -> list[str]:
        settings = ["evaluate_every=1", "checkpoint_every=0", "trace_steps=0", "epochs=1000000", f"max_steps={steps}"]
        return [JOB, *(word for one in settings for word in ("--set", one))]

    def _result(self, run: subprocess.Popen[str], what: str) -> dict[str, Any]:
        text = None
        while text is None:
            try:
                text, _ = run.communicate(timeout=POLL_S)
            except subprocess.TimeoutExpired:
                if self._closing.is_set():
                    raise DeadlineExceeded(f"the demo was ended before {what}") from None
        if run.returncode or not text:
            failure = f"{what} has failed with code {run.returncode}: {self._processes.stderr_tails()[-1000:]}"
            self._actor.lines = (failure,)
            raise InternalError(failure)
        try:
            result: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise InternalError(f"{what} has no result: {error}") from None
        return result
