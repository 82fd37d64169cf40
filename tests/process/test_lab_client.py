"""A program that knows only the lab's protocol, against a real cluster: right on every rank, whatever it asks for.

The messages are those of examples/gpu_sim_messages.py, which knows nothing of Hoop.
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
import pytest
from lab_cluster import EXAMPLES, Cluster, LabClient, channel_to, hoop_up, lab, refused

OPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SUM": lambda vectors: vectors.sum(axis=0),
    "PROD": lambda vectors: vectors.prod(axis=0),
    "MIN": lambda vectors: vectors.min(axis=0),
    "MAX": lambda vectors: vectors.max(axis=0),
    "AVG": lambda vectors: vectors.mean(axis=0),
}
ABOUT_A_COMMUNICATOR = [
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


def spread(comm: LabClient, vectors: np.ndarray, offset: int = 0) -> list[int]:
    """Every rank's vector in its memory, each at another address."""
    addresses = [comm.address(rank, 8 * (offset + rank)) for rank in range(len(vectors))]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    return addresses


def held(comm: LabClient, addresses: list[int], count: int) -> np.ndarray:
    return np.array([comm.read(rank, address, count) for rank, address in enumerate(addresses)])


def check_everywhere(comm: LabClient, addresses: list[int], expected: np.ndarray) -> None:
    """Right on every rank, and the same bits."""
    found = held(comm, addresses, len(expected))
    np.testing.assert_allclose(found[0], expected, rtol=1e-12, atol=1e-12)
    assert (found == found[0]).all()


def random(devices: int, count: int) -> np.ndarray:
    return np.random.default_rng([devices, count]).normal(size=(devices, count))


# ---- the example


def run_example(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "lab_client.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_example_starts_and_ends_its_own_cluster() -> None:
    done = run_example()
    assert (done.returncode, done.stderr) == (0, "")
    assert "right on all 3 devices" in done.stdout


@pytest.mark.parametrize(("devices", "count"), [(1, 5), (2, 1), (3, 1000)])
def test_the_example_on_a_running_cluster(cluster: Cluster, devices: int, count: int) -> None:
    options = ["--coordinator", cluster.address, "--devices", str(devices), "--count", str(count), "--json"]
    done = run_example(*options)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert told["right"] is True
    assert [step["right"] for step in told["steps"]] == [True] * 6


def test_the_example_says_what_went_wrong(cluster: Cluster) -> None:
    done = run_example("--coordinator", cluster.address, "--devices", "9")
    assert done.returncode == 1
    assert "FAILED_PRECONDITION: devices: 9 were asked for, 3 are alive" in done.stderr


def test_the_example_leaves_nothing_behind_when_it_is_ended() -> None:
    command = [sys.executable, str(EXAMPLES / "lab_client.py"), "--count", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as example:
        assert example.stdout is not None
        assert example.stdout.readline().startswith("coordinator ")
        example.send_signal(signal.SIGTERM)
        assert example.wait(20) in (143, 0)


# ---- all-reduce


@pytest.mark.parametrize("count", [0, 1, 2, 5, 17, 1000])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_right_on_every_rank(channel: grpc.Channel, devices: int, count: int) -> None:
    comm = LabClient(channel, devices)
    vectors = random(devices, count)
    for rpc in ("AllReduceRing", "NaiveAllReduce"):
        addresses = spread(comm, vectors)
        comm.all_reduce(lab.SUM, addresses, count, rpc)
        check_everywhere(comm, addresses, vectors.sum(axis=0))
    assert comm.wait() == lab.SUCCESS
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("rpc", ["AllReduceRing", "NaiveAllReduce"])
@pytest.mark.parametrize("op", OPS)
def test_every_op(channel: grpc.Channel, op: str, rpc: str) -> None:
    comm = LabClient(channel, 3)
    vectors = random(3, 7)
    addresses = spread(comm, vectors)
    comm.all_reduce(getattr(lab, op), addresses, 7, rpc)
    check_everywhere(comm, addresses, OPS[op](vectors))
    comm.on_all("CommDestroy")


def test_the_ops_differ() -> None:
    results = [expected(random(3, 7)) for expected in OPS.values()]
    assert all((one != other).all() for one, other in combinations(results, 2))


def test_ranks_at_far_apart_addresses(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random(3, 11)
    addresses = [comm.address(0), comm.address(1, 8_000_000), comm.address(2, 16_000_008)]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    comm.all_reduce(lab.SUM, addresses, 11)
    check_everywhere(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_a_buffer_that_ends_exactly_at_max(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random(3, 5)
    addresses = [device.maxMemAddr.value - 40 for device in comm.devices]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    comm.all_reduce(lab.SUM, addresses, 5)
    check_everywhere(comm, addresses, vectors.sum(axis=0))
    with refused("OUT_OF_RANGE", words="rank 0"):
        comm.all_reduce(lab.SUM, addresses, 6)
    with refused("OUT_OF_RANGE"):
        comm.write(0, addresses[0], np.zeros(6))
    check_everywhere(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_a_copy_that_does_not_fit_changes_nothing(channel: grpc.Channel) -> None:
    """Also where the part that does fit is longer than a message of the stream that carries it."""
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
    vectors = random(3, 400_001)  # 3.2 MB: near the 4 MiB that a gRPC client takes by default
    addresses = spread(comm, vectors)
    comm.all_reduce(lab.SUM, addresses, 400_001)
    check_everywhere(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_bytes_that_are_no_whole_elements(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    places = {rank: lab.MemAddr(value=comm.address(rank)) for rank in range(2)}
    with refused("INVALID_ARGUMENT", words="12 bytes .* --count-unit elements"):
        comm.call("AllReduceRing", commId=comm.id, count=12, op=lab.SUM, memAddrs=places)
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("rpc", ["AllReduceRing", "NaiveAllReduce"])
def test_every_rank_needs_an_address(channel: grpc.Channel, rpc: str) -> None:
    comm = LabClient(channel, 3)
    with refused("INVALID_ARGUMENT", words="rank 2 has no place"):
        comm.all_reduce(lab.SUM, [comm.address(0), comm.address(1)], 4, rpc)
    with refused("INVALID_ARGUMENT", words=r"\[3\]"):
        comm.all_reduce(lab.SUM, [comm.address(rank % 3) for rank in range(4)], 4, rpc)
    comm.on_all("CommDestroy")


def test_counting_elements() -> None:
    with hoop_up(2, "--count-unit", "elements") as cluster, channel_to(cluster.address) as channel:
        comm = LabClient(channel, 2, "elements")
        vectors = random(2, 13)
        for rpc in ("AllReduceRing", "NaiveAllReduce"):
            addresses = spread(comm, vectors)
            comm.all_reduce(lab.MIN, addresses, 13, rpc)
            check_everywhere(comm, addresses, vectors.min(axis=0))
        with refused("OUT_OF_RANGE"):
            comm.all_reduce(lab.SUM, [device.maxMemAddr.value - 8 for device in comm.devices], 8)


# ---- groups and status


def test_status_before_during_and_after(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
    comm.on_all("GroupStart")
    addresses = spread(comm, np.ones((2, 3)))
    comm.all_reduce(lab.SUM, addresses, 3)
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    comm.on_all("CommDestroy")


def test_a_group_runs_at_its_end_and_in_order(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    vectors = random(3, 9)
    addresses = spread(comm, vectors)
    comm.on_all("GroupStart")
    comm.all_reduce(lab.MAX, addresses, 9)
    comm.all_reduce(lab.SUM, addresses, 9)
    comm.all_reduce(lab.PROD, addresses, 9, "NaiveAllReduce")
    assert (held(comm, addresses, 9) == vectors).all()
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    check_everywhere(comm, addresses, (3 * vectors.max(axis=0)) ** 3)
    comm.on_all("CommDestroy")


def test_an_operation_is_refused_as_it_is_queued(channel: grpc.Channel) -> None:
    """And what was queued before it still runs."""
    comm = LabClient(channel, 2)
    vectors = random(2, 4)
    addresses = spread(comm, vectors)
    comm.on_all("GroupStart")
    comm.all_reduce(lab.SUM, addresses, 4)
    with refused("OUT_OF_RANGE"):
        comm.all_reduce(lab.SUM, [0, 0], 4)
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS
    check_everywhere(comm, addresses, vectors.sum(axis=0))
    comm.on_all("CommDestroy")


def test_groups_out_of_order(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    with refused("FAILED_PRECONDITION", words="GroupStart first"):
        comm.on_all("GroupEnd")
    comm.on_all("GroupStart")
    with refused("FAILED_PRECONDITION", words="GroupEnd first"):
        comm.on_all("GroupStart")
    comm.on_all("GroupEnd")
    assert comm.wait() == lab.SUCCESS  # an empty group
    with refused("FAILED_PRECONDITION"):
        comm.on_all("GroupEnd")
    comm.on_all("CommDestroy")


# ---- communicators


@pytest.mark.parametrize("rpc", ABOUT_A_COMMUNICATOR)
@pytest.mark.parametrize("unknown", [0, 999_999, 2**64 - 1])
def test_an_unknown_communicator(channel: grpc.Channel, rpc: str, unknown: int) -> None:
    comm = LabClient(channel, 1)
    with refused("NOT_FOUND", words=str(unknown)):
        comm.call(rpc, commId=unknown)
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("rpc", ABOUT_A_COMMUNICATOR)
def test_a_destroyed_communicator(channel: grpc.Channel, rpc: str) -> None:
    comm = LabClient(channel, 2)
    comm.on_all("CommDestroy")
    with refused("NOT_FOUND", words="unknown or destroyed"):
        comm.on_all(rpc)


def test_a_finalized_communicator(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 2)
    addresses = spread(comm, np.ones((2, 3)))
    comm.on_all("GroupStart")
    comm.on_all("CommFinalize")  # the open group is dropped
    for call in ("GroupStart", "GroupEnd"):
        with refused("FAILED_PRECONDITION"):
            comm.on_all(call)
    for rpc in ("AllReduceRing", "NaiveAllReduce"):
        with refused("FAILED_PRECONDITION", words="finalized"):
            comm.all_reduce(lab.SUM, addresses, 3, rpc)
    assert (held(comm, addresses, 3) == 1).all()
    comm.on_all("CommDestroy")


def test_finalizing_waits_for_what_is_queued(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    addresses = spread(comm, np.ones((3, 50_000)))
    comm.on_all("GroupStart")
    for _ in range(20):
        comm.all_reduce(lab.SUM, addresses, 50_000)
    comm.on_all("GroupEnd")
    comm.on_all("CommFinalize")
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.SUCCESS
    check_everywhere(comm, addresses, np.full(50_000, 3.0**20))
    comm.on_all("CommDestroy")


@pytest.mark.parametrize("devices", [0, 4, 2**32 - 1])
def test_so_many_devices_make_no_communicator(channel: grpc.Channel, devices: int) -> None:
    with refused("FAILED_PRECONDITION" if devices else "INVALID_ARGUMENT", words=str(devices)):
        LabClient(channel, devices)


def test_communicators_share_devices(channel: grpc.Channel) -> None:
    comms = [LabClient(channel, devices) for devices in (3, 2, 1, 3)]
    vectors = [random(len(comm.devices), 33) for comm in comms]
    places = [spread(comm, mine, 100 * at) for at, (comm, mine) in enumerate(zip(comms, vectors, strict=True))]
    for comm, addresses in zip(comms, places, strict=True):
        comm.on_all("GroupStart")
        comm.all_reduce(lab.SUM, addresses, 33)
    for comm in reversed(comms):
        comm.on_all("GroupEnd")
    for comm, addresses, mine in zip(comms, places, vectors, strict=True):
        assert comm.wait() == lab.SUCCESS
        check_everywhere(comm, addresses, mine.sum(axis=0))
        comm.on_all("CommDestroy")


def test_clients_at_once(cluster: Cluster) -> None:
    """Eight clients in threads, each with a channel and a communicator of its own, start together."""
    start = threading.Barrier(8)

    def client(number: int) -> None:
        with channel_to(cluster.address) as channel:
            comm = LabClient(channel, 1 + number % 3)
            vectors = random(len(comm.devices), 100 + number)
            start.wait(20)
            for _ in range(5):
                addresses = spread(comm, vectors, 1000 * number)
                comm.all_reduce(lab.SUM, addresses, 100 + number)
                check_everywhere(comm, addresses, vectors.sum(axis=0))
            comm.on_all("CommDestroy")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(client, range(8)))


def test_calls_on_one_communicator_at_once_take_turns(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    addresses = spread(comm, np.ones((3, 40)))
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: comm.all_reduce(lab.SUM, addresses, 40), range(6)))
    check_everywhere(comm, addresses, np.full(40, 3.0**6))
    comm.on_all("CommDestroy")


def test_a_client_that_goes_away_does_not_stop_what_it_began(channel: grpc.Channel) -> None:
    comm = LabClient(channel, 3)
    addresses = spread(comm, np.ones((3, 50_000)))
    comm.on_all("GroupStart")
    for _ in range(200):
        comm.all_reduce(lab.MAX, addresses, 50_000)
    comm.on_all("GroupEnd")
    places = {rank: lab.MemAddr(value=address) for rank, address in enumerate(addresses)}
    request = lab.AllReduceRingRequest(commId=comm.id, count=400_000, op=lab.SUM, memAddrs=places)
    call = lab.Stub(channel, "GPUCoordinator").AllReduceRing.future(request, timeout=20)
    assert comm.call("GetCommStatus", commId=comm.id).status == lab.IN_PROGRESS
    assert call.cancel()  # while it waits for its turn behind the group
    comm.on_all("CommFinalize")
    check_everywhere(comm, addresses, np.full(50_000, 3.0))
    comm.on_all("CommDestroy")


def test_both_kinds_of_messages_in_one_process() -> None:
    """A program's own gpu_sim messages and Hoop's are one protocol, and load beside each other."""
    from hoop.wire.generated import gpu_sim_pb2

    for name, theirs in gpu_sim_pb2.DESCRIPTOR.message_types_by_name.items():
        ours = getattr(lab, name).DESCRIPTOR
        assert ours.full_name == theirs.full_name
        assert ours is not theirs
        fields = [(field.name, field.number, field.type) for field in theirs.fields if field.number < 100]
        assert [(field.name, field.number, field.type) for field in ours.fields] == fields
    mine = lab.AllReduceRingRequest(commId=7, count=8, op=lab.MAX, memAddrs={2: lab.MemAddr(value=5)})
    read = gpu_sim_pb2.AllReduceRingRequest.FromString(mine.SerializeToString())
    assert (read.commId, read.count, read.op, read.memAddrs[2].value) == (7, 8, gpu_sim_pb2.MAX, 5)
