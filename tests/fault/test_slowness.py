"""Processes that are slow, frozen for a while, or hold Python's interpreter lock are not dead, and no call fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from fault_cluster import ENV, JOB, TIMEOUT_S, result_of, running_cluster, undisturbed, wait_for_job
from freezes import Freezes

import hoop
from hoop import job_events as ev
from hoop.client.cluster import Cluster
from hoop.runs.audit import audit

FALSE_DEATHS = {"device_dead", "communicator_failed", "communicator_rebuilt", "operation_failed"}
SHORT_S, LONG_S = 10.0, 600.0
ENDLESS = ["--epochs", "100000", "--set", "evaluate_every=0", "--set", "checkpoint_every=0"]
LONG = (pytest.mark.slow, pytest.mark.timeout(3 * LONG_S))


@contextmanager
def hoop_up(folder: Path, *options: str) -> Iterator[tuple[Cluster, int]]:
    """A cluster of three devices on this machine, and the process that has its coordinator."""
    command = [*preloaded.HOOP, "up", "--devices", "3", "--memory", "64MiB", "--json", *options]
    with (folder / "up.err").open("wb") as errors:
        process = preloaded.Popen(command, text=True, env=ENV, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        with hoop.connect(json.loads(process.stdout.readline())["coordinator"], connect_timeout=TIMEOUT_S) as cluster:
            yield cluster, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: nothing within {TIMEOUT_S:g} s"


def pids_of(cluster: Cluster) -> list[int]:
    return [one.device.pid for one in cluster.status().devices]


def kinds_of(cluster: Cluster) -> Counter[str]:
    return Counter(event.kind for event in cluster.events())


@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(LONG_S, marks=LONG)])
@pytest.mark.parametrize(
    ("options", "freeze_s"),
    [
        pytest.param((), (0.3, 2.5), id="default"),
        pytest.param((), (1.0, 4.0), id="long freezes", marks=pytest.mark.slow),
        pytest.param(("--lease", "1.5s"), (0.1, 0.7), id="lease of several hosts", marks=pytest.mark.slow),
    ],
)
def test_no_call_fails_while_every_process_is_frozen_again_and_again(
    tmp_path: Path, options: tuple[str, ...], freeze_s: tuple[float, float], seconds: float
) -> None:
    """A plain cluster: devices and coordinator, each by itself. Calls are answered late, once, and right."""
    freezes, calls = Freezes(), 0
    with hoop_up(tmp_path, *options) as (cluster, coordinator):
        communicator = cluster.communicator(3)
        vectors = communicator.buffer("in", 1000).fill([np.full(1000, rank, np.float32) for rank in range(3)])
        sums = communicator.buffer("out", 1000)
        with freezes.of([*pids_of(cluster), coordinator], freeze_s):
            until = time.monotonic() + seconds
            while time.monotonic() < until or min(freezes.counts.values()) == 0:
                calls += 1
                communicator.all_reduce(vectors, sums)
                assert sums.read(calls % 3)[0] == 3
        assert not FALSE_DEATHS & set(kinds_of(cluster))
        assert all(one.state in ("alive", "suspect") for one in cluster.status().devices)


def test_calls_to_a_coordinator_that_is_frozen_for_longer_than_connections_live_are_made_again(tmp_path: Path) -> None:
    """With a lease of 1.5 s a client gives its connection up after 3 s. The operation that it had sent is done once."""
    freezes, calls = Freezes(), 0
    with hoop_up(tmp_path, "--lease", "1.5s") as (cluster, coordinator):
        communicator = cluster.communicator(3)
        buffer = communicator.buffer("powers", 1000, "int64").fill([np.ones(1000, np.int64)] * 3)
        with freezes.of([coordinator], (3.5, 4.5)):
            while freezes.counts[coordinator] < 2:
                calls += 1
                communicator.all_reduce(buffer)  # in place: done twice it would count twice
        assert {int(value) % 2**64 for rank in range(3) for value in buffer.read(rank)} == {pow(3, calls, 2**64)}
        assert not FALSE_DEATHS & set(kinds_of(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(LONG_S, marks=LONG)])
def test_training_goes_on_while_every_process_is_frozen_again_and_again(tmp_path: Path, seconds: float) -> None:
    freezes, out = Freezes(), tmp_path / "out"
    with hoop_up(tmp_path) as (cluster, coordinator):
        command = [*preloaded.HOOP, "train", *JOB, *ENDLESS, "--json", "--coordinator", str(cluster.address)]
        with freezes.of([*pids_of(cluster), coordinator], (0.3, 2.5)):
            run = preloaded.Popen([*command, "--out", str(out)], text=True, env=ENV, stdout=subprocess.PIPE)
            job = cluster.job(wait_for_job(cluster))
            until = time.monotonic() + seconds
            next(one for one in job.events() if isinstance(one.event, ev.Steps) and time.monotonic() > until)
            job.stop()
            result = result_of(run)
        kinds = kinds_of(cluster)
    print(f"{sum(freezes.counts.values())} freezes, {result['steps']} steps, {dict(kinds)}")
    assert min(freezes.counts.values()) > 0
    assert not FALSE_DEATHS & set(kinds), kinds
    assert result["weights_sha256"] == undisturbed(*ENDLESS, "--set", f"max_steps={result['steps']}")["weights_sha256"]
    audited = audit(out)
    assert audited.holds, audited


HELD_S = 5.0
HOLDING_DEVICE = f"""
import ctypes, sys, threading
from hoop.cli.main import main

def hold():
    sys.stdin.readline()
    ctypes.PyDLL(None).usleep({HELD_S * 1e6:.0f})
    print("released", flush=True)

threading.Thread(target=hold, daemon=True).start()
sys.argv[0] = "hoop"
main()
"""


def test_a_device_whose_interpreter_is_held_for_longer_than_a_lease_is_not_dead(tmp_path: Path) -> None:
    """A C call that does not release the interpreter's lock, in the user's own code: no heartbeat is sent meanwhile."""
    command = [sys.executable, "-c", HOLDING_DEVICE, "device", "--memory", "16MiB", "--quiet", "--join"]
    with running_cluster(1, tmp_path) as processes:
        device = preloaded.Popen(
            [*command, processes.address], text=True, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            processes.cluster.wait_for_devices(2, TIMEOUT_S)
            assert device.stdin is not None
            assert device.stdout is not None
            device.stdin.write("\n")
            device.stdin.flush()

            def member() -> Any:
                return next(one for one in processes.cluster.status().devices if one.device.pid == device.pid)

            wait_until(lambda: member().silent_s > 2 * 1.5, "silence for two leases")
            assert member().state in ("alive", "suspect")
            assert any(line == "released\n" for line in iter(device.stdout.readline, ""))
            wait_until(lambda: member().silent_s < 1.0, "the next heartbeat")
            assert not FALSE_DEATHS & set(kinds_of(processes.cluster))
        finally:
            processes.terminate(device)
