"""A run under faults, then the same run without any: weights and losses must be the same, to the bit.

The run's ledger is audited too: each step reported once, every sample of every epoch in exactly one step.

What came of a run under faults, as a table: a line a kind of fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
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
from hoop.lab.chaos.fault_actions import FaultActions, FaultOutcome
from hoop.lab.chaos.job_watch import PATIENCE_S, JobWatch
from hoop.lab.chaos.processes import END_S, START_S, ClusterProcesses
from hoop.lab.chaos.schedule import KINDS, draw_schedule
from hoop.report.metrics import read_metrics
from hoop.report.tables import Column, Table
from hoop.runs.audit import audit

MEMORY = 64 << 20
EPOCHS = 1_000_000
"""It ends when the faults have."""
MOST_RANKS = 64


@dataclass(frozen=True)
class ChaosConfig:
    """What is trained, on how many devices, and what happens to it."""

    faults: int = 20
    seed: int = 0
    job: str = "mnist"
    strategy: str = "data"
    devices: int = 4
    pace: int = 8
    """How many times slower than it could each device computes: so that the run to compare with is a short one."""
    kinds: Sequence[str] = KINDS
    every_s: float = 0.0
    """Seconds from fault to fault at least; 0: the next as soon as the consequences of the last are over."""


@dataclass
class Chaos:
    """What came of it."""

    config: ChaosConfig
    outcomes: list[FaultOutcome] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    """From the first fault to the end of the last one's consequences."""
    goodput: float = 1.0
    """The share of that time in which steps went on as usual."""
    weights: str = ""
    undisturbed: str = ""
    failed: str = ""
    """Why it was not survived; what happened before is known all the same."""
    violation: str = ""
    """What the audit of the run's ledger found, or a step whose loss is not that of the undisturbed run."""
    stubborn: list[int] = field(default_factory=list)
    """Processes that did not leave when they were told to, at the end."""

    @property
    def faults_an_hour(self) -> float:
        return 3600 * len(self.outcomes) / self.seconds if self.seconds else 0.0

    @property
    def equal(self) -> bool:
        return bool(self.weights) and self.weights == self.undisturbed

    def as_dict(self) -> dict[str, Any]:
        config = self.config
        return {
            **{
                name: getattr(config, name)
                for name in ("seed", "job", "strategy", "devices", "pace", "every_s")
            },
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
            "stubborn": self.stubborn,
        }


Tell = Callable[[str], None]


def chaos(config: ChaosConfig, tell: Tell) -> Chaos:
    """Runs it; ``tell`` is told of progress."""
    chances = draw_schedule(config.faults, config.seed, config.kinds)
    found = Chaos(config)
    with tempfile.TemporaryDirectory(prefix="hoop-chaos-") as scratch:
        with ClusterProcesses(Path(scratch), config.devices, MEMORY) as fleet:
            try:
                _disturbed(fleet, found, chances, tell, Path(scratch) / "disturbed")
            except HoopError as error:
                found.failed = f"{error}\n{fleet.complaints()}"
        found.stubborn = fleet.stubborn
        if found.failed:
            return found
        tell(f"the same {found.steps} steps, undisturbed …")
        found.undisturbed = _undisturbed(found, Path(scratch) / "undisturbed")
        found.violation = _violation(Path(scratch) / "disturbed", Path(scratch) / "undisturbed", found.steps)
    return found


def _settings(config: ChaosConfig) -> list[str]:
    settings = ["evaluate_every=0", "checkpoint_every=0", "trace_steps=0", f"epochs={EPOCHS}"]
    return [config.job, "--strategy", config.strategy, *(word for one in settings for word in ("--set", one))]


def _disturbed(fleet: ClusterProcesses, found: Chaos, chances: Sequence[Any], tell: Tell, out: Path) -> None:
    config = found.config
    slowly = ["--set", f"slowdown={[config.pace] * MOST_RANKS}"]
    with connect(fleet.address) as cluster:
        cluster.wait_for_devices(config.devices, START_S)
        where = ["--coordinator", str(fleet.address), "--devices", str(config.devices), "--json"]
        where += ["--out", str(out)]
        run = fleet.start("train", *_settings(config), *slowly, *where)
        watch = JobWatch(cluster, config.devices)
        threading.Thread(target=_to_its_end, args=(run, watch), daemon=True).start()
        watch.event("started", 0)
        blows = FaultActions(fleet, cluster, watch, config.devices, config.every_s)
        began, first = time.monotonic(), watch.step
        for chance in chances:
            outcome = blows.strike(chance)
            found.outcomes.append(outcome)
            found.seconds = time.monotonic() - began
            found.goodput = min(1.0, (watch.step - first) * watch.usual_s / found.seconds)
            tell(f"{found.seconds:5.0f} s  {_sentence(outcome, len(chances))}")
        run.terminate()  # it stops after a step that all agree on; SIGINT may be ignored here, and then there
        result = _result(run)
        watch.join()
    found.steps, found.weights = result["steps"], result["weights_sha256"]


def _to_its_end(run: subprocess.Popen[str], watch: JobWatch) -> None:
    """Without whoever started the job nothing is waited for, least of all if it never came to start it."""
    watch.end(f"hoop train has ended with code {run.wait()}")


def _sentence(outcome: FaultOutcome, of: int) -> str:
    who = f" of device {outcome.device}" if outcome.device else ""
    known = f", known after {outcome.detected_s:.2f} s" if outcome.detected_s is not None else ""
    pause = f", pause {outcome.pause_s:.2f} s" if outcome.pause_s is not None else ""
    return f"{outcome.number}/{of} at step {outcome.step}: {outcome.kind}{who}{known}{pause}"


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
    """Data parallel gives the same bits on one device; what is cut into stages needs as many as before."""
    config = found.config
    devices = 1 if config.strategy == "data" else config.devices
    run = subprocess.Popen(
        [*_command(config, found.steps, devices), "--out", str(out)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        told, _ = run.communicate(timeout=max(PATIENCE_S, 4 * found.seconds))
    except BaseException:
        run.terminate()
        run.communicate(timeout=END_S)
        raise
    return str(json.loads(told)["weights_sha256"])


def _violation(disturbed: Path, undisturbed: Path, steps: int) -> str:
    """What does not hold of the run's ledger and losses; empty: everything does."""
    audited = audit(disturbed)
    if audited.violation is not None:
        return f"hoop audit: {audited.violation}"
    if audited.steps != steps:
        return f"the ledger has {audited.steps} of {steps} steps"
    rows, wanted = (_losses(one) for one in (disturbed, undisturbed))
    for place, (row, other) in enumerate(zip_longest(rows, wanted), start=1):
        if row != other:
            return f"step and loss at place {place} are {row}, and those of the undisturbed run {other}"
    return ""


def _losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def _command(config: ChaosConfig, steps: int, devices: int) -> list[str]:
    most = ["--set", f"max_steps={steps}", "--devices", str(devices), "--json"]
    return [sys.executable, "-m", "hoop", "train", *_settings(config), *most]


def table(found: Chaos) -> Table:
    """Counts, and the usual and the worst of each time."""
    rows = []
    for kind in KINDS:
        of = [one for one in found.outcomes if one.kind == kind]
        if of:
            known, paused = _times(of, "detected_s"), _times(of, "pause_s")
            again, replaced = sum(one.repeated for one in of), sum(one.replaced for one in of)
            rows.append([kind, len(of), *known, *paused, *_times(of, "settled_s"), again, replaced])
    columns = [Column("fault"), Column("count", digits=0)]
    for name in ("known after", "pause", "all there again after"):
        columns += [Column(name, "s", 2), Column("at most", "s", 2)]
    columns += [Column("steps repeated", digits=0), Column("did not come back", digits=0)]
    return Table(columns, rows, "Faults and what came of them")


def _times(of: Sequence[FaultOutcome], name: str) -> tuple[float | None, float | None]:
    values = [value for one in of if (value := getattr(one, name)) is not None]
    return (median(values), max(values)) if values else (None, None)


def verdict(found: Chaos) -> str:
    """One sentence."""
    config = found.config
    count, same = len(found.outcomes), "the same as" if found.equal else f"NOT those of ({found.undisturbed})"
    record = (
        f"; THE RECORD DOES NOT HOLD: {found.violation}"
        if found.violation
        else "; each step in the ledger once"
    )
    weights = f"{found.steps} steps, weights {found.weights}, {same} the undisturbed run's{record}"
    return (
        f"{count} faults in {found.seconds:.0f} s, one every {found.seconds / max(1, count):.1f} s "
        f"({found.faults_an_hour:.0f} an hour), on {config.devices} devices, {config.job} by {config.strategy} "
        f"{config.pace} times slower than they could, seed {config.seed}; goodput {found.goodput:.2f}; "
        + ("the next was not survived" if found.failed else weights)
    )
