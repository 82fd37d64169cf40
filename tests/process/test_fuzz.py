"""Fuzzing of every method of all four services: random messages built from descriptors, and mutated message bytes.

Each call must return an answer or an allowed status within its timeout; the servers must survive, and the next valid
all-reduce be correct. By default a method gets a few examples, always the same, and in the slow tests many.
``HOOP_FUZZ_EXAMPLES=5000`` runs as many, with a new seed each time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from lab_cluster import LabClient, check_all_reduce, check_refusal
from lab_target import METHODS, Target, running_target

from hoop.collectives.registry import CATALOG
from hoop.wire.generated import hoop_pb2 as pb

EXAMPLES = int(os.environ.get("HOOP_FUZZ_EXAMPLES", "12"))
FEW_AND_MANY = [EXAMPLES, pytest.param(8 * EXAMPLES, marks=pytest.mark.slow)]
"""Examples of a method, per test."""
DEADLINE_S = 120.0
CODES = (
    "INVALID_ARGUMENT",
    "OUT_OF_RANGE",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "ABORTED",
    "DATA_LOSS",
)
# Calls that wait by design, e.g. for the peer of a transfer or the next event.
WAITING_CALL_TIMEOUTS_S = {
    "GPUDevice.StreamSend": 0.1,
    "Coordinator.WatchEvents": 0.1,
    "Coordinator.WatchJob": 0.1,
    "Coordinator.KeepSession": 0.1,
    "Coordinator.ExamineHosts": 0.1,  # a process that loads PyTorch, on every host
    "Device.Examine": 0.1,
    "Device.WatchTask": 0.1,
}

fuzz_settings = settings(
    deadline=None,
    database=None,
    derandomize="HOOP_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

# ---- messages from descriptors

EDGES = sorted({edge for bits in (0, 3, 8, 12, 31, 32, 48, 63, 64) for edge in (2**bits - 1, 2**bits, 2**bits + 1)})
RANGES = {
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "enum": (-1, 99),
}
KINDS = {number: name[5:].lower() for name, number in FieldDescriptorProto.Type.items()}
ALGORITHMS = sorted({name for one in CATALOG.values() for name in one.algorithms})

absurd_percentage = st.shared(st.sampled_from([2, 0, 5, 20]), key="boldness")
"""How many percent of a request's fields are absurd; few, because otherwise every request fails the first check."""


@st.composite
def mostly(draw: Any, plausible: st.SearchStrategy[Any], absurd: st.SearchStrategy[Any]) -> Any:
    return draw(plausible if draw(st.integers(0, 99)) >= draw(absurd_percentage) else absurd)


def plausible_values(target: Target) -> dict[str, list[Any]]:
    """Plausible values, by field name or by message and field name."""
    low, high = target.low, target.high
    addresses = [
        target.cluster.address,
        *(device["data_address"] for device in target.devices),
        "127.0.0.1:1",
        "[::1]:0",
    ]
    table = {
        "commId communicator_id Communicator.id id": [target.comm],
        "device_id source_device destination_device device_ids lost_device DeviceId.value": [1, 2, 3],
        "DeviceDescription.device_id": [0, 0, 51, 52, 1],
        "devices numDevices": [1, 2, 3],
        "key root peer round generation Rank.value": [0, 1, 2],
        "rank": [0, 1],
        "StreamId.value": [1, 2, 3, 4, 5],
        "count numBytes bytes": [0, 1, 8, 64, 800],
        "offset": [0, 8],
        "Location.address Buffer.address MemAddr.value": [low, low, low + 8, low + 800, low + 4096, high - 8],
        "address data_address": addresses,
        "shared_address": ["", *addresses],
        "min_address": [low],
        "max_address": [high],
        "alignment": [0, 8, 64],
        "chunk_bytes": [0, 64],
        "timeout_s": [0.05],
        "collective": [*CATALOG],
        "algorithm": [*[""] * 20, *ALGORITHMS],
        "compression": [*[""] * 20, "float16", "int8", "top_k:0.5", "powersgd"],
        "dtype": ["float32", "float64", "bfloat16", "uint8", "int64"],
        "Operation.op": ["sum", "prod", "min", "max", "avg"],
        "op": [0, 1, 2, 3, 4],
        "driver": [*[""] * 4, "devices", "stepped", "relay"],
        "name buffer incarnation host": ["a", "b"],
        "pid": [1],
    }
    return {name: values for names, values in table.items() for name in names.split()}


class MessageStrategies:
    """Hypothesis strategies for messages, built from their descriptors."""

    def __init__(self, plausible_values: dict[str, list[Any]]) -> None:
        self._plausible = plausible_values

    @functools.cache  # noqa: B019 - an instance lives as long as a test
    def message(self, descriptor: Any) -> st.SearchStrategy[Any]:
        """A message, mostly with all of its fields, and with one field of each oneof."""
        oneofs = [[field.name for field in oneof.fields] for oneof in descriptor.oneofs]

        def build(values: dict[str, Any], which: int) -> Any:
            for names in oneofs:  # a oneof with a single field is an optional field: set or not
                keep = (*names, "")[which % max(2, len(names))]
                for name in names:
                    if name != keep:
                        values.pop(name, None)
            return descriptor._concrete_class(**values)

        fields = {field.name: self._field(field) for field in descriptor.fields}
        values = mostly(st.fixed_dictionaries(fields), st.fixed_dictionaries({}, optional=fields))
        return st.builds(build, values, st.integers(0, 5))

    def _field(self, field: Any) -> st.SearchStrategy[Any]:
        value, entry = self._value(field), field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = (self._value(entry.fields_by_name[name]) for name in ("key", "value"))
            return mostly(
                st.fixed_dictionaries(dict.fromkeys(range(3), value)), st.dictionaries(key, value, max_size=4)
            )
        if field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED:
            return mostly(st.lists(value, min_size=2, max_size=3), st.lists(value, max_size=5))
        return value

    def _value(self, field: Any) -> st.SearchStrategy[Any]:
        kind = KINDS[field.type]
        if kind == "message":
            return self.message(field.message_type)
        values = self._plausible.get(f"{field.containing_type.name}.{field.name}") or self._plausible.get(field.name)
        return mostly(st.sampled_from(values), self._absurd(kind)) if values else self._absurd(kind)

    def _absurd(self, kind: str) -> st.SearchStrategy[Any]:
        match kind:
            case "double":  # timeouts: no valid ones, which the call would wait for
                return st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf, 1e308])
            case "bool":
                return st.booleans()
            case "string":
                return st.text(max_size=20) | st.just("x" * 3000)
            case "bytes":
                return st.binary(max_size=64) | st.just(bytes(70_000))
        low, high = RANGES[kind]
        return st.sampled_from([edge for edge in EDGES if low <= edge <= high]) | st.integers(low, high)

    def stream(self, descriptor: Any) -> st.SearchStrategy[list[Any]]:
        """Several messages; mostly only the first has the fields that describe the stream."""

        def build(messages: list[Any]) -> list[Any]:
            for message in messages[1:]:
                for field in descriptor.fields:
                    if field.message_type is not None:
                        message.ClearField(field.name)
            return messages

        messages = st.lists(self.message(descriptor), max_size=4)
        return mostly(messages.map(build), messages)

    def bytes(self, descriptor: Any) -> st.SearchStrategy[bytes]:
        """A serialized message with some bytes removed or inserted."""

        def mutate(message: Any, position: int, removed: int, inserted: bytes) -> bytes:
            data: bytes = message.SerializeToString()
            position = position % (len(data) + 1)
            return data[:position] + inserted + data[position + removed :]

        return st.builds(
            mutate, self.message(descriptor), st.integers(0, 500), st.integers(0, 8), st.binary(max_size=6)
        )


serial = itertools.count()


def tame(request: Message) -> Message:
    """Changes a coordinator's request so that it has no id of a real communicator and no long timeout.

    A caller of AssignRank and Launch could take over a communicator; only authentication prevents that.
    """
    if isinstance(request, pb.AssignRankRequest | pb.LaunchRequest) and request.assignment.communicator_id:
        request.assignment.communicator_id = 2**40 + (request.assignment.communicator_id + next(serial)) % 2**40
    if isinstance(request, pb.DrainDeviceRequest) and 0 < request.device_id < 1000:
        request.device_id += 1000  # a device that is drained leaves
    if isinstance(request, pb.LaunchRequest) and request.timeout_s > 0.05:
        request.timeout_s = 0.05 if request.timeout_s <= 3600 else request.timeout_s
    return request


# ---- tests


@pytest.fixture(scope="module")
def cluster() -> Iterator[Target]:
    with running_target("--timeout", "5s") as target:
        for name in ("a", "b"):
            target.call("Device.Allocate", pb.AllocateRequest(name=name, bytes=8192))
        yield target


@pytest.fixture
def target(cluster: Target) -> Iterator[Target]:
    """The cluster with a new communicator for each test; at the end an all-reduce must be correct."""
    comm = LabClient(cluster.coordinator, 3)
    yield Target(cluster.cluster, cluster.coordinator, cluster.device, cluster.devices, comm.id)
    with contextlib.suppress(grpc.RpcError):
        comm.on_all("CommDestroy")
    status = cluster.call("Coordinator.GetStatus", pb.GetStatusRequest())
    real = {one["id"] for one in cluster.devices}
    cluster.wait_until_dead(*(one.device.device_id for one in status.devices if one.device.device_id not in real))
    check_all_reduce(cluster.coordinator)


def judge(target: Target, name: str, call: Callable[[float], Any]) -> None:
    """Asserts that the call returns an answer or an allowed status."""
    try:
        answer = call(WAITING_CALL_TIMEOUTS_S.get(name, DEADLINE_S))
        event("OK")
    except grpc.RpcError as error:
        event(error.code().name)
        timed_out = error.code().name == "DEADLINE_EXCEEDED"
        from_hoop = any(entry.key == "hoop-error" for entry in error.trailing_metadata() or ())
        if timed_out and (from_hoop or name in WAITING_CALL_TIMEOUTS_S):
            return
        check_refusal(error, *CODES)
        return
    # Destroys a communicator that the call created: their number is limited.
    created = getattr(answer, "commId", 0) or getattr(getattr(answer, "communicator", None), "id", 0)
    if created and created != target.comm:
        target.call("Coordinator.DestroyCommunicator", pb.DestroyCommunicatorRequest(id=created))


@pytest.mark.parametrize("examples", FEW_AND_MANY)
@pytest.mark.parametrize("name", METHODS)
def test_random_messages(target: Target, name: str, examples: int) -> None:
    method = METHODS[name]
    strategies = MessageStrategies(plausible_values(target))

    @settings(fuzz_settings, max_examples=examples)
    @given((strategies.stream if method.client_streaming else strategies.message)(method.input_type))
    def attack(request: Any) -> None:
        for one in request if method.client_streaming else [request]:
            tame(one)
        judge(target, name, lambda timeout: target.call(name, request, timeout))

    attack()


@pytest.mark.parametrize("examples", FEW_AND_MANY)
@pytest.mark.parametrize("name", METHODS)
def test_random_bytes(target: Target, name: str, examples: int) -> None:
    method = METHODS[name]
    data = MessageStrategies(plausible_values(target)).bytes(method.input_type)

    @settings(fuzz_settings, max_examples=max(1, examples // 3))
    @given(st.lists(data, min_size=1, max_size=3 if method.client_streaming else 1))
    def attack(request: list[bytes]) -> None:
        for at, one in enumerate(request):
            with contextlib.suppress(DecodeError):
                request[at] = tame(GetMessageClass(method.input_type).FromString(one)).SerializeToString()
        judge(target, name, lambda timeout: target.raw(name, *request, timeout=timeout))

    attack()
