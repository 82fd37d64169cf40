"""A cluster of processes that faults happen to, and what its trainings must come to."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

import hoop
from hoop.client.cluster import Cluster
from hoop.job_events import JobEvent, Steps

PATIENCE_S = 100.0
JOB = ["mnist", "--epochs", "1", "--shards", "8", "--batch-size", "512"]
SLOWLY = ["--set", "slowdown=[4, 4, 4, 4]"]
"""So that a run is not over before something happens to it."""
SLOWEST = ["--set", "slowdown=[20, 20, 20, 20]"]
"""So that somebody who has to load everything comes back in time, and few steps need comparing."""
STEPS = 118
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@functools.cache
def undisturbed(*more: str) -> dict[str, Any]:
    """The same training on one device that nothing happens to; ``out`` is its folder, until all tests are over."""
    folder = tempfile.mkdtemp(prefix="undisturbed-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = subprocess.run(
        [sys.executable, "-m", "hoop", "train", *JOB, *more, "--devices", "1", "--out", folder, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
        timeout=PATIENCE_S,
        check=True,
    )
    return {**json.loads(run.stdout), "out": folder}


class Processes:
    """A coordinator with a journal, its devices, and whoever trains on them: each a process of its own."""

    def __init__(self, folder: Path, ended: ExitStack, devices: int) -> None:
        self.folder, self._ended = folder, ended
        self.coordinator = self.coordinate("--port", "0")
        self.devices = [self.device("--id", str(number)) for number in range(1, devices + 1)]
        self.cluster = ended.enter_context(hoop.connect(self.address))
        self.cluster.wait_for_devices(devices)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with open(self.folder / f"{arguments[0]}.err", "ab") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "hoop", *arguments],
                text=True,
                env=ENV,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._ended.callback(self.end, process)
        return process

    def coordinate(self, *options: str) -> subprocess.Popen[str]:
        process = self.start("coordinator", "--journal", str(self.folder / "journal"), *options)
        assert process.stdout is not None
        self.address = process.stdout.readline().split()[-1]
        return process

    def again(self) -> None:
        """The coordinator, where it was."""
        self.coordinator = self.coordinate("--port", self.address.rpartition(":")[2])

    def device(self, *options: str) -> subprocess.Popen[str]:
        return self.start("device", "--join", self.address, "--memory", "64MiB", *options)

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        """No goodbye."""
        process.kill()
        process.wait(PATIENCE_S)

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.communicate(timeout=PATIENCE_S)


@contextmanager
def cluster_of(devices: int, folder: Path) -> Iterator[Processes]:
    with ExitStack() as ended:
        yield Processes(folder, ended, devices)


def job_of(cluster: Cluster, kind: str = "job_started") -> int:
    return next(int(event.fields["job"]) for event in cluster.events(follow=True) if event.kind == kind)


def until_step(cluster: Cluster, job: int, step: int) -> None:
    for observed in cluster.job(job).events(coordinator_timeout=PATIENCE_S):
        event = observed.event
        if isinstance(event, Steps) and event.first + len(event.loss) >= step:
            return
    raise AssertionError(f"job {job} was over before step {step}")


def until(cluster: Cluster, job: int, kind: type[JobEvent] | UnionType, times: int = 1, **fields: object) -> None:
    """Waits until the job has emitted this event ``times`` times."""
    for observed in cluster.job(job).events(coordinator_timeout=PATIENCE_S):
        event = observed.event
        if isinstance(event, kind) and fields.items() <= event.to_fields().items():
            times -= 1
        if not times:
            return
    raise AssertionError(f"job {job} was over before {kind} {fields}")


def all_events(cluster: Cluster, job: int) -> list[JobEvent]:
    """From its beginning to its end."""
    return [one.event for one in cluster.job(job).events(coordinator_timeout=PATIENCE_S)]


def steps_reported(events: list[JobEvent]) -> list[int]:
    """Every step that was reported, once each."""
    steps = (one for one in events if isinstance(one, Steps))
    return sorted({one.first + index for one in steps for index in range(len(one.loss))})


def result_of(run: subprocess.Popen[str], out: Path | None = None) -> dict[str, Any]:
    """The result that ``hoop train --json`` prints; ``out``: its folder, if it has one."""
    told, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0
    found: dict[str, Any] = json.loads(told)
    return {**found, "out": str(out)} if out is not None else found
