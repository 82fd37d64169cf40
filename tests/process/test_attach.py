"""Whoever started a job may go, or be killed, and come back to it with ``hoop attach``."""

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
JOB, SLOW = f"{DRIVER}:job", f"{DRIVER}:slow"


def steps_under_way(cluster: hoop.Cluster, job: int) -> None:
    assert any(isinstance(one.event, Steps) for one in cluster.job(job).events())


def answered(done: CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_detached_job_is_found_again_with_all_its_files(
    up: Running, cluster: hoop.Cluster, run_hoop: Run, tmp_path: Path
) -> None:
    there, out = ("--coordinator", up.address), tmp_path / "run"
    refused = run_hoop("train", JOB, *there, "--detach", "--out", out)
    assert refused.returncode == 2
    assert "hoop attach JOB --out FOLDER" in refused.stderr
    number = answered(run_hoop("train", JOB, *there, "--detach", "--json"))["job_id"]
    first = answered(run_hoop("attach", number, *there, "--out", out, "--json"))
    assert (first["job_id"], first["stopped"]) == (number, False)
    assert json.loads((out / "result.json").read_text())["weights_sha256"] == first["weights_sha256"]
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines() if "loss" in line]
    assert set(steps) == set(range(1, first["steps"] + 1)), "although nobody followed it from the beginning"
    assert [path.name for path in (out / "checkpoints").iterdir()][-1:], "the last state is kept"
    again = answered(run_hoop("attach", *there, "--json"))
    assert again["weights_sha256"] == first["weights_sha256"]
    ((listed),) = [one for one in answered(run_hoop("status", *there, "--json"))["jobs"] if one["id"] == number]
    assert (listed["status"], listed["job"]) == ("ended", "train_driver:job")
    unknown = run_hoop("attach", 999, *there)
    assert unknown.returncode == 2
    assert "job: 999 is unknown" in unknown.stderr


@pytest.mark.slow
def test_a_job_outlives_whoever_started_it_and_whoever_watched(
    up: Running, cluster: hoop.Cluster, start: Start, run_hoop: Run
) -> None:
    """Killed, or ended by Ctrl-C where it only watched: the job goes on until somebody stops it."""
    there = ("--coordinator", up.address)
    last = max((event.sequence for event in cluster.events()), default=0)
    starter = start("train", SLOW, *there)
    events = cluster.events(after=last, follow=True)
    job = next(int(event.fields["job"]) for event in events if event.kind == "job_started")
    steps_under_way(cluster, job)
    starter.kill()
    watcher = start("attach", job, *there)
    while "parameters on 2 devices" not in watcher.errors:
        assert watcher.process.poll() is None, watcher.errors
        threading.Event().wait(0.02)
    watcher.signal(signal.SIGINT)
    assert watcher.wait() == 130
    assert f"job {job} goes on; come back with: hoop attach {job}" in watcher.errors
    assert {one.id: one.status for one in cluster.status().jobs}[job] == "running"
    result = answered(run_hoop("attach", *there, "--stop", "--json"))
    assert (result["job_id"], result["stopped"]) == (job, True)
    assert {one.id: one.status for one in cluster.status().jobs}[job] == "ended"
