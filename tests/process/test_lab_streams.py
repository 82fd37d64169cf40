"""The lab's streams between devices: the bytes arrive, and a failed transfer reports the reason."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from descriptor_stub import Stub
from lab_cluster import CALL_S, Cluster, LabClient, channel_to, hoop_up, refused, wait_for

from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

LAB_DEVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]
HOOP_DEVICE = pb.DESCRIPTOR.services_by_name["Device"]
StreamStatus = lab.GetStreamStatusResponse
stream_ids = itertools.count(1001)
"""Ids of streams that the client chooses."""
FAILURE_TIMEOUT_S = 25.0
"""The loss of a device must be known before the 30 s for which one side of a transfer waits for the other."""


@dataclass(frozen=True)
class Device:
    """A device that the test calls directly."""

    pid: int
    address: str
    low: int
    high: int
    lab: Stub
    hoop: Stub

    def begin_send(self, address: int, size: int, to: int) -> int:
        request = lab.BeginSendRequest(numBytes=size)
        request.sendBuffAddr.value, request.dstRank.value = address, to
        answer = self.lab.BeginSend(request, timeout=CALL_S)
        assert answer.initiated
        return int(answer.streamId.value)

    def begin_receive(self, stream: int, address: int, size: int, source: int = 0) -> None:
        request = lab.BeginReceiveRequest(numBytes=size)
        request.streamId.value, request.recvBuffAddr.value, request.srcRank.value = stream, address, source
        assert self.lab.BeginReceive(request, timeout=CALL_S).initiated

    def send(self, stream: int, *parts: bytes) -> Any:
        """Call StreamSend from the client; stream 0 leaves out Hoop's ``streamId``."""
        return self.lab.StreamSend.future(iter(chunks(stream, *parts)), timeout=CALL_S)

    def status(self, stream: int) -> StreamStatus:
        request = lab.GetStreamStatusRequest()
        request.streamId.value = stream
        status: StreamStatus = self.lab.GetStreamStatus(request, timeout=CALL_S)
        return status

    def outcome(self, stream: int, within_s: float = CALL_S) -> tuple[str, str]:
        """Wait for SUCCESS or FAILED; return it and the reason."""

        def final_status() -> StreamStatus | None:
            found = self.status(stream)
            return found if found.status != lab.IN_PROGRESS else None

        status = wait_for(final_status, "the stream", within_s)
        assert status is not None
        return lab.Status.Name(status.status), status.reason

    def wait_for_data(self, streams: int = 1) -> None:
        """Wait for this number of open streams, including those whose data waits for a BeginReceive."""
        wait_for(lambda: self.hoop.Describe(pb.DescribeRequest(), timeout=CALL_S).open_streams == streams, "the data")


def chunks(stream: int, *parts: bytes) -> Iterator[lab.DataChunk]:
    for number, part in enumerate(parts):
        chunk = lab.DataChunk(data=part)
        if stream and not number:
            chunk.streamId.value = stream
        yield chunk


@contextlib.contextmanager
def devices_of(cluster: Cluster) -> Iterator[list[Device]]:
    with contextlib.ExitStack() as stack:
        devices = []
        for record in cluster.status()["devices"]:
            channel = stack.enter_context(channel_to(record["address"]))
            stubs = Stub(channel, LAB_DEVICE), Stub(channel, HOOP_DEVICE)
            devices.append(
                Device(record["pid"], record["address"], record["min_address"], record["max_address"], *stubs)
            )
        yield devices


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoop_up(3, "--insecure") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def comm(cluster: Cluster) -> Iterator[LabClient]:
    with channel_to(cluster.address) as channel:
        yield LabClient(channel, 3)


@pytest.fixture(scope="module")
def devices(cluster: Cluster, comm: LabClient) -> Iterator[list[Device]]:
    """In rank order."""
    with devices_of(cluster) as devices:
        yield devices


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([count, seed]).normal(size=count)


# ---- from device to device


@pytest.mark.parametrize("count", [1, 1000, 500_001])
def test_bytes_arrive(comm: LabClient, devices: list[Device], count: int) -> None:
    source, target = devices[0], devices[2]
    vector = numbers(count)
    comm.write(0, source.low, vector)
    comm.write(2, target.low + 808, np.zeros(count))
    stream = source.begin_send(source.low, 8 * count, to=2)
    target.begin_receive(stream, target.low + 808, 8 * count)
    assert target.outcome(stream) == ("SUCCESS", "")
    assert source.outcome(stream) == ("SUCCESS", "")
    assert (comm.read(2, target.low + 808, count) == vector).all()


def test_data_may_arrive_before_begin_receive(comm: LabClient, devices: list[Device]) -> None:
    source, target = devices[0], devices[1]
    comm.write(0, source.low, numbers(300_000))
    comm.write(1, target.low, np.zeros(300_000))
    stream = source.begin_send(source.low, 2_400_000, to=1)
    target.wait_for_data()
    with refused("NOT_FOUND"):
        target.status(stream)
    assert source.status(stream).status == lab.IN_PROGRESS
    assert not comm.read(1, target.low, 300_000).any()
    target.begin_receive(stream, target.low, 2_400_000)
    assert target.outcome(stream) == ("SUCCESS", "")
    assert (comm.read(1, target.low, 300_000) == numbers(300_000)).all()


def test_a_device_may_send_to_itself(comm: LabClient, devices: list[Device]) -> None:
    device = devices[1]
    comm.write(1, device.low, numbers(50))
    stream = device.begin_send(device.low, 400, to=1)
    device.begin_receive(stream, device.low + 4000, 400, source=1)
    assert device.outcome(stream) == ("SUCCESS", "")
    assert (comm.read(1, device.low + 4000, 50) == numbers(50)).all()


def test_a_transfer_at_the_end_of_memory(comm: LabClient, devices: list[Device]) -> None:
    source, target = devices[0], devices[1]
    comm.write(0, source.high - 24, numbers(3))
    stream = source.begin_send(source.high - 24, 24, to=1)
    target.begin_receive(stream, target.high - 24, 24)
    assert target.outcome(stream) == ("SUCCESS", "")
    assert (comm.read(1, target.high - 24, 3) == numbers(3)).all()
    with refused("OUT_OF_RANGE"):
        source.begin_send(source.high - 24, 25, to=1)
    with refused("OUT_OF_RANGE"):
        target.begin_receive(12345, target.high - 24, 25)


def test_an_empty_transfer(devices: list[Device]) -> None:
    source, target = devices[0], devices[1]
    stream = source.begin_send(source.high, 0, to=1)
    target.begin_receive(stream, target.high, 0)
    assert target.outcome(stream) == source.outcome(stream) == ("SUCCESS", "")


def test_many_streams_at_once(comm: LabClient, devices: list[Device]) -> None:
    """200 streams in both directions between two devices, to different addresses, received in reverse order."""
    vectors = [numbers(64, seed) for seed in range(200)]
    for rank in (0, 1):
        comm.write(rank, devices[rank].low, np.concatenate(vectors))
        comm.write(rank, devices[rank].low + 2**20, np.zeros(200 * 64))
    started = [
        (devices[index % 2].begin_send(devices[index % 2].low + 512 * index, 512, to=1 - index % 2), index)
        for index in range(200)
    ]
    for stream, index in reversed(started):
        target = devices[1 - index % 2]
        target.begin_receive(stream, target.low + 2**20 + 512 * index, 512, source=index % 2)
    for stream, index in started:
        assert devices[1 - index % 2].outcome(stream) == devices[index % 2].outcome(stream) == ("SUCCESS", "")
    received = [comm.read(rank, devices[rank].low + 2**20, 200 * 64).reshape(200, 64) for rank in (0, 1)]
    for index, vector in enumerate(vectors):
        assert (received[1 - index % 2][index] == vector).all()


@pytest.mark.parametrize(("sent", "awaited"), [(800, 792), (792, 800), (8, 0), (0, 8), (3_000_000, 8)])
def test_different_sizes_fail_on_both_sides(devices: list[Device], sent: int, awaited: int) -> None:
    source, target = devices[0], devices[1]
    stream = source.begin_send(source.low, sent, to=1)
    target.begin_receive(stream, target.low, awaited)
    for device in (target, source):
        outcome, reason = device.outcome(stream)
        assert outcome == "FAILED"
        assert f"{awaited} bytes" in reason


# ---- from the client to a device


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("parts", [(b"\1" * 640,), (b"\1" * 639, b"\1"), (b"", b"\1" * 640, b""), (b"\1",) * 640])
def test_a_client_sends_after_begin_receive(
    comm: LabClient, devices: list[Device], named: bool, parts: tuple[bytes, ...]
) -> None:
    target, stream = devices[1], next(stream_ids)
    comm.write(1, target.low, np.zeros(80))
    target.begin_receive(stream, target.low, 640)
    assert target.status(stream).status == lab.IN_PROGRESS
    assert target.send(stream if named else 0, *parts).result(CALL_S).success
    assert target.outcome(stream) == ("SUCCESS", "")
    assert comm.read(1, target.low, 80).tobytes() == b"\1" * 640


@pytest.mark.parametrize("named", [True, False])
def test_a_client_sends_before_begin_receive(comm: LabClient, devices: list[Device], named: bool) -> None:
    target, stream = devices[1], next(stream_ids)
    comm.write(1, target.low, np.zeros(2))
    call = target.send(stream if named else 0, b"\2" * 16)
    target.wait_for_data()
    target.begin_receive(stream, target.low, 16)
    assert call.result(CALL_S).success
    assert comm.read(1, target.low, 2).tobytes() == b"\2" * 16


def test_a_stream_without_id_goes_to_the_oldest_receive(comm: LabClient, devices: list[Device]) -> None:
    target = devices[2]
    comm.write(2, target.low, np.zeros(3))
    for index, stream in enumerate((5003, 5001, 5002)):
        target.begin_receive(stream, target.low + 8 * index, 8)
    for number in (1, 2, 3):
        assert target.send(0, bytes([number] * 8)).result(CALL_S).success
    assert comm.read(2, target.low, 3).tobytes() == bytes([1] * 8 + [2] * 8 + [3] * 8)


def test_concurrent_streams_without_id_go_to_one_receive_each(comm: LabClient, devices: list[Device]) -> None:
    target = devices[2]
    calls = [target.send(0, bytes([number] * 8)) for number in range(1, 41)]
    target.wait_for_data(40)
    for index in range(40):
        target.begin_receive(5100 + index, target.low + 8 * index, 8)
    assert all(call.result(CALL_S).success for call in calls)
    received = comm.read(2, target.low, 40).tobytes()
    assert sorted(received[::8]) == list(range(1, 41))


def test_a_stream_that_is_too_short_fails(devices: list[Device]) -> None:
    target = devices[1]
    target.begin_receive(6001, target.low, 100)
    with refused("DATA_LOSS", match="60 of 100 bytes"):
        target.send(6001, b"x" * 60).result(CALL_S)
    assert target.outcome(6001) == ("FAILED", "stream 6001: it ended after 60 of 100 bytes")


def test_a_stream_that_is_too_long_fails(comm: LabClient, devices: list[Device]) -> None:
    target = devices[1]
    comm.write(1, target.low + 96, np.zeros(1))
    target.begin_receive(6002, target.low, 100)
    with refused("DATA_LOSS", match="more than the 100 bytes"):
        target.send(6002, b"x" * 60, b"x" * 60).result(CALL_S)
    outcome, reason = target.outcome(6002)
    assert (outcome, "more than the 100 bytes" in reason) == ("FAILED", True)
    assert not comm.read(1, target.low + 96, 1).any()  # nothing was written past the buffer


def test_a_receive_fails_when_its_sender_is_cancelled(comm: LabClient, devices: list[Device]) -> None:
    target = devices[1]
    comm.write(1, target.low, np.zeros(10))
    target.begin_receive(6003, target.low, 100)
    with open_request_stream() as (send_chunk, requests):
        call = target.lab.StreamSend.future(requests, timeout=CALL_S)
        send_chunk(lab.DataChunk(data=b"x" * 60, streamId=lab.StreamId(value=6003)))
        wait_for(lambda: comm.read(1, target.low, 1).tobytes() == b"x" * 8, "the first chunk")
        assert target.status(6003).status == lab.IN_PROGRESS
        call.cancel()
    outcome, reason = target.outcome(6003)
    assert outcome == "FAILED"
    assert "60 of 100 bytes" in reason or "vanished" in reason


@contextlib.contextmanager
def open_request_stream() -> Iterator[tuple[Callable[[lab.DataChunk], None], Iterator[lab.DataChunk]]]:
    """A function that adds a chunk to a request stream, and that stream, which ends with the context."""
    chunk_queue: queue.Queue[lab.DataChunk | None] = queue.Queue()
    try:
        yield chunk_queue.put, iter(chunk_queue.get, None)
    finally:
        chunk_queue.put(None)


def test_a_stream_without_chunks_is_refused(devices: list[Device]) -> None:
    with refused("INVALID_ARGUMENT", match="before its first chunk"):
        devices[1].send(0).result(CALL_S)


def test_a_stream_has_one_sender(comm: LabClient, devices: list[Device]) -> None:
    target = devices[1]
    target.begin_receive(6004, target.low, 8)
    assert target.send(6004, b"\3" * 8).result(CALL_S).success
    with refused("FAILED_PRECONDITION", match="has a sender already"):
        target.send(6004, b"\4" * 8).result(CALL_S)
    assert target.outcome(6004) == ("SUCCESS", "")
    assert comm.read(1, target.low, 1).tobytes() == b"\3" * 8


def test_invalid_requests_are_refused(devices: list[Device]) -> None:
    device = devices[0]
    device.begin_receive(6005, device.low, 0)
    with refused("FAILED_PRECONDITION", match="already"):
        device.begin_receive(6005, device.low, 0)
    with refused("INVALID_ARGUMENT"):
        device.begin_receive(0, device.low, 8)
    with refused("INVALID_ARGUMENT", match=r"3 is not in 0\.\.2"):
        device.begin_send(device.low, 8, to=3)
    with refused("NOT_FOUND", match="6006"):
        device.status(6006)
    with refused("INVALID_ARGUMENT", match="streamId"):
        device.lab.GetStreamStatus(lab.GetStreamStatusRequest(), timeout=CALL_S)
    assert device.send(6005, b"").result(CALL_S).success


def test_send_to_a_rank_of_a_named_communicator(cluster: Cluster, comm: LabClient, devices: list[Device]) -> None:
    """``dstRank`` belongs to the newest communicator unless Hoop's ``commId`` names another."""
    with channel_to(cluster.address) as channel:
        pair = LabClient(channel, 2)
    first = [one.deviceId.value for one in comm.devices].index(pair.devices[0].deviceId.value)
    with refused("INVALID_ARGUMENT", match=r"2 is not in 0\.\.1"):
        devices[first].begin_send(devices[first].low, 8, to=2)
    request = lab.BeginSendRequest(numBytes=8, commId=comm.id)
    request.sendBuffAddr.value, request.dstRank.value = devices[first].low, 2
    stream = devices[first].lab.BeginSend(request, timeout=CALL_S).streamId.value
    devices[2].begin_receive(stream, devices[2].low, 8)
    assert devices[2].outcome(stream) == ("SUCCESS", "")
    request.commId = 999
    with refused("FAILED_PRECONDITION", match="not in communicator 999"):
        devices[first].lab.BeginSend(request, timeout=CALL_S)
    comm.call("CommDestroy", commId=pair.id)


# ---- devices that die


def test_a_transfer_fails_when_the_other_device_dies() -> None:
    """Sender and receiver report the failure long before their timeout."""
    with (
        hoop_up(3, "--insecure", "--lease", "1.5s") as cluster,
        channel_to(cluster.address) as channel,
        devices_of(cluster) as devices,
    ):
        LabClient(channel, 3)
        sender, receiver, dead = devices
        sending = sender.begin_send(sender.low, 8, to=2)
        dead.wait_for_data()
        receiver.begin_receive(7001, receiver.low, 8, source=2)
        other = receiver.begin_send(receiver.low, 8, to=0)
        os.kill(dead.pid, signal.SIGKILL)
        outcome, reason = receiver.outcome(7001, FAILURE_TIMEOUT_S)
        assert outcome == "FAILED"
        assert f"device 3 (pid {dead.pid}, {dead.address})" in reason  # reported by the coordinator
        outcome, reason = sender.outcome(sending, FAILURE_TIMEOUT_S)
        assert outcome == "FAILED"
        assert dead.address in reason  # reported by the link or by the coordinator
        sender.begin_receive(other, sender.low, 8, source=1)
        assert sender.outcome(other) == ("SUCCESS", "")  # a transfer between the survivors

        # A device that hangs with open sockets has the same effect once its lease expires.
        LabClient(channel, 2)
        sender.begin_receive(7002, sender.low, 8, source=1)
        with stopped(receiver.pid):
            outcome, reason = sender.outcome(7002, FAILURE_TIMEOUT_S)
        assert outcome == "FAILED"
        assert f"device 2 (pid {receiver.pid}, {receiver.address}) is gone: no heartbeat" in reason


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process by SIGSTOP until the context ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
