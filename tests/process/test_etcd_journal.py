"""A coordinator whose journal is in etcd, one that stands by, and an etcd that goes away."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from real_etcd import RealEtcd, free_port, needs_etcd, running_etcd

import hoop
from hoop.errors import DeadlineExceeded

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]
    Wait = Callable[..., Any]

WAIT_S = 30.0


@pytest.fixture
def etcd(tmp_path: Path, leaves_nothing_behind: None) -> Iterator[RealEtcd]:
    with running_etcd(tmp_path) as running:
        yield running


def works(comm: hoop.Communicator) -> None:
    for rank, found in enumerate(comm.all_reduce([np.full(10, 1 + rank) for rank in range(comm.size)])):
        np.testing.assert_array_equal(found, np.full(10, sum(range(1, comm.size + 1))), err_msg=f"rank {rank}")


def until(held: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not held():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@needs_etcd
def test_one_that_stands_by_takes_over(etcd: RealEtcd, start: Start, connect: Connect, await_event: Wait) -> None:
    """The first is stopped for longer than its lease. When it goes on it finds that it is the coordinator no longer."""
    one, two = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def coordinator(address: str) -> Running:
        options = ("--journal", f"etcd://{etcd.address}/test", "--journal-lease", "2s")
        return start("coordinator", *options, "--port", address.rpartition(":")[2])

    first = coordinator(one)
    assert first.address == one
    second = coordinator(two)
    devices = [start("device", "--join", f"{one},{two}", "--memory", "1MiB") for _ in range(2)]
    ids = [device.id for device in devices]
    comm = connect(f"{one},{two}").communicator(ids)
    works(comm)
    waits = f"waiting, it belongs to the coordinator at {one} (pid {first.pid} on "
    until(lambda: waits in second.errors, "the second should say whom it waits for")

    first.process.send_signal(signal.SIGSTOP)
    assert second.address == two
    for device_id in ids:
        await_event(two, "device_recovered", device=device_id)
    with hoop.connect(f"{one},{two}") as cluster:
        assert [member.state for member in cluster.status().devices] == ["alive"] * 2
        assert [(found.id, len(found.members)) for found in cluster.status().communicators] == [(comm.id, 2)]
    works(comm)

    third = coordinator(one)
    until(lambda: "waiting, it belongs to" in third.errors, "the third should wait")
    third.signal(signal.SIGINT)
    assert third.wait() == 0, "whoever waits can be told to stop"

    first.process.send_signal(signal.SIGCONT)
    assert first.wait() == 3
    assert f"taken over by the coordinator at {two}" in first.errors
    assert "hoop: journal etcd://" in first.errors, "the last word is a sentence"


@needs_etcd
def test_etcd_is_away(etcd: RealEtcd, start: Start, connect: Connect, await_event: Wait) -> None:
    """What needs no entry goes on, what needs one is refused or waits, and when etcd is back all is as before."""
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
    health = {member.device.device_id: member.state for member in cluster.status().devices}
    assert health == {device.id: "alive", other.id: "suspect"}, "a death that cannot be written is not one yet"
    works(comm)
    etcd.start()
    etcd.until_up()

    def made() -> bool:
        try:
            works(cluster.communicator([device.id]))
        except DeadlineExceeded:
            return False
        return True

    until(made, "a change should be possible again")
    await_event(coordinator.address, "device_dead", device=other.id)
    failing = [event.kind for event in cluster.events()].count("coordinator_failing")
    assert failing < 10, "it is told when it changes, not at every heartbeat"
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait() == 0


@pytest.mark.slow
def test_no_etcd_to_begin_with(run_hoop: Callable[..., CompletedProcess[str]]) -> None:
    answer = run_hoop("coordinator", "--journal", "etcd://127.0.0.1:1,127.0.0.1:2/test")
    assert answer.returncode == 3
    assert "\nhoop: etcd at 127.0.0.1:1,127.0.0.1:2 did not answer within 5." in answer.stderr
