"""Requests that are wrong in every way we could think of, and what is right to answer."""

from __future__ import annotations

import itertools
import math
from typing import Any

from lab_target import Target

from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

HUGE = 2**64 - 1
MIB = 2**20

Case = tuple[str, str, str, Any]
"""A method, the statuses that are right, what the sentence must name, and the request (see ``built``)."""


def ask(kind: Any, **fields: Any) -> Any:
    """A request to be made when it is known where things are."""
    return lambda to: kind(**built(fields, to))


def built(value: Any, to: Target) -> Any:
    """The value, with the functions in it replaced by what they return for this target."""
    if isinstance(value, dict):
        return {key: built(one, to) for key, one in value.items()}
    if isinstance(value, list):
        return [built(one, to) for one in value]
    return value(to) if callable(value) else value


def LOW(to: Target) -> int:
    return to.low


def END(to: Target) -> int:
    return to.high


def COMM(to: Target) -> int:
    return to.comm


def value(number: Any) -> dict[str, Any]:
    """An id, a rank or an address of the lab's."""
    return {"value": number}


def reduce_(address: Any = LOW, ranks: Any = range(3), **fields: Any) -> Any:
    """An all-reduce of one element a rank, right but for what is given."""

    def build(to: Target) -> lab.AllReduceRingRequest:
        request = lab.AllReduceRingRequest(**{"commId": to.comm, "count": 8, **fields})
        for rank in ranks:
            request.memAddrs[rank].value = built(address, to)
        return request

    return build


def to_device(data: bytes = b"12345678", device: int = 1, address: Any = LOW) -> Any:
    copy = {"hostSrcData": data, "dstDeviceId": value(device), "dstMemAddr": value(address)}
    return ask(lab.MemcpyRequest, hostToDevice=copy)


def to_host(size: int = 8, device: int = 1, address: Any = LOW) -> Any:
    copy = {"numBytes": size, "srcDeviceId": value(device), "srcMemAddr": value(address)}
    return ask(lab.MemcpyRequest, deviceToHost=copy)


def send(address: Any = LOW, size: int = 8, **fields: Any) -> Any:
    return ask(lab.BeginSendRequest, sendBuffAddr=value(address), numBytes=size, **fields)


def receive(stream: int = 77, address: Any = LOW, size: int = 8) -> Any:
    return ask(lab.BeginReceiveRequest, streamId=value(stream), recvBuffAddr=value(address), numBytes=size)


LAB_CASES: list[Case] = [
    ("GPUCoordinator.CommInit", "INVALID_ARGUMENT", "numDevices", lab.CommInitRequest()),
    ("GPUCoordinator.CommInit", "FAILED_PRECONDITION", "4294967295", lab.CommInitRequest(numDevices=2**32 - 1)),
    ("GPUCoordinator.GetCommStatus", "NOT_FOUND", str(HUGE), lab.GetCommStatusRequest(commId=HUGE)),
    ("GPUCoordinator.GroupStart", "NOT_FOUND", "0", lab.GroupStartRequest()),
    ("GPUCoordinator.GroupEnd", "FAILED_PRECONDITION", "GroupStart", ask(lab.GroupEndRequest, commId=COMM)),
    ("GPUCoordinator.AllReduceRing", "NOT_FOUND", "0", lab.AllReduceRingRequest()),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "op: 99", reduce_(op=99)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "op: -1", reduce_(op=-1)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "count", reduce_(count=7)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "count", reduce_(count=2**63)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "count", reduce_(count=2**64 - 8)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(count=2**50)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(0)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(2**64 - 8)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(2**64 - 8, count=16)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(lambda to: to.low - 8)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(END)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", reduce_(lambda to: to.high - 4)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "aligned", reduce_(lambda to: to.low + 4)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "rank 0", reduce_(ranks=())),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "4294967295", reduce_(ranks=(0, 1, 2, 2**32 - 1))),
    ("GPUCoordinator.Memcpy", "INVALID_ARGUMENT", "either", lab.MemcpyRequest()),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", "device 0", lab.MemcpyRequest(hostToDevice={})),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", "device 0", lab.MemcpyRequest(deviceToHost={})),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", str(HUGE), to_device(device=HUGE)),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", "99", to_host(device=99)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_device(address=0)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_device(address=lambda to: to.high - 7)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_device(b"x" * 16, address=2**64 - 8)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_host(address=lambda to: to.high - 7)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_host(16, address=2**64 - 8)),
    ("GPUCoordinator.Memcpy", "RESOURCE_EXHAUSTED", "numBytes", to_host(2**63)),
    ("GPUCoordinator.Memcpy", "RESOURCE_EXHAUSTED", "numBytes", to_host(HUGE, address=END)),
    ("GPUDevice.BeginSend", "OUT_OF_RANGE", "0x0", lab.BeginSendRequest()),
    ("GPUDevice.BeginSend", "INVALID_ARGUMENT", "rank", send(dstRank=value(2**32 - 1))),
    ("GPUDevice.BeginSend", "FAILED_PRECONDITION", str(HUGE), send(commId=HUGE)),
    ("GPUDevice.BeginSend", "OUT_OF_RANGE", "address", send(size=2**63)),
    ("GPUDevice.BeginSend", "OUT_OF_RANGE", "address", send(address=2**64 - 8, size=16)),
    ("GPUDevice.BeginReceive", "INVALID_ARGUMENT", "streamId", lab.BeginReceiveRequest()),
    ("GPUDevice.BeginReceive", "OUT_OF_RANGE", "address", receive(address=0)),
    ("GPUDevice.BeginReceive", "OUT_OF_RANGE", "address", receive(HUGE, size=HUGE)),
    ("GPUDevice.GetStreamStatus", "INVALID_ARGUMENT", "streamId", lab.GetStreamStatusRequest()),
    ("GPUDevice.GetStreamStatus", "NOT_FOUND", str(HUGE), lab.GetStreamStatusRequest(streamId=value(HUGE))),
    ("GPUDevice.StreamSend", "INVALID_ARGUMENT", "first chunk", []),
]  # fmt: skip

OPERATION = {"collective": "all_reduce", "dtype": "float32", "op": "sum", "count": 4}
NOBODY = {"address": "127.0.0.1:1", "data_address": "127.0.0.1:1", "incarnation": "nobody"}
NOBODY |= {"min_address": 4096, "max_address": 8192}  # type: ignore[dict-item]


HERE = {"address": LOW}


def run(place: Any = HERE, ranks: Any = range(3), times: int = 1, driver: str = "", **fields: Any) -> Any:
    """An all-reduce by Hoop's own call, right but for the fields of its operation."""
    request: dict[str, Any] = {key: fields.pop(key) for key in ("timeout_s", "communicator_id") if key in fields}

    def build(to: Target) -> pb.RunRequest:
        one = pb.RunOperation(operation={**OPERATION, **fields}, driver=driver)
        for rank in ranks:
            one.operands[rank].source.CopyFrom(pb.Location(**built(place, to)))
        return pb.RunRequest(**{"communicator_id": to.comm, "operations": [one] * times, **request})

    return build


def join(**fields: Any) -> Any:
    """A device that could join, but for what is given."""
    return pb.JoinRequest(device={**NOBODY, **fields})


def create(*device_ids: int, devices: int = 0) -> Any:
    return pb.CreateCommunicatorRequest(device_ids=device_ids, devices=devices)


def start_job(settings: str, resume: str = "") -> Any:
    return pb.StartJobRequest(settings=settings, resume=resume, device_ids=[HUGE])


def copy(**fields: Any) -> Any:
    plain = {"source_device": 1, "destination_device": 2, "bytes": 8}
    places = {"source": {"address": LOW}, "destination": {"address": LOW}}
    return ask(pb.CopyRequest, **{**plain, **places, **fields})


TIMES = [-1.0, -0.001, math.nan, math.inf, -math.inf, 1e308, 3601.0]
NAMES = [
    "nonsense",
    "SUM",
    "all_reduce\0",
    "x" * MIB,
    "é" * 1000,
    "\N{ROCKET}" * 9999,
    "'); DROP TABLE devices; --",
]
NO_ADDRESSES = ["", "nowhere", ":80", "host:", "host:99999", "host:-1", "host:²", "host:80:", "x" * MIB]

COORDINATOR_CASES: list[Case] = [
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", pb.JoinRequest()),
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", join(min_address=8192, max_address=4096)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", join(min_address=0)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", join(max_address=HUGE)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "incarnation", join(incarnation="")),
    ("Coordinator.Join", "INVALID_ARGUMENT", "incarnation", join(incarnation="x" * 65)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "host", join(host="x" * 1000)),
    *(("Coordinator.Join", "INVALID_ARGUMENT", "address", join(address=text)) for text in NO_ADDRESSES),
    *(("Coordinator.Join", "INVALID_ARGUMENT", "data_address", join(data_address=text)) for text in NO_ADDRESSES),
    ("Coordinator.Join", "FAILED_PRECONDITION", "in use", join(device_id=1)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "device_id", join(device_id=HUGE)),
    ("Coordinator.GetCommunicator", "NOT_FOUND", "0", pb.GetCommunicatorRequest()),
    ("Coordinator.RebuildCommunicator", "NOT_FOUND", str(HUGE), pb.RebuildCommunicatorRequest(id=HUGE)),
    ("Coordinator.DestroyCommunicator", "NOT_FOUND", str(HUGE), pb.DestroyCommunicatorRequest(id=HUGE)),
    ("Coordinator.CreateCommunicator", "INVALID_ARGUMENT", "devices", create()),
    ("Coordinator.CreateCommunicator", "FAILED_PRECONDITION", "devices", create(devices=2**32 - 1)),
    ("Coordinator.CreateCommunicator", "NOT_FOUND", str(HUGE), create(1, HUGE)),
    ("Coordinator.CreateCommunicator", "INVALID_ARGUMENT", "twice", create(1, 1)),
    *(
        ("Coordinator.CreateCommunicator", "INVALID_ARGUMENT", "session", pb.CreateCommunicatorRequest(session=name))
        for name in NAMES
    ),
    *(
        ("Coordinator.KeepSession", "INVALID_ARGUMENT", "session", pb.KeepSessionRequest(session=name))
        for name in NAMES
    ),
    *(("Coordinator.StartJob", "INVALID_ARGUMENT", "settings", start_job(text)) for text in ("", "[]", "x" * MIB)),
    ("Coordinator.StartJob", "INVALID_ARGUMENT", "resume", start_job("{}", "x" * MIB)),
    ("Coordinator.StartJob", "NOT_FOUND", str(HUGE), start_job("{}")),
    ("Coordinator.GetJob", "NOT_FOUND", str(HUGE), pb.GetJobRequest(job_id=HUGE)),
    ("Coordinator.CreateCommunicator", "INVALID_ARGUMENT", "device_ids", create(*[HUGE] * 100_000)),
    ("Coordinator.Run", "NOT_FOUND", "0", pb.RunRequest()),
    ("Coordinator.Run", "NOT_FOUND", str(HUGE), run(communicator_id=HUGE)),
    ("Coordinator.Run", "INVALID_ARGUMENT", "operations", run(times=1025)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "timeout_s", run(timeout_s=time)) for time in TIMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "collective", run(collective=name)) for name in ("", *NAMES)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "dtype", run(dtype=name)) for name in NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "op", run(op=name)) for name in NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "algorithm", run(algorithm=name)) for name in NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "driver", run(driver=name)) for name in NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "root", run(root=rank)) for rank in (3, 2**32 - 1)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "peer", run(peer=rank)) for rank in (3, 2**32 - 1)),
    ("Coordinator.Run", "INVALID_ARGUMENT", "chunk_bytes", run(chunk_bytes=1)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "compression", run(compression=name)) for name in NAMES),
    ("Coordinator.Run", "INVALID_ARGUMENT", "block", run(compression="int8:99999999999999")),
    ("Coordinator.Run", "INVALID_ARGUMENT", "compression", run(compression="int8", collective="barrier")),
    ("Coordinator.Run", "INVALID_ARGUMENT", "driver", run(compression="int8", driver="relay")),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "count", run(count=count)) for count in (2**48 + 1, 2**63, HUGE)),
    ("Coordinator.Run", "OUT_OF_RANGE", "rank 0", run(count=2**48)),
    ("Coordinator.Run", "OUT_OF_RANGE", "rank 0", run(count=2**48, collective="all_to_all")),
    ("Coordinator.Run", "INVALID_ARGUMENT", "rank 1", run(ranks=[0])),
    ("Coordinator.Run", "INVALID_ARGUMENT", "7", run(ranks=[0, 1, 2, 7])),
    ("Coordinator.Run", "INVALID_ARGUMENT", "location", run({})),
    ("Coordinator.Run", "NOT_FOUND", "no-such", run({"buffer": "no-such"})),
    ("Coordinator.Run", "NOT_FOUND", "buffer", run({"buffer": "", "offset": HUGE})),
    ("Coordinator.Run", "OUT_OF_RANGE", "rank 0", run({"address": LOW, "offset": HUGE})),
    ("Coordinator.Run", "OUT_OF_RANGE", "rank 0", run({"address": HUGE, "offset": HUGE})),
    ("Coordinator.Run", "INVALID_ARGUMENT", "aligned", run({"address": LOW, "offset": 2})),
    ("Coordinator.Copy", "NOT_FOUND", "device 0", pb.CopyRequest()),
    ("Coordinator.Copy", "NOT_FOUND", str(HUGE), copy(destination_device=HUGE)),
    ("Coordinator.Copy", "OUT_OF_RANGE", "rank 0", copy(source={"address": HUGE})),
    ("Coordinator.Copy", "OUT_OF_RANGE", "rank 1", copy(destination={"address": lambda to: to.high - 4})),
    ("Coordinator.Copy", "INVALID_ARGUMENT", "count", copy(bytes=2**63)),
    ("Coordinator.Copy", "OUT_OF_RANGE", "rank 0", copy(bytes=2**40)),
    ("Coordinator.Copy", "INVALID_ARGUMENT", "location", copy(source={})),
    ("Coordinator.Copy", "NOT_FOUND", "no-such", copy(destination={"buffer": "no-such"})),
]  # fmt: skip

fresh = itertools.count(2**50)
"""Ids of communicators that only the device hears of."""


def seat(**fields: Any) -> pb.RankAssignment:
    return pb.RankAssignment(**{"communicator_id": next(fresh), "generation": 1, "members": [NOBODY, NOBODY], **fields})


def beside(host: str) -> pb.RankAssignment:
    """A seat beside a member that is said to be at this host."""
    return seat(members=[NOBODY, {**NOBODY, "data_address": f"{host}:80"}])


def launch(times: int = 1, at: Any = None, timeout_s: float = 0.2, round: Any = None, **fields: Any) -> Any:  # noqa: A002
    """Rank 0 of two, of which the other does not exist; right but for the fields of its operation."""

    def build(to: Target) -> pb.LaunchRequest:
        operand = {"source": {"address": to.low}}
        one = pb.LaunchOperation(operation={**OPERATION, **fields}, operand=operand, round=round)
        return pb.LaunchRequest(assignment=at or seat(), operations=[one] * times, timeout_s=timeout_s)

    return build


def reserve(**fields: Any) -> Any:
    """A reservation of a few bytes that lapses soon, right but for what is given."""
    plain = {"reservation_id": next(fresh), "timeout_s": 0.05, "ranges": [{"location": HERE, "bytes": 8}]}
    return ask(pb.ReserveRequest, **{**plain, **fields})


def write(*parts: tuple[Any, bytes]) -> Any:
    """A stream of places and data."""
    return [ask(pb.WriteRequest, location=place, data=data) for place, data in parts]


def read(place: Any, size: int) -> Any:
    return ask(pb.ReadRequest, location=place, bytes=size)


def allocate(name: str, size: int = 8, alignment: int = 0) -> Any:
    return pb.AllocateRequest(name=name, bytes=size, alignment=alignment)


NO_HOSTS = ["a" * 64, "a..b", "x" * 5000, "."]  # no resolver is asked for these
LAST = {"address": lambda to: to.high - 1}

DEVICE_CASES: list[Case] = [
    ("Device.Allocate", "INVALID_ARGUMENT", "name", allocate("")),
    ("Device.Allocate", "INVALID_ARGUMENT", "name", allocate("x" * MIB)),
    ("Device.Allocate", "RESOURCE_EXHAUSTED", "", allocate("a", 2**40)),
    ("Device.Allocate", "RESOURCE_EXHAUSTED INVALID_ARGUMENT", "", allocate("a", HUGE)),
    ("Device.Allocate", "INVALID_ARGUMENT", "alignment", allocate("a", alignment=3)),
    ("Device.Allocate", "INVALID_ARGUMENT", "alignment", allocate("a", alignment=2**31)),
    ("Device.Free", "NOT_FOUND", "buffer", pb.FreeRequest()),
    ("Device.Free", "NOT_FOUND", "buffer", pb.FreeRequest(name="x" * MIB)),
    ("Device.Write", "INVALID_ARGUMENT", "location", []),
    ("Device.Write", "INVALID_ARGUMENT", "location", write((None, b"x"))),
    ("Device.Write", "INVALID_ARGUMENT", "location", write(({"address": LOW}, b"x"), ({}, b"x"))),
    ("Device.Write", "OUT_OF_RANGE", "", write((LAST, b"xx"))),
    ("Device.Write", "OUT_OF_RANGE", "", write((LAST, b"x"), (None, b"x"))),
    ("Device.Write", "OUT_OF_RANGE", "", write(({"address": 2**64 - 8}, b"x" * 16))),
    ("Device.Write", "OUT_OF_RANGE INVALID_ARGUMENT", "", write(({"address": HUGE, "offset": HUGE}, b"x"))),
    ("Device.Write", "NOT_FOUND", "no-such", write(({"buffer": "no-such"}, b"x"))),
    ("Device.Read", "INVALID_ARGUMENT", "location", read(None, 8)),
    ("Device.Read", "OUT_OF_RANGE", "", read({"address": LOW}, 2**63)),
    ("Device.Read", "OUT_OF_RANGE", "", read({"address": 2**64 - 8}, 16)),
    ("Device.Read", "OUT_OF_RANGE INVALID_ARGUMENT", "", read({"address": 8, "offset": HUGE}, HUGE)),
    ("Device.Read", "NOT_FOUND", "no-such", read({"buffer": "no-such"}, 8)),
    ("Device.AssignRank", "INVALID_ARGUMENT", "assignment: rank 0 of 0", pb.AssignRankRequest()),
    ("Device.AssignRank", "INVALID_ARGUMENT", "rank", pb.AssignRankRequest(assignment=seat(members=[]))),
    ("Device.AssignRank", "INVALID_ARGUMENT", "rank", pb.AssignRankRequest(assignment=seat(rank=2))),
    ("Device.AssignRank", "INVALID_ARGUMENT", "memory", pb.AssignRankRequest(assignment=seat(members=[{}]))),
    (
        "Device.AssignRank",
        "INVALID_ARGUMENT",
        "members",
        pb.AssignRankRequest(assignment=seat(members=[NOBODY] * 5000)),
    ),
    *(("Device.Launch", "INVALID_ARGUMENT", "timeout_s", launch(timeout_s=time)) for time in (0.0, *TIMES)),
    *(("Device.Launch", "INVALID_ARGUMENT", "collective", launch(collective=name)) for name in NAMES),
    *(("Device.Launch", "INVALID_ARGUMENT", "dtype", launch(dtype=name)) for name in NAMES),
    ("Device.Launch", "INVALID_ARGUMENT", "root", launch(root=2)),
    ("Device.Launch", "INVALID_ARGUMENT", "operation 1 of 2", launch(2, op="nonsense")),
    ("Device.Launch", "INVALID_ARGUMENT", "operations", launch(1025)),
    ("Device.Launch", "INVALID_ARGUMENT", "round", launch(round=2**32 - 1)),
    ("Device.Launch", "INVALID_ARGUMENT", "assignment: rank 0 of 0", pb.LaunchRequest(timeout_s=1)),
    ("Device.Launch", "INVALID_ARGUMENT", "count", launch(count=2**63)),
    ("Device.Launch", "OUT_OF_RANGE", "", launch(count=2**48)),
    ("Device.Launch", "UNAVAILABLE", "does not answer", launch()),
    *(("Device.Reserve", "INVALID_ARGUMENT", "timeout_s", reserve(timeout_s=time)) for time in (0.0, *TIMES)),
    ("Device.Reserve", "INVALID_ARGUMENT", "reservation_id", reserve(reservation_id=0)),
    ("Device.Reserve", "INVALID_ARGUMENT", "ranges", reserve(ranges=[{}] * 5000)),
    ("Device.Reserve", "INVALID_ARGUMENT", "location", reserve(ranges=[{}])),
    ("Device.Reserve", "OUT_OF_RANGE", "", reserve(ranges=[{"location": LAST, "bytes": 2}])),
    ("Device.Reserve", "OUT_OF_RANGE", "", reserve(ranges=[{"location": HERE, "bytes": HUGE}])),
    ("Device.Reserve", "NOT_FOUND", "no-such", reserve(ranges=[{"location": {"buffer": "no-such"}, "bytes": 1}])),
    *(("Device.Launch", "UNAVAILABLE INVALID_ARGUMENT", "", launch(at=beside(host))) for host in NO_HOSTS),
]  # fmt: skip

ALL = [*LAB_CASES, *COORDINATOR_CASES, *DEVICE_CASES]
