"""One scenario from its start to its verdict: the training, its fault, the comparison, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hoop.client.cluster import connect
from hoop.errors import DeadlineExceeded, HoopError, InternalError
from hoop.lab.chaos import network as network_module
from hoop.lab.chaos import paced_job
from hoop.lab.chaos import small_disk as small_disk_module
from hoop.lab.chaos.job_watch import JobWatch
from hoop.lab.chaos.leaks import Footprint, run_jobs
from hoop.lab.chaos.network import Network, private_network
from hoop.lab.chaos.processes import START_S, ClusterProcesses
from hoop.lab.chaos.run import violation
from hoop.lab.chaos.scenario import STRATEGIES, Scenario, fitting_devices
from hoop.lab.chaos.scenario_faults import PATIENCE_S, FaultMissed, RunningScenario, ScenarioFaults, placed_fault
from hoop.lab.chaos.small_disk import SmallDisk, small_disk
from hoop.launch.processes import hoop_command
from hoop.runs.audit import audit
from hoop.runs.checkpoint_store import newest_checkpoint

MEMORY = 16 << 20
"""Size of a device's arena in bytes."""
OUT_DISK = 4 << 20
PACE_S = 0.001
END_S = 400.0
"""Seconds that a training has to end after its fault, on a machine with ten times more work than cores."""
MANY_JOBS_STEPS = 10
SAME = "same"
"""Verdict: the weights are those of the undisturbed run."""
RESUMED = "resumed"
"""Verdict: the run ended with code 3, and has the same weights after ``--resume``."""
REFUSED = "refused"
"""Verdict: the run ended with code 3, and no checkpoint was written yet."""
MISSED = "missed"
"""Verdict: the training was over before the fault."""
NOT_RUN = "not run"
"""Verdict: the fault cannot be injected on this machine."""
FAILED = "failed"
"""Verdict: anything else."""
VERDICTS = (SAME, RESUMED, REFUSED, MISSED, NOT_RUN, FAILED)


@dataclass
class Outcome:
    """What came of a scenario."""

    scenario: Scenario
    verdict: str = FAILED
    fired: str = ""
    """Evidence that the fault happened; empty if it did not."""
    reason: str = ""
    """Reason why it failed, was missed or was not run."""
    code: int | None = None
    """Exit code of ``hoop train``."""
    weights: str = ""
    audit: str = ""
    """Result of the audit: ``holds``, or the violation."""
    leftovers: list[str] = field(default_factory=list)
    unresponsive: list[int] = field(default_factory=list)
    """Pids of the processes that did not leave at the end and were killed."""
    seconds: float = 0.0
    load: float = 0.0
    """Load average of the machine when the scenario began."""
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        scenario = self.scenario
        drawn = {"step": scenario.step, "victims": scenario.victims, "arenas": scenario.arenas}
        return {**asdict(self), "scenario": {**asdict(scenario), **drawn}, "command": scenario.command()}

    def sentence(self) -> str:
        """The outcome as a line of progress."""
        scenario = self.scenario
        arenas = ", arena files" if scenario.arenas else ""
        left = f"LEFT BEHIND: {'; '.join(self.leftovers)}" if self.leftovers else "nothing left"
        if self.verdict == NOT_RUN:
            return f"seed {scenario.seed}: {scenario.strategy}, {scenario.fault}: not run: {self.reason}"
        found = {
            SAME: f"same weights, audit {self.audit}",
            RESUMED: f"code 3, same weights after --resume, audit {self.audit}",
            REFUSED: "code 3 before the first checkpoint",
            MISSED: f"missed: {self.reason}",
        }.get(self.verdict, f"FAILED: {self.reason}")
        fired = self.fired or f"not fired, planned at step {scenario.step}"
        return (
            f"seed {scenario.seed}: {scenario.strategy}{arenas}, {scenario.fault}: {fired}: {found}; {left} "
            f"({self.seconds:.0f} s, load {self.load:.1f})"
        )


@dataclass(frozen=True)
class Reference:
    """The same steps without a fault."""

    out: Path
    weights: str
    steps: int


def unavailable_reason(scenario: Scenario) -> str:
    """Why this scenario cannot run on this machine; empty if it can."""
    if scenario.kind.network and (reason := network_module.unavailable_reason()):
        return reason
    return small_disk_module.unavailable_reason() if scenario.kind.disk else ""


def train_reference(folder: Path, steps: int) -> Reference:
    """Train without a fault, on one device."""
    out = folder / f"undisturbed-{steps}"
    result = _train_here([paced_job.NAME, *_limit(steps), "--devices", "1", "--out", str(out)])
    return Reference(out, result["weights_sha256"], steps)


def _limit(steps: int) -> list[str]:
    return ["--set", f"max_steps={steps}"]


def _train_here(options: list[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """``hoop train OPTIONS --json`` on this machine alone, as fast as it can; raises InternalError."""
    with tempfile.TemporaryFile() as errors:
        run = subprocess.Popen(
            hoop_command("train", *options, "--json"),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), paced_job.PACE: "0"},
            start_new_session=True,
        )
        try:
            output, _ = run.communicate(timeout=END_S)
        except BaseException as error:
            run.terminate()
            run.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise DeadlineExceeded(f"hoop train {' '.join(options)} did not end within {END_S:g} s") from None
            raise
        if run.returncode or not output:
            errors.seek(0)
            text = errors.read().decode(errors="replace")[-1000:]
            raise InternalError(f"hoop train {' '.join(options)} ended with code {run.returncode}: {text}")
    result: dict[str, Any] = json.loads(output)
    return result


def run_scenario(scenario: Scenario, reference: Reference, keep: Path | None = None) -> Outcome:
    """Run it. ``keep``: folder for the files of a run that fails."""
    outcome = Outcome(scenario, load=os.getloadavg()[0])
    if reason := unavailable_reason(scenario):
        outcome.verdict, outcome.reason = NOT_RUN, reason
        return outcome
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hoop-chaos-", ignore_cleanup_errors=True) as scratch:
        run = _Run(scenario, reference, Path(scratch), outcome)
        try:
            run.run()
        except FaultMissed as error:
            outcome.verdict, outcome.reason = MISSED, str(error)
        except HoopError as error:
            outcome.verdict, outcome.reason = FAILED, str(error)
        outcome.leftovers = run.footprint.leftovers(run.temporary)
        if outcome.leftovers and outcome.verdict != FAILED:
            outcome.verdict, outcome.reason = FAILED, "something is left behind"
        outcome.seconds = time.monotonic() - began
        if outcome.verdict == FAILED and keep is not None:
            _keep(Path(scratch), keep / f"seed-{scenario.seed}-{scenario.fault}", outcome)
    return outcome


def _keep(scratch: Path, folder: Path, outcome: Outcome) -> None:
    """Copy journal, stderr files and run folder; arenas and disks are large, and are left out."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(scratch, folder, ignore=shutil.ignore_patterns("arena*", "ballast", "tmp"), dirs_exist_ok=True)
    (folder / "outcome.json").write_text(json.dumps(outcome.as_dict(), indent=2) + "\n")


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process, which its children inherit."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _Run:
    """The run of one scenario in a scratch folder."""

    def __init__(self, scenario: Scenario, reference: Reference, scratch: Path, outcome: Outcome) -> None:
        self._scenario, self._reference, self._scratch, self._outcome = scenario, reference, scratch, outcome
        self.footprint = Footprint(scratch.name)
        self.temporary = scratch / "tmp"
        """Temporary folder of the run's processes."""
        self.temporary.mkdir()
        self._runtime = scratch / "runtime"
        self._runtime.mkdir(mode=0o700)
        self._hold = scratch / "hold"
        self._environment = {
            **self.footprint.environment,
            "TMPDIR": str(self.temporary),
            paced_job.PACE: str(PACE_S),
            paced_job.HOLD: str(self._hold),
        }
        self._out = scratch / ("disk/run" if scenario.kind.disk == "out" else "run")

    def run(self) -> None:
        scenario = self._scenario
        with ExitStack() as cleanup:
            # This process and those of the run find the coordinator's token there; TMPDIR is theirs alone.
            cleanup.enter_context(_environment_variable("XDG_RUNTIME_DIR", str(self._runtime)))
            network = cleanup.enter_context(private_network(scenario.devices + 2)) if scenario.kind.network else None
            disk = self._disk(cleanup) if scenario.kind.disk else None
            arenas = self._scratch / ("disk" if scenario.kind.disk == "arenas" else "arenas")
            arenas.mkdir(exist_ok=True)
            processes = ClusterProcesses(
                self._scratch,
                scenario.devices,
                MEMORY,
                with_ids=True,
                arenas=arenas if scenario.arenas else None,
                network=network,
                environment=self._environment,
            )
            with processes:
                try:
                    if scenario.fault == "many-jobs":
                        self._run_many_jobs(processes)
                    else:
                        self._run_disturbed(processes, network, disk)
                finally:
                    self.footprint.observe(processes.pids)
                    if network is not None:  # a process that leaves calls the others
                        for host in range(1, scenario.devices + 2):
                            network.heal(host)
            self._outcome.unresponsive = processes.unresponsive
            if processes.unresponsive:
                raise InternalError(f"processes {processes.unresponsive} did not end after SIGTERM")
            if scenario.fault != "many-jobs":
                self._judge(disk)

    def _disk(self, cleanup: ExitStack) -> SmallDisk:
        folder = self._scratch / "disk"
        folder.mkdir()
        size = OUT_DISK if self._scenario.kind.disk == "out" else (self._scenario.devices + 1) * (MEMORY + (1 << 20))
        return cleanup.enter_context(small_disk(folder, size))

    # ---- a disturbed training

    def _run_disturbed(self, processes: ClusterProcesses, network: Network | None, disk: SmallDisk | None) -> None:
        scenario, outcome = self._scenario, self._outcome
        with connect(processes.address, START_S) as cluster:
            cluster.wait_for_devices(scenario.devices, PATIENCE_S)
            client = processes.start("train", *self._train_options(str(processes.address)))
            watch = JobWatch(cluster, scenario.devices)
            running = RunningScenario(scenario, processes, watch, client, self._out, self._hold, network, disk)
            fault_error: HoopError | FaultMissed | None = None
            try:
                outcome.fired = ScenarioFaults(running).inject()
            except (HoopError, FaultMissed) as error:  # the training may go on, and what comes of it is reported too
                fault_error = error
            self.footprint.observe(processes.pids)
            if client.returncode is not None and client.returncode < 0:  # it was killed
                client = processes.start(
                    "attach", "-c", str(processes.address), str(watch.job), *self._attach_options()
                )
            try:
                output, _ = client.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                self._save_status(str(processes.address))
                raise DeadlineExceeded(
                    f"hoop train did not end within {END_S:g} s (step {watch.step}, {watch.ranks} ranks); {fault_error}"
                ) from None
            watch.end("the run is over")
        outcome.code = client.returncode
        if output:
            outcome.weights = json.loads(output)["weights_sha256"]
            outcome.details["steps"] = json.loads(output)["steps"]
        if fault_error is not None:
            raise fault_error

    def _train_options(self, address: str) -> list[str]:
        scenario = self._scenario
        options = [paced_job.NAME, "--strategy", scenario.strategy, *_limit(scenario.steps), "--json"]
        options += ["--coordinator", address, "--devices", str(scenario.devices), "--out", str(self._out)]
        return [*options, "--fault", fault] if (fault := placed_fault(scenario)) else options

    def _attach_options(self) -> list[str]:
        self._killed_out, self._out = self._out, self._scratch / "attached"
        return ["--out", str(self._out), "--json"]

    def _save_status(self, address: str) -> None:
        """Keep what the coordinator says about a job that does not end."""
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            status = subprocess.run(
                hoop_command("status", "-c", address, "--json"), capture_output=True, text=True, timeout=30, check=False
            )
            (self._scratch / "status.json").write_text(status.stdout + status.stderr)

    # ---- the verdict

    def _judge(self, disk: SmallDisk | None) -> None:
        """Compare with the reference; raises InternalError for anything that should not be."""
        scenario, outcome = self._scenario, self._outcome
        if disk is not None:
            disk.free()
        if outcome.code == 3 and scenario.may_lose_state:
            self._judge_lost()
            return
        if scenario.fault == "disk-full":
            self._judge_full_disk()
            return
        if outcome.code != 0:
            raise InternalError(f"hoop train ended with code {outcome.code}: {self._errors()}")
        self._compare_weights(outcome.weights)
        self._compare_record(self._out)
        if killed := getattr(self, "_killed_out", None):  # the client was killed while it wrote a checkpoint
            self._resume_if_possible(killed)
        outcome.verdict = SAME

    def _judge_lost(self) -> None:
        """The state was lost, as this fault may; the newest checkpoint must lead to the same weights."""
        errors = self._errors()
        if "lost" not in errors:
            raise InternalError(f"hoop train ended with code 3, and does not say what was lost: {errors}")
        try:
            newest_checkpoint(self._out)
        except HoopError as error:
            self._outcome.verdict, self._outcome.reason = REFUSED, str(error)
            return
        self._resume(self._out)
        self._outcome.verdict = RESUMED

    def _judge_full_disk(self) -> None:
        """Training goes on; the checkpoints that are there are whole, and lead to the same weights."""
        outcome = self._outcome
        if outcome.code not in (0, 2):
            raise InternalError(f"hoop train ended with code {outcome.code}: {self._errors()}")
        self._compare_weights(outcome.weights)
        if outcome.code == 0:
            found = audit(self._out)
            outcome.audit = found.violation or "holds"
            if found.violation:
                raise InternalError(f"hoop audit: {found.violation}")
        elif "space" not in self._errors():
            raise InternalError(f"hoop train ended with code 2, and does not name the full disk: {self._errors()}")
        self._resume_if_possible(self._out)
        outcome.verdict = SAME

    def _resume_if_possible(self, out: Path) -> None:
        """Resumes from the newest checkpoint, if one was complete before the fault."""
        try:
            newest_checkpoint(out)
        except HoopError as error:
            self._outcome.details["resume"] = f"refused: {error}"
        else:
            self._resume(out)

    def _resume(self, out: Path) -> None:
        """``hoop train --resume`` to the last step, on this machine; the audit must hold afterwards."""
        result = _train_here(
            ["--resume", "--out", str(out), "--set", "faults=", "--devices", str(self._scenario.devices)],
            self._environment,
        )
        self._compare_weights(result["weights_sha256"])
        found = audit(out)
        self._outcome.details["resumed_from"] = found.resumed
        self._outcome.audit = found.violation or "holds"
        if found.violation or found.steps != self._reference.steps:
            raise InternalError(f"hoop audit after --resume: {found.violation or f'{found.steps} steps'}")

    def _compare_weights(self, weights: str) -> None:
        self._outcome.weights = weights
        if weights != self._reference.weights:
            raise InternalError(f"weights {weights or 'none'} are not {self._reference.weights}, the undisturbed run's")

    def _compare_record(self, out: Path) -> None:
        found = violation(out, self._reference.out, self._reference.steps)
        self._outcome.audit = found or "holds"
        if found:
            raise InternalError(f"the record does not hold: {found}")

    def _errors(self) -> str:
        """The end of what ``hoop train`` wrote to stderr."""
        with contextlib.suppress(OSError):
            return (self._scratch / "train.err").read_text(errors="replace")[-600:]
        return ""

    # ---- many jobs

    def _run_many_jobs(self, processes: ClusterProcesses) -> None:
        from hoop.runs.job_lookup import load_job

        outcome, scenario = self._outcome, self._scenario
        settings = load_job(paced_job.NAME, load=False).defaults(paced_job.NAME)
        settings = settings.replaced({"max_steps": MANY_JOBS_STEPS}).check()

        def pids() -> dict[str, int]:
            devices = {f"device {number}": one.pid for number, one in processes.numbered.items()}
            return {"coordinator": processes.coordinator.pid, **devices}

        with connect(processes.address, START_S) as cluster:
            cluster.wait_for_devices(scenario.devices, PATIENCE_S)
        strategies = [one for one in STRATEGIES if fitting_devices(one, scenario.devices) == scenario.devices]
        found = run_jobs(processes.address, settings, strategies, pids)
        self.footprint.observe(processes.pids)
        outcome.details = found.as_dict()
        outcome.fired = f"{len(found.weights)} jobs"
        if len(set(found.weights)) != 1:
            raise InternalError(f"{len(found.weights)} jobs gave {len(set(found.weights))} different weights")
        outcome.weights, outcome.audit, outcome.code = found.weights[0], "no run folder", 0
        if problem := found.problem():
            raise InternalError(problem)
        outcome.verdict = SAME
