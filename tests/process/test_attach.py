"""A job keeps running when its client exits or is killed; ``hoop attach`` reconnects to it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import pytest

import hoop
from hoop.job_events import Steps

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Run = Callable[..., CompletedProcess[str]]

DRIVER = Path(__file__).with_name("train_driver.py")
UP = ("--devices", "2", "--memory", "64MiB", "--jobs", DRIVER.parent)
TRAINING_S = 480.0
"""Deadline of a training whose devices are slowed down, on a machine that stands still most of the time."""
JOB, SLOW = f"{DRIVER}:job", f"{DRIVER}:slow"


def wait_for_steps(cluster: hoop.Cluster, job: int) -> None:
    assert any(isinstance(one.event, Steps) for one in cluster.job(job).events())


def json_output(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    output: dict[str, Any] = json.loads(line)
    return output


@pytest.mark.slow
def test_attach_to_a_detached_job_writes_all_its_files(
    up: Running, cluster: hoop.Cluster, run_hoop: Run, tmp_path: Path
) -> None:
    coordinator, out = ("--coordinator", up.address), tmp_path / "run"
    refused = run_hoop("train", JOB, *coordinator, "--detach", "--out", out)
    assert refused.returncode == 2
    assert "hoop attach JOB --out FOLDER" in refused.stderr
    job_id = json_output(run_hoop("train", JOB, *coordinator, "--detach", "--json"))["job_id"]
    first = json_output(run_hoop("attach", job_id, *coordinator, "--out", out, "--json"))
    assert (first["job_id"], first["stopped"]) == (job_id, False)
    assert json.loads((out / "result.json").read_text())["weights_sha256"] == first["weights_sha256"]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines() if "loss" in line]
    assert set(steps) == set(range(1, first["steps"] + 1)), "although no client followed it from the beginning"
    assert [path.name for path in (out / "checkpoints").iterdir()][-1:], "the last checkpoint is kept"
    again = json_output(run_hoop("attach", *coordinator, "--json"))
    assert again["weights_sha256"] == first["weights_sha256"]
    ((listed),) = [
        one for one in json_output(run_hoop("status", *coordinator, "--json"))["jobs"] if one["id"] == job_id
    ]
    assert (listed["status"], listed["job"]) == ("ended", "train_driver:job")
    unknown = run_hoop("attach", 999, *coordinator)
    assert unknown.returncode == 2
    assert "job: 999 is unknown" in unknown.stderr


def test_attach_continues_the_folder_of_a_client_that_was_killed(
    up: Running, cluster: hoop.Cluster, start: Start, run_hoop: Run, tmp_path: Path
) -> None:
    """It is the same run: its job is a file for the client, and a module for the devices."""
    coordinator, out = ("--coordinator", up.address), tmp_path / "run"
    last = max((event.sequence for event in cluster.events()), default=0)
    options = ("--epochs", "1000", "--set", "max_steps=200")
    starter = start("train", JOB, *coordinator, *options, "--set", "slowdown=[50, 50]", "--out", out)
    events = cluster.events(after=last, follow=True)
    job = next(int(event.fields["job"]) for event in events if event.kind == "job_started")
    while not list(out.glob("checkpoints/step-*")):
        assert starter.process.poll() is None, starter.errors
    starter.kill()
    attached = json_output(run_hoop("attach", job, *coordinator, "--out", out, "--json", within=TRAINING_S))
    alone = json_output(run_hoop("train", JOB, "--devices", "1", *options, "--json", within=TRAINING_S))
    assert attached["weights_sha256"] == alone["weights_sha256"]
    report = json_output(run_hoop("audit", out, "--json"))
    assert (report["holds"], report["steps"]) == (True, 200), report


@pytest.mark.slow
def test_a_job_outlives_the_client_that_started_it_and_the_one_that_attached(
    up: Running, cluster: hoop.Cluster, start: Start, run_hoop: Run
) -> None:
    """The first is killed, the second ends at Ctrl-C; the job runs until ``hoop attach --stop``."""
    coordinator = ("--coordinator", up.address)
    last = max((event.sequence for event in cluster.events()), default=0)
    starter = start("train", SLOW, *coordinator)
    events = cluster.events(after=last, follow=True)
    job = next(int(event.fields["job"]) for event in events if event.kind == "job_started")
    wait_for_steps(cluster, job)
    starter.kill()
    watcher = start("attach", job, *coordinator)
    while "parameters on 2 devices" not in watcher.errors:
        assert watcher.process.poll() is None, watcher.errors
        threading.Event().wait(0.02)
    watcher.signal(signal.SIGINT)
    assert watcher.wait() == 130
    assert f"job {job} goes on; come back with: hoop attach {job}" in watcher.errors
    assert {one.id: one.status for one in cluster.status().jobs}[job] == "running"
    result = json_output(run_hoop("attach", *coordinator, "--stop", "--json"))
    assert (result["job_id"], result["stopped"]) == (job, True)
    assert {one.id: one.status for one in cluster.status().jobs}[job] == "ended"
