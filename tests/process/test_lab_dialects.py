"""A client for each dialect of the lab's protocol, and the calls that only some programs have."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from lab_cluster import LabClient, channel_to, hoop_up, lab, refused, wait_for
from lab_dialects import NIL_FIRST, STARTER
from lab_in_process import Servers, lab_channel, lab_servers

from hoop.errors import FailedPrecondition
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.lab_device import LabDevice
from hoop.servers.lab_dialect import Dialect, detect
from hoop.wire.auth import Credentials
from hoop.wire.generated import gpu_sim_pb2
from hoop.wire.roles import Role
from hoop.wire.tokens import Token

CALL_S = 120.0
OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SUM": lambda vectors: vectors.sum(axis=0),
    "PROD": lambda vectors: vectors.prod(axis=0),
    "MIN": lambda vectors: vectors.min(axis=0),
    "MAX": lambda vectors: vectors.max(axis=0),
}


@contextlib.contextmanager
def serving(dialect: str, devices: int = 3, **options: Any) -> Iterator[tuple[Servers, grpc.Channel]]:
    config = CoordinatorConfig(lab_dialect=dialect, command="hoop up", **options)
    with lab_servers(devices, config, lab_dialect=dialect) as servers, lab_channel(servers) as channel:
        yield servers, channel


def vectors(devices: int, count: int) -> np.ndarray:
    return np.random.default_rng([devices, count]).normal(size=(devices, count))


class NilFirstClient:
    """One communicator, used as the programs of the paper dsml do: counts in elements, no groups."""

    def __init__(self, channel: grpc.Channel, devices: int) -> None:
        self._coordinator = NIL_FIRST.stub(channel, "GPUCoordinator")
        answer = self._coordinator.CommInit(NIL_FIRST.CommInitRequest(numDevices=devices), timeout=CALL_S)
        assert answer.success
        self.id, self.devices = answer.commId, list(answer.devices)

    def status(self) -> int:
        request = NIL_FIRST.GetCommStatusRequest(commId=self.id)
        return int(self._coordinator.GetCommStatus(request, timeout=CALL_S).status)

    def write(self, vectors: np.ndarray) -> None:
        for device, vector in zip(self.devices, vectors, strict=True):
            copy = NIL_FIRST.MemcpyHostToDeviceRequest(
                hostSrcData=vector.tobytes(), dstDeviceId=device.deviceId, dstMemAddr=device.minMemAddr
            )
            answer = self._coordinator.Memcpy(NIL_FIRST.MemcpyRequest(hostToDevice=copy), timeout=CALL_S)
            assert answer.hostToDevice.success

    def read(self, count: int) -> np.ndarray:
        copies = (
            NIL_FIRST.MemcpyDeviceToHostRequest(
                numBytes=8 * count, srcDeviceId=device.deviceId, srcMemAddr=device.minMemAddr
            )
            for device in self.devices
        )
        requests = (NIL_FIRST.MemcpyRequest(deviceToHost=copy) for copy in copies)
        answers = [self._coordinator.Memcpy(request, timeout=CALL_S) for request in requests]
        return np.array([np.frombuffer(answer.deviceToHost.dstData, "<f8") for answer in answers])

    def all_reduce(self, op: int, count: int) -> None:
        addresses = {rank: device.minMemAddr for rank, device in enumerate(self.devices)}
        request = NIL_FIRST.AllReduceRingRequest(commId=self.id, count=count, op=op, memAddrs=addresses)
        assert self._coordinator.AllReduceRing(request, timeout=CALL_S).success


# ---- the coordinator


@pytest.mark.parametrize("dialect", ["nil-first", "auto"])
def test_a_client_of_nil_first(dialect: str) -> None:
    with serving(dialect) as (servers, channel):
        for op, count in itertools.product(OPS, (3, 17)):
            comm = NilFirstClient(channel, 3)
            assert [device.rank.value for device in comm.devices] == [0, 1, 2]
            assert [device.HasField("rank") for device in comm.devices] == [True] * 3
            assert {f"{one.ip}:{one.port}" for one in comm.devices} == {
                str(servers.info(at).address) for at in range(3)
            }
            assert comm.status() == NIL_FIRST.READY
            comm.write(vectors(3, count))
            comm.all_reduce(getattr(NIL_FIRST, op), count)
            assert comm.status() == NIL_FIRST.SUCCESS
            found = comm.read(count)
            np.testing.assert_allclose(found[0], OPS[op](vectors(3, count)), rtol=1e-12)
            assert (found == found[0]).all()


def test_nil_is_no_operation() -> None:
    with serving("nil-first", 1) as (_, channel):
        comm = NilFirstClient(channel, 1)
        comm.write(vectors(1, 4))
        with refused("INVALID_ARGUMENT", match="op: 0 is unknown in the dialect nil-first; known: SUM=1 PROD=2"):
            comm.all_reduce(NIL_FIRST.NIL, 4)


@pytest.mark.parametrize("dialect", ["starter", "auto"])
@pytest.mark.parametrize("grouped", [True, False])
def test_a_client_of_starter(dialect: str, grouped: bool) -> None:
    """Bytes, with groups and without, and the first operation of a communicator may be any."""
    with serving(dialect, 2) as (_, channel):
        for op in OPS:
            comm = LabClient(channel, 2)
            assert not comm.devices[1].DESCRIPTOR.fields_by_name.get("rank")
            addresses = [comm.address(rank) for rank in range(2)]
            for rank, address in enumerate(addresses):
                comm.write(rank, address, vectors(2, 8)[rank])
            if grouped:
                comm.on_all("GroupStart")
                assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
            comm.all_reduce(getattr(lab, op), addresses, 8)
            if grouped:
                comm.on_all("GroupEnd")
            assert comm.wait() == lab.SUCCESS
            np.testing.assert_allclose(comm.read(1, addresses[1], 8), OPS[op](vectors(2, 8)), rtol=1e-12)


def test_a_client_of_starter_gets_no_fields_of_nil_first() -> None:
    with serving("starter", 1) as (_, channel):
        (device,) = NilFirstClient(channel, 1).devices
        assert (device.ip, device.port, device.HasField("rank")) == ("", 0, False)


@pytest.mark.parametrize(
    ("op", "unit", "grouped", "dialect"),
    [
        (0, "", False, Dialect.STARTER),
        (0, "elements", False, Dialect.STARTER),
        (1, "bytes", False, Dialect.STARTER),
        (4, "bytes", True, Dialect.STARTER),
        (1, "elements", False, Dialect.NIL_FIRST),
        (4, "elements", False, Dialect.NIL_FIRST),
        (5, "", False, Dialect.NIL_FIRST),
        (1, "elements", True, None),
        (1, "", False, None),
    ],
)
def test_detection(op: int, unit: str, grouped: bool, dialect: Dialect | None) -> None:
    assert detect(op, unit, grouped) == dialect


def test_auto_refuses_what_it_cannot_tell_apart() -> None:
    with serving("auto", 1) as (servers, channel):
        comm = NilFirstClient(channel, 1)
        with refused("INVALID_ARGUMENT", match=r"op: 1 differs by dialect.*hoop up with --lab-dialect starter"):
            comm.all_reduce(NIL_FIRST.SUM, 4)  # nothing was copied there
        comm.write(vectors(1, 4))
        comm.all_reduce(NIL_FIRST.SUM, 4)
        with refused("INVALID_ARGUMENT", match="op: 0 is unknown in the dialect nil-first"):
            comm.all_reduce(NIL_FIRST.NIL, 4)
        texts = [event.text for event in servers.events("lab_call_reported")]
        assert any("speaks the lab's dialect nil-first" in text for text in texts)


def test_auto_serves_a_client_of_starter_that_counts_elements() -> None:
    with serving("auto", 2) as (_, channel):
        comm = LabClient(channel, 2, "elements")
        addresses = [comm.address(rank) for rank in range(2)]
        for op in ("SUM", "MAX"):  # the first shows the dialect
            for rank, address in enumerate(addresses):
                comm.write(rank, address, vectors(2, 16)[rank])
            comm.all_reduce(getattr(lab, op), addresses, 16)
            np.testing.assert_allclose(comm.read(1, addresses[1], 16), OPS[op](vectors(2, 16)), rtol=1e-12)


def test_hoop_up_passes_the_dialect_to_its_devices_and_prints_refused_calls() -> None:
    with hoop_up(2, "--lab-dialect", "nil-first") as cluster:
        with channel_to(cluster.address) as channel:
            comm = NilFirstClient(channel, 2)
            comm.write(vectors(2, 5))
            comm.all_reduce(NIL_FIRST.SUM, 5)
            np.testing.assert_allclose(comm.read(5)[1], vectors(2, 5).sum(axis=0), rtol=1e-12)
            with refused("INVALID_ARGUMENT"):
                comm.all_reduce(77, 5)
        with channel_to(f"{comm.devices[1].ip}:{comm.devices[1].port}") as channel:
            device = NilFirstDevice(channel)
            device.begin_receive(NIL_FIRST.StreamId(value=1), 0, 8, 0, NIL_FIRST.SUM)
            with refused("INVALID_ARGUMENT"):
                device.begin_receive(NIL_FIRST.StreamId(value=2), 0, 8, 0, 78)
        log = cluster.log.read_text()
    assert "AllReduceRing of the client at ipv4:127.0.0.1 was refused: INVALID_ARGUMENT: op: 77" in log
    assert f"device {device.id.value}: BeginReceive of the client at ipv4:127.0.0.1 was refused" in log


# ---- devices, driven by the coordinator of another program


class NilFirstDevice:
    """A device, called as the coordinator of the paper dsml calls it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.calls = NIL_FIRST.stub(channel, "GPUDevice")
        metadata = self.calls.GetDeviceMetadata(NIL_FIRST.GetDeviceMetadataRequest(), timeout=CALL_S).metadata
        self.id, self.low, self.high = metadata.deviceId, metadata.minMemAddr.value, metadata.maxMemAddr.value

    def set_up(self, rank: int, addresses: list[str]) -> None:
        request = NIL_FIRST.SetupCommunicationRequest(
            rankToAddress=dict(enumerate(addresses)), rank=NIL_FIRST.Rank(value=rank)
        )
        assert self.calls.SetupCommunication(request, timeout=CALL_S).success

    def write(self, vector: np.ndarray) -> None:
        to = NIL_FIRST.MemAddr(value=self.low)
        copy = NIL_FIRST.MemcpyHostToDeviceRequest(hostSrcData=vector.tobytes(), dstDeviceId=self.id, dstMemAddr=to)
        assert self.calls.Memcpy(NIL_FIRST.MemcpyRequest(hostToDevice=copy), timeout=CALL_S).hostToDevice.success

    def read(self, count: int) -> np.ndarray:
        source = NIL_FIRST.MemAddr(value=self.low)
        copy = NIL_FIRST.MemcpyDeviceToHostRequest(srcDeviceId=self.id, srcMemAddr=source, numBytes=8 * count)
        answer = self.calls.Memcpy(NIL_FIRST.MemcpyRequest(deviceToHost=copy), timeout=CALL_S)
        return np.frombuffer(answer.deviceToHost.dstData, "<f8")

    def begin_send(self, offset: int, size: int, to: int) -> Any:
        request = NIL_FIRST.BeginSendRequest(
            sendBuffAddr=NIL_FIRST.MemAddr(value=self.low + offset), numBytes=size, dstRank=NIL_FIRST.Rank(value=to)
        )
        answer = self.calls.BeginSend(request, timeout=CALL_S)
        assert answer.initiated
        return answer.streamId

    def begin_receive(self, stream: Any, offset: int, size: int, source: int, op: int) -> None:
        request = NIL_FIRST.BeginReceiveRequest(
            streamId=stream,
            recvBuffAddr=NIL_FIRST.MemAddr(value=self.low + offset),
            numBytes=size,
            srcRank=NIL_FIRST.Rank(value=source),
            op=op,
        )
        assert self.calls.BeginReceive(request, timeout=CALL_S).initiated

    def status(self, stream: Any, source: int) -> int:
        request = NIL_FIRST.GetStreamStatusRequest(streamId=stream, srcRank=NIL_FIRST.Rank(value=source))
        return int(self.calls.GetStreamStatus(request, timeout=CALL_S).status)

    def outcome(self, stream: Any, source: int) -> int:
        ended = (NIL_FIRST.SUCCESS, NIL_FIRST.FAILED)
        wait_for(lambda: self.status(stream, source) in ended, "the stream")
        return self.status(stream, source)


@contextlib.contextmanager
def nil_first_devices(dialect: str, count: int) -> Iterator[tuple[Servers, list[NilFirstDevice]]]:
    with serving(dialect, count) as (servers, _), contextlib.ExitStack() as stack:
        addresses = [str(servers.info(rank).address) for rank in range(count)]
        devices = [NilFirstDevice(stack.enter_context(channel_to(address))) for address in addresses]
        for rank, device in enumerate(devices):
            device.set_up(rank, addresses)
        yield servers, devices


@pytest.mark.parametrize("dialect", ["nil-first", "auto"])
@pytest.mark.parametrize("op", OPS)
def test_the_ring_of_another_programs_coordinator(dialect: str, op: str) -> None:
    """Reduce-scatter with receives that reduce, then all-gather with receives that overwrite, block by block."""
    count, size = 17, 3
    with nil_first_devices(dialect, size) as (_, devices):
        data = vectors(size, count)
        for device, vector in zip(devices, data, strict=True):
            device.write(vector)
        blocks = [(8 * (count // size) * at, 8 * (count // size)) for at in range(size)]
        blocks[-1] = (blocks[-1][0], 8 * count - blocks[-1][0])
        for step in range(2 * (size - 1)):
            reduces = step < size - 1
            streams = []
            for rank, device in enumerate(devices):
                block = blocks[(rank - step) % size] if reduces else blocks[(rank + 1 - (step - size + 1)) % size]
                to = (rank + 1) % size
                stream = device.begin_send(*block, to=to)
                devices[to].begin_receive(stream, *block, rank, getattr(NIL_FIRST, op if reduces else "NIL"))
                streams.append((rank, to, stream))
            for rank, to, stream in streams:
                assert devices[to].outcome(stream, rank) == NIL_FIRST.SUCCESS
                assert devices[rank].outcome(stream, rank) == NIL_FIRST.SUCCESS
        for device in devices:
            np.testing.assert_allclose(device.read(count), OPS[op](data), rtol=1e-12)


def test_reset_gpu_fails_open_streams_and_forgets_the_ranks() -> None:
    with nil_first_devices("nil-first", 2) as (_, devices):
        stream = devices[1].begin_send(0, 256, to=0)
        assert devices[1].status(stream, 1) == NIL_FIRST.IN_PROGRESS
        assert devices[1].calls.ResetGpu(NIL_FIRST.ResetGpuRequest(), timeout=CALL_S).success
        assert devices[1].outcome(stream, 1) == NIL_FIRST.FAILED
        with refused("FAILED_PRECONDITION", match="in no communicator yet"):
            devices[1].begin_send(0, 256, to=0)


def test_a_communicator_of_hoops_coordinator_replaces_the_ranks_of_setup() -> None:
    with nil_first_devices("nil-first", 2) as (servers, devices), lab_channel(servers) as channel:
        with refused("INVALID_ARGUMENT", match=r"dstRank: 2 is not in 0\.\.1"):
            devices[0].begin_send(0, 8, to=2)
        NilFirstClient(channel, 1)
        with refused("INVALID_ARGUMENT", match=r"rank: 1 is not in 0\.\.0"):
            devices[0].begin_send(0, 8, to=1)


@pytest.mark.parametrize("parts", [(20, 12), (3, 29), (32,), (1,) * 32])
def test_a_receive_that_reduces_takes_chunks_of_any_size(parts: tuple[int, ...]) -> None:
    with nil_first_devices("nil-first", 1) as (_, (device,)):
        device.write(np.arange(4.0))
        stream = NIL_FIRST.StreamId(value=9)
        device.begin_receive(stream, 0, 32, 0, NIL_FIRST.SUM)
        data, ends = np.full(4, 10.0).tobytes(), list(itertools.accumulate(parts))
        chunks = [NIL_FIRST.DataChunk(data=data[end - part : end]) for part, end in zip(parts, ends, strict=True)]
        chunks[0].streamId.CopyFrom(stream)
        assert device.calls.StreamSend(iter(chunks), timeout=CALL_S).success
        assert device.read(4).tolist() == [10.0, 11.0, 12.0, 13.0]


def test_invalid_calls_of_nil_first_are_refused() -> None:
    with nil_first_devices("nil-first", 1) as (_, (device,)):
        stream = NIL_FIRST.StreamId(value=9)
        with refused("INVALID_ARGUMENT", match="op: 5"):
            device.begin_receive(stream, 0, 8, 0, 5)
        with refused("INVALID_ARGUMENT", match="numBytes: 12 bytes are not whole float64"):
            device.begin_receive(stream, 0, 12, 0, NIL_FIRST.SUM)
        with refused("INVALID_ARGUMENT", match="0x.*8"):
            device.begin_receive(stream, 4, 8, 0, NIL_FIRST.SUM)
        with refused("INVALID_ARGUMENT", match=r"rank: 1 is not in 0\.\.0"):
            device.set_up(1, ["127.0.0.1:1"])
        with refused("INVALID_ARGUMENT", match=r"rankToAddress\[1\]: 'nowhere' is not host:port"):
            device.set_up(0, ["127.0.0.1:1", "nowhere"])
        with refused("INVALID_ARGUMENT", match="rankToAddress: it has 0 ranks"):
            device.set_up(0, [])
        device.id.value += 1
        with refused("NOT_FOUND", match="dstDeviceId: 2 is not this device, which is 1"):
            device.write(np.ones(1))
    with serving("starter", 1) as (servers, _), channel_to(str(servers.info(0).address)) as channel:
        device = NilFirstDevice(channel)
        with refused("INVALID_ARGUMENT", match="op: 1: BeginReceive has no op in the dialect starter.*--lab-dialect"):
            device.begin_receive(stream, 0, 8, 0, NIL_FIRST.SUM)


# ---- what programs have added to the starter


def test_a_chunk_goes_to_the_receive_that_it_names() -> None:
    """``streamId`` has number 2 in several public programs."""
    with serving("starter", 1) as (servers, _), channel_to(str(servers.info(0).address)) as channel:
        device, low = STARTER.stub(channel, "GPUDevice"), servers.info(0).min_address
        for stream in (1, 2):
            request = STARTER.BeginReceiveRequest(
                streamId=STARTER.StreamId(value=stream),
                recvBuffAddr=STARTER.MemAddr(value=low + 8 * stream),
                numBytes=8,
            )
            device.BeginReceive(request, timeout=CALL_S)
        chunk = STARTER.DataChunk(data=b"\2" * 8, streamId=STARTER.StreamId(value=2))
        assert device.StreamSend(iter([chunk]), timeout=CALL_S).success
        copy = STARTER.MemcpyDeviceToHostRequest(srcMemAddr=STARTER.MemAddr(value=low + 8), numBytes=16)
        answer = device.Memcpy(STARTER.MemcpyRequest(deviceToHost=copy), timeout=CALL_S)
        assert answer.deviceToHost.dstData == bytes(8) + b"\2" * 8


def test_a_chunk_that_may_name_its_stream_in_an_unknown_field_is_refused_if_there_is_a_choice() -> None:
    with serving("starter", 1) as (servers, _), channel_to(str(servers.info(0).address)) as channel:
        device, low = STARTER.stub(channel, "GPUDevice"), servers.info(0).min_address
        for stream in (1, 2):
            request = STARTER.BeginReceiveRequest(
                streamId=STARTER.StreamId(value=stream), recvBuffAddr=STARTER.MemAddr(value=low), numBytes=8
            )
            device.BeginReceive(request, timeout=CALL_S)
        chunk = STARTER.DataChunk(data=bytes(8)).SerializeToString() + bytes([7 << 3, 2])
        send = channel.stream_unary("/gpu_sim.GPUDevice/StreamSend", None, None)
        with refused("INVALID_ARGUMENT", match="streamId: missing, and 2 receives wait here"):
            send(iter([chunk]), timeout=CALL_S)


class StarterComm(LabClient):
    """A communicator, with the calls that programs have added."""

    def __init__(self, channel: grpc.Channel, devices: int) -> None:
        super().__init__(channel, devices)
        self.more = STARTER.stub(channel, "GPUCoordinator")

    def reduce(self, rpc: str, addresses: dict[int, int], count: int) -> None:
        places = {rank: STARTER.MemAddr(value=address) for rank, address in addresses.items()}
        request = getattr(STARTER, f"{rpc}Request")(commId=self.id, count=8 * count, op=STARTER.SUM, memAddrs=places)
        assert getattr(self.more, rpc)(request, timeout=CALL_S).success

    def remove(self, rank: int) -> None:
        request = STARTER.CommRemoveDeviceRequest(commId=self.id, rank=STARTER.Rank(value=rank))
        assert self.more.CommRemoveDevice(request, timeout=CALL_S).success

    def write_all(self) -> dict[int, int]:
        """Writes 1, 2, 4 … to the ranks, at addresses of their own."""
        addresses = {rank: self.address(rank, 64 * rank) for rank in range(len(self.devices))}
        for rank, address in addresses.items():
            self.write(rank, address, np.full(4, 2.0**rank))
        return addresses

    def held(self, addresses: dict[int, int]) -> list[float]:
        return [float(self.read(rank, address, 1)[0]) for rank, address in addresses.items()]


def test_all_reduce() -> None:
    with serving("starter") as (_, channel):
        comm = StarterComm(channel, 3)
        addresses = comm.write_all()
        comm.reduce("AllReduce", addresses, 4)
        assert comm.held(addresses) == [7.0, 7.0, 7.0]
        comm.on_all("GroupStart")
        comm.reduce("AllReduce", addresses, 4)
        comm.on_all("GroupEnd")
        assert comm.wait() == lab.SUCCESS
        assert comm.held(addresses) == [21.0, 21.0, 21.0]


@pytest.mark.parametrize("rpc", ["AllReduceRing", "AllReduce", "NaiveAllReduce"])
def test_a_communicator_goes_on_without_a_removed_device(rpc: str) -> None:
    """The client keeps its ranks, and may go on to give an address for the one that it removed."""
    with serving("starter") as (_, channel):
        comm = StarterComm(channel, 3)
        addresses = comm.write_all()
        comm.remove(1)
        comm.reduce(rpc, addresses, 4)
        assert comm.held(addresses) == [5.0, 2.0, 5.0]
        comm.reduce(rpc, {0: addresses[0], 2: addresses[2]}, 4)
        assert comm.held(addresses) == [10.0, 2.0, 10.0]
        assert comm.wait() == lab.SUCCESS
        with refused("INVALID_ARGUMENT", match="memAddrs: rank 2 has no address"):
            comm.reduce(rpc, {0: addresses[0], 1: addresses[1]}, 4)
        with refused("INVALID_ARGUMENT", match=r"memAddrs: ranks \[3\]"):
            comm.reduce(rpc, {**addresses, 3: addresses[0]}, 4)


def test_a_device_is_removed_in_a_group_and_after_one() -> None:
    with serving("starter") as (_, channel):
        comm = StarterComm(channel, 3)
        addresses = comm.write_all()
        comm.on_all("GroupStart")
        comm.reduce("AllReduceRing", addresses, 4)
        comm.remove(0)
        comm.reduce("AllReduceRing", addresses, 4)
        comm.on_all("GroupEnd")
        comm.remove(1)  # behind the group
        assert comm.wait() == lab.SUCCESS
        assert comm.held(addresses) == [1.0, 12.0, 12.0]
        with refused("FAILED_PRECONDITION", match="rank: 2 is the only one left"):
            comm.remove(2)
        with refused("FAILED_PRECONDITION", match=r"rank: 1 \(device 2\) is no longer in communicator"):
            comm.remove(1)
        with refused("INVALID_ARGUMENT", match=r"rank: 3 is not in 0\.\.2"):
            comm.remove(3)
        with refused("INVALID_ARGUMENT", match="rank: missing"):
            comm.more.CommRemoveDevice(STARTER.CommRemoveDeviceRequest(commId=comm.id), timeout=CALL_S)


def test_a_communicator_goes_on_after_a_device_has_died() -> None:
    with serving("starter") as (servers, channel):
        comm = StarterComm(channel, 3)
        addresses = comm.write_all()
        ids = [device.deviceId.value for device in comm.devices]
        lost = servers.devices[ids[1] - 1]
        servers.call(lost.stop())
        servers.devices.remove(lost)
        assert comm.wait() == lab.FAILED
        with refused("FAILED_PRECONDITION", match="is gone"):
            comm.reduce("AllReduceRing", addresses, 4)
        comm.remove(1)
        assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
        comm.reduce("AllReduceRing", addresses, 4)
        assert comm.wait() == lab.SUCCESS
        survivors = {rank: addresses[rank] for rank in (0, 2)}
        assert comm.held(survivors) == [5.0, 5.0]


def test_a_device_with_credentials_calls_no_address_that_a_client_names() -> None:
    """It would send its token there."""
    credentials = Credentials(Role.DEVICE, Token.parse("0123456789abcdef" * 4))
    unused: Any = None
    device = LabDevice(unused, unused, unused, credentials, "nil-first", 1 << 20)
    request = gpu_sim_pb2.SetupCommunicationRequest(rankToAddress={0: "127.0.0.1:1"}, rank={"value": 0})
    with pytest.raises(FailedPrecondition, match="a device calls no others; make the communicator with CommInit"):
        asyncio.run(device.setup_communication(request))
