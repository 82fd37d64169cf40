"""Devices join and leave while the coordinator runs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from background import START_S
from free_ports import free_port

import hoop

if TYPE_CHECKING:
    from subprocess import CompletedProcess

    from background import Running

    Start = Callable[..., Running]
    Connect = Callable[..., hoop.Cluster]
    Wait = Callable[..., Any]


def check_all_reduce(comm: hoop.Communicator) -> None:
    x = [np.arange(1000, dtype="float32") % 5 + rank for rank in range(comm.size)]
    for rank, found in enumerate(comm.all_reduce(x)):
        np.testing.assert_array_equal(found, sum(x), err_msg=f"rank {rank}")


def test_a_device_joins_and_leaves(start: Start, connect: Connect, await_event: Wait) -> None:
    """New communicators use the device, existing ones are undisturbed, and leaving is not reported as a failure."""
    up = start("up", "--devices", 2, "--memory", "8MiB")
    cluster = connect(up.address)
    pair = cluster.communicator(2)
    check_all_reduce(pair)
    device = start("device", "--join", up.address, "--memory", "8MiB")
    assert device.id == 3
    joined = await_event(up.address, "device_joined", device=3)
    assert f"device 3 (pid {device.pid}, {device.address}) joined" in joined.text
    all_three = cluster.communicator(3)
    check_all_reduce(all_three)
    check_all_reduce(pair)

    device.signal(signal.SIGTERM)
    assert device.wait() == 0
    left = await_event(up.address, "device_left", device=3)
    assert [member.state for member in cluster.status().devices] == ["alive", "alive", "left"]
    kinds = [event.kind for event in cluster.events(after=joined.sequence)]
    assert not {"device_suspect", "device_dead"} & set(kinds), "a device that left was reported as failed"
    status = all_three.status()
    assert status.status == "failed"
    assert "device 3" in status.reason
    assert "it left" in status.reason
    check_all_reduce(pair)
    check_all_reduce(all_three.rebuild())

    rejoined = start("device", "--join", up.address, "--memory", "8MiB", "--id", 3)
    assert rejoined.id == 3
    await_event(up.address, "device_joined", after=left.sequence, device=3)
    check_all_reduce(cluster.communicator([3, 1]))


def test_six_devices_join_at_once(start: Start, connect: Connect, await_event: Wait) -> None:
    """Each device gets its own id, and none is suspected while all of them start."""
    coordinator = start("coordinator")
    address = coordinator.address
    devices = [start("device", "--join", address, "--memory", "1MiB") for _ in range(6)]
    assert sorted(device.id for device in devices) == [1, 2, 3, 4, 5, 6]
    cluster = connect(address)
    assert {member.device.pid for member in cluster.status().devices} == {device.pid for device in devices}
    check_all_reduce(cluster.communicator(6))
    assert [event.kind for event in cluster.events()].count("device_joined") == 6
    assert not {"device_suspect", "device_dead"} & {event.kind for event in cluster.events()}
    for device in devices:
        device.signal(signal.SIGTERM)
    assert [device.wait() for device in devices] == [0] * 6
    assert [member.state for member in cluster.status().devices] == ["left"] * 6


def test_a_device_id_in_use_is_refused(
    start: Start, connect: Connect, run_hoop: Callable[..., CompletedProcess[str]]
) -> None:
    """The error names the device that has the id; that device is not disturbed."""
    coordinator = start("coordinator")
    device = start("device", "--join", coordinator.address, "--memory", "1MiB", "--id", 5)
    assert device.id == 5
    completed = run_hoop("device", "--join", coordinator.address, "--memory", "1MiB", "--id", 5)
    assert completed.returncode == 2
    name = f"device 5 (pid {device.pid}, {device.address})"
    assert f"device id 5 is in use by {name}; choose another with --id or stop that" in completed.stderr
    cluster = connect(coordinator.address)
    (member,) = cluster.status().devices
    assert (member.state, member.device.pid) == ("alive", device.pid)
    check_all_reduce(cluster.communicator([5]))


def test_a_device_retries_until_the_coordinator_starts(start: Start, connect: Connect, await_event: Wait) -> None:
    """The device may be started before the coordinator."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    device = start("device", "--join", address, "--memory", "1MiB", "--connect-timeout", f"{START_S:g}s")
    with socket.create_server(("127.0.0.1", port)) as listener:  # until the device has tried to connect
        listener.settimeout(START_S)
        listener.accept()[0].close()
    start("coordinator", "--port", port)
    assert device.first_line == f"device 1 {device.address}"
    check_all_reduce(connect(address).communicator(1))


def test_a_device_can_be_stopped_while_it_retries(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(START_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        device = start("device", "--join", address, "--memory", "1MiB")
        listener.accept()[0].close()
        device.signal(signal.SIGTERM)
        assert device.wait() == 0
