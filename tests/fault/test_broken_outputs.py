"""The readers of all outputs are gone: jobs go on, devices are lost and replaced, and the exit codes tell the results.

A terminal that is closed, a ``tee`` or a pager that has ended, a disk that is full.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import preloaded
import pytest
from fault_cluster import (
    ENV,
    JOB,
    SLOWDOWN,
    TIMEOUT_S,
    ClusterProcesses,
    running_cluster,
    undisturbed,
    wait_for_event,
    wait_for_job,
    wait_for_step,
)
from reported_rows import check_same

import hoop
from hoop import job_events as ev
from hoop.membership.heartbeats import DetectorConfig
from hoop.membership.journal import decode, replay
from hoop.membership.state import Health

KILLS = 3
STRATEGIES = ("data", "data:sharded", "pipeline:1f1b", "hybrid:replicas=2", "ps:bsp", "ring")
LOST_OF_UP = (2, 3)
LONG = ["--set", "epochs=1000", "--set", "slowdown=[10, 10, 10, 10]"]


def result_in(out: Path) -> dict[str, Any]:
    """The result in a run's folder."""
    return {**json.loads((out / "result.json").read_text()), "out": str(out)}


def test_a_device_is_lost_and_the_job_recovers_without_any_reader(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with running_cluster(3, tmp_path, piped=True) as processes:
        run = processes.start("train", *JOB, *SLOWDOWN, "--json", "--coordinator", processes.address, "--out", str(out))
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 5)
        processes.break_outputs()
        processes.kill(processes.devices[1])
        wait_for_event(processes.cluster, job, ev.Recovered)
        assert run.wait(TIMEOUT_S) == 0
        said = [event.text for event in processes.cluster.events() if event.kind == "listener_failed"]
        for process in (processes.devices[0], processes.coordinator):
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
    assert len(said) == 1, said
    assert "standard error: Broken pipe" in said[0]
    check_same(result_in(out), undisturbed())


@pytest.mark.parametrize("errors", ["closed", "/dev/full"])
def test_hoop_up_recovers_jobs_when_its_terminal_is_gone(tmp_path: Path, errors: str) -> None:
    out = tmp_path / "out"
    up = preloaded.Popen(
        [*preloaded.HOOP, "up", "--devices", "3", "--memory", "64MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors == "closed" else os.open(errors, os.O_WRONLY),
        text=True,
        env=ENV,
    )
    try:
        assert up.stdout is not None
        address = up.stdout.readline().split()[-1]
        with hoop.connect(address, connect_timeout=TIMEOUT_S) as cluster:
            run = preloaded.Popen(
                [*preloaded.HOOP, "train", *JOB, *SLOWDOWN, "--coordinator", address, "--out", str(out)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if errors == "closed" else os.open(errors, os.O_WRONLY),
                env=ENV,
            )
            job = wait_for_job(cluster)
            wait_for_step(cluster, job, 5)
            for stream in (up.stdout, up.stderr, run.stdout, run.stderr):
                if stream is not None:
                    stream.close()
            os.kill(cluster.status().devices[1].device.pid, signal.SIGKILL)
            wait_for_event(cluster, job, ev.Recovered)
            assert run.wait(TIMEOUT_S) == 0
    finally:
        up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    check_same(result_in(out), undisturbed())


def test_a_training_without_outputs_ends_with_the_code_of_its_result(tmp_path: Path) -> None:
    """On devices of this machine, one of which is killed."""
    out, fault = tmp_path / "out", ("--fault", "kill@rank=1,step=7")
    words = [*preloaded.HOOP, "train", *JOB, "--devices", "3", *fault, "--out", str(out)]
    run = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words], env=ENV, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0
    check_same(result_in(out), undisturbed())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_devices_are_killed_and_replaced_without_any_reader(tmp_path: Path, strategy: str) -> None:
    """Twenty in data parallel, ``KILLS`` in each of the other strategies."""
    out, kills = tmp_path / "out", 20 if strategy == "data" else KILLS
    size = 4 if strategy.startswith("hybrid") else 3
    with running_cluster(size, tmp_path, piped=True) as processes:
        words = ("--strategy", strategy, "--json", "--coordinator", processes.address, "--out", str(out))
        run = processes.start("train", *JOB, *LONG, *words)
        job = wait_for_job(processes.cluster)
        wait_for_step(processes.cluster, job, 5)
        devices = dict(enumerate(processes.devices, 1))
        for number in range(size + 1, size + 1 + kills):
            devices[number] = processes.start_device("--id", str(number))
            processes.break_outputs()
            wait_for_rank(processes, job, present=number)
            oldest = min(devices)
            devices.pop(oldest).kill()
            wait_for_rank(processes, job, present=number, absent=oldest)
        processes.cluster.job(job).stop()
        assert run.wait(TIMEOUT_S) == 0
        dead = [event for event in processes.cluster.events() if event.kind == "device_dead"]
        assert [event.fields["device"] for event in dead] == [str(number) for number in range(1, kills + 1)]
        said = [event.text for event in processes.cluster.events() if event.kind == "listener_failed"]
        assert len(said) == 1, said
        assert devices_in_journal(tmp_path / "journal") == set(devices)
    result = result_in(out)
    check_same(result, undisturbed(*LONG, "--set", f"max_steps={result['steps']}"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_devices_of_hoop_up_are_killed_without_any_reader(tmp_path: Path, strategy: str) -> None:
    """Two devices of four, or of three where the model has no more stages; the second when the ranks have recovered."""
    size = "3" if strategy.startswith(("pipeline", "ring")) else "4"
    out, state = tmp_path / "out", tmp_path / "state"
    up = preloaded.Popen(
        [*preloaded.HOOP, "up", "--devices", size, "--memory", "64MiB", "--state", str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    try:
        assert up.stdout is not None
        address = up.stdout.readline().split()[-1]
        with hoop.connect(address, connect_timeout=TIMEOUT_S) as cluster:
            words = ("--strategy", strategy, "--coordinator", address, "--out", str(out))
            run = preloaded.Popen(
                [*preloaded.HOOP, "train", *JOB, *LONG, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=ENV,
            )
            job = wait_for_job(cluster)
            wait_for_step(cluster, job, 5)
            for stream in (up.stdout, up.stderr, run.stdout, run.stderr):
                assert stream is not None
                stream.close()
            pids = {one.device.device_id: one.device.pid for one in cluster.status().devices}
            for times, number in enumerate(LOST_OF_UP, 1):
                os.kill(pids[number], signal.SIGKILL)
                wait_for_event(cluster, job, ev.Recovered, times=times)
            cluster.job(job).stop()
            assert run.wait(TIMEOUT_S) == 0
            dead = [event.fields["device"] for event in cluster.events() if event.kind == "device_dead"]
            assert dead == [str(number) for number in LOST_OF_UP]
            assert devices_in_journal(state / "journal") == set(pids) - set(LOST_OF_UP)
    finally:
        up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    result = result_in(out)
    check_same(result, undisturbed(*LONG, "--set", f"max_steps={result['steps']}"))


def devices_in_journal(path: Path) -> set[int]:
    """The devices that are not dead after a replay of a coordinator's journal, which must be whole."""
    state = replay(decode(path.read_bytes(), path), DetectorConfig(), now=0.0)
    return {number for number, member in state.members.items() if member.health is not Health.DEAD}


def wait_for_rank(processes: ClusterProcesses, job: int, present: int, absent: int = 0) -> None:
    """Waits until the ranks run steps with one device and without the other."""
    generation = 0
    for observed in processes.cluster.job(job).events():
        match observed.event:
            case ev.Reassigned() as event:
                generation = event.generation if present in event.devices and absent not in event.devices else 0
            case ev.Resized() | ev.Recovered() as event if event.generation == generation:
                return
    raise AssertionError(f"the job was over before device {present} had a rank and device {absent} had none")
