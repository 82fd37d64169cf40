"""How many cores other work keeps busy here: times that are measured beside it decide nothing.

Where experiments run: real devices of this machine, with progress, and nothing left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoop.config import parse_size
from hoop.errors import InternalError
from hoop.lab.papers.findings import Verdict
from hoop.resources import STARTED, Request, admit

if TYPE_CHECKING:
    from hoop.engine.job import Job


WINDOW_S = 0.5
_IDLE = (3, 4)
"""Which fields of the first line of /proc/stat are time in which nothing was done: idle, and waiting for a disk."""


def busy_cores() -> float:
    """Measured while this process waits; where there is no /proc/stat, the load average of the last minute."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return os.getloadavg()[0]
    began, before = time.monotonic(), _worked(stat)
    time.sleep(WINDOW_S)
    return (_worked(stat) - before) / (time.monotonic() - began)


def _worked(stat: Path) -> float:
    """Seconds that all cores have worked since the machine started."""
    fields = [int(word) for word in stat.read_text("ascii").split("\n", 1)[0].split()[1:9]]
    return sum(one for index, one in enumerate(fields) if index not in _IDLE) / os.sysconf("SC_CLK_TCK")


PATIENCE_S = 60.0
EventFields = dict[str, Any]
Disturb = Callable[["RunningCluster", EventFields], None]
"""Called with every event of a training while it runs."""


@dataclass
class TrainingRun:
    """What a training told while it ran, and what came of it."""

    summary: EventFields
    losses: list[float] = field(default_factory=list)
    """One a step."""
    seconds: list[float] = field(default_factory=list)
    evaluations: list[EventFields] = field(default_factory=list)
    """Each with ``epoch``, ``accuracy``, ``loss``, and ``at``: seconds since the first step."""
    events: list[EventFields] = field(default_factory=list)
    """Losses, recoveries, seats: everything else."""

    def of_kind(self, kind: str) -> list[EventFields]:
        return [one for one in self.events if one["kind"] == kind]

    @property
    def step(self) -> float:
        """The median time of a step, the first tenth left out."""
        settled = sorted(self.seconds[len(self.seconds) // 10 :])
        return settled[len(settled) // 2] if settled else 0.0


class RunningCluster:
    """A cluster while a job runs on it, for whoever disturbs it; every call is a process of its own.

    gRPC does not survive a fork, and the next training forks: so this process never opens it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.stop: Callable[[], None] = lambda: None
        """Ends the training after a step."""
        self._joined: list[subprocess.Popen[bytes]] = []
        self._stopped: set[int] = set()

    @property
    def address(self) -> str:
        return self.file.read_text("utf-8").strip()

    def pids(self) -> dict[int, int]:
        """Each device's process, by its id."""
        told = subprocess.run(
            hoop_command("status", "--coordinator", self.address, "--json"),
            stdout=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=True,
        )
        return {one["id"]: one["pid"] for one in json.loads(told.stdout)["devices"]}

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Sent to a device; one that is stopped is set free again when the run ends, whatever happens."""
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._stopped.add(pid)
        else:
            self._stopped.discard(pid)

    def join(self, memory: int) -> None:
        """One more device."""
        command = hoop_command(
            "device", "--join", self.address, "--memory", str(memory), "--quiet", "--leave-with-stdin"
        )
        self._joined.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))

    def close(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for process in self._joined:
            end(process)


@dataclass
class Experiment:
    """What a study works with."""

    quick: bool = False
    accelerator: str = "cpu"
    mpirun: Path | None = None
    say: Callable[[str], None] = lambda text: None
    """A line that stays: what is being done now."""
    note: Callable[[str], None] = lambda text: None
    """A line that is written over: how far it is."""
    others: float = field(default_factory=busy_cores)
    """How many cores were busy with other work as this began."""

    @property
    def cores(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def busy(self) -> bool:
        """Whether others compute here: then times are reported, and decide nothing."""
        return self.others > 0.25 * self.cores

    def timed(self, verdict: Verdict) -> Verdict:
        """A verdict that rests on times: none, where others compute here too."""
        return "not shown" if self.busy else verdict

    def train(
        self,
        what: str,
        job: str | Job,
        *,
        devices: int = 1,
        strategy: str = "data",
        memory: str | int = "256MiB",
        disturb: Disturb | None = None,
        accelerator: str = "",
        **settings: Any,
    ) -> TrainingRun:
        """Trains, showing how far it is; ``disturb`` sees every event and may do harm."""
        from hoop.engine.job import INHERITED, Job, find_job
        from hoop.engine.recipes import RECIPES
        from hoop.runs.api import Launch, Training

        self.say(f"{what}: {strategy} on {devices} device{'s'[: devices != 1]}")
        name = job if isinstance(job, str) else f"inherited:{len(INHERITED)}"
        if isinstance(job, Job):
            INHERITED.append(job)
        found = find_job(name, RECIPES)
        if (accelerator or self.accelerator) != "cpu":
            settings["accelerator"] = accelerator or self.accelerator
        wanted = found.defaults(name).replaced({**settings, "strategy": strategy}).check()
        found.data()  # before the fork: devices share what is loaded now
        trained = TrainingRun({})
        with tempfile.TemporaryDirectory(prefix="hoop-") as folder:
            running = RunningCluster(Path(folder) / "address")
            launch = Launch(wanted, devices, parse_size(memory, "memory"), address_file=running.file)
            training = Training(launch)
            running.stop = training.stop
            try:
                with contextlib.closing(training.events()) as events:  # type: ignore[type-var]
                    for event in events:
                        self._note(trained, event)
                        if disturb is not None:
                            disturb(running, event)
            finally:
                running.close()
        if not trained.summary:
            raise InternalError(f"{what}: the training ended without a result")
        return trained

    def _note(self, trained: TrainingRun, event: EventFields) -> None:
        match event["kind"]:
            case "steps":
                trained.losses += event["loss"]
                trained.seconds += event["seconds"]
                self.note(f"step {len(trained.losses)}, loss {event['loss'][-1]:.4f}")
            case "evaluated":
                trained.evaluations.append(event | {"at": sum(trained.seconds)})
                self.note(f"epoch {event['epoch']}, accuracy {event['accuracy']:.2%}")
            case "result":
                trained.summary = event
            case _:
                trained.events.append(event)

    @contextlib.contextmanager
    def cluster(self, devices: int, memory: str = "64MiB", lease: str = "1.5s") -> Iterator[str]:
        """A coordinator and its devices, as ``hoop up`` starts them; the address to connect to."""
        admit(Request(devices, parse_size(memory, "memory"), STARTED))
        command = hoop_command("up", "--devices", str(devices), "--memory", memory, "--lease", lease)
        process = (
            subprocess.Popen(  # it leaves when its input closes: however this process ends, nothing is left
                [*command, "--leave-with-stdin"],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if words[:1] != ["coordinator"]:
                raise InternalError(f"hoop up with {devices} devices ended with code {process.wait()}")
            yield words[1]
        finally:
            end(process)


def hoop_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hoop", *arguments]


def end(process: subprocess.Popen[Any]) -> None:
    """Asks it to leave; kills it if it does not."""
    process.terminate()
    try:
        process.communicate(timeout=PATIENCE_S / 4)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def timed(call: Callable[[], object], seconds: float, least: int = 5) -> float:
    """The median time of a call, called for so long and at least so often, after once to warm up."""
    call()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < until:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]
