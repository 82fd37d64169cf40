"""All devices of a job are killed at once and restarted on their arenas: the weights equal those of an undisturbed run.

Each device reports its fault and kills itself at an instruction of step 20. No device survives to detect the failure of
another one and continue without it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault_cluster import (
    ENV,
    JOB,
    STEPS,
    TIMEOUT_S,
    ClusterProcesses,
    all_events,
    reported_steps,
    result_of,
    running_cluster,
    undisturbed,
    wait_for_event,
    wait_for_job,
)
from reported_rows import check_same

from hoop import job_events as ev

STEP = 20
FEW = 40
LIMIT = ("--set", f"max_steps={FEW}")
"""Of a run whose length shows nothing."""


def arena_options(folder: Path, number: int) -> tuple[str, ...]:
    return "--id", str(number), "--arena", str(folder / f"arena{number}")


def train_until_all_killed(
    processes: ClusterProcesses, strategy: Sequence[str], instructions: Sequence[str], step: int = STEP
) -> tuple[int, subprocess.Popen[str]]:
    devices = [processes.start_device(*arena_options(processes.folder, number)) for number in (1, 2)]
    processes.cluster.wait_for_devices(2, TIMEOUT_S)
    faults = [
        f"kill@rank={rank},step={step}{f',instruction={instruction}' if instruction else ''}"
        for rank, instruction in enumerate(instructions)
    ]
    options = [*JOB, "--strategy", *strategy, *(option for fault in faults for option in ("--fault", fault))]
    run = processes.start(
        "train", *options, "--json", "--coordinator", processes.address, "--out", str(processes.folder / "out")
    )
    job = wait_for_job(processes.cluster)
    for device in devices:
        device.wait(TIMEOUT_S)
    return job, run


PIPELINE = ["pipeline:1f1b", "--set", "cut=[1]"]
"""Rank 1 dies at its first instruction of the step, whichever that is: if it has noticed that rank 0 is lost, it does
the step alone, and receives no input."""


@pytest.mark.parametrize(
    ("strategy", "instructions", "coordinator"),
    [
        pytest.param(["data"], ["reduce", "reduce"], False, id="data", marks=pytest.mark.slow),
        pytest.param(["data:sharded"], ["reduce", "reduce"], False, id="data, sharded", marks=pytest.mark.slow),
        pytest.param(["data", "--set", "accelerator=emulated"], ["reduce", "reduce"], False, id="data on GPUs"),
        pytest.param(
            ["data", "--set", "accelerator=cuda"], ["reduce", "reduce"], False, id="data, CUDA", marks=pytest.mark.gpu
        ),
        pytest.param(PIPELINE, ["forward", ""], False, id="pipeline"),
        pytest.param(PIPELINE, ["forward", ""], True, id="and the coordinator", marks=pytest.mark.slow),
        pytest.param(
            [*PIPELINE, "--set", "accelerator=emulated"],
            ["forward", ""],
            False,
            id="pipeline on GPUs",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_devices_restart_and_no_step_is_lost(
    tmp_path: Path, strategy: list[str], instructions: list[str], coordinator: bool
) -> None:
    """The previous step's state is restored from the arenas: each part from the device's own or the other's.

    Data parallel on GPUs: from the memory of each device on its GPU, which its keeper has kept.
    """
    with running_cluster(0, tmp_path) as processes:
        job, run = train_until_all_killed(processes, [*strategy, *LIMIT], instructions)
        if coordinator:
            processes.kill(processes.coordinator)
            processes.restart_coordinator()
        wait_for_event(processes.cluster, job, ev.WaitingForRestart, waiting=[1, 2])
        for number in (1, 2):
            processes.start_device(*arena_options(tmp_path, number))
        result = result_of(run, tmp_path / "out")
        events = all_events(processes.cluster, job)
    if "accelerator=cuda" in strategy:
        assert result["weights_sha256"] == undisturbed(*LIMIT, "--set", "accelerator=cuda")["weights_sha256"]
    else:
        check_same(result, undisturbed(*LIMIT))
    assert result["steps"] == FEW
    states = sorted((state["device"], state["step"], state["source"]) for state in result["states"])
    assert [state[:2] for state in states] == [(1, STEP - 1), (2, STEP - 1)]
    sources = [state[2] for state in states]
    assert sources == ["its own arena"] * 2 or (strategy != ["data"] and sources == ["device 2", "device 1"])
    assert reported_steps(events)[-1] == FEW - 1


def test_a_job_does_not_wait_for_a_device_that_was_lost_long_before(tmp_path: Path) -> None:
    """Device 2 dies and stays away. Device 1, which alone has the newest state, is killed later and comes back."""
    with running_cluster(0, tmp_path, options=("--restart-grace", "3600s")) as processes:
        first, second = (processes.start_device(*arena_options(tmp_path, number)) for number in (1, 2))
        processes.cluster.wait_for_devices(2, TIMEOUT_S)
        faults = ["--fault", "kill@rank=1,step=5", "--fault", f"kill@rank=0,step={STEP}"]
        out = tmp_path / "out"
        options = [*JOB, *LIMIT, "--strategy", "data", *faults, "--json", "--out", str(out)]
        run = processes.start("train", *options, "--coordinator", processes.address)
        job = wait_for_job(processes.cluster)
        second.wait(TIMEOUT_S)
        first.wait(TIMEOUT_S)
        wait_for_event(processes.cluster, job, ev.WaitingForRestart, waiting=[1])
        processes.start_device(*arena_options(tmp_path, 1))
        result = result_of(run, out)
    check_same(result, undisturbed(*LIMIT))
    (state,) = result["states"]
    assert (state["device"], state["step"], state["source"]) == (1, STEP - 1, "its own arena")


@pytest.mark.slow
def test_devices_that_all_lose_their_gpu_go_on_from_a_copy_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go back to the newest copy: at least to the snapshot of epoch 1, which one of them has."""
    monkeypatch.setitem(ENV, "HOOP_GPU_KEEPER", "0")  # the memory of the GPU ends with the device
    with running_cluster(0, tmp_path) as processes:
        strategy = ["data", "--set", "epochs=2", "--set", "accelerator=emulated", "--set", "host_replica_s=0.001"]
        _, run = train_until_all_killed(processes, strategy, ["reduce", "reduce"], 2 * STEPS - 2)
        for number in (1, 2):
            processes.start_device(*arena_options(tmp_path, number))
        result = result_of(run, tmp_path / "out")
    check_same(result, undisturbed("--set", "epochs=2"))
    states = {state["device"]: state for state in result["states"]}
    assert {state["source"] for state in states.values()} == {"its own arena", "device 1"}
    assert STEPS <= states[1]["step"] < 2 * STEPS - 2


@pytest.mark.slow
def test_partially_updated_states_are_not_used(tmp_path: Path) -> None:
    """Both devices are killed in an update of epoch 2: they go back to the snapshot of epoch 1 that one holds."""
    with running_cluster(0, tmp_path) as processes:
        two_epochs = ["data", "--set", "epochs=2"]
        _, run = train_until_all_killed(processes, two_epochs, ["update", "update"], STEPS + 3)
        for number in (1, 2):
            processes.start_device(*arena_options(tmp_path, number))
        result = result_of(run, tmp_path / "out")
    check_same(result, undisturbed("--set", "epochs=2"))
    states = {state["device"]: (state["step"], state["source"]) for state in result["states"]}
    assert states == {1: (STEPS, "its own arena"), 2: (STEPS, "device 1")}


@pytest.mark.slow
def test_without_a_complete_state_the_job_fails(tmp_path: Path) -> None:
    """Both devices are killed in the same update, before any snapshot."""
    with running_cluster(0, tmp_path) as processes:
        _, run = train_until_all_killed(processes, ["data"], ["update", "update"])
        for number in (1, 2):
            processes.start_device(*arena_options(tmp_path, number))
        run.communicate(timeout=TIMEOUT_S)
        assert run.returncode == 3
        assert "everything was lost: go on from its newest checkpoint" in (tmp_path / "train.err").read_text()


@pytest.mark.slow
def test_a_device_with_different_data_is_refused(tmp_path: Path) -> None:
    """The error names the device and the remedy; the job continues without it."""
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "sized.py").write_text(JOB_SOURCE)
    with running_cluster(0, tmp_path) as processes:
        processes.start_device("--id", "1", "--jobs", str(jobs))
        processes.cluster.wait_for_devices(1, TIMEOUT_S)
        run = processes.start("train", f"{jobs / 'sized.py'}:job", "--json", "--coordinator", processes.address)
        job = wait_for_job(processes.cluster)
        wait_for_event(processes.cluster, job, ev.Steps)
        (jobs / "sized.py").write_text(JOB_SOURCE.replace("seed(5)", "seed(6)"))
        processes.start_device("--id", "2", "--jobs", str(jobs))
        wait_for_event(processes.cluster, job, ev.Refused, device=2)
        processes.cluster.job(job).stop()
        assert result_of(run)["devices"] == 1
        events = all_events(processes.cluster, job)
    (refused,) = [event.text for event in events if isinstance(event, ev.Refused)]
    assert re.search(r"device 2 .* has other data than job 1: .* of 64 samples .* put the same dataset on ", refused)
    assert not any(isinstance(event, ev.Resized) for event in events)


JOB_SOURCE = """
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
