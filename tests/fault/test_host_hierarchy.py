"""Hosts with several devices: what a step sends between them, a host that is cut off, IPv6, and several interfaces.

The weights are those of one device each time.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import preloaded
import pytest
from fault_cluster import result_of, wait_for_event, wait_for_job, wait_for_step
from host_cluster import DATA_PORTS, HostCluster, host_cluster
from reported_rows import check_same
from trainings import DRIVER, ENV, HOOP, TIMEOUT_S, hoop_train

import hoop
from hoop import job_events as ev
from hoop.lab.chaos.network import unavailable_reason

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())
HOSTS = (2, 3)
GRADIENT_BYTES = 4 * (784 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)
"""Of the network of ``mnist``."""
SHORT_JOB = f"{DRIVER}:job", "--memory", "16MiB"
LONG_JOB = f"{DRIVER}:job", "--set", "epochs=1000", "--set", "evaluate_every=0", "--set", "checkpoint_every=0"
FEW, MANY = 10, 40
"""Steps of two runs; what they send beyond their steps is equal."""


def train(cluster: HostCluster | None, steps: int, out: Path) -> dict[str, Any]:
    where = ("--devices", "1") if cluster is None else ("--coordinator", cluster.address)
    fixed = "--set", f"max_steps={steps}", "--set", "evaluate_every=0", "--set", "balance=false"
    return hoop_train("mnist", "--shards", "8", *fixed, *where, out=out)


@pytest.mark.slow
def test_between_hosts_a_step_sends_one_gradient_a_host(tmp_path: Path) -> None:
    sent: dict[int, list[int]] = {}
    with host_cluster(len(HOSTS), tmp_path) as cluster:
        cluster.add_devices([2, 3, 2, 3])  # ranks of a host are not neighbours
        for steps in (FEW, MANY):
            for host in HOSTS:
                cluster.network.count_sent(host, *DATA_PORTS)
            result = train(cluster, steps, tmp_path / f"hosts{steps}")
            sent[steps] = [cluster.network.counted_bytes(host) for host in HOSTS]
    assert result["devices"] == 4
    for few, many in zip(sent[FEW], sent[MANY], strict=True):
        gradients = (many - few) / (MANY - FEW) / GRADIENT_BYTES
        # 2(h-1)/h = 1 of a gradient, and headers; if each device sent its own it would be 2.
        assert 1.0 <= gradients < 1.15, sent
    assert result["weights_sha256"] == train(None, MANY, tmp_path / "alone")["weights_sha256"]


@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_host_that_is_cut_off_and_comes_back_changes_nothing(tmp_path: Path, hosts: int) -> None:
    """All packets of one host are dropped in the middle of a training: its two devices are lost, and join again."""
    victim, devices, out = hosts + 1, 2 * hosts, tmp_path / "disturbed"
    with host_cluster(hosts, tmp_path) as cluster, ExitStack() as cleanup:
        cluster.add_devices([host for host in range(2, hosts + 2) for _ in range(2)])
        slowdown = "--set", f"slowdown={[20] * devices}"
        command = [*HOOP, "train", *LONG_JOB, *slowdown, "--coordinator", cluster.address, "--json", "--out", str(out)]
        run = preloaded.Popen(command, text=True, env=ENV, stdout=subprocess.PIPE)
        cleanup.callback(run.wait, TIMEOUT_S)
        cleanup.callback(run.kill)
        with hoop.connect(cluster.address) as client:
            job = wait_for_job(client)
            wait_for_event(client, job, ev.Started)
            wait_for_step(client, job, 3)
            cluster.network.cut(victim, "all", "all")
            wait_for_event(client, job, ev.Recovered, ranks=devices - 2)
            assert cluster.network.dropped(victim) > 0
            cluster.network.heal(victim)
            wait_for_event(client, job, ev.Resized | ev.Recovered, ranks=devices)
            client.job(job).stop()
            result = result_of(run)
    undisturbed = hoop_train(
        *LONG_JOB, "--devices", "1", "--set", f"max_steps={result['steps']}", out=tmp_path / "undisturbed"
    )
    check_same({**result, "out": str(out)}, undisturbed)


# ---- IPv6, and hosts with several interfaces


@pytest.mark.slow
def test_hosts_train_over_ipv6(tmp_path: Path) -> None:
    with host_cluster(len(HOSTS), tmp_path, ipv6=True) as cluster:
        lines = cluster.add_devices([2, 2, 3])
        assert [line.split()[2].startswith(f"[{cluster.network.address(2)}]:") for line in lines] == [True, True, False]
        for host in HOSTS:
            cluster.network.count_sent(host, *DATA_PORTS)
        result = hoop_train(*SHORT_JOB, "--coordinator", cluster.address, out=tmp_path / "hosts")
        assert all(cluster.network.counted_bytes(host) for host in HOSTS)
    alone = hoop_train(*SHORT_JOB, "--devices", "1", out=tmp_path / "alone")
    assert (result["devices"], result["weights_sha256"]) == (3, alone["weights_sha256"])


@pytest.mark.slow
def test_devices_use_the_interface_that_is_named(tmp_path: Path) -> None:
    """Every host has eth0 and eth1; with ``--interface eth1`` calls and data go over eth1, and none over eth0."""
    with host_cluster(len(HOSTS), tmp_path, interface=1) as cluster:
        for host in HOSTS:
            cluster.network.count_received(host, 0)
        lines = cluster.add_devices(HOSTS, "--interface", "eth1")
        for host, line in zip(HOSTS, lines, strict=True):
            assert line.split()[2].startswith(f"{cluster.network.address(host, 1)}:")
        result = hoop_train(*SHORT_JOB, "--coordinator", cluster.address, out=tmp_path / "hosts")
        assert [cluster.network.counted_bytes(host) for host in HOSTS] == [0, 0]
    alone = hoop_train(*SHORT_JOB, "--devices", "1", out=tmp_path / "alone")
    assert (result["devices"], result["weights_sha256"]) == (2, alone["weights_sha256"])
