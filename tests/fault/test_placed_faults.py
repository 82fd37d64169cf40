"""Faults at a chosen rank, step and instruction: each fires once, and the weights are those of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from reported_rows import check_same
from trainings import DRIVER, ENV, HOOP, PATIENCE_S, driven, hoop_train, linked

JOB = {"model": "plain", "epochs": 2, "batch_size": 32, "shards": 4}
FAULTS = [
    "kill@rank=1,step=5,instruction=load",
    "kill@rank=0,step=5,instruction=backward",
    "kill@rank=1,step=5,instruction=reduce",
    "kill@rank=2,step=6,instruction=update",
    "stop@rank=1,step=4,seconds=0.5,instruction=forward",
    "slow@rank=0,step=2,factor=3,instruction=forward; kill@rank=2,step=8,instruction=reduce",
]


def test_faults_before_any_instruction_change_nothing(tmp_path: Path) -> None:
    jobs = [{**JOB, "devices": 1}, *({**JOB, "devices": 3, "faults": fault} for fault in FAULTS)]
    undisturbed, *found = driven(DRIVER, jobs, tmp_path)
    for fault, result in zip(FAULTS, found, strict=True):
        fired = sorted(result.get("faults", []))
        assert len(fired) == fault.count("@"), f"{fault}: {result}"
        assert [one.partition("@")[0] for one in fired] == sorted(
            one.strip().partition("@")[0] for one in fault.split(";")
        )
        check_same(result, undisturbed)
    assert undisturbed["faults"] == []


@pytest.mark.slow
def test_a_lost_stage_changes_nothing(tmp_path: Path) -> None:
    job = [f"{DRIVER}:job", "--epochs", "1", "--strategy", "pipeline", "--devices", "3"]
    fault = "kill@rank=0,step=5,instruction=send-output"
    disturbed = hoop_train(*job, "--fault", fault, out=tmp_path / "disturbed")
    assert disturbed["faults"] == [fault]
    check_same(disturbed, hoop_train(*job, out=tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_slow_device_is_named_and_a_wrong_fault_is_refused(tmp_path: Path) -> None:
    slow = {**JOB, "epochs": 6, "shards": 8, "devices": 2, "faults": "slow@rank=1,step=3,factor=50"}
    wrong = {**JOB, "devices": 2, "faults": "kill@instruction=think"}
    named, refused = driven(DRIVER, [slow, wrong], tmp_path)
    assert 1 in [one["rank"] for one in named["stragglers"]]
    assert refused["error"] == "InvalidArgument"


NEVER = {
    "kill@rank=9,step=2": "rank 9 does not exist, the job begins with ranks 0..1",
    "kill@rank=0,step=8": "step 8 never comes, the job has 7 steps",
    "kill@rank=0,step=2,instruction=push": "rank 0 has no push",
    "corrupt@rank=1,step=2": "corrupt needs TCP connections",
}


def refused(*arguments: str) -> str:
    """What a training that ends as a mistake of the user's says, which has not begun."""
    done = subprocess.run(
        [*HOOP, "train", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, env=ENV, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "parameters on" not in done.stderr, "it has begun"
    return done.stderr


def test_a_fault_that_can_never_happen_is_refused(tmp_path: Path) -> None:
    job = {**JOB, "epochs": 1, "devices": 2}
    for (fault, text), found in zip(
        NEVER.items(), driven(DRIVER, [{**job, "faults": fault} for fault in NEVER], tmp_path), strict=True
    ):
        assert found.get("error") == "InvalidArgument", f"{fault}: {found}"
        assert f"fault {fault}" in found["text"]
        assert text in found["text"]


def test_the_command_line_refuses_it() -> None:
    job = [f"{DRIVER}:job", "--epochs", "1", "--devices", "2"]
    never = {
        "kill@rank=9,step=2": "rank 9 does not exist, the job begins with ranks 0..1",
        "disk-full@step=2": "no file of this run is written",
    }
    for fault, text in never.items():
        assert f"fault {fault}: {text}" in refused(*job, "--fault", fault)


def test_devices_of_a_cluster_refuse_it() -> None:
    """They have the data, and know how many they are."""
    job = [f"{DRIVER}:job", "--epochs", "1"]
    with linked(2) as address:
        for fault in ("kill@rank=9,step=2", "kill@rank=0,step=8"):
            assert NEVER[fault] in refused(*job, "--fault", fault, "--coordinator", address)


def test_a_fault_of_a_server_that_follows_a_rule_happens_in_its_step(tmp_path: Path) -> None:
    """Without barriers, servers and their workers know by the messages which step they are in."""
    faults = "slow@rank=2,step=7,factor=2,instruction=take; slow@rank=0,step=7,factor=2,instruction=get"
    (found,) = driven(
        DRIVER,
        [{**JOB, "epochs": 1, "devices": 3, "strategy": "ps:asp", "faults": faults, "max_steps": 7}],
        tmp_path,
    )
    assert len(found.get("faults", [])) == 2, json.dumps(found)


@pytest.mark.slow
def test_a_bit_that_a_link_flips_does_not_change_the_weights(tmp_path: Path) -> None:
    faults = ["--fault", "corrupt@rank=0,step=2", "--fault", "corrupt@rank=1,step=4,instruction=reduce"]

    with linked(2) as address:
        job = [f"{DRIVER}:job", "--epochs", "1", "--coordinator", address]
        disturbed = hoop_train(*job, *faults, out=tmp_path / "disturbed")
        undisturbed = hoop_train(*job, out=tmp_path / "undisturbed")
    assert len(disturbed["faults"]) == 2
    assert disturbed["damaged"] >= 2, "what was flipped was not noticed"
    check_same(disturbed, undisturbed)
    assert undisturbed["damaged"] == 0
