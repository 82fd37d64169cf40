"""What a study gets and gives: the environment of its experiments, and its findings.

``Experiment`` runs trainings and clusters on this machine and prints progress. ``Findings`` has the paper's claims with
Hoop's figures, and the tables and charts behind them. ``busy_cores`` measures the load of other processes: a verdict
that depends on times is not given on a busy machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hoop import job_events as ev
from hoop.config import parse_size
from hoop.errors import InternalError
from hoop.job_events import JobEvent
from hoop.launch.processes import LEAVE_WITH_STDIN, hoop_command, start_process, terminate_process
from hoop.report.chart import Chart
from hoop.report.page import Page, Section
from hoop.report.tables import Column, Table
from hoop.resources import STARTED, Request, admit, available_cores

if TYPE_CHECKING:
    from hoop.engine.job import Job

How = Literal["measured", "simulated"]
Verdict = Literal["holds", "in part", "does not hold", "not shown"]
CLAIMS = "Claims"
"""Title of the table of claims; ``stored_claims`` finds the table by it."""
CLAIM_COLUMNS = ("claim", "the paper", "ours", "how", "verdict", "why")
WINDOW_S = 0.5
_IDLE = (3, 4)
"""Fields of the first line of /proc/stat that count idle time: idle and iowait."""
STATUS_S = 60.0
END_S = 15.0
"""Seconds that a process has to leave before it is killed."""
OnEvent = Callable[["RunningCluster", JobEvent], None]
"""Function that is called with every event of a training while it runs; it may inject faults."""


@dataclass(frozen=True)
class PaperClaim:
    """One claim of the paper with its figure, and Hoop's figure.

    The verdict ``not shown`` means that this run could not decide it: the machine is too small, or data is missing.
    """

    claim: str
    paper: str
    ours: str
    how: How
    verdict: Verdict
    why: str = ""


@dataclass
class Findings:
    """A report under construction: a study adds to it after each experiment."""

    claims: list[PaperClaim] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    """Limits of this run, with reasons; the report shows them before any figure."""

    def claim(self, claim: str, *, paper: str, ours: str, how: How, verdict: Verdict, why: str = "") -> None:
        self.claims.append(PaperClaim(claim, paper, ours, how, verdict, why))

    def section(self, heading: str, *blocks: str | Table | Chart) -> None:
        self.sections.append(Section(heading, blocks))

    def page(self, title: str, lead: str, facts: dict[str, str]) -> Page:
        """The report, claims first."""
        top = [Section("What holds", [self.table()])]
        if self.limits:
            top.append(Section("What this run cannot show", ["\n".join(f"- {one}" for one in self.limits)]))
        return Page(title, [*top, *self.sections], lead, facts)

    def table(self) -> Table:
        make_table = [[one.claim, one.paper, one.ours, one.how, one.verdict, one.why or None] for one in self.claims]
        return Table([Column(name) for name in CLAIM_COLUMNS], make_table, CLAIMS)


def grade(value: float, good: float, fair: float) -> Verdict:
    """Verdict on a figure that should be large."""
    return "holds" if value >= good else "in part" if value >= fair else "does not hold"


def make_table(found: Sequence[Mapping[str, Any]], title: str, **units: str) -> Table:
    """A table with the columns of the first row. ``units`` by column name, with ``_`` for a space."""
    names = list(found[0]) if found else []
    return Table.of(found, [Column(name, units.get(name.replace(" ", "_"), "")) for name in names], title)


def stored_claims(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The claims of a report that was stored as JSON."""
    return [row for table in report["tables"] if table["title"] == CLAIMS for row in table["rows"]]


def busy_cores() -> float:
    """Cores that other processes keep busy, measured while this process sleeps.

    Where there is no /proc/stat: the load average of the last minute.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return os.getloadavg()[0]
    began, before = time.monotonic(), _busy_seconds(stat)
    time.sleep(WINDOW_S)
    return (_busy_seconds(stat) - before) / (time.monotonic() - began)


def _busy_seconds(stat: Path) -> float:
    """Busy time of all cores since the machine started."""
    fields = [int(word) for word in stat.read_text("ascii").split("\n", 1)[0].split()[1:9]]
    return sum(one for index, one in enumerate(fields) if index not in _IDLE) / os.sysconf("SC_CLK_TCK")


@dataclass
class TrainingRun:
    """The events and the result of a training."""

    summary: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    """Loss of each step."""
    seconds: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Evaluations, each with ``epoch``, ``accuracy``, ``loss``, and ``at``: seconds since the first step."""
    events: list[JobEvent] = field(default_factory=list)
    """All other events: lost devices, recoveries, rank assignments."""

    @property
    def recoveries(self) -> list[ev.Recovered]:
        return [one for one in self.events if isinstance(one, ev.Recovered)]

    @property
    def step(self) -> float:
        """Median seconds of a step, without the first tenth of the steps."""
        steady = sorted(self.seconds[len(self.seconds) // 10 :])
        return steady[len(steady) // 2] if steady else 0.0


class RunningCluster:
    """A cluster that runs a training, for fault injection. Every query runs in a separate process.

    This process must not open gRPC: gRPC does not survive a fork, and the next training forks.
    """

    def __init__(self, file: Path) -> None:
        """``file``: the coordinator's address file."""
        self.file = file
        self.stop: Callable[[], None] = lambda: None
        """Function that stops the training after a step."""
        self._joined: list[subprocess.Popen[str]] = []
        self._stopped: set[int] = set()

    @property
    def address(self) -> str:
        return self.file.read_text("utf-8").strip()

    def pids(self) -> dict[int, int]:
        """Device id to pid."""
        status = subprocess.run(
            hoop_command("status", "--coordinator", self.address, "--json"),
            stdout=subprocess.PIPE,
            timeout=STATUS_S,
            check=True,
        )
        return {one["id"]: one["pid"] for one in json.loads(status.stdout)["devices"]}

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a device. ``close`` continues every device that is still stopped."""
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            self._stopped.add(pid)
        else:
            self._stopped.discard(pid)

    def join(self, memory: int) -> None:
        """Start one more device with an arena of ``memory`` bytes."""
        self._joined.append(
            start_process("device", "--join", self.address, "--memory", str(memory), "--quiet", LEAVE_WITH_STDIN)
        )

    def close(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for process in self._joined:
            terminate_process(process, END_S)


@dataclass
class Experiment:
    """The options and the tools of a study."""

    quick: bool = False
    accelerator: str = "cpu"
    mpirun: Path | None = None
    log: Callable[[str], None] = lambda text: None
    """Function that prints a line about the current experiment."""
    show_progress: Callable[[str], None] = lambda text: None
    """Function that shows progress on a line that the next call overwrites."""
    other_busy_cores: float = field(default_factory=busy_cores)
    """Number of cores that other processes kept busy when this object was made."""

    @property
    def cores(self) -> int:
        return available_cores()

    @property
    def busy(self) -> bool:
        """Whether other processes use the cores: then times are reported, but decide no verdict."""
        return self.other_busy_cores > 0.25 * self.cores

    def timing_verdict(self, verdict: Verdict) -> Verdict:
        """``verdict`` for a claim about times; ``not shown`` on a busy machine."""
        return "not shown" if self.busy else verdict

    def train(
        self,
        what: str,
        job: str | Job,
        *,
        devices: int = 1,
        strategy: str = "data",
        memory: str | int = "256MiB",
        on_event: OnEvent | None = None,
        accelerator: str = "",
        **settings: Any,
    ) -> TrainingRun:
        """Train with progress output. ``what`` describes the run; ``on_event`` is called with every event."""
        from hoop.engine.job import GIVEN, LOADED, Job, find_job
        from hoop.engine.recipes import RECIPES
        from hoop.runs.training import Launch, Training

        self.log(f"{what}: {strategy} on {devices} device{'s'[: devices != 1]}")
        name = job if isinstance(job, str) else GIVEN
        loaded = job if isinstance(job, Job) else find_job(job, RECIPES)
        LOADED[name] = loaded
        settings["accelerator"] = accelerator or self.accelerator
        checked = loaded.defaults(name).replaced({**settings, "strategy": strategy}).check()
        loaded.data()  # before the fork: the devices share the loaded data
        trained = TrainingRun({})
        with tempfile.TemporaryDirectory(prefix="hoop-") as folder:
            running = RunningCluster(Path(folder) / "address")
            launch = Launch(checked, devices, parse_size(memory, "memory"), address_file=running.file)
            training = Training(launch)
            running.stop = training.stop
            try:
                with contextlib.closing(training.events()) as events:  # type: ignore[type-var]
                    for observed in events:
                        self._record(trained, observed.event)
                        if on_event is not None:
                            on_event(running, observed.event)
            finally:
                running.close()
        if not trained.summary:
            raise InternalError(f"{what}: the training ended without a result")
        return trained

    def _record(self, trained: TrainingRun, event: JobEvent) -> None:
        match event:
            case ev.Steps():
                trained.losses += event.loss
                trained.seconds += event.seconds
                self.show_progress(f"step {len(trained.losses)}, loss {event.loss[-1]:.4f}")
            case ev.Evaluated():
                trained.evaluations.append(event.to_fields() | {"at": sum(trained.seconds)})
                self.show_progress(f"epoch {event.epoch}, accuracy {event.accuracy:.2%}")
            case ev.Finished():
                trained.summary = event.result
            case _:
                trained.events.append(event)

    @contextlib.contextmanager
    def cluster(self, devices: int, memory: str = "64MiB", lease: str = "1.5s", lab: bool = False) -> Iterator[str]:
        """Run a cluster with ``hoop up``; yields the coordinator's address. ``lab``: open the lab's calls."""
        admit(Request(devices, parse_size(memory, "memory"), STARTED))
        options = ["--devices", str(devices), "--memory", memory, "--lease", lease, LEAVE_WITH_STDIN]
        options += ["--lab"] if lab else []
        process = start_process("up", *options, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if words[:1] != ["coordinator"]:
                raise InternalError(f"hoop up with {devices} devices ended with code {process.wait()}")
            yield words[1]
        finally:
            terminate_process(process, END_S)


def median_seconds(call: Callable[[], object], seconds: float, least: int = 5) -> float:
    """Median time of a call, over ``seconds`` seconds and at least ``least`` calls, after one warm-up call."""
    call()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < deadline:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]
