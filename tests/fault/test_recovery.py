"""Devices are killed, stop, leave and join during a job; the weights equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preloaded
import pytest
from fault_cluster import undisturbed
from interrupts import interruptible
from reported_rows import check_same

import hoop
from hoop import job_events as ev
from hoop.client.cluster import Cluster

TIMEOUT_S = 400.0
JOB = ["mnist", "--epochs", "1", "--shards", "8", "--batch-size", "512", "--json"]
SLOWDOWN = ["--set", "slowdown=[4, 4, 4, 4]"]
"""Keeps a run going until the fault has been injected."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return interruptible([*preloaded.HOOP, *arguments], text=True, env=ENV, **options)


@contextmanager
def running_cluster(devices: int, folder: Path) -> Iterator[Cluster]:
    address = folder / "address"
    up = command("up", "--devices", str(devices), "--address-file", str(address), stdout=subprocess.PIPE)
    try:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("coordinator ")
        with hoop.connect(address.read_text().strip(), connect_timeout=TIMEOUT_S) as cluster:
            yield cluster
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=TIMEOUT_S)


def pids(cluster: Cluster) -> dict[int, int]:
    return {member.device.device_id: member.device.pid for member in cluster.status().devices}


def train_disturbed(
    cluster: Cluster, devices: int, disturb: Callable[[int], None], out: Path, strategy: str = "data"
) -> tuple[dict[str, Any], list[type[ev.JobEvent]]]:
    """Trains, calls ``disturb`` with the step at each ``Steps`` event; returns the result and the event types."""
    run = command(
        "train",
        *JOB,
        *SLOWDOWN,
        "--strategy",
        strategy,
        "--devices",
        str(devices),
        "--coordinator",
        str(cluster.address),
        "--out",
        str(out),
        stdout=subprocess.PIPE,
    )
    kinds: list[type[ev.JobEvent]] = []
    left_out: dict[str, str] = {}
    for event in cluster.events(follow=True):
        if event.kind == "job_started":
            job = int(event.fields["job"])
            break
    for observed in cluster.job(job).events():
        kinds.append(type(observed.event))
        if isinstance(observed.event, ev.Reassigned):
            left_out.update(observed.event.left_out)
        if isinstance(observed.event, ev.Steps):
            disturb(observed.event.first + len(observed.event.loss))
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, kinds
    return {**json.loads(output), "out": str(out), "left_out": left_out}, kinds


@pytest.mark.parametrize(
    ("strategy", "devices", "victims", "signal_number"),
    [
        pytest.param("data", 4, [2], signal.SIGKILL, id="one of four killed"),
        pytest.param("data", 3, [1, 3], signal.SIGKILL, id="two of three killed", marks=pytest.mark.slow),
        pytest.param("data", 3, [2], signal.SIGSTOP, id="one stops answering", marks=pytest.mark.slow),
        pytest.param("data", 2, [1], signal.SIGTERM, id="one leaves on notice", marks=pytest.mark.slow),
        pytest.param("data:sharded", 3, [2], signal.SIGSTOP, id="one with a slice stops", marks=pytest.mark.slow),
        pytest.param("pipeline", 3, [3], signal.SIGKILL, id="a stage killed", marks=pytest.mark.slow),
        pytest.param("ps", 4, [4, 1], signal.SIGKILL, id="server and worker killed", marks=pytest.mark.slow),
        pytest.param(
            "ring", 2, [1], signal.SIGTERM, id="a device of the ring leaves on notice", marks=pytest.mark.slow
        ),
        pytest.param(
            "hybrid:replicas=2", 4, [2, 1], signal.SIGKILL, id="a stage of each replica killed", marks=pytest.mark.slow
        ),
        pytest.param("pipeline:1f1b", 2, [2], signal.SIGSTOP, id="a stage stops answering", marks=pytest.mark.slow),
    ],
)
def test_losing_devices_does_not_change_the_weights(
    tmp_path: Path, strategy: str, devices: int, victims: list[int], signal_number: signal.Signals
) -> None:
    with running_cluster(devices, tmp_path) as cluster:
        running = pids(cluster)
        pending = list(victims)

        def disturb(_: int) -> None:
            if pending:
                os.kill(running[pending.pop(0)], signal_number)

        try:
            result, kinds = train_disturbed(cluster, devices, disturb, tmp_path / "out", strategy)
        finally:
            if signal_number == signal.SIGSTOP:
                for victim in victims:
                    os.kill(running[victim], signal.SIGKILL)
    assert not pending, "the run ended before the fault"
    # Only data parallel ranks take planned ranks after a step; the others hand over what they hold, and repartition.
    planned = signal_number == signal.SIGTERM and strategy == "data"
    assert kinds.count(ev.Resized if planned else ev.Recovered) >= 1, kinds
    assert result["steps"] == 118
    if signal_number == signal.SIGKILL:
        assert sorted(result["left_out"]) == sorted(map(str, victims)), "the lost devices are named with the reason"
    check_same(result, undisturbed())


@pytest.mark.parametrize(
    ("strategy", "devices", "victims", "replicas"),
    [
        pytest.param("pipeline", 3, [2, 3], 2, id="a stage's device and its first holder", marks=pytest.mark.slow),
        pytest.param("hybrid:replicas=2", 4, [1, 3], 2, id="both devices of a hybrid's stage", marks=pytest.mark.slow),
        pytest.param("pipeline", 3, [2, 3], 1, id="with one replica the run ends", marks=pytest.mark.slow),
    ],
)
def test_a_device_and_the_holder_of_its_replica_are_killed_at_once(
    tmp_path: Path, strategy: str, devices: int, victims: list[int], replicas: int
) -> None:
    out = tmp_path / "out"
    with running_cluster(devices, tmp_path) as cluster:
        running = pids(cluster)
        options = "--strategy", strategy, "--replicas", str(replicas), "--devices", str(devices), "--out", str(out)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        run = command("train", *JOB, *SLOWDOWN, *options, "--coordinator", str(cluster.address), **pipes)
        job = next(int(event.fields["job"]) for event in cluster.events(follow=True) if event.kind == "job_started")
        assert any(isinstance(observed.event, ev.Steps) for observed in cluster.job(job).events())
        for victim in victims:
            os.kill(running[victim], signal.SIGKILL)
        output, errors = run.communicate(timeout=TIMEOUT_S)
    if replicas == 1:
        assert run.returncode == 3, errors
        assert "was lost" in errors
        return
    assert run.returncode == 0, errors
    check_same({**json.loads(output), "out": str(out)}, undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "pipeline"])
def test_a_joining_device_gets_a_rank_and_does_not_change_the_weights(tmp_path: Path, strategy: str) -> None:
    with running_cluster(2, tmp_path) as cluster:
        joined: list[subprocess.Popen[str]] = []

        def disturb(_: int) -> None:
            if not joined:
                joined.append(command("device", "--join", str(cluster.address), "--quiet"))

        run = command(
            "train",
            *JOB,
            "--set",
            "epochs=12",
            *SLOWDOWN,
            "--strategy",
            strategy,
            "--devices",
            "2",
            "--coordinator",
            str(cluster.address),
            "--out",
            str(tmp_path / "out"),
            stdout=subprocess.PIPE,
        )
        job = next(int(event.fields["job"]) for event in cluster.events(follow=True) if event.kind == "job_started")
        ranks = set()
        for observed in cluster.job(job).events():
            if isinstance(observed.event, ev.Steps):
                disturb(0)
            if isinstance(observed.event, ev.Resized | ev.Recovered):
                ranks.add(observed.event.ranks)
                cluster.job(job).stop()
        out, _ = run.communicate(timeout=TIMEOUT_S)
        result = {**json.loads(out), "out": str(tmp_path / "out")}
        for device in joined:
            device.send_signal(signal.SIGTERM)
            assert device.wait(TIMEOUT_S) == 0
    assert ranks == {3}
    limit = "--set", f"max_steps={result['steps']}"
    check_same(result, undisturbed("--set", "epochs=12", *limit))
