"""A coordinator with its journal in etcd: a standby coordinator takes over, and etcd becomes unavailable."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from free_ports import free_port
from real_etcd import RealEtcd, needs_etcd, running_etcd

import hoop
from hoop.errors import DeadlineExceeded

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]
    Wait = Callable[..., Any]

WAIT_S = 120.0


@pytest.fixture
def etcd(tmp_path: Path, leaves_nothing_behind: None) -> Iterator[RealEtcd]:
    with running_etcd(tmp_path) as running:
        yield running


def assert_all_reduce_works(comm: hoop.Communicator) -> None:
    for rank, found in enumerate(comm.all_reduce([np.full(10, 1 + rank) for rank in range(comm.size)])):
        np.testing.assert_array_equal(found, np.full(10, sum(range(1, comm.size + 1))), err_msg=f"rank {rank}")


def wait_until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


@needs_etcd
def test_a_standby_coordinator_takes_over(etcd: RealEtcd, start: Start, connect: Connect, await_event: Wait) -> None:
    """The first coordinator is stopped for longer than its lease. When it continues, it exits and names the second."""
    first_address, second_address = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def coordinator(address: str) -> Running:
        options = ("--journal", f"etcd://{etcd.address}/test", "--journal-lease", "2s")
        return start("coordinator", *options, "--port", address.rpartition(":")[2])

    first = coordinator(first_address)
    assert first.address == first_address
    second = coordinator(second_address)
    devices = [start("device", "--join", f"{first_address},{second_address}", "--memory", "1MiB") for _ in range(2)]
    ids = [device.id for device in devices]
    comm = connect(f"{first_address},{second_address}").communicator(ids)
    assert_all_reduce_works(comm)
    waiting_message = f"waiting, it belongs to the coordinator at {first_address} (pid {first.pid} on "
    wait_until(lambda: waiting_message in second.errors, "the second should say whom it waits for")

    first.process.send_signal(signal.SIGSTOP)
    assert second.address == second_address
    for device_id in ids:
        await_event(second_address, "device_recovered", device=device_id)
    with hoop.connect(f"{first_address},{second_address}") as cluster:
        assert [member.state for member in cluster.status().devices] == ["alive"] * 2
        assert [(info.id, len(info.members)) for info in cluster.status().communicators] == [(comm.id, 2)]
    assert_all_reduce_works(comm)

    third = coordinator(first_address)
    wait_until(lambda: "waiting, it belongs to" in third.errors, "the third should wait")
    third.signal(signal.SIGINT)
    assert third.wait() == 0, "a standby coordinator can be stopped"

    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 3
    assert f"taken over by the coordinator at {second_address}" in first.errors
    assert "hoop: journal etcd://" in first.errors, "its error is a readable message"


@needs_etcd
def test_etcd_becomes_unavailable_and_comes_back(
    etcd: RealEtcd, start: Start, connect: Connect, await_event: Wait
) -> None:
    """Operations without a journal entry continue; those that need one are refused, or wait until etcd is back."""
    coordinator = start("coordinator", "--journal", f"etcd://{etcd.address}/test", "--journal-lease", "60s")
    device, other = (start("device", "--join", coordinator.address, "--memory", "1MiB") for _ in range(2))
    assert device.id != other.id
    cluster = connect(coordinator.address)
    comm = cluster.communicator([device.id])
    etcd.kill()
    with pytest.raises(DeadlineExceeded, match=f"journal etcd://{etcd.address}/test is away, and nothing can be"):
        cluster.communicator([device.id])
    other.kill()
    await_event(coordinator.address, "coordinator_failing")
    states = {member.device.device_id: member.state for member in cluster.status().devices}
    assert states == {device.id: "alive", other.id: "suspect"}, (
        "a device is not dead before its death is in the journal"
    )
    assert_all_reduce_works(comm)
    etcd.start()
    etcd.until_up()

    def communicator_can_be_created() -> bool:
        try:
            assert_all_reduce_works(cluster.communicator([device.id]))
        except DeadlineExceeded:
            return False
        return True

    wait_until(communicator_can_be_created, "a change should be possible again")
    await_event(coordinator.address, "device_dead", device=other.id)
    failing = [event.kind for event in cluster.events()].count("coordinator_failing")
    assert failing < 10, "emitted when the state changes, not at every heartbeat"
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait() == 0


@pytest.mark.slow
def test_etcd_is_unavailable_at_startup(run_hoop: Callable[..., CompletedProcess[str]]) -> None:
    answer = run_hoop("coordinator", "--journal", "etcd://127.0.0.1:1,127.0.0.1:2/test")
    assert answer.returncode == 3
    assert "\nhoop: etcd at 127.0.0.1:1,127.0.0.1:2 did not answer within 5." in answer.stderr
