"""The lab's calls, named buffers and copies on a device whose memory is on a GPU: the same answers as in host memory.

The tests run on an emulated GPU everywhere, and with the marker ``gpu`` on a real one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from descriptor_stub import Stub
from lab_cluster import LabClient, channel_to, refused, wait_for
from lab_in_process import Servers, lab_channel, lab_servers

import hoop
from hoop.cli.status import as_plain
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.memory.gpu_driver import count_driver_gpus, open_gpu
from hoop.wire.generated import gpu_sim_pb2 as lab

DEVICES, MEMORY = 3, 1 << 20
LAB_DEVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]
KINDS = [pytest.param("cpu", id="host"), "emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
stream_ids = itertools.count(7001)


@pytest.fixture(params=KINDS)
def servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    with lab_servers(DEVICES, accelerator=request.param, lab_dialect="auto", memory=MEMORY) as found:
        yield found


@pytest.fixture
def channel(servers: Servers) -> Iterator[grpc.Channel]:
    with lab_channel(servers) as found:
        yield found


@contextlib.contextmanager
def device_stub(servers: Servers, rank: int) -> Iterator[Any]:
    with channel_to(str(servers.info(rank).address)) as channel:
        yield Stub(channel, LAB_DEVICE)


def test_a_copy_may_end_at_the_last_byte_and_not_beyond(channel: grpc.Channel) -> None:
    comm = LabClient(channel, DEVICES)
    device = comm.devices[1]
    low, high = device.minMemAddr.value, device.maxMemAddr.value
    assert high - low == MEMORY
    vector = np.arange(1000.0)
    comm.write(1, high - vector.nbytes, vector)
    np.testing.assert_array_equal(comm.read(1, high - vector.nbytes, 1000), vector)
    np.testing.assert_array_equal(comm.read(1, low, 16), np.zeros(16))
    for address in (high - vector.nbytes + 1, low - 1, 0, high):
        with refused("OUT_OF_RANGE", match="outside device"):
            comm.write(1, address, vector)
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_an_all_reduce_is_right_on_every_device(channel: grpc.Channel, count: int) -> None:
    comm = LabClient(channel, DEVICES)
    vectors = np.random.default_rng(count).normal(size=(DEVICES, count))
    addresses = [comm.address(rank, 4096 + 8 * rank) for rank in range(DEVICES)]
    for op, expected in ((lab.SUM, vectors.sum(0)), (lab.MAX, vectors.max(0)), (lab.PROD, vectors.prod(0))):
        for rank, address in enumerate(addresses):
            comm.write(rank, address, vectors[rank])
        comm.all_reduce(op, addresses, count, "AllReduceRing" if op != lab.MAX else "NaiveAllReduce")
        results = [comm.read(rank, address, count) for rank, address in enumerate(addresses)]
        np.testing.assert_allclose(results[0], expected, rtol=1e-12)
        assert {one.tobytes() for one in results} == {results[0].tobytes()}
    comm.on_all("CommDestroy")


def test_operations_of_a_group_run_in_order(channel: grpc.Channel) -> None:
    comm = LabClient(channel, DEVICES)
    addresses = [comm.address(rank, 64) for rank in range(DEVICES)]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, np.full(10, rank + 1.0))
    comm.on_all("GroupStart")
    for _ in range(2):
        comm.all_reduce(lab.SUM, addresses, 10)
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    for rank, address in enumerate(addresses):
        np.testing.assert_array_equal(comm.read(rank, address, 10), np.full(10, 18.0))
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("op", [0, 1])
def test_a_stream_arrives_or_is_added(servers: Servers, channel: grpc.Channel, op: int) -> None:
    """``op`` 1 is the other dialect's SUM: the receiver adds the bytes to its own."""
    comm = LabClient(channel, DEVICES)
    sent, held = np.random.default_rng(op).normal(size=(2, 50_000))
    source, target = comm.address(0, 8), comm.address(2, 16)
    comm.write(0, source, sent)
    comm.write(2, target, held)
    with device_stub(servers, 0) as sender, device_stub(servers, 2) as receiver:
        request = lab.BeginSendRequest(numBytes=sent.nbytes)
        request.sendBuffAddr.value, request.dstRank.value = source, 2
        stream = sender.BeginSend(request, timeout=20).streamId.value
        begin = lab.BeginReceiveRequest(numBytes=sent.nbytes, op=op)
        begin.streamId.value, begin.recvBuffAddr.value, begin.srcRank.value = stream, target, 0
        assert receiver.BeginReceive(begin, timeout=20).initiated
        status = lab.GetStreamStatusRequest()
        status.streamId.value = stream
        wait_for(lambda: receiver.GetStreamStatus(status, timeout=20).status != lab.IN_PROGRESS, "the stream", 60)
        found = receiver.GetStreamStatus(status, timeout=20)
        assert (found.status, found.reason) == (lab.SUCCESS, "")
        begin.recvBuffAddr.value = comm.devices[2].maxMemAddr.value - 8
        begin.streamId.value = next(stream_ids)
        with refused("OUT_OF_RANGE"):
            receiver.BeginReceive(begin, timeout=20)
        request.sendBuffAddr.value = 0x1000 if comm.devices[0].minMemAddr.value > 0x1000 else 1
        with refused("OUT_OF_RANGE"):
            sender.BeginSend(request, timeout=20)
    np.testing.assert_array_equal(comm.read(2, target, len(sent)), sent + held if op else sent)
    comm.on_all("CommDestroy")


def test_named_buffers_and_collectives_of_the_client(servers: Servers) -> None:
    with hoop.connect(servers.address) as cluster:
        comm = cluster.communicator(DEVICES)
        values = np.arange(3 * 1001, dtype=np.float32).reshape(3, 1001)
        grads = comm.buffer("grads", 1001, "float32")
        grads.fill(list(values))
        comm.all_reduce(grads, op="sum")
        for rank in range(DEVICES):
            np.testing.assert_array_equal(grads.read(rank), values.sum(0))
        info = servers.info(0)
        address, size = cluster.device(1).buffers()["grads"]
        assert size == values[0].nbytes
        assert info.min_address <= address <= info.max_address - size
        gathered = comm.all_gather([np.full(4, rank) for rank in range(DEVICES)])
        assert all(np.array_equal(one.reshape(-1), np.repeat([0, 1, 2], 4)) for one in gathered)


def test_the_status_shows_the_memory_on_the_gpu(servers: Servers) -> None:
    kind = servers.devices[0].config.accelerator
    with hoop.connect(servers.address) as cluster:
        cluster.device(1).allocate("shown", 4096)

        def shown() -> dict[str, Any] | None:
            """The first device, once a heartbeat has brought the buffer."""
            one: dict[str, Any] = as_plain(cluster.status())["devices"][0]
            used = one["gpu_memory"]["used"] if one["gpu_memory"] else one["memory"]["used"]
            return one if used else None

        found = wait_for(shown, "a heartbeat with the buffer", 60)
        cluster.device(1).free("shown")
    assert found is not None
    if kind == "cpu":
        assert found["gpu_memory"] is None
        return
    gpu = found["gpu_memory"]
    assert found["max_address"] - found["min_address"] == MEMORY == gpu["capacity"]
    assert gpu["used"] == 4096
    assert [(one["name"], one["bytes"]) for one in gpu["buffers"]] == [("shown", 4096)]
    assert 0 < gpu["free"] <= gpu["total"]
    assert gpu["name"]


def test_a_checkpoint_in_host_memory_is_read_by_its_name(servers: Servers) -> None:
    """Jobs keep their checkpoints in the host arena: clients read them by name, and no address leads there."""
    device = servers.devices[0]
    arena = device._arena
    buffer = arena.allocate("job7.checkpoint", 100)
    arena.write(buffer.address, bytes(range(100)))
    with hoop.connect(servers.address) as cluster:
        assert cluster.device(1).read("job7.checkpoint", 100) == bytes(range(100))
        if device.config.accelerator != "cpu":
            with pytest.raises(hoop.HoopError, match="not inside"):
                cluster.device(1).read(buffer.address, 100)
    arena.free("job7.checkpoint")


def test_unknown_kinds_of_memory_are_refused() -> None:
    for kind in ("gpu", "cuda:x", "auto:1", ""):
        with pytest.raises(InvalidArgument, match=r"--accelerator: .* is unknown; known: cpu, auto, cuda, emulated"):
            open_gpu(kind)
    assert open_gpu("cpu") is None
    if not count_driver_gpus():
        assert open_gpu("auto") is None
        with pytest.raises(FailedPrecondition, match=r"accelerator: .*nvidia-smi"):
            open_gpu("cuda")
