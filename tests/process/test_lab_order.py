"""Copies and streams run after the operations launched before them: a lab client that never polls reads the results.

GroupEnd returns before its operations have run. A later access to the same bytes must see their effect.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from descriptor_stub import Stub
from lab_cluster import CALL_S, Cluster, LabClient, channel_to, hoop_up, lab, refused, wait_for

import hoop
from hoop.wire.generated import gpu_sim_pb2 as sim

COUNT = 512
DEVICE = sim.DESCRIPTOR.services_by_name["GPUDevice"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoop_up(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    with channel_to(cluster.address) as channel:
        yield channel


@pytest.fixture(params=[10, pytest.param(40, marks=pytest.mark.slow)])
def rounds(request: pytest.FixtureRequest) -> int:
    """How often a test repeats what shows a race."""
    return int(request.param)


def launch(comm: LabClient, addresses: list[int], count: int = COUNT, times: int = 1, op: int = lab.SUM) -> None:
    """Launch a group of all-reduces without waiting for it."""
    comm.on_all("GroupStart")
    for _ in range(times):
        comm.all_reduce(op, addresses, count)
    comm.on_all("GroupEnd")


def rounds_without_polling(comm: LabClient, offset: int, rounds: int) -> None:
    """In each round, overwrite two vectors, reduce both in one group, and read them from every rank."""
    ranks = range(len(comm.devices))
    for number in range(rounds):
        expected = []
        vector_addresses = [
            [comm.address(rank, offset + vector * 16 * COUNT + 8 * rank) for rank in ranks] for vector in range(2)
        ]
        for vector, addresses in enumerate(vector_addresses):
            values = [np.arange(COUNT) + 1000 * vector + 7 * number + rank for rank in ranks]
            for rank, address in enumerate(addresses):
                comm.write(rank, address, values[rank].astype("<f8"))
            expected.append(np.sum(values, axis=0).astype("<f8"))
        comm.on_all("GroupStart")
        for addresses in vector_addresses:
            comm.all_reduce(lab.SUM, addresses, COUNT)
        comm.on_all("GroupEnd")
        for vector in reversed(range(2)):
            for rank in ranks:
                found = comm.read(rank, vector_addresses[vector][rank], COUNT)
                np.testing.assert_array_equal(found, expected[vector], f"round {number}, vector {vector}, rank {rank}")


def test_a_client_that_never_polls_reads_the_result(channel: grpc.Channel, rounds: int) -> None:
    comm = LabClient(channel, 3)
    rounds_without_polling(comm, 0, 2 * rounds)
    comm.on_all("CommDestroy")


def test_concurrent_clients_that_never_poll(cluster: Cluster, rounds: int) -> None:
    """Six communicators on the same devices, each with its own memory."""

    def client(number: int) -> None:
        with channel_to(cluster.address) as channel:
            comm = LabClient(channel, 1 + number % 3)
            rounds_without_polling(comm, (1 + number) << 20, rounds)
            comm.on_all("CommDestroy")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(client, range(6)))


def test_a_late_result_does_not_overwrite_the_next_vector(channel: grpc.Channel, rounds: int) -> None:
    """Another communicator overwrites the buffers right after GroupEnd."""
    for turn in range(rounds):
        comm = LabClient(channel, 3)
        addresses = [comm.address(rank) for rank in range(3)]
        for rank, address in enumerate(addresses):
            comm.write(rank, address, np.full(COUNT, 2.0 + turn))
        launch(comm, addresses, times=4)
        next_comm = LabClient(channel, 3)
        for rank, address in enumerate(addresses):
            next_comm.write(rank, address, np.full(COUNT, float(turn)))
        for rank, address in enumerate(addresses):
            np.testing.assert_array_equal(next_comm.read(rank, address, COUNT), np.full(COUNT, float(turn)))
        comm.on_all("CommDestroy")
        next_comm.on_all("CommDestroy")


def test_operations_on_the_same_bytes_run_in_the_order_of_acceptance(channel: grpc.Channel, rounds: int) -> None:
    """Three communicators launch MAX, SUM and PROD; none is waited for."""
    for turn in range(rounds):
        comms = [LabClient(channel, 3) for _ in range(3)]
        addresses = [comms[0].address(rank) for rank in range(3)]
        for rank, address in enumerate(addresses):
            comms[0].write(rank, address, np.full(COUNT, turn + rank, "<f8"))
        for comm, op in zip(comms, (lab.MAX, lab.SUM, lab.PROD), strict=True):
            launch(comm, addresses, op=op)
        for rank, address in enumerate(addresses):
            expected = np.full(COUNT, (3.0 * (turn + 2)) ** 3)
            np.testing.assert_array_equal(comms[0].read(rank, address, COUNT), expected)
        for comm in comms:
            comm.on_all("CommDestroy")


def test_the_relayed_all_reduce_is_ordered_too(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    addresses = [comm.address(rank) for rank in range(3)]
    for _ in range(10):
        for rank, address in enumerate(addresses):
            comm.write(rank, address, np.full(COUNT, 1.0))
        comm.on_all("GroupStart")
        comm.all_reduce(lab.SUM, addresses, COUNT, "NaiveAllReduce")
        comm.all_reduce(lab.SUM, addresses, COUNT)
        comm.on_all("GroupEnd")
        launch(comm, addresses)
        for rank, address in enumerate(addresses):
            np.testing.assert_array_equal(comm.read(rank, address, COUNT), np.full(COUNT, 27.0))
    comm.on_all("CommDestroy")


def test_copies_through_the_device_api_are_ordered(cluster: Cluster, channel: grpc.Channel, rounds: int) -> None:
    """Hoop's Read, Write and Copy, right after GroupEnd: the device already knows of the operations."""
    with hoop.connect(cluster.address) as connected:
        comm = LabClient(channel, 3)
        addresses = [comm.address(rank) for rank in range(3)]
        devices = [connected.device(device.deviceId.value) for device in comm.devices]
        for turn in range(rounds):
            for device, address in zip(devices, addresses, strict=True):
                device.write(address, np.full(COUNT, float(turn)).tobytes())
            launch(comm, addresses, times=2)
            found = [
                np.frombuffer(device.read(address, 8 * COUNT))
                for device, address in zip(devices, addresses, strict=True)
            ]
            np.testing.assert_array_equal(found, np.full((3, COUNT), 9.0 * turn))
            launch(comm, addresses)
            destination = comm.address(1, 1 << 20)
            connected.copy((devices[0].id, addresses[0]), (devices[1].id, destination), 8 * COUNT)
            np.testing.assert_array_equal(comm.read(1, destination, COUNT), np.full(COUNT, 27.0 * turn))
        comm.on_all("CommDestroy")


def test_streams_are_ordered(cluster: Cluster, channel: grpc.Channel) -> None:
    """BeginSend sends the result of the preceding group; BeginReceive does not overwrite the group's operands."""
    device_addresses = {device["id"]: device["address"] for device in cluster.status()["devices"]}
    comm = LabClient(channel, 2)
    ids = [device.deviceId.value for device in comm.devices]
    with channel_to(device_addresses[ids[0]]) as source, channel_to(device_addresses[ids[1]]) as destination:
        sender, receiver = Stub(source, DEVICE), Stub(destination, DEVICE)
        addresses = [comm.address(rank) for rank in range(2)]
        for turn in range(15):
            for rank, address in enumerate(addresses):
                comm.write(rank, address, np.full(COUNT, 1.0 + turn))
            launch(comm, addresses, times=3)
            send = sim.BeginSendRequest(
                sendBuffAddr={"value": addresses[0]}, numBytes=8 * COUNT, dstRank={"value": 1}, commId=comm.id
            )
            stream = sender.BeginSend(send, timeout=CALL_S).streamId
            receive = sim.BeginReceiveRequest(
                streamId=stream, recvBuffAddr={"value": addresses[1] + 4 * COUNT}, numBytes=8 * COUNT
            )
            receiver.BeginReceive(receive, timeout=CALL_S)
            assert final_status(receiver, stream) == sim.SUCCESS
            summed = np.full(COUNT, 8.0 * (1 + turn))
            np.testing.assert_array_equal(comm.read(1, addresses[1] + 4 * COUNT, COUNT), summed)
            np.testing.assert_array_equal(comm.read(1, addresses[1], COUNT // 2), summed[: COUNT // 2])
    comm.on_all("CommDestroy")


def final_status(device: Stub, stream: Any) -> int:
    def status() -> int:
        return int(device.GetStreamStatus(sim.GetStreamStatusRequest(streamId=stream), timeout=CALL_S).status)

    return wait_for(lambda: status() if status() != sim.IN_PROGRESS else 0, "the end of the stream")


# ---- during a long group, and after a failure

LONG_COUNT, LONG_REPEATS = 4_000_000, 100
"""A group that takes longer than two seconds on every machine."""


def launch_long(comm: LabClient) -> list[int]:
    addresses = [comm.address(rank) for rank in range(len(comm.devices))]
    launch(comm, addresses, LONG_COUNT, LONG_REPEATS, lab.MAX)
    return addresses


def test_copies_beside_a_long_group_and_after_the_loss_of_its_device() -> None:
    """Copies to other bytes complete while a group runs, by other communicators and through every API.

    Then one of its devices is killed: copies to the group's own bytes do not hang.
    """
    with (
        hoop_up(3, check_log=False) as cluster,
        channel_to(cluster.address) as channel,
        hoop.connect(cluster.address) as connected,
        ThreadPoolExecutor(1) as thread,
    ):
        pids = {record["id"]: record["pid"] for record in cluster.status()["devices"]}
        comm, other = LabClient(channel, 3), LabClient(channel, 3)
        addresses = launch_long(comm)
        beside = [address + 8 * LONG_COUNT for address in addresses]
        for rank, address in enumerate(beside):
            other.write(rank, address, np.full(COUNT, 5.0))
            assert (other.read(rank, address, COUNT) == 5).all()
        other.all_reduce(lab.SUM, beside, COUNT)
        device = connected.device(other.devices[0].deviceId.value)
        device.write(beside[0], np.full(COUNT, 7.0).tobytes())
        connected.copy((device.id, beside[0]), (other.devices[1].deviceId.value, beside[1]), 8 * COUNT)
        assert (other.read(1, beside[1], COUNT) == 7).all()
        assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
        assert cluster.error_lines() == []

        device = connected.device(comm.devices[1].deviceId.value)
        read = thread.submit(comm.read, 0, addresses[0], COUNT)
        os.kill(pids[comm.devices[2].deviceId.value], signal.SIGKILL)
        assert len(read.result(CALL_S)) == COUNT
        assert len(device.read(addresses[1], 8 * COUNT)) == 8 * COUNT
        assert comm.wait() == lab.FAILED
        comm.write(0, addresses[0], np.full(COUNT, 3.0))
        assert (comm.read(0, addresses[0], COUNT) == 3).all()
        with refused("FAILED_PRECONDITION", "UNAVAILABLE"):
            comm.read(2, addresses[2], COUNT)


def test_a_copy_waits_no_longer_than_the_timeout() -> None:
    """The error says what the copy waited for."""
    with hoop_up(3, "--timeout", "1s", check_log=False) as cluster, channel_to(cluster.address) as channel:
        comm = LabClient(channel, 3)
        addresses = launch_long(comm)
        words = rf"Memcpy from .* of device \d+ waited .* all_reduce.* of communicator {comm.id}"
        with refused("DEADLINE_EXCEEDED", match=words) as messages:
            comm.read(0, addresses[0], COUNT)
        assert "--timeout" in messages[0]
