"""Memory on a GPU: bytes, addresses, buffers, staging; on an emulated GPU and, with the marker ``gpu``, a real one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hoop.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfMemory, OutOfRange
from hoop.memory import CHECKS, READS, Arena
from hoop.memory.cuda_arena import CudaArena, GpuMemory
from hoop.memory.gpu_driver import Bytes, Gpu, open_gpu

MIB = 1 << 20


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    found = open_gpu(request.param)
    assert found is not None
    yield found
    found.close()


@pytest.fixture
def memory(gpu: Gpu, tmp_path: Path) -> Iterator[GpuMemory]:
    with Arena.create(tmp_path / "host.arena", MIB) as host:
        found = GpuMemory(host, gpu, 3 * MIB + 8)
        yield found
        found._staging.close()
        found.arena.close()


def test_bytes_are_zero_at_first_and_come_back(memory: GpuMemory) -> None:
    assert memory.read(memory.min_address, memory.capacity) == bytes(memory.capacity)
    data = np.random.default_rng(1).integers(0, 256, memory.capacity, np.uint8)
    memory.write(memory.min_address, data)
    assert memory.read(memory.min_address, memory.capacity) == data.tobytes()
    memory.write(memory.max_address - 3, b"end")
    assert memory.read(memory.max_address - 3, 3) == b"end"
    memory.write(memory.min_address, np.arange(5.0))
    assert memory.read(memory.min_address, 40) == np.arange(5.0).tobytes()
    assert memory.read(memory.max_address, 0) == b""


def test_addresses_are_checked(memory: GpuMemory) -> None:
    low, high = memory.min_address, memory.max_address
    assert high - low == memory.capacity == 3 * MIB + 8
    for address, size in ((low - 1, 1), (high, 1), (high - 1, 2), (0, 1), (memory.host.min_address, 1), (low, 1 << 63)):
        with pytest.raises(OutOfRange, match=f"address {address:#x} with size {size} ends at"):
            memory.check(address, size)
    for address, size in ((-1, 1), (low, -1), (1 << 64, 1)):
        with pytest.raises(InvalidArgument, match=r"not a number from 0 to 2\*\*64 - 1"):
            memory.check(address, size)
    with pytest.raises(InvalidArgument, match="not aligned for elements of 8 bytes"):
        memory.check(low + 4, 8, 8)
    for address in (low - 1, high - 1):
        with pytest.raises(OutOfRange):
            memory.write(address, b"xy")
        with pytest.raises(OutOfRange):
            memory.read(address, 2)


def test_a_view_in_host_memory_is_written_back_unless_it_fails(memory: GpuMemory) -> None:
    at = memory.min_address + 100
    memory.write(at, bytes(range(10)))
    with memory.host_view(at, 10) as view:
        assert view.tobytes() == bytes(range(10))
        view[:] = 7
        assert memory.read(at, 1) == b"\0"
    assert memory.read(at, 10) == b"\7" * 10
    with memory.host_view(at, 10, READS) as view:
        view[:] = 1
    with memory.host_view(at, 10, CHECKS) as view:
        view[:] = 2
    with contextlib.suppress(ZeroDivisionError), memory.host_view(at, 10) as view:
        view[:] = 3
        raise ZeroDivisionError
    assert memory.read(at, 10) == b"\7" * 10
    with pytest.raises(OutOfRange), memory.host_view(memory.max_address - 9, 10):
        pass


def test_views_of_several_threads_do_not_share_staging(memory: GpuMemory) -> None:
    failures: list[str] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        at = memory.min_address + number * 100_000
        start.wait(60)
        for turn in range(20):
            with memory.host_view(at, 100_000) as view:
                view[:] = number * 20 + turn
            if memory.read(at, 100_000) != bytes([number * 20 + turn]) * 100_000:
                failures.append(f"{number} {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    assert not failures
    assert not any(one.is_alive() for one in threads)


def test_buffers_are_on_the_gpu_and_those_of_jobs_in_host_memory(memory: GpuMemory) -> None:
    grads = memory.allocate("grads", 1000)
    assert memory.check(grads.address, 1000) == grads.address
    assert memory.used == 1000
    assert memory.allocate("grads", 1000, reuse=True) == grads
    with pytest.raises(FailedPrecondition, match="exists with 1000 bytes"):
        memory.allocate("grads", 1001, reuse=True)
    with pytest.raises(InvalidArgument, match="alignment 8192; 4096 is the most"):
        memory.allocate("pages", 1, 8192)
    with pytest.raises(OutOfMemory, match=r"GPU memory: cannot allocate 'more'.*'grads' 1000 B"):
        memory.allocate("more", 4 * MIB)
    kept = memory.host.allocate("job1.weights", 10)
    memory.host.write(kept.address, b"0123456789")
    address = memory.resolve("job1.weights", 2, 3)
    assert memory.read(address, 3) == b"234"
    memory.write(address, b"xyz")
    assert memory.host.read(kept.address, 10) == b"01xyz56789"
    assert [one.name for one in memory.buffers()] == ["job1.weights", "grads"]
    assert memory.resolve("grads", 990, 10) == grads.address + 990
    with pytest.raises(OutOfRange, match="past the end of buffer 'grads'"):
        memory.resolve("grads", 990, 11)
    memory.free("grads")
    memory.free("job1.weights")
    with pytest.raises(NotFound, match="no buffer is called 'grads'"):
        memory.buffer("grads")


def test_copies_within_the_gpu(gpu: Gpu) -> None:
    first, second = (CudaArena.create(MIB, gpu) for _ in range(2))
    try:
        first.write(first.min_address + 7, b"on the card")
        second.copy_from(second.max_address - 11, first, first.min_address + 7, 11)
        assert second.read(second.max_address - 11, 11) == b"on the card"
        first.copy_from(first.min_address + 18, first, first.min_address + 7, 11)
        assert first.read(first.min_address + 7, 22) == b"on the card" * 2
        with pytest.raises(InvalidArgument, match="overlap"):
            first.copy_from(first.min_address + 8, first, first.min_address + 7, 11)
        with pytest.raises(OutOfRange):
            second.copy_from(second.max_address - 10, first, first.min_address, 11)
        first.clear()
        assert first.read(first.min_address, MIB) == bytes(MIB)
    finally:
        first.close()
        second.close()
    with pytest.raises(FailedPrecondition, match="it is closed"):
        first.read(0, 1)
    first.close()


def test_more_than_is_free_is_refused(gpu: Gpu, tmp_path: Path) -> None:
    free, total = gpu.memory()
    assert 0 < free <= total
    with (
        Arena.create(tmp_path / "host.arena", MIB) as host,
        pytest.raises(OutOfMemory, match=r"^--memory: .*, which has .* free of .*; choose a smaller --memory"),
    ):
        GpuMemory(host, gpu, 2 * total)


def test_pinned_memory_is_reused(memory: GpuMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    pin = memory.gpu.pin

    def counted(size: int) -> Bytes:
        pinned.append(size)
        return pin(size)

    monkeypatch.setattr(memory.gpu, "pin", counted)
    for _ in range(3):
        with memory.host_view(memory.min_address, 100_000):
            pass
    assert pinned == [1 << 17]
    with memory.host_view(memory.min_address, 10), memory.host_view(memory.min_address, 10):
        pass
    assert pinned == [1 << 17, 1 << 16]
