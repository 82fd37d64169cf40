"""A client of the lab's protocol on a real cluster: all-reduce, groups, communicators and errors.

The messages come from examples/gpu_sim_messages.py, which does not import Hoop.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import grpc
import numpy as np
import preloaded
import pytest
from lab_cluster import EXAMPLES, Cluster, LabClient, channel_to, hoop_up, lab, refused, wait_for
from lab_in_process import WAIT_S, lab_channel, lab_servers

OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SUM": lambda vectors: vectors.sum(axis=0),
    "PROD": lambda vectors: vectors.prod(axis=0),
    "MIN": lambda vectors: vectors.min(axis=0),
    "MAX": lambda vectors: vectors.max(axis=0),
    "AVG": lambda vectors: vectors.mean(axis=0),
}
COMMUNICATOR_RPCS = [
    "GetCommStatus",
    "GroupStart",
    "GroupEnd",
    "AllReduceRing",
    "NaiveAllReduce",
    "CommFinalize",
    "CommDestroy",
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoop_up(3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    with channel_to(cluster.address) as channel:
        yield channel


def write_vectors(comm: LabClient, vectors: np.ndarray, offset: int = 0) -> list[int]:
    """Write each rank's vector to its memory, at a different offset on each rank; return the addresses."""
    addresses = [comm.address(rank, 8 * (offset + rank)) for rank in range(len(vectors))]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    return addresses


def read_vectors(comm: LabClient, addresses: list[int], count: int) -> np.ndarray:
    return np.array([comm.read(rank, address, count) for rank, address in enumerate(addresses)])


def check_every_rank(comm: LabClient, addresses: list[int], expected: np.ndarray) -> None:
    """Every rank holds ``expected``, and all ranks hold the same bits."""
    found = read_vectors(comm, addresses, len(expected))
    np.testing.assert_allclose(found[0], expected, rtol=1e-12, atol=1e-12)
    assert (found == found[0]).all()


def random_vectors(devices: int, count: int) -> np.ndarray:
    return np.random.default_rng([devices, count]).normal(size=(devices, count))


# ---- the example


def run_example(*options: str, real_start: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "lab_client.py"), *options]
    run = subprocess.run if real_start else preloaded.run
    return run(command, capture_output=True, text=True, timeout=240)


def test_the_example_starts_and_ends_its_own_cluster() -> None:
    done = run_example(real_start=True)  # as a reader starts it: it imports all that it needs
    assert (done.returncode, done.stderr) == (0, "")
    assert "right on all 3 devices" in done.stdout


@pytest.mark.parametrize(("devices", "count"), [(1, 5), (2, 1), (3, 1000)])
def test_the_example_on_a_running_cluster(cluster: Cluster, devices: int, count: int) -> None:
    options = ["--coordinator", cluster.address, "--devices", str(devices), "--count", str(count), "--json"]
    done = run_example(*options)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["right"] is True
    assert [step["right"] for step in report["steps"]] == [True] * 6


def test_the_example_prints_the_error(cluster: Cluster) -> None:
    done = run_example("--coordinator", cluster.address, "--devices", "9")
    assert done.returncode == 1
    assert "FAILED_PRECONDITION: devices: 9 were asked for, 3 are alive" in done.stderr


def test_the_example_leaves_nothing_behind_after_sigterm() -> None:
    command = [sys.executable, str(EXAMPLES / "lab_client.py"), "--count", "1000000"]
    with preloaded.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as example:
        assert example.stdout is not None
        assert example.stdout.readline().startswith("coordinator ")
        example.send_signal(signal.SIGTERM)
        assert example.wait(120) in (143, 0)


# ---- all-reduce


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 1000])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_all_reduce_is_right_on_every_rank(channel: grpc.Channel, devices: int, count: int) -> None:
    comm = LabClient(channel, devices)
    vectors = random_vectors(devices, count)
    for rpc in ("AllReduceRing", "NaiveAllReduce"):
        addresses = write_vectors(comm, vectors)
        comm.all_reduce(lab.SUM, addresses, count, rpc)
        check_every_rank(comm, addresses, vectors.sum(axis=0))
    assert comm.wait() == lab.SUCCESS
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("rpc", ["AllReduceRing", "NaiveAllReduce"])
@pytest.mark.parametrize("op", OPS)
def test_every_op(channel: grpc.Channel, op: str, rpc: str) -> None:
    comm = LabClient(channel, 3)
    vectors = random_vectors(3, 7)
    addresses = write_vectors(comm, vectors)
    comm.all_reduce(getattr(lab, op), addresses, 7, rpc)
    check_every_rank(comm, addresses, OPS[op](vectors))
    comm.on_all("CommDestroy")


def test_the_ops_differ() -> None:
    results = [expected(random_vectors(3, 7)) for expected in OPS.values()]
    assert all((one != other).all() for one, other in combinations(results, 2))


def test_all_reduce_with_buffers_far_apart(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random_vectors(3, 11)
    addresses = [comm.address(0), comm.address(1, 8_000_000), comm.address(2, 16_000_008)]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    comm.all_reduce(lab.SUM, addresses, 11)
    check_every_rank(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_a_buffer_that_ends_at_the_end_of_memory(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random_vectors(3, 5)
    addresses = [device.maxMemAddr.value - 40 for device in comm.devices]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    comm.all_reduce(lab.SUM, addresses, 5)
    check_every_rank(comm, addresses, vectors.sum(axis=0))
    with refused("OUT_OF_RANGE", match="rank 0"):
        comm.all_reduce(lab.SUM, addresses, 6)
    with refused("OUT_OF_RANGE"):
        comm.write(0, addresses[0], np.zeros(6))
    check_every_rank(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_a_copy_that_does_not_fit_changes_nothing(channel: grpc.Channel) -> None:
    """Even if the part that fits is longer than one message of the stream that carries it."""
    comm = LabClient(channel, 1)
    count = 3 * 2**20 // 8
    address = comm.devices[0].maxMemAddr.value - 8 * count
    comm.write(0, address, np.ones(count))
    with refused("OUT_OF_RANGE"):
        comm.write(0, address + 8, np.zeros(count))
    assert (comm.read(0, address, count) == 1).all()
    comm.on_all("CommDestroy")


def test_a_large_vector(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random_vectors(3, 400_001)  # 3.2 MB: near gRPC's default limit of 4 MiB for a message
    addresses = write_vectors(comm, vectors)
    comm.all_reduce(lab.SUM, addresses, 400_001)
    check_every_rank(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_a_count_of_bytes_that_splits_an_element_is_refused(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    addresses = {rank: lab.MemAddr(value=comm.address(rank)) for rank in range(2)}
    with refused("INVALID_ARGUMENT", match="12 bytes .* --count-unit elements"):
        comm.call("AllReduceRing", commId=comm.id, count=12, op=lab.SUM, memAddrs=addresses)
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("rpc", ["AllReduceRing", "NaiveAllReduce"])
def test_every_rank_needs_an_address(channel: grpc.Channel, rpc: str) -> None:
    comm = LabClient(channel, 3)
    with refused("INVALID_ARGUMENT", match="memAddrs: rank 2 has no address"):
        comm.all_reduce(lab.SUM, [comm.address(0), comm.address(1)], 4, rpc)
    with refused("INVALID_ARGUMENT", match=r"\[3\]"):
        comm.all_reduce(lab.SUM, [comm.address(rank % 3) for rank in range(4)], 4, rpc)
    comm.on_all("CommDestroy")


def test_count_unit_elements() -> None:
    with hoop_up(2, "--count-unit", "elements") as cluster, channel_to(cluster.address) as channel:
        comm = LabClient(channel, 2, "elements")
        vectors = random_vectors(2, 13)
        for rpc in ("AllReduceRing", "NaiveAllReduce"):
            addresses = write_vectors(comm, vectors)
            comm.all_reduce(lab.MIN, addresses, 13, rpc)
            check_every_rank(comm, addresses, vectors.min(axis=0))
        with refused("OUT_OF_RANGE"):
            comm.all_reduce(lab.SUM, [device.maxMemAddr.value - 8 for device in comm.devices], 8)


# ---- groups and status


def test_communicator_status_before_during_and_after_a_group(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
    comm.on_all("GroupStart")
    addresses = write_vectors(comm, np.ones((2, 3)))
    comm.all_reduce(lab.SUM, addresses, 3)
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    comm.on_all("CommDestroy")


def test_a_group_runs_at_its_end_and_in_order(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random_vectors(3, 9)
    addresses = write_vectors(comm, vectors)
    comm.on_all("GroupStart")
    comm.all_reduce(lab.MAX, addresses, 9)
    comm.all_reduce(lab.SUM, addresses, 9)
    comm.all_reduce(lab.PROD, addresses, 9, "NaiveAllReduce")
    assert (read_vectors(comm, addresses, 9) == vectors).all()
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    check_every_rank(comm, addresses, (3 * vectors.max(axis=0)) ** 3)
    comm.on_all("CommDestroy")


def test_an_invalid_operation_is_refused_when_it_is_queued(channel: grpc.Channel) -> None:
    """Operations queued before it still run."""
    comm = LabClient(channel, 2)
    vectors = random_vectors(2, 4)
    addresses = write_vectors(comm, vectors)
    comm.on_all("GroupStart")
    comm.all_reduce(lab.SUM, addresses, 4)
    with refused("OUT_OF_RANGE"):
        comm.all_reduce(lab.SUM, [0, 0], 4)
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    check_every_rank(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_group_calls_out_of_order_are_refused(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    with refused("FAILED_PRECONDITION", match="GroupStart first"):
        comm.on_all("GroupEnd")
    comm.on_all("GroupStart")
    with refused("FAILED_PRECONDITION", match="GroupEnd first"):
        comm.on_all("GroupStart")
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS  # an empty group
    with refused("FAILED_PRECONDITION"):
        comm.on_all("GroupEnd")
    comm.on_all("CommDestroy")


# ---- communicators


@pytest.mark.parametrize("rpc", COMMUNICATOR_RPCS)
@pytest.mark.parametrize("unknown", [0, 999_999, 2**64 - 1])
def test_an_unknown_communicator_is_refused(channel: grpc.Channel, rpc: str, unknown: int) -> None:
    comm = LabClient(channel, 1)
    with refused("NOT_FOUND", match=str(unknown)):
        comm.call(rpc, commId=unknown)
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("rpc", COMMUNICATOR_RPCS)
def test_a_destroyed_communicator_is_refused(channel: grpc.Channel, rpc: str) -> None:
    comm = LabClient(channel, 2)
    comm.on_all("CommDestroy")
    with refused("NOT_FOUND", match="unknown or destroyed"):
        comm.on_all(rpc)


def test_a_finalized_communicator_accepts_no_operations(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    addresses = write_vectors(comm, np.ones((2, 3)))
    comm.on_all("GroupStart")
    comm.on_all("CommFinalize")  # the open group is dropped
    for call in ("GroupStart", "GroupEnd"):
        with refused("FAILED_PRECONDITION"):
            comm.on_all(call)
    for rpc in ("AllReduceRing", "NaiveAllReduce"):
        with refused("FAILED_PRECONDITION", match="finalized"):
            comm.all_reduce(lab.SUM, addresses, 3, rpc)
    assert (read_vectors(comm, addresses, 3) == 1).all()
    comm.on_all("CommDestroy")


def test_finalizing_waits_for_queued_operations(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    addresses = write_vectors(comm, np.ones((3, 50_000)))
    comm.on_all("GroupStart")
    for _ in range(20):
        comm.all_reduce(lab.SUM, addresses, 50_000)
    comm.on_all("GroupEnd")
    comm.on_all("CommFinalize")
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.SUCCESS
    check_every_rank(comm, addresses, np.full(50_000, 3.0**20))
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("devices", [0, 4, 2**32 - 1])
def test_an_impossible_number_of_devices_is_refused(channel: grpc.Channel, devices: int) -> None:
    with refused("FAILED_PRECONDITION" if devices else "INVALID_ARGUMENT", match=str(devices)):
        LabClient(channel, devices)


def test_communicators_share_devices(channel: grpc.Channel) -> None:
    comms = [LabClient(channel, devices) for devices in (3, 2, 1, 3)]
    vectors = [random_vectors(len(comm.devices), 33) for comm in comms]
    all_addresses = [
        write_vectors(comm, comm_vectors, 100 * index)
        for index, (comm, comm_vectors) in enumerate(zip(comms, vectors, strict=True))
    ]
    for comm, addresses in zip(comms, all_addresses, strict=True):
        comm.on_all("GroupStart")
        comm.all_reduce(lab.SUM, addresses, 33)
    for comm in reversed(comms):
        comm.on_all("GroupEnd")
    for comm, addresses, comm_vectors in zip(comms, all_addresses, vectors, strict=True):
        assert comm.wait() == lab.SUCCESS
        check_every_rank(comm, addresses, comm_vectors.sum(axis=0))
        comm.on_all("CommDestroy")


def test_concurrent_clients(cluster: Cluster) -> None:
    """Eight threads start together, each with its own channel and communicator."""
    start = threading.Barrier(8)

    def client(number: int) -> None:
        with channel_to(cluster.address) as channel:
            comm = LabClient(channel, 1 + number % 3)
            vectors = random_vectors(len(comm.devices), 100 + number)
            start.wait(120)
            for _ in range(5):
                addresses = write_vectors(comm, vectors, 1000 * number)
                comm.all_reduce(lab.SUM, addresses, 100 + number)
                check_every_rank(comm, addresses, vectors.sum(axis=0))
            comm.on_all("CommDestroy")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(client, range(8)))


def test_concurrent_calls_on_one_communicator_are_serialized(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    addresses = write_vectors(comm, np.ones((3, 40)))
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: comm.all_reduce(lab.SUM, addresses, 40), range(6)))
    check_every_rank(comm, addresses, np.full(40, 3.0**6))
    comm.on_all("CommDestroy")


def test_a_cancelled_call_still_completes_its_operation() -> None:
    """The servers are in this process: the call waits behind an operation that ends when the test says so."""
    with lab_servers(3) as servers, lab_channel(servers) as channel:
        comm = LabClient(channel, 3)
        addresses = write_vectors(comm, np.ones((3, 50)))
        comm.all_reduce(lab.MAX, addresses, 50)
        assert comm.wait() == lab.SUCCESS
        lock = servers.coordinator._jobs._operations._locks[comm.id]
        servers.call(lock.acquire())
        places = {rank: lab.MemAddr(value=address) for rank, address in enumerate(addresses)}
        request = lab.AllReduceRingRequest(commId=comm.id, count=400, op=lab.SUM, memAddrs=places)
        call = lab.Stub(channel, "GPUCoordinator").AllReduceRing.future(request, timeout=WAIT_S)
        wait_for(lambda: comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS, "the call")
        assert call.cancel()
        # An answer over the same connection: the server has seen the cancellation before.
        assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
        servers.loop.call_soon_threadsafe(lock.release)
        comm.on_all("CommFinalize")
        check_every_rank(comm, addresses, np.full(50, 3.0))
        comm.on_all("CommDestroy")


def test_example_messages_and_generated_messages_in_one_process() -> None:
    """Both modules define the same protocol and can be imported together."""
    from hoop.wire.generated import gpu_sim_pb2

    for name, generated in gpu_sim_pb2.DESCRIPTOR.message_types_by_name.items():
        example = getattr(lab, name, None)
        if example is None:  # a call of other dialects
            assert name.startswith(("AllReduceRe", "CommRemoveDevice", "SetupCommunication", "ResetGpu"))
            continue
        assert example.DESCRIPTOR.full_name == generated.full_name
        assert example.DESCRIPTOR is not generated
        numbers = {field.name: (field.number, field.type) for field in generated.fields}
        for field in example.DESCRIPTOR.fields:
            assert numbers[field.name] == (field.number, field.type)
    sent = lab.AllReduceRingRequest(commId=7, count=8, op=lab.MAX, memAddrs={2: lab.MemAddr(value=5)})
    received = gpu_sim_pb2.AllReduceRingRequest.FromString(sent.SerializeToString())
    assert (received.commId, received.count, received.op, received.memAddrs[2].value) == (7, 8, gpu_sim_pb2.MAX, 5)
