"""Invalid requests for every method, each with the status codes and the message that are expected."""

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
"""Method, expected status codes, pattern that the message must match, and the request (see ``resolve``)."""


def deferred(kind: Any, **fields: Any) -> Any:
    """A request that is built once the target's addresses are known."""
    return lambda target: kind(**resolve(fields, target))


def resolve(value: Any, target: Target) -> Any:
    """The value, with each function in it replaced by its result for this target."""
    if isinstance(value, dict):
        return {key: resolve(one, target) for key, one in value.items()}
    if isinstance(value, list):
        return [resolve(one, target) for one in value]
    return value(target) if callable(value) else value


def LOW(target: Target) -> int:
    return target.low


def END(target: Target) -> int:
    return target.high


def COMM(target: Target) -> int:
    return target.comm


def value(number: Any) -> dict[str, Any]:
    """A wrapped id, rank or address of the lab's protocol."""
    return {"value": number}


def all_reduce(address: Any = LOW, ranks: Any = range(3), **fields: Any) -> Any:
    """An all-reduce of one element per rank of the lab's protocol, valid except for the arguments."""

    def build(target: Target) -> lab.AllReduceRingRequest:
        request = lab.AllReduceRingRequest(**{"commId": target.comm, "count": 8, **fields})
        for rank in ranks:
            request.memAddrs[rank].value = resolve(address, target)
        return request

    return build


def to_device(data: bytes = b"12345678", device: int = 1, address: Any = LOW) -> Any:
    copy = {"hostSrcData": data, "dstDeviceId": value(device), "dstMemAddr": value(address)}
    return deferred(lab.MemcpyRequest, hostToDevice=copy)


def to_host(size: int = 8, device: int = 1, address: Any = LOW) -> Any:
    copy = {"numBytes": size, "srcDeviceId": value(device), "srcMemAddr": value(address)}
    return deferred(lab.MemcpyRequest, deviceToHost=copy)


def send(address: Any = LOW, size: int = 8, **fields: Any) -> Any:
    return deferred(lab.BeginSendRequest, sendBuffAddr=value(address), numBytes=size, **fields)


def receive(stream: int = 77, address: Any = LOW, size: int = 8) -> Any:
    return deferred(lab.BeginReceiveRequest, streamId=value(stream), recvBuffAddr=value(address), numBytes=size)


def remove(**fields: Any) -> Any:
    return deferred(lab.CommRemoveDeviceRequest, commId=COMM, **fields)


def set_up(addresses: dict[int, str], rank: int = 0) -> Any:
    return lab.SetupCommunicationRequest(rankToAddress=addresses, rank=value(rank))


BAD_ADDRESSES = ["", "nowhere", ":80", "host:", "host:99999", "host:-1", "host:²", "host:80:", "x" * MIB]

LAB_CASES: list[Case] = [
    ("GPUCoordinator.CommInit", "INVALID_ARGUMENT", "numDevices", lab.CommInitRequest()),
    ("GPUCoordinator.CommInit", "FAILED_PRECONDITION", "4294967295", lab.CommInitRequest(numDevices=2**32 - 1)),
    ("GPUCoordinator.GetCommStatus", "NOT_FOUND", str(HUGE), lab.GetCommStatusRequest(commId=HUGE)),
    ("GPUCoordinator.GroupStart", "NOT_FOUND", "0", lab.GroupStartRequest()),
    ("GPUCoordinator.GroupEnd", "FAILED_PRECONDITION", "GroupStart", deferred(lab.GroupEndRequest, commId=COMM)),
    ("GPUCoordinator.AllReduceRing", "NOT_FOUND", "0", lab.AllReduceRingRequest()),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "op: 99", all_reduce(op=99)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "op: -1", all_reduce(op=-1)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "count", all_reduce(count=7)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "count", all_reduce(count=2**63)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "count", all_reduce(count=2**64 - 8)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(count=2**50)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(0)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(2**64 - 8)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(2**64 - 8, count=16)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(lambda target: target.low - 8)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(END)),
    ("GPUCoordinator.AllReduceRing", "OUT_OF_RANGE", "rank 0", all_reduce(lambda target: target.high - 4)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "aligned", all_reduce(lambda target: target.low + 4)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "memAddrs: it is missing", all_reduce(ranks=())),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "memAddrs: it is missing", all_reduce(ranks=(), count=0)),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "memAddrs: rank 1 has no", all_reduce(ranks=(0, 2))),
    ("GPUCoordinator.AllReduceRing", "INVALID_ARGUMENT", "4294967295", all_reduce(ranks=(0, 1, 2, 2**32 - 1))),
    ("GPUCoordinator.Memcpy", "INVALID_ARGUMENT", "either", lab.MemcpyRequest()),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", "device 0", lab.MemcpyRequest(hostToDevice={})),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", "device 0", lab.MemcpyRequest(deviceToHost={})),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", str(HUGE), to_device(device=HUGE)),
    ("GPUCoordinator.Memcpy", "NOT_FOUND", "99", to_host(device=99)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_device(address=0)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_device(address=lambda target: target.high - 7)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_device(b"x" * 16, address=2**64 - 8)),
    ("GPUCoordinator.Memcpy", "OUT_OF_RANGE", "device 1", to_host(address=lambda target: target.high - 7)),
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
    ("GPUDevice.BeginReceive", "INVALID_ARGUMENT", "op: 3: .* starter", deferred(lab.BeginReceiveRequest, op=3)),
    ("GPUDevice.Memcpy", "INVALID_ARGUMENT", "either", lab.MemcpyRequest()),
    ("GPUDevice.Memcpy", "NOT_FOUND", "dstDeviceId: 2 is not this device", to_device(device=2)),
    ("GPUDevice.Memcpy", "NOT_FOUND", str(HUGE), to_host(device=HUGE)),
    ("GPUDevice.Memcpy", "OUT_OF_RANGE", "address", to_device(address=lambda target: target.high - 7)),
    ("GPUDevice.Memcpy", "OUT_OF_RANGE", "address", to_host(16, address=2**64 - 8)),
    ("GPUDevice.Memcpy", "RESOURCE_EXHAUSTED", "numBytes", to_host(HUGE, address=END)),
    ("GPUDevice.SetupCommunication", "INVALID_ARGUMENT", "rankToAddress", lab.SetupCommunicationRequest()),
    ("GPUDevice.SetupCommunication", "INVALID_ARGUMENT", "rankToAddress", set_up({1: "127.0.0.1:1"})),
    ("GPUDevice.SetupCommunication", "INVALID_ARGUMENT", "rank: 4294967295", set_up({0: "127.0.0.1:1"}, 2**32 - 1)),
    ("GPUDevice.SetupCommunication", "INVALID_ARGUMENT", "4096", set_up(dict.fromkeys(range(5000), "127.0.0.1:1"))),
    *(("GPUDevice.SetupCommunication", "INVALID_ARGUMENT", "host:port", set_up({0: text})) for text in BAD_ADDRESSES),
    ("GPUCoordinator.AllReduce", "NOT_FOUND", "0", lab.AllReduceRequest()),
    ("GPUCoordinator.CommRemoveDevice", "NOT_FOUND", str(HUGE), lab.CommRemoveDeviceRequest(commId=HUGE)),
    ("GPUCoordinator.CommRemoveDevice", "INVALID_ARGUMENT", "rank: missing", remove()),
    ("GPUCoordinator.CommRemoveDevice", "INVALID_ARGUMENT", "rank: 3", remove(rank=value(3))),
]  # fmt: skip

OPERATION = {"collective": "all_reduce", "dtype": "float32", "op": "sum", "count": 4}
UNREACHABLE = {"address": "127.0.0.1:1", "data_address": "127.0.0.1:1", "incarnation": "nobody"}
UNREACHABLE |= {"min_address": 4096, "max_address": 8192}  # type: ignore[dict-item]


FIRST = {"address": LOW}


def run(location: Any = FIRST, ranks: Any = range(3), times: int = 1, driver: str = "", **fields: Any) -> Any:
    """An all-reduce of Hoop's own protocol, valid except for the arguments."""
    request: dict[str, Any] = {key: fields.pop(key) for key in ("timeout_s", "communicator_id") if key in fields}

    def build(target: Target) -> pb.RunRequest:
        operation = pb.RunOperation(operation={**OPERATION, **fields}, driver=driver)
        for rank in ranks:
            operation.operands[rank].source.CopyFrom(pb.Location(**resolve(location, target)))
        return pb.RunRequest(**{"communicator_id": target.comm, "operations": [operation] * times, **request})

    return build


def join(**fields: Any) -> Any:
    """A join request, valid except for the arguments."""
    return pb.JoinRequest(device={**UNREACHABLE, **fields})


def create(*device_ids: int, devices: int = 0) -> Any:
    return pb.CreateCommunicatorRequest(device_ids=device_ids, devices=devices)


def start_job(settings: str, resume: str = "") -> Any:
    return pb.StartJobRequest(settings=settings, resume=resume, device_ids=[HUGE])


def copy(**fields: Any) -> Any:
    valid = {"source_device": 1, "destination_device": 2, "bytes": 8}
    locations = {"source": {"address": LOW}, "destination": {"address": LOW}}
    return deferred(pb.CopyRequest, **{**valid, **locations, **fields})


BAD_TIMEOUTS = [-1.0, -0.001, math.nan, math.inf, -math.inf, 1e308, 3601.0]
BAD_NAMES = [
    "nonsense",
    "SUM",
    "all_reduce\0",
    "x" * MIB,
    "é" * 1000,
    "\N{ROCKET}" * 9999,
    "'); DROP TABLE devices; --",
]

COORDINATOR_CASES: list[Case] = [
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", pb.JoinRequest()),
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", join(min_address=8192, max_address=4096)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", join(min_address=0)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "memory", join(max_address=HUGE)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "incarnation", join(incarnation="")),
    ("Coordinator.Join", "INVALID_ARGUMENT", "incarnation", join(incarnation="x" * 65)),
    ("Coordinator.Join", "INVALID_ARGUMENT", "host", join(host="x" * 1000)),
    *(("Coordinator.Join", "INVALID_ARGUMENT", "address", join(address=text)) for text in BAD_ADDRESSES),
    *(("Coordinator.Join", "INVALID_ARGUMENT", "data_address", join(data_address=text)) for text in BAD_ADDRESSES),
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
        for name in BAD_NAMES
    ),
    *(
        ("Coordinator.KeepSession", "INVALID_ARGUMENT", "session", pb.KeepSessionRequest(session=name))
        for name in BAD_NAMES
    ),
    *(("Coordinator.StartJob", "INVALID_ARGUMENT", "settings", start_job(text)) for text in ("", "[]", "x" * MIB)),
    ("Coordinator.StartJob", "INVALID_ARGUMENT", "resume", start_job("{}", "x" * MIB)),
    ("Coordinator.StartJob", "NOT_FOUND", str(HUGE), start_job("{}")),
    ("Coordinator.GetJob", "NOT_FOUND", str(HUGE), pb.GetJobRequest(job_id=HUGE)),
    ("Coordinator.CreateCommunicator", "INVALID_ARGUMENT", "device_ids", create(*[HUGE] * 100_000)),
    ("Coordinator.Run", "NOT_FOUND", "0", pb.RunRequest()),
    ("Coordinator.Run", "NOT_FOUND", str(HUGE), run(communicator_id=HUGE)),
    ("Coordinator.Run", "INVALID_ARGUMENT", "operations", run(times=1025)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "timeout_s", run(timeout_s=time)) for time in BAD_TIMEOUTS),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "collective", run(collective=name)) for name in ("", *BAD_NAMES)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "dtype", run(dtype=name)) for name in BAD_NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "op", run(op=name)) for name in BAD_NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "algorithm", run(algorithm=name)) for name in BAD_NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "driver", run(driver=name)) for name in BAD_NAMES),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "root", run(root=rank)) for rank in (3, 2**32 - 1)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "peer", run(peer=rank)) for rank in (3, 2**32 - 1)),
    ("Coordinator.Run", "INVALID_ARGUMENT", "chunk_bytes", run(chunk_bytes=1)),
    *(("Coordinator.Run", "INVALID_ARGUMENT", "compression", run(compression=name)) for name in BAD_NAMES),
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
    ("Coordinator.Copy", "OUT_OF_RANGE", "rank 1", copy(destination={"address": lambda target: target.high - 4})),
    ("Coordinator.Copy", "INVALID_ARGUMENT", "count", copy(bytes=2**63)),
    ("Coordinator.Copy", "OUT_OF_RANGE", "rank 0", copy(bytes=2**40)),
    ("Coordinator.Copy", "INVALID_ARGUMENT", "location", copy(source={})),
    ("Coordinator.Copy", "NOT_FOUND", "no-such", copy(destination={"buffer": "no-such"})),
]  # fmt: skip

unused_ids = itertools.count(2**50)
"""Ids of communicators and reservations that the coordinator does not know."""


def rank_assignment(**fields: Any) -> pb.RankAssignment:
    return pb.RankAssignment(
        **{"communicator_id": next(unused_ids), "generation": 1, "members": [UNREACHABLE, UNREACHABLE], **fields}
    )


def assignment_with_peer(host: str) -> pb.RankAssignment:
    """An assignment whose other member is at this host."""
    return rank_assignment(members=[UNREACHABLE, {**UNREACHABLE, "data_address": f"{host}:80"}])


def launch(times: int = 1, assignment: Any = None, timeout_s: float = 0.2, round: Any = None, **fields: Any) -> Any:  # noqa: A002
    """A launch on rank 0 of two, of which rank 1 does not exist; valid except for the arguments."""

    def build(target: Target) -> pb.LaunchRequest:
        operand = {"source": {"address": target.low}}
        operation = pb.LaunchOperation(operation={**OPERATION, **fields}, operand=operand, round=round)
        return pb.LaunchRequest(
            assignment=assignment or rank_assignment(), operations=[operation] * times, timeout_s=timeout_s
        )

    return build


def reserve(**fields: Any) -> Any:
    """A reservation of a few bytes that expires soon, valid except for the arguments."""
    valid = {"reservation_id": next(unused_ids), "timeout_s": 0.05, "ranges": [{"location": FIRST, "bytes": 8}]}
    return deferred(pb.ReserveRequest, **{**valid, **fields})


def write(*parts: tuple[Any, bytes]) -> Any:
    """A stream of locations and data."""
    return [deferred(pb.WriteRequest, location=location, data=data) for location, data in parts]


def read(location: Any, size: int) -> Any:
    return deferred(pb.ReadRequest, location=location, bytes=size)


def allocate(name: str, size: int = 8, alignment: int = 0) -> Any:
    return pb.AllocateRequest(name=name, bytes=size, alignment=alignment)


BAD_HOSTS = ["a" * 64, "a..b", "x" * 5000, "."]  # rejected before a name lookup
LAST = {"address": lambda target: target.high - 1}

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
    ("Device.AssignRank", "INVALID_ARGUMENT", "rank", pb.AssignRankRequest(assignment=rank_assignment(members=[]))),
    ("Device.AssignRank", "INVALID_ARGUMENT", "rank", pb.AssignRankRequest(assignment=rank_assignment(rank=2))),
    ("Device.AssignRank", "INVALID_ARGUMENT", "memory", pb.AssignRankRequest(assignment=rank_assignment(members=[{}]))),
    (
        "Device.AssignRank",
        "INVALID_ARGUMENT",
        "members",
        pb.AssignRankRequest(assignment=rank_assignment(members=[UNREACHABLE] * 5000)),
    ),
    *(("Device.Launch", "INVALID_ARGUMENT", "timeout_s", launch(timeout_s=time)) for time in (0.0, *BAD_TIMEOUTS)),
    *(("Device.Launch", "INVALID_ARGUMENT", "collective", launch(collective=name)) for name in BAD_NAMES),
    *(("Device.Launch", "INVALID_ARGUMENT", "dtype", launch(dtype=name)) for name in BAD_NAMES),
    ("Device.Launch", "INVALID_ARGUMENT", "root", launch(root=2)),
    ("Device.Launch", "INVALID_ARGUMENT", "operation 1 of 2", launch(2, op="nonsense")),
    ("Device.Launch", "INVALID_ARGUMENT", "operations", launch(1025)),
    ("Device.Launch", "INVALID_ARGUMENT", "round", launch(round=2**32 - 1)),
    ("Device.Launch", "INVALID_ARGUMENT", "assignment: rank 0 of 0", pb.LaunchRequest(timeout_s=1)),
    ("Device.Launch", "INVALID_ARGUMENT", "count", launch(count=2**63)),
    ("Device.Launch", "OUT_OF_RANGE", "", launch(count=2**48)),
    ("Device.Launch", "UNAVAILABLE", "does not answer", launch()),
    *(("Device.Reserve", "INVALID_ARGUMENT", "timeout_s", reserve(timeout_s=time)) for time in (0.0, *BAD_TIMEOUTS)),
    ("Device.Reserve", "INVALID_ARGUMENT", "reservation_id", reserve(reservation_id=0)),
    ("Device.Reserve", "INVALID_ARGUMENT", "ranges", reserve(ranges=[{}] * 5000)),
    ("Device.Reserve", "INVALID_ARGUMENT", "location", reserve(ranges=[{}])),
    ("Device.Reserve", "OUT_OF_RANGE", "", reserve(ranges=[{"location": LAST, "bytes": 2}])),
    ("Device.Reserve", "OUT_OF_RANGE", "", reserve(ranges=[{"location": FIRST, "bytes": HUGE}])),
    ("Device.Reserve", "NOT_FOUND", "no-such", reserve(ranges=[{"location": {"buffer": "no-such"}, "bytes": 1}])),
    *(
        ("Device.Launch", "UNAVAILABLE INVALID_ARGUMENT", "", launch(assignment=assignment_with_peer(host)))
        for host in BAD_HOSTS
    ),
]  # fmt: skip

ALL = [*LAB_CASES, *COORDINATOR_CASES, *DEVICE_CASES]
