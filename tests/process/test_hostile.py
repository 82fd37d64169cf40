"""Wrong requests, false devices and strangers: each gets the right status and a sentence, and harms nobody.

What only a coordinator or a device is meant to call (Join, Seat, Launch …) is asked as wrongly as the rest.
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
from lab_cluster import LabClient, check_all_reduce, check_refusal, memory_of, refused, wait_for
from lab_target import LAB_DEVICE, METHODS, Target, target_of
from wrong_requests import ALL, HUGE, MIB, NOBODY, built, create, join, launch, run, seat

from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_SEND = "/gpu_sim.GPUDevice/StreamSend"
fresh = itertools.count(2**55)
IDS = [f"{case[0]}-{at}" for at, case in enumerate(ALL)]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with target_of("--timeout", "10s") as target:
        yield target
        check_all_reduce(target.coordinator)


@pytest.mark.parametrize(("method", "codes", "words", "request_"), ALL, ids=IDS)
def test_refused_with_a_sentence(target: Target, method: str, codes: str, words: str, request_: Any) -> None:
    with refused(*codes.split(), words=words) as said:
        target.call(method, built(request_, target))
    assert len(said[0]) < 3000


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [b"\xff" * 12, b"\x0a\xff\xff\xff\xff\x7f", b"\x00", b"GET / HTTP/1.1\r\n\r\n"])
def test_bytes_that_are_no_message(target: Target, method: str, data: bytes) -> None:
    with refused("INVALID_ARGUMENT", words="not a valid"):
        target.raw(method, data)


@pytest.mark.parametrize(
    "method", ["GPUCoordinator.Memcpy", "Coordinator.GetStatus", "GPUDevice.StreamSend", "Device.Write"]
)
def test_a_message_over_the_limit(target: Target, method: str) -> None:
    with refused("RESOURCE_EXHAUSTED"):
        target.raw(method, bytes(64 * MIB + 100))


def test_a_stranger_cannot_take_what_is_not_there(target: Target) -> None:
    """Calls that may be made about anything, and do nothing about what is unknown."""
    target.call("Coordinator.Leave", pb.LeaveRequest(device_id=1, incarnation="not its own"))
    target.call("Device.Abort", pb.AbortRequest(communicator_id=HUGE, generation=9, lost_device=HUGE))
    beat = pb.Heartbeat(device_id=1, incarnation="not its own")
    assert [one.known for one in target.call("Coordinator.SendHeartbeats", [beat])] == [False]
    assert target.call("Coordinator.SendHeartbeats", []) == []
    assert target.call("Coordinator.WatchEvents", pb.WatchEventsRequest(after=HUGE)) == []
    assert all(target.member(one["id"]).state == "alive" for one in target.devices)


def test_absurd_but_possible(target: Target) -> None:
    """What is large only in words is done."""
    for chunk in (4, 2**63, HUGE):
        request = run(algorithm="chunked_ring", chunk_bytes=chunk, count=1000)
        target.call("Coordinator.Run", built(request, target))
    target.call("Coordinator.Run", built(run(times=1024), target))
    target.call("Coordinator.Run", built(run(timeout_s=3600), target))


def test_a_seat_that_is_given_anew(target: Target) -> None:
    """A coordinator that forgot everything gives old names to new communicators; the old one must not answer."""
    communicator = next(fresh)
    before = seat(communicator_id=communicator)
    now = seat(communicator_id=communicator, members=[NOBODY])
    for place in (before, now):
        target.call("Device.AssignRank", pb.AssignRankRequest(assignment=place))
    target.call("Device.Launch", built(launch(at=now), target))
    with refused("UNAVAILABLE", words="does not answer"):
        target.call("Device.Launch", built(launch(at=before), target))


def test_a_launch_keeps_its_time_where_memory_is_shared(target: Target) -> None:
    """The others have a place for it but never come."""
    status = target.call("Coordinator.GetStatus", pb.GetStatusRequest())
    members = [{**NOBODY, "shared_address": one.device.shared_address} for one in status.devices[:3]]
    request = built(launch(at=seat(members=members), timeout_s=0.1), target)
    with refused("DEADLINE_EXCEEDED", words="passed its deadline"):
        target.call("Device.Launch", request, timeout=2)


# ---- devices that are none


def communicators(target: Target) -> list[int]:
    return [one.id for one in target.call("Coordinator.GetStatus", pb.GetStatusRequest()).communicators]


def test_a_device_that_is_not_there(target: Target) -> None:
    """CommInit that picks it fails at once, by its name, and nothing of the attempt stays; then it is dead."""
    before = communicators(target)
    joined = target.call("Coordinator.Join", join())
    with refused("UNAVAILABLE", words=f"device {joined.device_id} "):
        LabClient(target.coordinator, 4)
    target.wait_until_dead(joined.device_id)
    with refused("FAILED_PRECONDITION", words="4 were asked for, 3 are alive"):
        LabClient(target.coordinator, 4)
    assert communicators(target) == before
    check_all_reduce(target.coordinator)


def test_a_device_that_is_something_else(target: Target) -> None:
    """It answers, but not as a device does: here it is the coordinator itself."""
    before = communicators(target)
    joined = target.call("Coordinator.Join", join(address=target.cluster.address))
    for _ in range(3):
        with refused("UNAVAILABLE", words=f"device {joined.device_id}"):
            target.call("Coordinator.CreateCommunicator", create(1, joined.device_id))
    target.wait_until_dead(joined.device_id)
    with refused("FAILED_PRECONDITION", words="dead"):
        target.call("Coordinator.CreateCommunicator", create(1, joined.device_id))
    assert communicators(target) == before
    check_all_reduce(target.coordinator)


# ---- connections that are no calls

STRANGERS = {
    "http/1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100f1010000ed0303") + bytes(200),
    "noise": bytes(range(256)) * 64,
    "preface and noise": PREFACE + b"\xff" * 1000,
    "half a word": b"PR",
    "a frame's beginning": b"HOOP\x01\x01",
    "nothing": b"",
}


@pytest.mark.parametrize("door", ["coordinator", "device", "data"])
@pytest.mark.parametrize("words", STRANGERS)
def test_a_stranger_at_the_door(target: Target, words: str, door: str) -> None:
    first = target.devices[0]
    doors = {"coordinator": target.cluster.address, "device": first["address"], "data": first["data_address"]}
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stranger = stack.enter_context(connection(doors[door]))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(STRANGERS[words])
        check_all_reduce(target.coordinator)  # while they stand there


def connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


# ---- too much of everything


class Flood:
    """Calls that are opened and left open, as the fewest bytes of HTTP/2 that do so: ten thousand are cheap."""

    def __init__(self, address: str, path: str) -> None:
        self._socket = connection(address)
        self._socket.sendall(PREFACE + _frame(4))
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        # Each a literal that is never indexed: a zero, then name and value with their lengths.
        self._headers = b"".join(
            b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in header) for header in headers.items()
        )
        self._ids = itertools.count(1, 2)
        self._heard = b""
        self.ended = 0
        """How many of the calls the server has ended."""

    def open(self, calls: int) -> None:
        self._socket.sendall(b"".join(_frame(1, 4, next(self._ids), self._headers) for _ in range(calls)))

    def listen(self) -> None:
        """Takes in what the server has sent so far."""
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := self._socket.recv(2**20):
                self._heard += data
        self._socket.setblocking(True)
        while len(self._heard) >= 9 and len(self._heard) >= (size := 9 + int.from_bytes(self._heard[:3])):
            kind, flags = self._heard[3:5]
            self.ended += (kind == 1 and flags & 1) or kind == 3  # trailers, or a reset
            self._heard = self._heard[size:]

    def close(self) -> None:
        self._socket.close()


def _frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def open_streams(target: Target) -> int:
    return int(target.call("Device.Describe", pb.DescribeRequest()).open_streams)


def test_ten_thousand_open_streams(target: Target) -> None:
    """A device takes as many streams as it has room for, refuses the rest, and answers others meanwhile."""
    before = memory_of(target.pid)
    with contextlib.ExitStack() as stack:
        floods = [
            stack.enter_context(contextlib.closing(Flood(target.devices[0]["address"], STREAM_SEND))) for _ in range(4)
        ]
        for flood in floods * 5:
            flood.open(500)
            assert open_streams(target) <= 4096

        def rest_has_ended() -> bool:
            for flood in floods:
                flood.listen()
            return sum(one.ended for one in floods) >= 5904

        wait_for(rest_has_ended, "the rest")
        assert open_streams(target) == 4096
        with refused("RESOURCE_EXHAUSTED", words="4096 streams are open"):
            target.call("GPUDevice.StreamSend", [lab.DataChunk()])
        check_all_reduce(target.coordinator)
        assert memory_of(target.pid) - before < 300 * MIB
    wait_for(lambda: open_streams(target) == 0, "the end of the flood")


def test_a_burst_of_calls(target: Target) -> None:
    """More at once than gRPC itself keeps waiting: some calls are dropped, and then all is as before."""
    with contextlib.closing(Flood(target.cluster.address, "/hoop.v1.Coordinator/Attend")) as flood:
        flood.open(4096)

    def answers() -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(target.call("Coordinator.GetStatus", pb.GetStatusRequest()).pid)
        return False

    wait_for(answers, "an answer")
    check_all_reduce(target.coordinator)


def test_data_that_nobody_wants_yet(target: Target) -> None:
    """What waits for its BeginReceive is bounded in bytes, too; and what is refused is not kept."""
    send = Stub(target.device, LAB_DEVICE).StreamSend
    data = bytes(16 * MIB)

    def begin() -> Any:
        return send.future(iter([lab.DataChunk(data=data, streamId={"value": next(fresh)})]))

    calls: list[Any] = []
    with contextlib.ExitStack() as stack:
        for number in range(29):
            calls.append(begin())
            stack.callback(calls[-1].cancel)
            # Four are 64 MiB: of any more, one is refused.
            wait_for(lambda: sum(not call.done() for call in calls) <= 4, "a refusal")
            if number == 8:
                before = memory_of(target.pid)
        assert memory_of(target.pid) - before < 200 * MIB  # of the 320 MiB that came since
        ended = [call for call in calls if call.done()]
        assert len(ended) == 25
        for call in ended:
            check_refusal(call, "RESOURCE_EXHAUSTED", words="wait for their BeginReceive")
        check_all_reduce(target.coordinator)
    wait_for(lambda: open_streams(target) == 0, "the end of the data")
