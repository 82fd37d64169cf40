"""The Python client with device processes: collectives on arrays and buffers, device memory, communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import hoop
from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    OutOfRange,
)

UP = ("--devices", "4", "--memory", "256MiB")
N = 4
LONG_S = 120.0
LARGE = 100_000_000
"""Bytes; more than fit into one message."""


@pytest.fixture
def comm(cluster: hoop.Cluster) -> Iterator[hoop.Communicator]:
    """A communicator of all four devices. After the test its buffers are freed; no internal one may be left."""
    communicator = cluster.communicator([1, 2, 3, 4])
    yield communicator
    for device in communicator.devices:
        for name in device.buffers():
            assert not name.startswith("hoop."), f"{name} was left in {device.info}"
            device.free(name)
    communicator.destroy()


def vectors(count: int, dtype: str = "float32", ranks: int = N) -> list[Any]:
    """Small integers, so that sums are exact in any order and dtype."""
    return [(np.arange(count) % 7 + rank + 1).astype(dtype) for rank in range(ranks)]


def blocks(values: list[Any], rank: int) -> list[Any]:
    """Block ``rank`` of each rank's vector."""
    return [value.reshape(N, -1)[rank] for value in values]


# The expected result of each rank, from the input of each rank (``x``) and the old content of its result (``old``).
EXPECTED: dict[str, Callable[[list[Any], list[Any]], list[Any]]] = {
    "all_reduce": lambda x, _: [sum(x)] * N,
    "broadcast": lambda x, _: [x[1]] * N,
    "reduce": lambda x, old: [sum(x) if rank == 1 else old[rank] for rank in range(N)],
    "all_gather": lambda x, _: [np.concatenate(x)] * N,
    "reduce_scatter": lambda x, _: [sum(blocks(x, rank)) for rank in range(N)],
    "gather": lambda x, old: [np.concatenate(x) if rank == 1 else old[rank] for rank in range(N)],
    "scatter": lambda x, _: list(x[1].reshape(N, -1)),
    "all_to_all": lambda x, _: [np.concatenate(blocks(x, rank)) for rank in range(N)],
    "send": lambda x, old: [x[1] if rank == 3 else old[rank] for rank in range(N)],
}
ROOTED = {name: {"root": 1} for name in ("broadcast", "reduce", "gather", "scatter")}
OPTIONS: dict[str, dict[str, int]] = {**ROOTED, "send": {"source": 1, "destination": 3}}
RESULT_SCALE = {"all_gather": N, "gather": N, "reduce_scatter": 1 / N, "scatter": 1 / N}
"""The length of the result relative to the input, if they differ."""
COLLECTIVES = sorted(EXPECTED)
DTYPES = ("float32", "int8", "float64", "float16", "int32", "int64", "uint8")
"""A client handles all in one way; the contract tests run every collective with each."""


def assert_ranks_equal(results: list[Any], expected: list[Any]) -> None:
    assert len(results) == len(expected)
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        np.testing.assert_array_equal(result, wanted, err_msg=f"rank {rank}")


# ---- arrays


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_arrays(comm: hoop.Communicator, collective: str) -> None:
    """NumPy arrays in, new arrays out; a rank that receives nothing gets its input back, or zeros."""
    length = int(3 * N * RESULT_SCALE.get(collective, 1))
    for dtype in DTYPES if collective == "all_reduce" else DTYPES[:2]:
        x = vectors(3 * N, dtype)
        before = [value.copy() for value in x]
        found = getattr(comm, collective)(x, **OPTIONS.get(collective, {}))
        old = x if length == 3 * N else [np.zeros(length, dtype)] * N
        assert_ranks_equal(found, EXPECTED[collective](x, old))
        assert all(value.dtype == dtype for value in found)
        assert_ranks_equal(x, before)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_tensors(comm: hoop.Communicator, collective: str) -> None:
    values = vectors(2 * N)
    length = int(2 * N * RESULT_SCALE.get(collective, 1))
    old = values if length == 2 * N else [np.zeros(length, "float32")] * N
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        tensors = [torch.from_numpy(value).to(dtype) for value in values]
        found = getattr(comm, collective)(tensors, **OPTIONS.get(collective, {}))
        assert all(isinstance(tensor, torch.Tensor) and tensor.dtype == dtype for tensor in found)
        assert_ranks_equal([tensor.to(torch.float32).numpy() for tensor in found], EXPECTED[collective](values, old))


def test_bfloat16_keeps_its_bits(comm: hoop.Communicator) -> None:
    """All 65536 bit patterns, including NaNs, arrive unchanged."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensors = [patterns.view(torch.bfloat16)] + [torch.zeros(2**16, dtype=torch.bfloat16)] * (N - 1)
    for tensor in comm.broadcast(tensors):
        assert torch.equal(tensor.view(torch.int16), patterns)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
def test_every_reduction_op(comm: hoop.Communicator, op: str) -> None:
    x = vectors(10, "float64")
    wanted = {"sum": sum(x), "prod": np.prod(x, 0), "min": x[0], "max": x[3], "avg": sum(x) / N}[op]
    assert_ranks_equal(comm.all_reduce(x, op=op), [wanted] * N)
    assert_ranks_equal(comm.reduce(x, op=op, root=2), [x[0], x[1], wanted, x[3]])
    assert_ranks_equal(comm.reduce_scatter([np.tile(value, N) for value in x], op=op), [wanted] * N)


def test_shapes_are_kept(comm: hoop.Communicator) -> None:
    """Also for arrays that are not contiguous and tensors that require gradients."""
    x = [value.reshape(2, 3).T for value in vectors(6)]
    found = comm.all_reduce(x)
    assert found[0].shape == (3, 2)
    assert_ranks_equal(found, [sum(x)] * N)
    tensors = [torch.from_numpy(value.copy()).requires_grad_() for value in x]
    assert_ranks_equal([tensor.numpy() for tensor in comm.all_reduce(tensors)], [sum(x)] * N)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_fewer_elements_than_ranks(comm: hoop.Communicator, count: int) -> None:
    assert_ranks_equal(comm.all_reduce(vectors(count)), [sum(vectors(count))] * N)


@pytest.mark.parametrize("algorithm", ["ring", "chunked_ring", "naive", "tree"])
def test_algorithms(comm: hoop.Communicator, algorithm: str) -> None:
    x = vectors(1000)
    buffer = comm.buffer("x", 1000).fill(x)
    report = comm.all_reduce(buffer, algorithm=algorithm, chunk_bytes=256)
    assert report.algorithm == algorithm
    assert report.bytes_sent == 2 * (N - 1) * 4000  # in total, for every algorithm
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], [sum(x)] * N)


def test_a_compressed_all_reduce(comm: hoop.Communicator) -> None:
    """Repeated on one buffer: what one call does not send is sent by a later one (error feedback)."""
    x = vectors(1000)
    source, out = comm.buffer("x", 1000).fill(x), comm.buffer("y", 1000)
    totals = [np.zeros(1000) for _ in range(N)]
    for _ in range(20):
        report = comm.all_reduce(source, out=out, op="avg", compression="top_k:0.2")
        assert report.algorithm == "top_k:0.2"
        for rank, total in enumerate(totals):
            total += out.read(rank)
    exact = 20 * sum(x).astype("float64") / N
    for rank, total in enumerate(totals):
        assert np.array_equal(total, totals[0]), f"rank {rank}"
    assert 0 < np.linalg.norm(totals[0] - exact) < 0.5 * np.linalg.norm(exact)
    with pytest.raises(InvalidArgument, match=r"compression: int8 keeps .* put them into a buffer"):
        comm.all_reduce(x, compression="int8")


# ---- buffers


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_buffers(comm: hoop.Communicator, collective: str) -> None:
    """From one buffer into another: the source does not change, nor the result of a rank that receives nothing."""
    x = vectors(4 * N)
    length = int(4 * N * RESULT_SCALE.get(collective, 1))
    old = [np.full(length, -1, "float32")] * N
    source, out = comm.buffer("x", 4 * N).fill(x), comm.buffer("y", length).fill(old)
    getattr(comm, collective)(source, out=out, **OPTIONS.get(collective, {}))
    assert_ranks_equal([out.read(rank) for rank in range(N)], EXPECTED[collective](x, old))
    assert_ranks_equal([source.read(rank) for rank in range(N)], x)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "reduce", "send"])
def test_buffers_in_place(comm: hoop.Communicator, collective: str) -> None:
    x = vectors(50)
    buffer = comm.buffer("x", 50).fill(x)
    getattr(comm, collective)(buffer, **OPTIONS.get(collective, {}))
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], EXPECTED[collective](x, x))


@pytest.mark.parametrize("collective", ["all_gather", "gather", "reduce_scatter", "scatter"])
def test_blocks_in_place(comm: hoop.Communicator, collective: str) -> None:
    """Rank r's own block is block r of the whole buffer, so its address differs on every rank."""
    whole = comm.buffer("whole", 3 * N)
    addresses = [
        device.buffers()["whole"][0] + rank * 3 * whole.dtype.itemsize for rank, device in enumerate(comm.devices)
    ]
    own_blocks = comm.at(addresses, 3)
    full = vectors(3 * N)
    whole.fill(full)
    old = [value.copy() for value in full]
    if "gather" in collective:
        x = [value.reshape(N, 3)[rank] for rank, value in enumerate(full)]
        getattr(comm, collective)(own_blocks, out=whole, **OPTIONS.get(collective, {}))
        assert_ranks_equal([whole.read(rank) for rank in range(N)], EXPECTED[collective](x, old))
    else:
        getattr(comm, collective)(whole, out=own_blocks, **OPTIONS.get(collective, {}))
        assert_ranks_equal([own_blocks.read(rank) for rank in range(N)], EXPECTED[collective](full, old))


def test_part(comm: hoop.Communicator) -> None:
    """A range of a buffer's elements; the elements around it do not change."""
    x = vectors(10)
    buffer = comm.buffer("x", 10).fill(x)
    middle = buffer.part(2, 8)
    assert (middle.count, middle.part(1, 3).offset) == (6, 12)
    comm.all_reduce(middle.part(1, 3))
    wanted = [value.copy() for value in x]
    for value in wanted:
        value[3:5] = sum(x)[3:5]
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], wanted)
    comm.broadcast(buffer.part(0, 5), out=buffer.part(5, 10), root=2)
    assert_ranks_equal([buffer.read(rank)[5:] for rank in range(N)], [wanted[2][:5]] * N)


def test_different_addresses(comm: hoop.Communicator) -> None:
    """The vectors have a different address on each rank, and no name."""
    x = vectors(64, "float64")
    buffer = comm.at([0x1000 + 4096 * rank for rank in range(N)], 64, "float64").fill(x)
    comm.all_reduce(buffer)
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], [sum(x)] * N)
    raw = comm.devices[2].read(0x1000 + 4096 * 2, 64 * 8)
    np.testing.assert_array_equal(np.frombuffer(raw, "float64"), sum(x))


def test_named_buffers_can_be_reused(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    x = vectors(8)
    comm.buffer("weights", 8).fill(x)
    with pytest.raises(FailedPrecondition, match="'weights' already exists"):
        comm.buffer("weights", 8)
    with pytest.raises(FailedPrecondition, match="exists with 32 bytes"):
        comm.buffer("weights", 9, reuse=True)
    other = cluster.communicator([4, 3, 2, 1]).buffer("weights", 8, reuse=True)
    assert_ranks_equal([other.read(rank) for rank in range(N)], x[::-1])
    assert cluster.device(3).buffers()["weights"][1] == 32
    other.free()
    assert "weights" not in cluster.device(3).buffers()


# ---- drivers, groups, handles


def test_drivers_agree_to_the_bit(comm: hoop.Communicator) -> None:
    """``stepped`` adds in the same order as ``devices``, so the results are bitwise equal."""
    generator = np.random.default_rng(1)
    x = [generator.standard_normal(1001).astype("float32") for _ in range(N)]
    found = {driver: comm.all_reduce(x, driver=driver, algorithm="ring") for driver in ("devices", "stepped", "relay")}
    for one, other in zip(found["devices"], found["stepped"], strict=True):
        assert one.tobytes() == other.tobytes()
    # The relay adds in rank order; the ring starts at a different rank for each segment.
    assert_ranks_equal(found["relay"], [((x[0] + x[1]) + x[2]) + x[3]] * N)
    whole = vectors(1001)
    for driver in ("devices", "stepped", "relay"):
        assert_ranks_equal(comm.all_reduce(whole, driver=driver), [sum(whole)] * N)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_stepped(comm: hoop.Communicator, collective: str) -> None:
    """Including collectives in which a rank keeps scratch data between rounds."""
    x = vectors(2 * N)
    options = OPTIONS.get(collective, {})
    call = getattr(comm, collective)
    assert_ranks_equal(call(x, driver="stepped", **options), call(x, **options))


def test_invalid_options_are_refused(comm: hoop.Communicator) -> None:
    x = vectors(8)
    for options, says in (
        ({"driver": "magic"}, "driver: 'magic' is unknown; known: devices, stepped, relay"),
        ({"driver": "stepped", "algorithm": "chunked_ring"}, "be stepped; use ring"),
        ({"algorithm": "magic"}, "all_reduce has no 'magic'"),
        ({"op": "xor"}, "op: 'xor' is unknown"),
        ({"timeout": -1.0}, "timeout_s: -1.0"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            comm.all_reduce(x, **options)
    with pytest.raises(InvalidArgument, match="relay does all_reduce only"):
        comm.broadcast(x, driver="relay")
    with pytest.raises(InvalidArgument, match=r"root: rank 9 is not in 0\.\.3"):
        comm.broadcast(x, root=9)


def test_a_group_runs_in_order(comm: hoop.Communicator) -> None:
    """Each operation reads the result of the one before it."""
    x = vectors(16)
    buffer, out = comm.buffer("x", 16).fill(x), comm.buffer("y", 16)
    with comm.group():
        assert comm.all_reduce(buffer) is None
        comm.all_reduce(buffer, out=out)
        comm.broadcast(buffer, root=0)
        comm.reduce(out, root=3, op="max")
        comm.barrier()
        assert_ranks_equal([buffer.read(rank) for rank in range(N)], x)  # nothing has run yet
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], [sum(x)] * N)
    assert_ranks_equal([out.read(rank) for rank in range(N)], [sum(x) * N] * N)


def test_an_exception_discards_the_group(comm: hoop.Communicator) -> None:
    x = vectors(4)
    buffer = comm.buffer("x", 4).fill(x)

    def interrupted() -> None:
        with comm.group():
            comm.all_reduce(buffer)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    with pytest.raises(FailedPrecondition, match="groups do not nest"), comm.group(), comm.group():
        pass
    with pytest.raises(InvalidArgument, match="cannot be in a group"), comm.group():
        comm.all_reduce(x)
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], x)
    comm.barrier()


def test_an_error_in_a_group_names_the_operation(comm: hoop.Communicator) -> None:
    """Whether the coordinator detects the error before anything runs, or a device does."""
    x = vectors(4)
    buffer = comm.buffer("x", 4).fill(x)
    outside = comm.at([0] * N, 4)
    missing = hoop.Buffer(buffer.devices, ("x", "x", "gone", "x"), 0, 4, buffer.dtype)

    def reduce_all(*buffers: hoop.Buffer) -> None:
        with comm.group():
            for each in buffers:
                comm.all_reduce(each)

    with pytest.raises(OutOfRange, match=r"operation 2 of 3: rank 0: \[0x0, 0x10\)"):
        reduce_all(buffer, outside, buffer)
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], x)
    with pytest.raises(NotFound, match=r"device 3: operation 3 of 3: .* no buffer is called 'gone'"):
        reduce_all(buffer, buffer, missing)


def test_handles(comm: hoop.Communicator) -> None:
    x = vectors(4_000_000)
    said, attempts = "", 100  # a sum may be done before this process is scheduled again
    while not said and attempts:
        attempts -= 1
        handle = comm.all_reduce(x, wait=False)
        assert isinstance(handle, hoop.Handle)
        try:
            handle.wait(1e-5)
        except DeadlineExceeded as error:
            said = str(error)
    assert "not done after 1e-05 s; it goes on" in said
    found = handle.wait(LONG_S)
    assert handle.done()
    assert handle.wait() is found
    assert_ranks_equal(found, [sum(x)] * N)
    buffer = comm.buffer("x", 4).fill(vectors(4))
    handles = [comm.all_reduce(buffer, wait=False) for _ in range(8)]
    for one in handles:
        assert one.wait(LONG_S).algorithm
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], [sum(vectors(4)) * N**7] * N)


def test_a_handle_raises_the_failure_at_every_wait(comm: hoop.Communicator) -> None:
    handle = comm.all_reduce(comm.at([0] * N, 4), wait=False)
    for _ in range(2):
        with pytest.raises(OutOfRange, match="outside device 1's memory"):
            handle.wait(LONG_S)
    assert handle.done()


def test_barrier_and_reports(comm: hoop.Communicator) -> None:
    assert comm.barrier().bytes_sent == 0
    assert comm.barrier(wait=False).wait(LONG_S).algorithm
    buffer = comm.buffer("x", 100)
    report = comm.all_reduce(buffer, algorithm="ring")
    assert (report.algorithm, report.bytes_sent, report.messages_sent) == ("ring", 2 * (N - 1) * 400, 24)
    assert 0 < report.seconds < LONG_S
    report = comm.all_reduce(buffer, algorithm="ring", driver="stepped")
    assert (report.algorithm, report.messages_sent) == ("ring, stepped", 24)
    report = comm.all_reduce(buffer, driver="relay")
    assert (report.algorithm, report.messages_sent) == ("naive, relayed", 2 * N)


# ---- memory


def test_copies(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    """Between devices and within one, by name and by address; source and destination may be the same."""
    comm.buffer("x", 8)
    one, two = cluster.device(1), cluster.device(2)
    one.write("x", bytes(range(32)))
    cluster.copy((1, "x"), (2, "x"), 32)
    assert two.read("x", 32) == bytes(range(32))
    cluster.copy((2, "x"), (1, 0x2000), 16)
    assert one.read(0x2000, 16) == bytes(range(16))
    cluster.copy((1, 0x2000), (1, "x"), 4)
    cluster.copy((1, "x"), (1, "x"), 32)
    assert one.read("x", 32) == bytes(range(32))
    cluster.copy((1, "x"), (2, "x"), 0)


def test_invalid_copies_are_refused(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    comm.buffer("x", 8)
    with pytest.raises(NotFound, match=r"device 2: .*no buffer is called 'y'"):
        cluster.copy((1, "x"), (2, "y"), 8)
    with pytest.raises(NotFound, match=r"device 1: .*no buffer is called 'y'"):
        cluster.copy((1, "y"), (2, "x"), 8)
    with pytest.raises(NotFound, match="device 9 is unknown"):
        cluster.copy((1, "x"), (9, "x"), 8)
    with pytest.raises(OutOfRange, match="past the end of buffer 'x' of 32 bytes"):
        cluster.copy((1, "x"), (2, "x"), 33)
    with pytest.raises(OutOfRange, match="outside device 2's memory"):
        cluster.copy((1, "x"), (2, 0), 8)
    cluster.copy((1, "x"), (2, "x"), 32)


def test_large_transfers(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    """100 MB to one device, on to another, and back: more than fit into one message."""
    data = np.random.default_rng(2).integers(0, 256, LARGE, dtype="uint8")
    one, two = cluster.device(1), cluster.device(2)
    one.allocate("large", LARGE)
    two.allocate("large", LARGE)
    one.write("large", data.data)
    cluster.copy((1, "large"), (2, "large"), LARGE)
    assert np.array_equal(np.frombuffer(two.read("large", LARGE), "uint8"), data)
    assert two.read("large", 10, offset=LARGE - 10) == data[-10:].tobytes()


def test_write_accepts_any_bytes_like_object(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    """Also with elements larger than a byte and more than one dimension."""
    values = np.arange(3 * 2**19, dtype="float64").reshape(-1, 2)  # 12 MiB
    device = cluster.device(1)
    device.allocate("x", values.nbytes)
    device.write("x", values.data)
    assert device.read("x", values.nbytes) == values.tobytes()
    device.write("x", b"")
    device.write("x", b"end", offset=values.nbytes - 3)
    assert device.read("x", 5, offset=values.nbytes - 5) == values.tobytes()[-5:-3] + b"end"
    assert device.read("x", 0) == b""


def test_out_of_memory(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    """The error names device, buffer, sizes and what holds the memory; no device keeps a partial allocation."""
    cluster.device(4).allocate("hoard", 200 * 2**20)
    with pytest.raises(OutOfMemory) as caught:
        comm.buffer("x", 60 * 2**20, "uint8")
    for text in ("device 4", "'x'", "60 MiB", "56 MiB free of 256 MiB", "held by 'hoard' 200 MiB"):
        assert text in str(caught.value)
    with pytest.raises(OutOfMemory):
        comm.all_reduce([np.zeros(60 * 2**20, "uint8")] * N)
    assert [list(device.buffers()) for device in comm.devices] == [[], [], [], ["hoard"]]


def test_staging_is_freed(comm: hoop.Communicator) -> None:
    """After success and refusal, with and without ``wait=False``."""
    x = vectors(8)
    comm.all_reduce(x)
    with pytest.raises(InvalidArgument):
        comm.all_reduce(x, op="xor")
    handle = comm.all_reduce(x, op="xor", wait=False)
    with pytest.raises(InvalidArgument):
        handle.wait(LONG_S)
    for options in ({"root": -1}, {"root": "first"}, {"colour": "red"}):
        with pytest.raises(InvalidArgument, match=f"options: .*{next(iter(options))}"):
            comm.broadcast(x, **options)
    comm.all_reduce(x, wait=False).wait(LONG_S)
    assert [device.buffers() for device in comm.devices] == [{}] * N


# ---- invalid arguments


def test_invalid_arrays_are_refused(comm: hoop.Communicator) -> None:
    for values, says in (
        (vectors(3)[:3], "values: 3 were given for 4 ranks"),
        ([*vectors(3)[:3], np.zeros(4, "float32")], r"their sizes differ: \[3, 3, 3, 4\]"),
        ([*vectors(3)[:3], np.zeros(3)], "an array of float64 was given, float32 is wanted"),
        (
            [torch.zeros(3)] * 3 + [torch.zeros(3).double()],
            "a tensor of float64 was given, float32 is wanted",
        ),
        ([np.zeros(3, complex)] * N, "dtype: 'complex128' is not known; use one of"),
        ([[1.0, 2.0]] * N, "a list is neither a NumPy array nor a torch tensor"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            comm.all_reduce(values)
    with pytest.raises(InvalidArgument, match="values: 3 elements do not make 4 equal blocks"):
        comm.reduce_scatter(vectors(3))
    with pytest.raises(InvalidArgument, match="they need no out"):
        comm.all_reduce(vectors(3), out=comm.buffer("x", 3))


def test_invalid_buffers_are_refused(cluster: hoop.Cluster, comm: hoop.Communicator) -> None:
    buffer = comm.buffer("x", 10)
    with pytest.raises(InvalidArgument, match="values: 3 elements were given, the buffer has 10"):
        buffer.write(0, np.zeros(3, "float32"))
    with pytest.raises(InvalidArgument, match="an array of float64 was given, float32 is wanted"):
        buffer.write(0, np.zeros(10))
    with pytest.raises(InvalidArgument, match="values: 1 were given for 4 ranks"):
        buffer.fill([np.zeros(10, "float32")])
    with pytest.raises(InvalidArgument, match=r"part: \[3, 11\) is not within the buffer's 10 elements"):
        buffer.part(3, 11)
    with pytest.raises(InvalidArgument, match="addresses: 2 were given for 4 ranks"):
        comm.at([1, 2], 3)
    with pytest.raises(InvalidArgument, match="dtype: 'float8' is not known"):
        comm.buffer("y", 3, "float8")
    with pytest.raises(InvalidArgument, match="out: it holds int32, the vectors are of float32"):
        comm.all_reduce(buffer, out=comm.buffer("y", 10, "int32"))
    with pytest.raises(InvalidArgument, match="rank 3: address 0x1001 is not aligned to the 4 bytes"):
        comm.all_reduce(comm.at([0x1000, 0x1000, 0x1000, 0x1001], 3))
    with pytest.raises(InvalidArgument, match="overlap"):
        comm.all_reduce(buffer.part(0, 6), out=buffer.part(2, 8))
    with pytest.raises(InvalidArgument, match=r"on 4 devices, communicator \d+ has 2"):
        cluster.communicator(2).all_reduce(buffer)


def test_a_result_is_never_written_outside_its_buffer(comm: hoop.Communicator) -> None:
    """A part that is too short is refused, although memory follows it; so are unequal blocks."""
    x, old = vectors(10), vectors(40)
    source, out = comm.buffer("x", 10).fill(x), comm.buffer("y", 40).fill(old)
    with pytest.raises(InvalidArgument, match="out: it has 4 elements, the result 10"):
        comm.all_reduce(source, out=out.part(0, 4))
    with pytest.raises(InvalidArgument, match="out: it has 39 elements, the result 40"):
        comm.all_gather(source, out=out.part(0, 39))
    with pytest.raises(InvalidArgument, match="values: 10 elements do not make 4 equal blocks"):
        comm.reduce_scatter(source, out=out)
    assert_ranks_equal([out.read(rank) for rank in range(N)], old)


def test_invalid_device_memory_calls_are_refused(cluster: hoop.Cluster) -> None:
    device = cluster.device(1)
    with pytest.raises(OutOfRange, match=r"device 1 .*address 0x0 with size 8"):
        device.read(0, 8)
    with pytest.raises(OutOfRange, match="device 1"):
        device.write(device.info.max_address - 4, b"12345678")
    for call in (device.free, lambda name: device.read(name, 1), lambda name: device.write(name, b"1")):
        with pytest.raises(NotFound, match="no buffer is called 'nobody'"):
            call("nobody")
    with pytest.raises(InvalidArgument, match="cannot name a buffer"):
        device.allocate("", 8)
    with pytest.raises(NotFound, match="device 9 is unknown to the coordinator at"):
        cluster.device(9)


# ---- communicators


def test_ranks_are_in_the_order_of_the_ids(cluster: hoop.Cluster) -> None:
    comm = cluster.communicator([3, 1, 4])
    assert [device.id for device in comm.devices] == [3, 1, 4]
    x = vectors(3, ranks=3)
    assert_ranks_equal(comm.all_gather(x), [np.concatenate(x)] * 3)
    comm.buffer("mine", 3).fill(x)
    found = [np.frombuffer(cluster.device(device_id).read("mine", 12), "float32") for device_id in (3, 1, 4)]
    assert_ranks_equal(found, x)
    comm.buffer("mine", 3, reuse=True).free()
    comm.destroy()


def test_invalid_communicators_are_refused(cluster: hoop.Cluster) -> None:
    with pytest.raises(FailedPrecondition, match="9 were asked for, 4 are alive; start more with: hoop device"):
        cluster.communicator(9)
    with pytest.raises(NotFound, match=r"device 7 is unknown; known: \[1, 2, 3, 4\]"):
        cluster.communicator([1, 7])
    with pytest.raises(InvalidArgument, match=r"\[1, 1\] names a device twice"):
        cluster.communicator([1, 1])
    empty_sets: tuple[int | list[int], ...] = (0, [])
    for empty in empty_sets:
        with pytest.raises(InvalidArgument, match="needs at least one"):
            cluster.communicator(empty)


@pytest.mark.parametrize("driver", ["devices", "stepped", "relay"])
def test_a_communicator_of_one_device(cluster: hoop.Cluster, driver: str) -> None:
    """Every collective is the identity."""
    comm = cluster.communicator([2])
    x = vectors(5, ranks=1)
    for collective in COLLECTIVES:
        if driver != "relay" or collective == "all_reduce":
            options = {"source": 0, "destination": 0} if collective == "send" else {}
            assert_ranks_equal(getattr(comm, collective)(x, driver=driver, **options), x)
    comm.barrier()
    comm.destroy()


def test_the_life_cycle_of_a_communicator(cluster: hoop.Cluster) -> None:
    comm = cluster.communicator(2)
    assert (comm.size, comm.generation, comm.status().status) == (2, 1, "in_progress")
    comm.barrier()
    assert (comm.status().status, comm.status().reason) == ("success", "")
    with pytest.raises(OutOfRange):
        comm.all_reduce(comm.at([0, 0], 1))
    assert comm.status().status == "success"  # a request that is refused changes nothing
    assert comm.rebuild().generation == 2  # all members are alive: same members, next generation
    assert_ranks_equal(comm.all_reduce(vectors(3, ranks=2)), [sum(vectors(3, ranks=2))] * 2)
    comm.destroy()
    for call in (comm.barrier, comm.status, comm.rebuild, comm.destroy):
        with pytest.raises(NotFound, match="unknown or destroyed"):
            call()
    assert comm.id not in [one.id for one in cluster.status().communicators]


def test_communicators_side_by_side(cluster: hoop.Cluster) -> None:
    """Eight over the same devices in different orders, each in its own thread."""
    orders = [[1, 2, 3, 4], [4, 3, 2, 1], [2, 1], [1, 2], [3, 4, 1], [2], [4, 2], [1, 4, 2, 3]]
    all_ready = threading.Barrier(len(orders), timeout=LONG_S)

    def run(index: int) -> int:
        comm = cluster.communicator(orders[index])
        x = [value * (index + 1) for value in vectors(5000, ranks=comm.size)]
        all_ready.wait()
        for _ in range(5):
            assert_ranks_equal(comm.all_reduce(x), [sum(x)] * comm.size)
        comm.destroy()
        return index

    with ThreadPoolExecutor(len(orders)) as threads:
        assert sorted(threads.map(run, range(len(orders)))) == list(range(len(orders)))


def test_one_communicator_from_many_threads(comm: hoop.Communicator) -> None:
    """Its operations run one at a time."""
    buffer = comm.buffer("x", 100).fill([np.ones(100, "float64").astype("float32")] * N)
    with ThreadPoolExecutor(6) as threads:
        assert len(list(threads.map(lambda _: comm.all_reduce(buffer), range(6)))) == 6
    assert_ranks_equal([buffer.read(rank) for rank in range(N)], [np.full(100, float(N**6), "float32")] * N)


def test_clients_come_and_go(up: Any, connect: Callable[..., hoop.Cluster]) -> None:
    """Each of two clients sees the communicators and events of the other."""
    one, two = connect(up.address), connect(up.address, timeout=LONG_S)
    comm = one.communicator([1, 2])
    assert comm.id in [each.id for each in two.status().communicators]
    kinds = [event.kind for event in two.events()]
    assert kinds[0] == "coordinator_started"
    assert kinds.count("device_joined") == N
    comm.destroy()
    sequence = [event.sequence for event in two.events()]
    assert sequence == list(range(1, len(sequence) + 1))
    # Those of the clients of tests before may be destroyed now, too.
    assert {event.kind for event in two.events(after=sequence[-1] - 1)} == {"communicator_destroyed"}
    follow = two.events(after=sequence[-1], follow=True)
    assert isinstance(follow, Generator)
    made = one.communicator([2])
    event = next(event for event in follow if event.kind != "communicator_destroyed")
    assert (event.kind, event.fields["communicator"]) == ("communicator_created", str(made.id))
    follow.close()
    made.destroy()


def test_a_failed_connect_reports_address_tries_and_cause() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        hoop.connect("127.0.0.1:1", connect_timeout=0.4)
    for text in ("the coordinator at 127.0.0.1:1", "within ", "tries", "refused"):
        assert text in str(caught.value)
    with pytest.raises(InvalidArgument, match="'nonsense' is not host:port"):
        hoop.connect("nonsense")
