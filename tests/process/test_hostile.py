"""Invalid requests, fake devices, other protocols and overload: each is refused with the right status and a message,
and the cluster keeps working.

Methods for the coordinator and devices only (Join, AssignRank, Launch …) are tested like the others.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from descriptor_stub import Stub
from lab_cluster import CALL_S, LabClient, check_all_reduce, check_refusal, refused, resident_bytes, wait_for
from lab_target import LAB_DEVICE, METHODS, Target, running_target
from wrong_requests import ALL, HUGE, MIB, UNREACHABLE, create, join, launch, rank_assignment, resolve, run

from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_SEND = "/gpu_sim.GPUDevice/StreamSend"
unused_ids = itertools.count(2**55)
IDS = [f"{case[0]}-{at}" for at, case in enumerate(ALL)]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with running_target("--timeout", "10s") as target:
        yield target
        check_all_reduce(target.coordinator)


@pytest.mark.parametrize(("method", "codes", "match", "request_"), ALL, ids=IDS)
def test_an_invalid_request_is_refused_with_a_message(
    target: Target, method: str, codes: str, match: str, request_: Any
) -> None:
    with refused(*codes.split(), match=match) as messages:
        target.call(method, resolve(request_, target))
    assert len(messages[0]) < 3000


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [b"\xff" * 12, b"\x0a\xff\xff\xff\xff\x7f", b"\x00", b"GET / HTTP/1.1\r\n\r\n"])
def test_malformed_bytes_are_refused(target: Target, method: str, data: bytes) -> None:
    with refused("INVALID_ARGUMENT", match="not a valid"):
        target.raw(method, data)


@pytest.mark.parametrize(
    "method", ["GPUCoordinator.Memcpy", "Coordinator.GetStatus", "GPUDevice.StreamSend", "Device.Write"]
)
def test_a_message_over_the_size_limit_is_refused(target: Target, method: str) -> None:
    with refused("RESOURCE_EXHAUSTED"):
        target.raw(method, bytes(64 * MIB + 100))


def test_calls_about_unknown_devices_and_communicators_change_nothing(target: Target) -> None:
    target.call("Coordinator.Leave", pb.LeaveRequest(device_id=1, incarnation="not its own"))
    target.call("Device.Abort", pb.AbortRequest(communicator_id=HUGE, generation=9, lost_device=HUGE))
    beat = pb.Heartbeat(device_id=1, incarnation="not its own")
    assert [one.known for one in target.call("Coordinator.SendHeartbeats", [beat])] == [False]
    assert target.call("Coordinator.SendHeartbeats", []) == []
    assert target.call("Coordinator.WatchEvents", pb.WatchEventsRequest(after=HUGE)) == []
    assert all(target.member(one["id"]).state == "alive" for one in target.devices)


def test_extreme_but_valid_requests_succeed(target: Target) -> None:
    """Large numbers that cost nothing."""
    for chunk in (4, 2**63, HUGE):
        request = run(algorithm="chunked_ring", chunk_bytes=chunk, count=1000)
        target.call("Coordinator.Run", resolve(request, target))
    target.call("Coordinator.Run", resolve(run(times=1024), target))
    target.call("Coordinator.Run", resolve(run(timeout_s=3600), target))


def test_a_new_rank_assignment_replaces_the_old_one(target: Target) -> None:
    """A coordinator that lost its state reuses communicator ids; a launch must use the assignment it carries."""
    communicator_id = next(unused_ids)
    old = rank_assignment(communicator_id=communicator_id)
    new = rank_assignment(communicator_id=communicator_id, members=[UNREACHABLE])
    for assignment in (old, new):
        target.call("Device.AssignRank", pb.AssignRankRequest(assignment=assignment))
    target.call("Device.Launch", resolve(launch(assignment=new), target))
    with refused("UNAVAILABLE", match="does not answer"):
        target.call("Device.Launch", resolve(launch(assignment=old), target))


def test_a_launch_over_shared_memory_keeps_its_deadline(target: Target) -> None:
    """The other ranks never join the operation."""
    status = target.call("Coordinator.GetStatus", pb.GetStatusRequest())
    members = [{**UNREACHABLE, "shared_address": one.device.shared_address} for one in status.devices[:3]]
    request = resolve(launch(assignment=rank_assignment(members=members), timeout_s=0.1), target)
    with refused("DEADLINE_EXCEEDED", match="passed its deadline"):
        target.call("Device.Launch", request)


def test_devices_that_a_client_names_in_another_protocol_are_not_replaced_by_others(target: Target) -> None:
    named = lab.CommInitRequest(numDevices=2).SerializeToString() + b"\x12\x02\x08\x03"
    with refused("INVALID_ARGUMENT", match=r"unknown fields \(2\)"):
        target.raw("GPUCoordinator.CommInit", named)


def test_a_receive_from_a_rank_that_does_not_exist_is_refused(target: Target) -> None:
    request = lab.BeginReceiveRequest(numBytes=8, streamId={"value": 77}, recvBuffAddr={"value": target.low})
    request.srcRank.value = 12
    with refused("INVALID_ARGUMENT", match="srcRank: 12 is not in"):
        target.call("GPUDevice.BeginReceive", request)


def test_errors_show_no_path_of_the_machine(target: Target) -> None:
    copy = {"srcMemAddr": {"value": target.high}, "numBytes": 8}
    with refused("OUT_OF_RANGE", match="is not inside") as messages:
        target.call("GPUDevice.Memcpy", lab.MemcpyRequest(deviceToHost=copy))
    assert "/" not in messages[0]


# ---- fake devices


def communicator_ids(target: Target) -> list[int]:
    return [one.id for one in target.call("Coordinator.GetStatus", pb.GetStatusRequest()).communicators]


def test_a_device_that_does_not_exist_is_refused_and_declared_dead(target: Target) -> None:
    """CommInit with it fails, names it and leaves no communicator; when its lease expires it is dead."""
    before = communicator_ids(target)
    joined = target.call("Coordinator.Join", join())
    with refused("UNAVAILABLE", match=f"device {joined.device_id} "):
        LabClient(target.coordinator, 4)
    target.wait_until_dead(joined.device_id)
    with refused("FAILED_PRECONDITION", match="4 were asked for, 3 are alive"):
        LabClient(target.coordinator, 4)
    assert communicator_ids(target) == before
    check_all_reduce(target.coordinator)


def test_a_device_that_is_another_server_is_refused_and_declared_dead(target: Target) -> None:
    """Its address is the coordinator's, which does not serve a device's methods."""
    before = communicator_ids(target)
    joined = target.call("Coordinator.Join", join(address=target.cluster.address))
    for _ in range(3):  # on a busy machine it may be dead, by its silence, before the third call
        with refused("UNAVAILABLE", "FAILED_PRECONDITION", match=f"device {joined.device_id}"):
            target.call("Coordinator.CreateCommunicator", create(1, joined.device_id))
    target.wait_until_dead(joined.device_id)
    with refused("FAILED_PRECONDITION", match="dead"):
        target.call("Coordinator.CreateCommunicator", create(1, joined.device_id))
    assert communicator_ids(target) == before
    check_all_reduce(target.coordinator)


# ---- connections that do not speak gRPC

OTHER_PROTOCOLS = {
    "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100f1010000ed0303") + bytes(200),
    "noise": bytes(range(256)) * 64,
    "preface and noise": PREFACE + b"\xff" * 1000,
    "half a word": b"PR",
    "a frame's beginning": b"HOOP\x01\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("port", ["coordinator", "device", "data"])
@pytest.mark.parametrize("protocol", OTHER_PROTOCOLS)
def test_other_protocols_on_a_port_do_not_disturb_the_cluster(target: Target, protocol: str, port: str) -> None:
    device = target.devices[0]
    addresses = {"coordinator": target.cluster.address, "device": device["address"], "data": device["data_address"]}
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            client = stack.enter_context(connection(addresses[port]))
            with contextlib.suppress(ConnectionError):
                client.sendall(OTHER_PROTOCOLS[protocol])
        check_all_reduce(target.coordinator)  # while the connections are open


def connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CALL_S)


# ---- overload


class Flood:
    """Opens calls and leaves them open, with as few bytes of HTTP/2 as possible, so that thousands are cheap."""

    def __init__(self, address: str, path: str) -> None:
        self._socket = connection(address)
        self._socket.sendall(PREFACE + _frame(4))
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        # Each header is a never-indexed literal: a zero byte, then the name and the value, each after its length.
        self._headers = b"".join(
            b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in header) for header in headers.items()
        )
        self._ids = itertools.count(1, 2)
        self._received = b""
        self.ended = 0
        """The number of calls that the server has ended."""

    def open(self, calls: int) -> None:
        self._socket.sendall(b"".join(_frame(1, 4, next(self._ids), self._headers) for _ in range(calls)))

    def receive(self) -> None:
        """Reads what the server has sent so far, without blocking."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := self._socket.recv(2**20):
                self._received += data
        self._socket.setblocking(True)
        while len(self._received) >= 9 and len(self._received) >= (size := 9 + int.from_bytes(self._received[:3])):
            kind, flags = self._received[3:5]
            self.ended += (kind == 1 and flags & 1) or kind == 3  # trailers, or a reset
            self._received = self._received[size:]

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def open_streams(target: Target) -> int:
    """Asks the device. While more than a thousand calls wait for a server, gRPC cancels new ones at random."""
    answers: list[pb.DescribeResponse] = []

    def answered() -> bool:
        try:
            answers.append(target.call("Device.Describe", pb.DescribeRequest()))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
        return bool(answers)

    wait_for(answered, "an answer of the device")
    return int(answers[0].open_streams)


def test_open_streams_are_limited(target: Target) -> None:
    """Six thousand streams: a device accepts 4096, refuses the others, and still serves other calls."""
    before = resident_bytes(target.pid)
    with contextlib.ExitStack() as stack:
        floods = [
            stack.enter_context(contextlib.closing(Flood(target.devices[0]["address"], STREAM_SEND))) for _ in range(4)
        ]
        for flood in floods * 3:
            flood.open(500)
            assert open_streams(target) <= 4096

        def excess_calls_have_ended() -> bool:
            for flood in floods:
                flood.receive()
            return sum(flood.ended for flood in floods) >= 1904

        wait_for(excess_calls_have_ended, "the rest")
        assert open_streams(target) == 4096
        with refused("RESOURCE_EXHAUSTED", match="4096 streams are open"):
            target.call("GPUDevice.StreamSend", [lab.DataChunk()])
        check_all_reduce(target.coordinator)
        assert resident_bytes(target.pid) - before < 300 * MIB
    wait_for(lambda: open_streams(target) == 0, "the end of the flood")


def test_the_coordinator_survives_a_burst_of_calls(target: Target) -> None:
    """More calls at once than gRPC queues: some are dropped, then the coordinator answers again."""
    with contextlib.closing(Flood(target.cluster.address, "/hoop.v1.Coordinator/SendHeartbeats")) as flood:
        flood.open(4096)

    def sums_again() -> bool:  # a device whose heartbeats were dropped may be suspect until the next one
        with contextlib.suppress(grpc.RpcError):
            check_all_reduce(target.coordinator)
            return True
        return False

    wait_for(sums_again, "an answer, and heartbeats of the devices")


def test_data_that_waits_for_a_receive_is_limited(target: Target) -> None:
    """Data that waits for its BeginReceive is limited to 64 MiB, and refused data is freed."""
    send = Stub(target.device, LAB_DEVICE).StreamSend
    data = bytes(16 * MIB)

    def start_send() -> Any:
        return send.future(iter([lab.DataChunk(data=data, streamId={"value": next(unused_ids)})]))

    calls: list[Any] = []
    with contextlib.ExitStack() as stack:
        for number in range(21):
            calls.append(start_send())
            stack.callback(calls[-1].cancel)
            # Four sends fill the 64 MiB; of five, one is refused.
            wait_for(lambda: sum(not call.done() for call in calls) <= 4, "a refusal")
            if number == 8:
                before = resident_bytes(target.pid)
        assert resident_bytes(target.pid) - before < 120 * MIB  # of the 192 MiB received since
        ended = [call for call in calls if call.done()]
        assert len(ended) == 17
        for call in ended:
            check_refusal(call, "RESOURCE_EXHAUSTED", match="wait for their BeginReceive")
        check_all_reduce(target.coordinator)
    wait_for(lambda: open_streams(target) == 0, "the end of the data")
