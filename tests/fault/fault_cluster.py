"""A cluster whose coordinator, devices and clients are processes, for tests that inject faults into them."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

import preloaded

import hoop
from hoop.client.cluster import Cluster
from hoop.job_events import JobEvent, Steps

TIMEOUT_S = 400.0
JOB = ["mnist", "--epochs", "1", "--shards", "8", "--batch-size", "512"]
SLOWDOWN = ["--set", "slowdown=[4, 4, 4, 4]"]
"""Keeps a run going until the fault has been injected."""
LARGE_SLOWDOWN = ["--set", "slowdown=[20, 20, 20, 20]"]
"""Leaves a restarted device time to load code and data, and keeps the number of compared steps small."""
STEPS = 118
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@functools.cache
def undisturbed(*options: str) -> dict[str, Any]:
    """Returns the result of the same job on one device without faults; ``out`` is its run folder, deleted at exit."""
    folder = tempfile.mkdtemp(prefix="undisturbed-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = preloaded.run(
        [*preloaded.HOOP, "train", *JOB, *options, "--devices", "1", "--out", folder, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=ENV,
        timeout=TIMEOUT_S,
        check=True,
    )
    return {**json.loads(run.stdout), "out": folder}


LEASE = "1.5s"
"""As between hosts: a device that is stopped is dead after it."""


class ClusterProcesses:
    """A coordinator with a journal, its devices and the clients that train on them, each in its own process."""

    def __init__(
        self, folder: Path, cleanup: ExitStack, devices: int, piped: bool = False, options: Sequence[str] = ()
    ) -> None:
        """``piped``: the standard error of each process is a pipe to this one; see ``break_outputs``.

        ``options``: more options of the coordinator.
        """
        self.folder, self._cleanup, self._piped = folder, cleanup, piped
        self._started: list[subprocess.Popen[str]] = []
        self.coordinator = self.start_coordinator("--port", "0", *options)
        self.devices = [self.start_device("--id", str(number)) for number in range(1, devices + 1)]
        self.cluster = cleanup.enter_context(hoop.connect(self.address, connect_timeout=TIMEOUT_S))
        self.cluster.wait_for_devices(devices, TIMEOUT_S)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        with open(self.folder / f"{arguments[0]}.err", "ab") as errors:
            process = preloaded.Popen(
                [*preloaded.HOOP, *arguments],
                text=True,
                env=ENV,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if self._piped else errors,
            )
        self._cleanup.callback(self.terminate, process)
        self._started.append(process)
        return process

    def break_outputs(self) -> None:
        """Closes the reading ends of standard output and error of all processes so far."""
        for process in self._started:
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def start_coordinator(self, *options: str) -> subprocess.Popen[str]:
        process = self.start("coordinator", "--journal", str(self.folder / "journal"), "--lease", LEASE, *options)
        assert process.stdout is not None
        self.address = process.stdout.readline().split()[-1]
        return process

    def restart_coordinator(self) -> None:
        """Restarts the coordinator on the same port and journal."""
        self.coordinator = self.start_coordinator("--port", self.address.rpartition(":")[2])

    def start_device(self, *options: str) -> subprocess.Popen[str]:
        return self.start("device", "--join", self.address, "--memory", "64MiB", *options)

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(TIMEOUT_S)

    @staticmethod
    def terminate(process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.communicate(timeout=TIMEOUT_S)


@contextmanager
def running_cluster(
    devices: int, folder: Path, piped: bool = False, options: Sequence[str] = ()
) -> Iterator[ClusterProcesses]:
    with ExitStack() as cleanup:
        yield ClusterProcesses(folder, cleanup, devices, piped, options)


def wait_for_job(cluster: Cluster, kind: str = "job_started") -> int:
    return next(int(event.fields["job"]) for event in cluster.events(follow=True) if event.kind == kind)


def wait_for_step(cluster: Cluster, job: int, step: int) -> None:
    for observed in cluster.job(job).events(coordinator_timeout=TIMEOUT_S):
        event = observed.event
        if isinstance(event, Steps) and event.first + len(event.loss) >= step:
            return
    raise AssertionError(f"job {job} was over before step {step}")


def wait_for_event(
    cluster: Cluster, job: int, kind: type[JobEvent] | UnionType, times: int = 1, **fields: object
) -> None:
    """Waits until the job has emitted an event of this kind, with these fields, ``times`` times."""
    for observed in cluster.job(job).events(coordinator_timeout=TIMEOUT_S):
        event = observed.event
        if isinstance(event, kind) and fields.items() <= event.to_fields().items():
            times -= 1
        if not times:
            return
    raise AssertionError(f"job {job} was over before {kind} {fields}")


def all_events(cluster: Cluster, job: int) -> list[JobEvent]:
    """Returns the events of the job from its start; blocks until it ends."""
    return [observed.event for observed in cluster.job(job).events(coordinator_timeout=TIMEOUT_S)]


def reported_steps(events: list[JobEvent]) -> list[int]:
    """Returns the sorted numbers of the reported steps, without duplicates."""
    steps = (event for event in events if isinstance(event, Steps))
    return sorted({event.first + index for event in steps for index in range(len(event.loss))})


def result_of(run: subprocess.Popen[str], out: Path | None = None) -> dict[str, Any]:
    """Returns the result that ``hoop train --json`` prints; ``out``: its run folder, if it has one."""
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0
    result: dict[str, Any] = json.loads(output)
    return {**result, "out": str(out)} if out is not None else result
