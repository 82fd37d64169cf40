"""All devices of a job are killed at once, and started again on their arenas: the weights of an undisturbed run.

Each device kills itself as it comes to an instruction of step 40, which it tells of first: none is left to see
another's death, and to go on without it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault_cluster import (
    JOB,
    PATIENCE_S,
    STEPS,
    Processes,
    all_events,
    cluster_of,
    job_of,
    result_of,
    steps_reported,
    undisturbed,
    until,
)
from reported_rows import check_same

from hoop import job_events as ev

STEP = 40


def arena(folder: Path, number: int) -> tuple[str, ...]:
    return "--id", str(number), "--arena", str(folder / f"arena{number}")


def all_killed(
    up: Processes, strategy: Sequence[str], instructions: Sequence[str], step: int = STEP
) -> tuple[int, subprocess.Popen[str]]:
    devices = [up.device(*arena(up.folder, number)) for number in (1, 2)]
    up.cluster.wait_for_devices(2)
    told = [f"kill@rank={rank},step={step},instruction={one}" for rank, one in enumerate(instructions)]
    options = [*JOB, "--strategy", *strategy, *(word for one in told for word in ("--fault", one))]
    run = up.start("train", *options, "--json", "--coordinator", up.address, "--out", str(up.folder / "out"))
    job = job_of(up.cluster)
    for device in devices:
        device.wait(PATIENCE_S)
    return job, run


PIPELINE = ["pipeline:1f1b", "--set", "cut=[1]"]


@pytest.mark.parametrize(
    ("strategy", "instructions", "coordinator"),
    [
        pytest.param(["data"], ["reduce", "reduce"], False, id="data"),
        pytest.param(PIPELINE, ["forward", "recv-input"], False, id="pipeline", marks=pytest.mark.slow),
        pytest.param(PIPELINE, ["forward", "recv-input"], True, id="and the coordinator", marks=pytest.mark.slow),
    ],
)
def test_all_come_back(tmp_path: Path, strategy: list[str], instructions: list[str], coordinator: bool) -> None:
    """No step is lost: each has the state of the step before, or its part of it, or the part of whose seat it has."""
    with cluster_of(0, tmp_path) as up:
        job, run = all_killed(up, strategy, instructions)
        if coordinator:
            up.kill(up.coordinator)
            up.again()
        until(up.cluster, job, ev.WaitingForRestart, waiting=[1, 2])
        for number in (1, 2):
            up.device(*arena(tmp_path, number))
        result = result_of(run, tmp_path / "out")
        events = all_events(up.cluster, job)
    check_same(result, undisturbed())
    assert result["steps"] == STEPS
    states = sorted((one["device"], one["step"], one["source"]) for one in result["states"])
    assert [one[:2] for one in states] == [(1, STEP - 1), (2, STEP - 1)]
    sources = [one[2] for one in states]
    assert sources == ["its own arena"] * 2 or (strategy != ["data"] and sources == ["device 2", "device 1"])
    assert steps_reported(events)[-1] == STEPS - 1


@pytest.mark.slow
def test_torn_states_are_not_believed(tmp_path: Path) -> None:
    """Long: killed within the same update, after an epoch: all go back to its snapshot, which was one device's."""
    with cluster_of(0, tmp_path) as up:
        two = ["data", "--set", "epochs=2"]
        _, run = all_killed(up, two, ["update", "update"], STEPS + 3)
        for number in (1, 2):
            up.device(*arena(tmp_path, number))
        result = result_of(run, tmp_path / "out")
    check_same(result, undisturbed("--set", "epochs=2"))
    states = {one["device"]: (one["step"], one["source"]) for one in result["states"]}
    assert states == {1: (STEPS, "its own arena"), 2: (STEPS, "device 1")}


@pytest.mark.slow
def test_nobody_has_anything(tmp_path: Path) -> None:
    """Long: killed within the same update, before any snapshot."""
    with cluster_of(0, tmp_path) as up:
        _, run = all_killed(up, ["data"], ["update", "update"])
        for number in (1, 2):
            up.device(*arena(tmp_path, number))
        run.communicate(timeout=PATIENCE_S)
        assert run.returncode == 3
        assert "everything was lost: go on from its newest checkpoint" in (tmp_path / "train.err").read_text()


def test_other_data_is_refused(tmp_path: Path) -> None:
    """A device whose dataset is another one is named, with what to do, and the others go on without it."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "sized.py").write_text(SIZED)
    with cluster_of(0, tmp_path) as up:
        up.device("--id", "1", "--jobs", str(jobs))
        up.cluster.wait_for_devices(1)
        run = up.start("train", f"{jobs / 'sized.py'}:job", "--json", "--coordinator", up.address)
        job = job_of(up.cluster)
        until(up.cluster, job, ev.Steps)
        (jobs / "sized.py").write_text(SIZED.replace("seed(5)", "seed(6)"))
        up.device("--id", "2", "--jobs", str(jobs))
        until(up.cluster, job, ev.Refused, device=2)
        up.cluster.job(job).stop()
        assert result_of(run)["devices"] == 1
        events = all_events(up.cluster, job)
    (refused,) = [one.text for one in events if isinstance(one, ev.Refused)]
    assert re.search(r"device 2 .* has other data than job 1: .* of 64 samples .* put the same dataset on ", refused)
    assert not any(isinstance(one, ev.Resized) for one in events)


SIZED = """
import torch
from hoop import job_events as ev
import hoop

def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 3)

def data():
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    found = hoop.TensorData(inputs, inputs.argmax(1) % 3)
    return hoop.Splits(found, found)

settings = {"epochs": 1_000_000, "batch_size": 8, "shards": 2, "evaluate_every": 0, "checkpoint_every": 0}
job = hoop.Job(model, data, settings=settings)
"""
