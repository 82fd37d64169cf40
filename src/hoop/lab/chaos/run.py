"""A chaos run: train under faults, then train the same steps without faults, and compare weights and losses bitwise.

The ledger of the run under faults is audited too: each step is reported once, and every sample of every epoch is in
exactly one step. ``table`` and ``verdict`` summarise the result.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from hoop.client.cluster import connect
from hoop.errors import DeadlineExceeded, HoopError, InternalError
from hoop.job_events import Started
from hoop.lab.chaos.fault_actions import KINDS, FaultActions, FaultOutcome, ScheduledFault, draw_schedule
from hoop.lab.chaos.job_watch import PATIENCE_S, JobWatch
from hoop.lab.chaos.processes import END_S, START_S, ClusterProcesses
from hoop.launch.processes import hoop_command
from hoop.report.metrics import read_metrics
from hoop.report.tables import Column, Table
from hoop.runs.audit import audit
from hoop.strategies.catalog import parse

MEMORY = 64 << 20
EPOCHS = 1_000_000
"""Number of epochs, more than any run needs: the run is stopped after the last fault."""
MAX_RANKS = 64


@dataclass(frozen=True)
class ChaosConfig:
    """The job of a chaos run, its devices, and its faults."""

    faults: int = 20
    seed: int = 0
    job: str = "mnist"
    strategy: str = "data"
    devices: int = 4
    pace: int = 8
    """Slowdown factor of each device under faults. The run without faults is not slowed down, so it is short."""
    kinds: Sequence[str] = KINDS
    every_s: float = 0.0
    """Minimum seconds between two faults; 0: the next fault follows when the job has recovered."""


@dataclass
class Chaos:
    """The result of a chaos run."""

    config: ChaosConfig
    outcomes: list[FaultOutcome] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    """Seconds from the first fault until the job had recovered from the last one."""
    goodput: float = 1.0
    """Fraction of that time in which steps were done at their median speed."""
    weights: str = ""
    """SHA-256 of the final weights."""
    undisturbed: str = ""
    """SHA-256 of the final weights of the run without faults."""
    failed: str = ""
    """Reason why the job failed; empty: it did not. The outcomes of the earlier faults are valid nevertheless."""
    violation: str = ""
    """Violation that the audit of the ledger found, or the first step whose loss differs from the other run's; empty:
    none."""
    unresponsive: list[int] = field(default_factory=list)
    """Pids of the processes that did not leave at the end and were killed."""

    @property
    def faults_an_hour(self) -> float:
        return 3600 * len(self.outcomes) / self.seconds if self.seconds else 0.0

    @property
    def equal(self) -> bool:
        return bool(self.weights) and self.weights == self.undisturbed

    def as_dict(self) -> dict[str, Any]:
        config = self.config
        return {
            **{name: getattr(config, name) for name in ("seed", "job", "strategy", "devices", "pace", "every_s")},
            "faults": [one.as_dict() for one in self.outcomes],
            "faults_an_hour": self.faults_an_hour,
            "steps": self.steps,
            "seconds": self.seconds,
            "goodput": self.goodput,
            "weights_sha256": self.weights,
            "undisturbed_sha256": self.undisturbed,
            "equal": self.equal,
            "violation": self.violation,
            "failed": self.failed,
            "stubborn": self.unresponsive,
        }


Log = Callable[[str], None]


def chaos(config: ChaosConfig, log: Log) -> Chaos:
    """Run it; ``log`` is called with lines of progress."""
    schedule = draw_schedule(config.faults, config.seed, config.kinds)
    found = Chaos(config)
    with tempfile.TemporaryDirectory(prefix="hoop-chaos-") as scratch:
        with ClusterProcesses(Path(scratch), config.devices, MEMORY) as processes:
            try:
                _disturbed(processes, found, schedule, log, Path(scratch) / "disturbed")
            except HoopError as error:
                found.failed = f"{error}\n{processes.stderr_tails()}"
        found.unresponsive = processes.unresponsive
        if found.failed:
            return found
        log(f"the same {found.steps} steps, undisturbed …")
        found.undisturbed = _undisturbed(found, Path(scratch) / "undisturbed")
        found.violation = violation(Path(scratch) / "disturbed", Path(scratch) / "undisturbed", found.steps)
    return found


def _job_options(config: ChaosConfig) -> list[str]:
    settings = ["evaluate_every=0", "checkpoint_every=0", "trace_steps=0", f"epochs={EPOCHS}"]
    return [config.job, "--strategy", config.strategy, *(word for one in settings for word in ("--set", one))]


def _disturbed(
    processes: ClusterProcesses, found: Chaos, schedule: Sequence[ScheduledFault], log: Log, out: Path
) -> None:
    """Train under the scheduled faults, and fill ``found``."""
    config = found.config
    slowdown = ["--set", f"slowdown={[config.pace] * MAX_RANKS}"]
    with connect(processes.address) as cluster:
        cluster.wait_for_devices(config.devices, START_S)
        options = ["--coordinator", str(processes.address), "--devices", str(config.devices), "--json"]
        options += ["--out", str(out)]
        run = processes.start("train", *_job_options(config), *slowdown, *options)
        watch = JobWatch(cluster, config.devices)
        threading.Thread(target=_watch_client, args=(run, watch), daemon=True).start()
        watch.wait_event(Started, 0)
        actions = FaultActions(processes, cluster, watch, config.devices, config.every_s)
        began, first = time.monotonic(), watch.step
        for fault in schedule:
            outcome = actions.inject(fault)
            found.outcomes.append(outcome)
            found.seconds = time.monotonic() - began
            found.goodput = min(1.0, (watch.step - first) * watch.median_step_s / found.seconds)
            log(f"{found.seconds:5.0f} s  {_sentence(outcome, len(schedule))}")
        # The job stops after a step that all ranks agree on. Not SIGINT: this process may ignore it, and the child
        # would inherit that.
        run.terminate()
        result = _result(run)
        watch.join()
    found.steps, found.weights = result["steps"], result["weights_sha256"]


def _watch_client(run: subprocess.Popen[str], watch: JobWatch) -> None:
    """Thread body: if the job's client exits, stop waiting for events; it may never have started the job."""
    watch.end(f"hoop train has ended with code {run.wait()}")


def _sentence(outcome: FaultOutcome, total: int) -> str:
    device = f" of device {outcome.device}" if outcome.device else ""
    detected = f", known after {outcome.detected_s:.2f} s" if outcome.detected_s is not None else ""
    pause = f", pause {outcome.pause_s:.2f} s" if outcome.pause_s is not None else ""
    return f"{outcome.number}/{total} at step {outcome.step}: {outcome.kind}{device}{detected}{pause}"


def _result(run: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, _ = run.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"the job did not stop within {PATIENCE_S:g} s") from None
    if not out:
        raise InternalError(f"hoop train ended with code {run.returncode} and without a result")
    result: dict[str, Any] = json.loads(out)
    return result


def _undisturbed(found: Chaos, out: Path) -> str:
    """Train the same steps without faults; returns the SHA-256 of the weights.

    Data parallel training gives the same bits on one device; a strategy with stages needs as many devices as before.
    """
    config = found.config
    devices = 1 if parse(config.strategy).replicated else config.devices
    run = subprocess.Popen(
        [*_command(config, found.steps, devices), "--out", str(out)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        output, _ = run.communicate(timeout=max(PATIENCE_S, 4 * found.seconds))
    except BaseException:
        run.terminate()
        run.communicate(timeout=END_S)
        raise
    return str(json.loads(output)["weights_sha256"])


def violation(disturbed: Path, undisturbed: Path, steps: int) -> str:
    """The first violation in the ledger or the losses of the run under faults; empty if there is none."""
    audited = audit(disturbed)
    if audited.violation is not None:
        return f"hoop audit: {audited.violation}"
    if audited.steps != steps:
        return f"the ledger has {audited.steps} of {steps} steps"
    rows, expected = (_losses(one) for one in (disturbed, undisturbed))
    for place, (row, other) in enumerate(zip_longest(rows, expected), start=1):
        if row != other:
            return f"step and loss at place {place} are {row}, and those of the undisturbed run {other}"
    return ""


def _losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def _command(config: ChaosConfig, steps: int, devices: int) -> list[str]:
    options = ["--set", f"max_steps={steps}", "--devices", str(devices), "--json"]
    return hoop_command("train", *_job_options(config), *options)


def table(found: Chaos) -> Table:
    """A row a kind of fault: the count, and median and maximum of each time."""
    rows = []
    for kind in KINDS:
        outcomes = [one for one in found.outcomes if one.kind == kind]
        if outcomes:
            detected, paused = _times(outcomes, "detected_s"), _times(outcomes, "pause_s")
            repeated, replaced = (sum(one.repeated for one in outcomes), sum(one.replaced for one in outcomes))
            settled = _times(outcomes, "settled_s")
            rows.append([kind, len(outcomes), *detected, *paused, *settled, repeated, replaced])
    columns = [Column("fault"), Column("count", digits=0)]
    for name in ("known after", "pause", "all there again after"):
        columns += [Column(name, "s", 2), Column("at most", "s", 2)]
    columns += [Column("steps repeated", digits=0), Column("did not come back", digits=0)]
    return Table(columns, rows, "Faults and what came of them")


def _times(outcomes: Sequence[FaultOutcome], name: str) -> tuple[float | None, float | None]:
    values = [value for one in outcomes if (value := getattr(one, name)) is not None]
    return (median(values), max(values)) if values else (None, None)


def verdict(found: Chaos) -> str:
    """The result as one sentence."""
    config = found.config
    count, same = len(found.outcomes), "the same as" if found.equal else f"NOT those of ({found.undisturbed})"
    record = f"; THE RECORD DOES NOT HOLD: {found.violation}" if found.violation else "; each step in the ledger once"
    weights = f"{found.steps} steps, weights {found.weights}, {same} the undisturbed run's{record}"
    return (
        f"{count} faults in {found.seconds:.0f} s, one every {found.seconds / max(1, count):.1f} s "
        f"({found.faults_an_hour:.0f} an hour), on {config.devices} devices, {config.job} by {config.strategy} "
        f"{config.pace} times slower than they could, seed {config.seed}; goodput {found.goodput:.2f}; "
        + ("the next was not survived" if found.failed else weights)
    )
