"""Faults at a given rank, step and instruction: each fires once, and the weights equal those of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import preloaded
import pytest
from reported_rows import check_same
from trainings import DRIVER, ENV, HOOP, TIMEOUT_S, hoop_train, run_driver, tcp_cluster

JOB = {"model": "plain", "epochs": 2, "batch_size": 32, "shards": 4}
FAULTS = [
    "kill@rank=1,step=5,instruction=load",
    "kill@rank=0,step=5,instruction=backward",
    "stop@rank=1,step=4,seconds=0.5,instruction=forward; kill@rank=2,step=6,instruction=update",
    "slow@rank=0,step=2,factor=3,instruction=forward; kill@rank=2,step=8,instruction=reduce",
]
ON_A_GPU = [
    "kill@rank=0,step=5,instruction=backward",
    "kill@rank=1,step=5,instruction=reduce",
    "kill@rank=2,step=6,instruction=update",
    "stop@rank=1,step=4,seconds=0.5,instruction=forward; kill@rank=0,step=13",
]


def test_faults_at_any_instruction_do_not_change_the_weights(tmp_path: Path) -> None:
    jobs = [{**JOB, "devices": 1}, *({**JOB, "devices": 3, "faults": fault} for fault in FAULTS)]
    undisturbed, *results = run_driver(DRIVER, jobs, tmp_path)
    for fault, result in zip(FAULTS, results, strict=True):
        fired = sorted(result.get("faults", []))
        assert len(fired) == fault.count("@"), f"{fault}: {result}"
        assert [spec.partition("@")[0] for spec in fired] == sorted(
            spec.strip().partition("@")[0] for spec in fault.split(";")
        )
        check_same(result, undisturbed)
    assert undisturbed["faults"] == []


@pytest.mark.slow
def test_faults_while_the_state_is_on_an_emulated_gpu(tmp_path: Path) -> None:
    """Steps are launched in strides; the survivors bring the state to the host, and the same bits come out."""
    jobs = [{**JOB, "devices": 3, "accelerator": "emulated", "faults": one} for one in ON_A_GPU]
    undisturbed, *results = run_driver(DRIVER, [{**JOB, "devices": 1}, *jobs], tmp_path)
    for fault, result in zip(ON_A_GPU, results, strict=True):
        assert len(result.get("faults", [])) == fault.count("@"), f"{fault}: {result}"
        check_same(result, undisturbed)


@pytest.mark.slow
def test_a_lost_stage_does_not_change_the_weights(tmp_path: Path) -> None:
    job = [f"{DRIVER}:job", "--epochs", "1", "--strategy", "pipeline", "--devices", "3"]
    fault = "kill@rank=0,step=5,instruction=send-output"
    disturbed = hoop_train(*job, "--fault", fault, out=tmp_path / "disturbed")
    assert disturbed["faults"] == [fault]
    check_same(disturbed, hoop_train(*job, out=tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_slow_device_is_reported_and_an_invalid_fault_is_refused(tmp_path: Path) -> None:
    slow = {**JOB, "epochs": 6, "shards": 8, "devices": 2, "faults": "slow@rank=1,step=3,factor=50"}
    invalid = {**JOB, "devices": 2, "faults": "kill@instruction=think"}
    slowed, refused = run_driver(DRIVER, [slow, invalid], tmp_path)
    assert 1 in [straggler["rank"] for straggler in slowed["stragglers"]]
    assert refused["error"] == "InvalidArgument"


IMPOSSIBLE = {
    "kill@rank=9,step=2": "rank 9 does not exist, the job begins with ranks 0..1",
    "kill@rank=0,step=8": "step 8 never comes, the job has 7 steps",
    "kill@rank=0,step=2,instruction=push": "rank 0 has no push",
    "corrupt@rank=1,step=2": "corrupt needs TCP connections",
}


def refused_output(*arguments: str) -> str:
    """Returns the error output of ``hoop train``, which must exit with code 2 before the training starts."""
    completed = preloaded.run(
        [*HOOP, "train", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, env=ENV, check=False
    )
    assert completed.returncode == 2, completed.stderr
    assert "parameters on" not in completed.stderr, "the training started"
    return str(completed.stderr)


def test_an_impossible_fault_is_refused(tmp_path: Path) -> None:
    job = {**JOB, "epochs": 1, "devices": 2}
    for (fault, text), result in zip(
        IMPOSSIBLE.items(),
        run_driver(DRIVER, [{**job, "faults": fault} for fault in IMPOSSIBLE], tmp_path),
        strict=True,
    ):
        assert result.get("error") == "InvalidArgument", f"{fault}: {result}"
        assert f"fault {fault}" in result["text"]
        assert text in result["text"]


@pytest.mark.slow
def test_the_command_line_refuses_an_impossible_fault() -> None:
    job = [f"{DRIVER}:job", "--epochs", "1", "--devices", "2"]
    impossible = {
        "kill@rank=9,step=2": "rank 9 does not exist, the job begins with ranks 0..1",
        "disk-full@step=2": "no file of this run is written",
    }
    for fault, text in impossible.items():
        assert f"fault {fault}: {text}" in refused_output(*job, "--fault", fault)


@pytest.mark.slow
def test_the_devices_of_a_cluster_refuse_an_impossible_fault() -> None:
    """Only the devices know the data and their number."""
    job = [f"{DRIVER}:job", "--epochs", "1"]
    with tcp_cluster(2) as address:
        for fault in ("kill@rank=9,step=2", "kill@rank=0,step=8"):
            assert IMPOSSIBLE[fault] in refused_output(*job, "--fault", fault, "--coordinator", address)


def test_a_fault_in_an_asynchronous_server_fires_in_its_step(tmp_path: Path) -> None:
    """Without barriers, servers and workers learn the current step from the messages."""
    faults = "slow@rank=2,step=7,factor=2,instruction=take; slow@rank=0,step=7,factor=2,instruction=get"
    (result,) = run_driver(
        DRIVER,
        [{**JOB, "epochs": 1, "devices": 3, "strategy": "ps:asp", "faults": faults, "max_steps": 7}],
        tmp_path,
    )
    assert len(result.get("faults", [])) == 2, json.dumps(result)


@pytest.mark.slow
def test_a_bit_flip_on_a_link_does_not_change_the_weights(tmp_path: Path) -> None:
    faults = ["--fault", "corrupt@rank=0,step=2", "--fault", "corrupt@rank=1,step=4,instruction=reduce"]

    with tcp_cluster(2) as address:
        job = [f"{DRIVER}:job", "--epochs", "1", "--coordinator", address]
        disturbed = hoop_train(*job, *faults, out=tmp_path / "disturbed")
        undisturbed = hoop_train(*job, out=tmp_path / "undisturbed")
    assert len(disturbed["faults"]) == 2
    assert disturbed["damaged"] >= 2, "the flipped bits were not detected"
    check_same(disturbed, undisturbed)
    assert undisturbed["damaged"] == 0
