"""Devices die, stop, leave and join in the middle of a training, and the weights are those of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_cluster import undisturbed
from interrupts import interruptible
from reported_rows import check_same

import hoop
from hoop import job_events as ev
from hoop.client.cluster import Cluster

PATIENCE_S = 100.0
JOB = ["mnist", "--epochs", "1", "--shards", "8", "--batch-size", "512", "--json"]
SLOWLY = ["--set", "slowdown=[4, 4, 4, 4]"]
"""So that a run is not over before something happens to it."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return interruptible([sys.executable, "-m", "hoop", *arguments], text=True, env=ENV, **options)


@contextmanager
def cluster_of(devices: int, folder: Path) -> Iterator[Cluster]:
    address = folder / "address"
    up = command("up", "--devices", str(devices), "--address-file", str(address), stdout=subprocess.PIPE)
    try:
        assert up.stdout is not None
        assert up.stdout.readline().startswith("coordinator ")
        with hoop.connect(address.read_text().strip()) as cluster:
            yield cluster
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=PATIENCE_S)


def pids(cluster: Cluster) -> dict[int, int]:
    return {one.device.device_id: one.device.pid for one in cluster.status().devices if one.state == "alive"}


def disturbed(
    cluster: Cluster, devices: int, disturb: Callable[[int], None], out: Path, strategy: str = "data"
) -> tuple[dict[str, Any], list[type[ev.JobEvent]]]:
    """Trains, and disturbs it with every report of the figures; the result, and the kinds of its events."""
    run = command(
        "train",
        *JOB,
        *SLOWLY,
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
    for event in cluster.events(follow=True):
        if event.kind == "job_started":
            number = int(event.fields["job"])
            break
    for one in cluster.job(number).events():
        kinds.append(type(one.event))
        if isinstance(one.event, ev.Steps):
            disturb(one.event.first + len(one.event.loss))
    result, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, kinds
    return {**json.loads(result), "out": str(out)}, kinds


@pytest.mark.parametrize(
    ("strategy", "devices", "victims", "how"),
    [
        pytest.param("data", 4, [2], signal.SIGKILL, id="one of four killed"),
        pytest.param("data", 3, [1, 3], signal.SIGKILL, id="two of three killed", marks=pytest.mark.slow),
        pytest.param("data", 3, [2], signal.SIGSTOP, id="one stops answering", marks=pytest.mark.slow),
        pytest.param("data", 2, [1], signal.SIGTERM, id="one leaves on notice", marks=pytest.mark.slow),
        pytest.param("pipeline", 3, [3], signal.SIGKILL, id="a stage killed", marks=pytest.mark.slow),
        pytest.param("ps", 4, [4, 1], signal.SIGKILL, id="server and worker killed", marks=pytest.mark.slow),
        pytest.param(
            "ring", 2, [1], signal.SIGTERM, id="a device of the ring leaves on notice", marks=pytest.mark.slow
        ),
        pytest.param(
            "hybrid:replicas=2", 4, [2, 1], signal.SIGKILL, id="a stage of each replica killed", marks=pytest.mark.slow
        ),
        pytest.param(
            "pipeline:interleaved", 2, [2], signal.SIGSTOP, id="a stage stops answering", marks=pytest.mark.slow
        ),
    ],
)
def test_a_loss_changes_nothing(
    tmp_path: Path, strategy: str, devices: int, victims: list[int], how: signal.Signals
) -> None:
    with cluster_of(devices, tmp_path) as cluster:
        running = pids(cluster)
        todo = list(victims)

        def disturb(_: int) -> None:
            if todo:
                os.kill(running[todo.pop(0)], how)

        try:
            result, kinds = disturbed(cluster, devices, disturb, tmp_path / "out", strategy)
        finally:
            if how == signal.SIGSTOP:
                for victim in victims:
                    os.kill(running[victim], signal.SIGKILL)
    assert not todo, "the run was over before the fault"
    assert kinds.count(ev.Resized if how == signal.SIGTERM else ev.Recovered) >= 1, kinds
    assert result["steps"] == 118
    check_same(result, undisturbed())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "pipeline"])
def test_a_newcomer_changes_nothing_and_takes_part(tmp_path: Path, strategy: str) -> None:
    with cluster_of(2, tmp_path) as cluster:
        newcomers: list[subprocess.Popen[str]] = []

        def disturb(_: int) -> None:
            if not newcomers:
                newcomers.append(command("device", "--join", str(cluster.address), "--quiet"))

        run = command(
            "train",
            *JOB,
            "--set",
            "epochs=12",
            *SLOWLY,
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
        number = next(int(event.fields["job"]) for event in cluster.events(follow=True) if event.kind == "job_started")
        ranks = set()
        for one in cluster.job(number).events():
            if isinstance(one.event, ev.Steps):
                disturb(0)
            if isinstance(one.event, ev.Resized):
                ranks.add(one.event.ranks)
                cluster.job(number).stop()
        out, _ = run.communicate(timeout=PATIENCE_S)
        result = {**json.loads(out), "out": str(tmp_path / "out")}
        for newcomer in newcomers:
            newcomer.send_signal(signal.SIGTERM)
            assert newcomer.wait(PATIENCE_S) == 0
    assert ranks == {3}
    limit = "--set", f"max_steps={result['steps']}"
    check_same(result, undisturbed("--set", "epochs=12", *limit))
