"""Faults at a chosen rank, step and instruction: each fires once, and the weights are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATIENCE_S = 100.0
DRIVER = Path(__file__).parents[1] / "process" / "train_driver.py"
JOB = {"model": "plain", "epochs": 2, "batch_size": 32, "shards": 4}
FAULTS = [
    "kill@rank=1,step=5,instruction=load",
    "kill@rank=0,step=5,instruction=backward",
    "kill@rank=1,step=5,instruction=reduce",
    "kill@rank=2,step=6,instruction=update",
    "stop@rank=1,step=4,seconds=0.5,instruction=forward",
    "slow@rank=0,step=2,factor=3,instruction=forward; kill@rank=2,step=8,instruction=reduce",
]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def trained(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One process, and devices forked for each job."""
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENV,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def hoop_train(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "hoop", "train", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        env=ENV,
        check=True,
    )
    return dict(json.loads(done.stdout))


def test_faults_before_any_instruction_change_nothing() -> None:
    jobs = [{**JOB, "devices": 1}, *({**JOB, "devices": 3, "faults": fault} for fault in FAULTS)]
    undisturbed, *found = trained(jobs)
    for fault, result in zip(FAULTS, found, strict=True):
        fired = sorted(result.get("faults", []))
        assert len(fired) == fault.count("@"), f"{fault}: {result}"
        assert [one.partition("@")[0] for one in fired] == sorted(
            one.strip().partition("@")[0] for one in fault.split(";")
        )
        assert result["weights_sha256"] == undisturbed["weights_sha256"], fault
        assert result["steps"] == undisturbed["steps"]
    assert undisturbed["faults"] == []


def test_a_lost_stage_changes_nothing() -> None:
    job = [f"{DRIVER}:job", "--epochs", "1", "--strategy", "pipeline", "--devices", "3", "--json"]
    fault = "kill@rank=0,step=5,instruction=send-output"
    disturbed, undisturbed = (hoop_train(*job, *more) for more in (["--fault", fault], []))
    assert disturbed["faults"] == [fault]
    assert disturbed["weights_sha256"] == undisturbed["weights_sha256"]


def test_a_slow_device_is_named_and_a_wrong_fault_is_refused() -> None:
    slow = {**JOB, "epochs": 6, "shards": 8, "devices": 2, "faults": "slow@rank=1,step=3,factor=50"}
    named, refused = trained([slow, {**JOB, "devices": 2, "faults": "kill@instruction=think"}])
    assert 1 in [one["rank"] for one in named["stragglers"]]
    assert refused["error"] == "InvalidArgument"


@pytest.fixture
def links() -> Any:
    """A coordinator and two devices that have nothing but TCP between them."""
    command = [sys.executable, "-m", "hoop"]
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        started.append(subprocess.Popen([*command, *arguments], text=True, stdout=subprocess.PIPE, env=ENV))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline()

    try:
        address = start("coordinator").split()[-1]
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = str(probe.getsockname()[1])
            there = (
                "--data-port",
                port,
                "--advertise-data",
                f"127.0.0.1:{port}",
                "--jobs",
                str(DRIVER.parent),
            )
            start("device", "--join", address, *there)
        yield address
    finally:
        for one in reversed(started):
            one.send_signal(signal.SIGTERM)
            one.communicate(timeout=PATIENCE_S)


def test_a_bit_that_a_link_flips_does_not_change_the_weights(links: str) -> None:
    job = [f"{DRIVER}:job", "--json", "--epochs", "1", "--coordinator", links]
    faults = ["--fault", "corrupt@rank=0,step=2", "--fault", "corrupt@rank=1,step=4,instruction=reduce"]

    disturbed, undisturbed = hoop_train(*job, *faults), hoop_train(*job)
    assert len(disturbed["faults"]) == 2
    assert disturbed["damaged"] >= 2, "what was flipped was not noticed"
    assert disturbed["weights_sha256"] == undisturbed["weights_sha256"]
    assert undisturbed["damaged"] == 0
