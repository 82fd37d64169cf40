"""An arena as its owner uses it: addresses, buffers, threads and closing."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hoop.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    OutOfRange,
    ResourceExhausted,
)
from hoop.memory import Arena, ArenaBuffer, dtype, storage
from hoop.memory.storage import Geometry

CAPACITY = 64 * 1024


def test_addresses_are_checked_at_both_ends(arena: Arena) -> None:
    low, high = arena.min_address, arena.max_address
    assert arena.check(low, 0) == arena.check(low, CAPACITY) == Geometry(CAPACITY).data_offset
    assert arena.check(high, 0) - arena.check(low, 0) == CAPACITY
    assert arena.check(high - 1, 1) == arena.check(high, 0) - 1
    for address, size in [
        (low - 1, 1),
        (low - 1, 0),
        (0, 0),
        (high, 1),
        (high + 1, 0),
        (low, CAPACITY + 1),
    ]:
        with pytest.raises(OutOfRange) as caught:
            arena.check(address, size)
        message = str(caught.value)
        assert f"address {address:#x} with size {size} " in message
        assert f"[{low:#x}, {high:#x})" in message
        assert str(arena.path) not in message, "the caller may be on another machine"


def test_sums_beyond_64_bits_are_out_of_range_and_do_not_wrap_around(arena: Arena) -> None:
    for address, size in [(2**64 - 1, 2**64 - 1), (2**64 - 1, 0x1001), (0x1000, 2**64 - 1)]:
        with pytest.raises(OutOfRange):
            arena.check(address, size)
    with pytest.raises(OutOfRange):
        arena.check(np.uint64(2**64 - 1), np.uint64(0x1001))  # type: ignore[arg-type]


@pytest.mark.parametrize("address", [-1, 2**64])
def test_addresses_and_sizes_beyond_64_bits_are_refused(arena: Arena, address: int) -> None:
    with pytest.raises(InvalidArgument, match=f"address {address:#x} is not a number from 0"):
        arena.view(address, 1)
    with pytest.raises(InvalidArgument, match=f"size {address:#x} is not"):
        arena.read(0x1000, address)


def test_written_bytes_are_read_back(arena: Arena) -> None:
    arena.write(0x1001, b"hello")
    arena.write(arena.max_address - 3, bytearray(b"end"))
    assert arena.read(0x1000, 7) == b"\0hello\0"
    assert arena.read(arena.max_address - 3, 3) == b"end"
    arena.view(0x1001, 1)[:] = b"j"
    assert bytes(arena.view(0x1001, 5)) == b"jello"
    arena.write(0x1002, arena.view(0x1001, 5))  # overlaps its source
    assert arena.read(0x1001, 6) == b"jjello"
    arena.write(arena.max_address, b"")
    assert arena.read(arena.max_address, 0) == b""
    assert len(arena.view(arena.max_address, 0)) == 0
    with pytest.raises(OutOfRange, match="size 4"):
        arena.write(arena.max_address - 3, b"over")


def test_any_array_can_be_written(arena: Arena) -> None:
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    for values in (grid, grid.T, np.array(3.0), grid[:0], np.ones(2, np.complex64)):
        arena.write(0x1000, values)
        assert arena.read(0x1000, values.nbytes) == values.tobytes()
    with pytest.raises(InvalidArgument, match="3 bytes for address 0x1000 are not contiguous"):
        arena.write(0x1000, memoryview(b"abcdef")[::2])


def test_an_array_shares_the_memory_of_the_arena(arena: Arena) -> None:
    values = arena.array(0x1010, dtype("float32"), 4)
    values[:] = [1, 2, 3, 4]
    assert values.flags.aligned
    assert arena.read(0x1010, 16) == np.array([1, 2, 3, 4], np.float32).tobytes()
    assert arena.array(0x1010, dtype("bfloat16"), 8).dtype == np.uint16
    assert arena.array(arena.max_address - 8, dtype("int64"), 1).shape == (1,)
    assert arena.array(arena.max_address, dtype("int64"), 0).shape == (0,)
    with pytest.raises(OutOfRange):
        arena.array(arena.max_address - 8, dtype("int64"), 2)
    with pytest.raises(InvalidArgument, match="size -0x4"):
        arena.array(0x1000, dtype("float32"), -1)


@pytest.mark.parametrize(("name", "size"), [("float16", 2), ("float32", 4), ("float64", 8)])
def test_elements_must_be_aligned_to_their_size(arena: Arena, name: str, size: int) -> None:
    address = 0x1000 + size // 2
    with pytest.raises(InvalidArgument, match=f"{address:#x} is not aligned for elements of {size} bytes"):
        arena.array(address, dtype(name), 1)
    with pytest.raises(InvalidArgument, match="such as 0x1000"):
        arena.check(address, size, align=size)


def test_allocate_find_and_free(arena: Arena) -> None:
    weights = arena.allocate("weights", 100)
    grads = arena.allocate("grads", 100, alignment=4096)
    assert (weights, grads) == (ArenaBuffer("weights", 0x10F80, 100), ArenaBuffer("grads", 0x10000, 100))
    assert arena.buffer("grads") == grads
    assert arena.buffers() == [grads, weights]
    assert arena.used == 200
    arena.free("weights")
    assert arena.buffers() == [grads]
    with pytest.raises(NotFound, match=r"device.arena: no buffer is called 'weights'; there are 'grads'"):
        arena.buffer("weights")
    with pytest.raises(NotFound):
        arena.free("weights")


def test_named_buffers_reach_raw_bytes_at_the_bottom_only_when_the_arena_is_full(arena: Arena) -> None:
    raw = b"raw!" * (CAPACITY // 2 // 4)
    arena.write(arena.min_address, raw)
    buffers = [arena.allocate(f"b{number}", CAPACITY // 8) for number in range(4)]
    for buffer in buffers:
        arena.write(buffer.address, b"\xff" * buffer.size)
    assert arena.read(arena.min_address, len(raw)) == raw
    assert min(buffer.address for buffer in buffers) == arena.min_address + len(raw)
    assert arena.allocate("more", 1).address < arena.min_address + len(raw)


def test_errors_name_the_arena(arena: Arena) -> None:
    arena.allocate("w", 1)
    with pytest.raises(FailedPrecondition, match=f"arena {arena.path}: buffer 'w' already exists"):
        arena.allocate("w", 1)
    with pytest.raises(OutOfMemory, match=f"arena {arena.path}: cannot allocate 'all'.*held by 'w' 1 B"):
        arena.allocate("all", CAPACITY)
    with pytest.raises(InvalidArgument, match="alignment 8192; 4096 is the most"):
        arena.allocate("huge page", 1, alignment=8192)


def test_reuse_returns_the_same_buffer_or_refuses(arena: Arena) -> None:
    first = arena.allocate("w", 128, reuse=True)
    arena.write(first.address, b"kept")
    assert arena.allocate("w", 128, reuse=True) == first
    assert arena.read(first.address, 4) == b"kept"
    with pytest.raises(FailedPrecondition, match="'w' exists with 128 bytes at 0x10f80, asked for 129"):
        arena.allocate("w", 129, reuse=True)
    arena.allocate("v", 8)
    with pytest.raises(FailedPrecondition, match="asked for 8 bytes aligned to 4096"):
        arena.allocate("v", 8, alignment=4096, reuse=True)


def test_resolve_stays_inside_the_buffer(arena: Arena) -> None:
    arena.allocate("pad", 64)
    buffer = arena.allocate("w", 100)
    assert arena.resolve("w", 0, 100) == buffer.address
    assert arena.resolve("w", 40, 60) == buffer.address + 40
    assert arena.resolve("w", 100, 0) == buffer.address + 100
    for offset, size in [(0, 101), (100, 1), (101, 0), (2**64 - 1, 2**64 - 1)]:
        with pytest.raises(OutOfRange, match=f"offset {offset} .* past the end of buffer 'w' of 100 bytes"):
            arena.resolve("w", offset, size)
    with pytest.raises(InvalidArgument, match="buffer 'w': offset -0x1"):
        arena.resolve("w", -1, 1)
    with pytest.raises(NotFound, match="'x'"):
        arena.resolve("x", 0, 1)


def test_a_full_table_refuses_a_buffer_and_stays_valid(path: Path) -> None:
    with Arena.create(path, CAPACITY, table_size=4096) as arena:
        count = 28  # rows of 128 + 2 quotes, 2 brackets, 3 commas, an offset and a size: 141 bytes each
        for number in range(count):
            arena.allocate(f"{number:0128}", 8)
        with pytest.raises(ResourceExhausted, match=r"needs \d+ bytes and has 4076; use fewer") as caught:
            arena.allocate(f"{count:0128}", 8)
        assert not isinstance(caught.value, OutOfMemory)
        assert len(arena.buffers()) == count
        assert arena.used == count * 8
        arena.free(f"{0:0128}")
        arena.allocate("short", 8)
    with Arena.open(path) as reopened:
        assert reopened.capacity == CAPACITY
        assert len(reopened.buffers()) == count


def test_threads_share_one_table(arena: Arena, path: Path) -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            start.wait(timeout=30)
            for turn in range(25):
                arena.allocate(f"{number}/{turn}", 16)
                if turn % 2:
                    arena.free(f"{number}/{turn}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    assert failures == []
    found = arena.buffers()
    assert len({buffer.address for buffer in found}) == len(found) == 4 * 13
    arena.close()
    with Arena.open(path) as reopened:
        assert reopened.buffers() == found


def test_views_outlive_the_arena(arena: Arena, path: Path) -> None:
    values = arena.array(0x1000, dtype("float32"), 4)
    view = arena.view(0x1000, 16)
    arena.close()
    arena.close()
    values[:] = 7
    assert np.frombuffer(view, np.float32).tolist() == [7] * 4
    with Arena.open(path) as reopened:  # the lock is released although views exist
        assert reopened.array(0x1000, dtype("float32"), 1)[0] == 7


def test_every_operation_after_close_is_refused(arena: Arena) -> None:
    arena.allocate("w", 8)
    arena.close()
    for use in (
        lambda: arena.view(0x1000, 1),
        lambda: arena.read(0x1000, 0),
        lambda: arena.write(0x1000, b"x"),
        lambda: arena.array(0x1000, dtype("int8"), 1),
        lambda: arena.allocate("v", 1),
        lambda: arena.allocate("w", 8, reuse=True),
        lambda: arena.free("w"),
        lambda: arena.buffer("w"),
        arena.buffers,
        lambda: arena.resolve("w", 0, 1),
        lambda: arena.label("owner"),
        lambda: arena.set_label("owner", "3"),
        arena.refresh,
    ):
        with pytest.raises(FailedPrecondition, match=f"arena {arena.path}: it is closed"):
            use()


def test_delete_removes_only_the_file_of_the_arena(arena: Arena, path: Path) -> None:
    arena.close(delete=True)
    assert not path.exists()
    path.write_bytes(b"somebody else's")
    arena.close(delete=True)
    assert path.exists()
    path.unlink()
    with Arena.create(path, CAPACITY) as deleted:
        path.unlink()
        deleted.close(delete=True)
    with Arena.create(path, CAPACITY) as replaced:
        path.unlink()
        path.write_bytes(b"somebody else's")
        replaced.close(delete=True)
    assert path.read_bytes() == b"somebody else's"


def test_a_file_deleted_between_open_and_lock_is_refused(
    arena: Arena, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = storage.BackingFile._lock

    def delete_and_lock(self: storage.BackingFile) -> None:
        arena.close(delete=True)
        lock(self)

    monkeypatch.setattr(storage.BackingFile, "_lock", delete_and_lock)
    with pytest.raises(FailedPrecondition, match="deleted while it was being opened; try again"):
        Arena.open(path)
