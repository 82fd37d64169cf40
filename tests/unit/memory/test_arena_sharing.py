"""An arena that several processes share, and an arena whose owner is killed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition
from hoop.memory import Allocator, Arena, dtype
from hoop.memory.arena import BufferTable
from hoop.memory.storage import Geometry

CAPACITY = 64 * 1024
Python = Callable[..., subprocess.Popen[str]]


def test_an_arena_has_one_owner_at_a_time(arena: Arena, path: Path, python: Python) -> None:
    for enter in (Arena.open, lambda path: Arena.open_or_create(path, CAPACITY)):
        with pytest.raises(FailedPrecondition, match=f"arena {path}: another process owns it"):
            enter(path)
    program = (
        "import sys\nfrom hoop.errors import FailedPrecondition\nfrom hoop.memory import Arena\n"
        "try:\n    Arena.open(sys.argv[1])\nexcept FailedPrecondition as error:\n    print(error)\n"
    )
    child = python(program, path)
    output, _ = child.communicate(timeout=300)
    assert "another process owns it" in output
    arena.close()
    Arena.open(path).close()


def test_a_forked_child_that_closes_does_not_release_its_parents_lock(path: Path, python: Python) -> None:
    program = (
        "import os, sys\nfrom hoop.errors import FailedPrecondition\nfrom hoop.memory import Arena\n"
        "arena = Arena.create(sys.argv[1], 4096)\n"
        "if (child := os.fork()) == 0:\n    arena.close()\n    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "try:\n    Arena.open(sys.argv[1])\nexcept FailedPrecondition as error:\n    print(error)\n"
        "arena.close()\n"
    )
    child = python(program, path)
    output, _ = child.communicate(timeout=300)
    assert "another process owns it" in output


def test_another_process_attaches_and_writes(arena: Arena, python: Python) -> None:
    buffer = arena.allocate("w", 16)
    values = arena.array(buffer.address, dtype("float32"), 4)
    program = (
        "import sys\nfrom hoop.memory import Arena, dtype\n"
        "with Arena.attach(sys.argv[1]) as arena:\n"
        "    buffer = arena.buffer('w')\n"
        "    arena.array(buffer.address, dtype('float32'), 4)[:] = [1, 2, 3, 4]\n"
        "    print(arena.read(arena.max_address - 4, 4).decode())\n"
    )
    arena.write(arena.max_address - 4, b"ping")
    child = python(program, arena.path)
    output, _ = child.communicate(timeout=300)
    assert child.returncode == 0
    assert output.strip() == "ping"
    assert values.tolist() == [1, 2, 3, 4]


def test_a_shared_descriptor_has_the_same_bytes_and_no_lock(arena: Arena, path: Path) -> None:
    arena.write(arena.min_address, b"here")
    descriptor, offset = arena.share()
    try:
        assert os.pread(descriptor, 4, offset) == b"here"
        os.pwrite(descriptor, b"back", offset)
        assert arena.read(arena.min_address, 4) == b"back"
        arena.close()
        Arena.open(path).close()
    finally:
        os.close(descriptor)
    with pytest.raises(FailedPrecondition, match="it is closed"):
        arena.share()


def test_the_arena_is_shared_even_if_its_path_names_another_file(arena: Arena, path: Path) -> None:
    arena.write(arena.min_address, b"here")
    path.unlink()
    path.write_bytes(b"somebody else's")
    descriptor, offset = arena.share()
    try:
        assert os.pread(descriptor, 4, offset) == b"here"
    finally:
        os.close(descriptor)


def test_without_proc_another_file_at_the_path_is_not_shared(
    arena: Arena, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # no /proc
    path.unlink()
    path.write_bytes(b"somebody else's")
    with pytest.raises(FailedPrecondition, match="the name means another file now"):
        arena.share()


def test_an_attached_process_reads_and_cannot_change(arena: Arena, path: Path) -> None:
    with Arena.attach(path) as other:
        buffer = arena.allocate("w", 16)
        assert other.buffers() == []
        other.refresh()
        assert other.buffers() == [buffer]
        assert other.used == 16
        arena.free("w")
        arena.refresh()  # no effect: the owner's table is authoritative
        other.refresh()
        assert other.buffers() == arena.buffers() == []
        for change in (
            lambda: other.allocate("v", 1),
            lambda: other.allocate("w", 16, reuse=True),
            lambda: other.free("w"),
            lambda: other.set_label("owner", "3"),
            lambda: other.close(delete=True),
        ):
            with pytest.raises(FailedPrecondition, match="is attached and does not own it; ask its owner"):
                change()
    assert path.exists()


def test_a_refresh_during_updates_sees_a_consistent_table(path: Path, python: Python) -> None:
    program = (
        "import sys\nfrom hoop.memory import Arena\n"
        "with Arena.create(sys.argv[1], 65536) as arena:\n"
        "    arena.allocate('always', 8)\n"
        "    print('ready', flush=True)\n"
        "    for turn in range(500):\n"
        "        arena.allocate(str(turn) * 20, 8)\n"
        "        arena.free(str(turn) * 20)\n"
    )
    child = python(program, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with Arena.attach(path) as other:
        while child.poll() is None:
            other.refresh()
            assert len(other.buffers()) in (1, 2)
            assert other.buffer("always").size == 8
    assert child.returncode == 0


def test_a_read_that_overlaps_two_updates_is_retried(arena: Arena, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = BufferTable._read
    slots_read = []

    def fail_twice(self: BufferTable, slot: int) -> tuple[int, Allocator, dict[str, str]]:
        slots_read.append(slot)
        if len(slots_read) <= 2:
            raise ValueError("does not match its checksum")
        return read(self, slot)

    buffer = arena.allocate("w", 8)
    monkeypatch.setattr(BufferTable, "_read", fail_twice)
    with Arena.attach(path) as other:
        assert other.buffers() == [buffer]
    assert slots_read == [0, 1, 0, 1]


def test_open_or_create_reopens_an_existing_arena(path: Path) -> None:
    with Arena.open_or_create(path, CAPACITY, 0x4000) as arena:
        buffer = arena.allocate("größe", 100)
        arena.write(buffer.address, b"kept")
    with Arena.open_or_create(path, CAPACITY, 0x4000) as arena:
        assert arena.buffers() == [buffer]
        assert arena.read(buffer.address, 4) == b"kept"
        assert arena.allocate("more", 1).address == buffer.address - 64
    for capacity, low in [(2 * CAPACITY, 0x4000), (CAPACITY, 0x1000)]:
        with pytest.raises(FailedPrecondition) as caught:
            Arena.open_or_create(path, capacity, low)
        message = str(caught.value)
        assert f"capacity 64 KiB ({CAPACITY} bytes) from address 0x4000, not" in message
        assert f"({capacity} bytes) from {low:#x}; start with the values it has, or delete it" in message
    Arena.open(path).close()  # the refused calls kept no lock


def test_the_bytes_of_a_killed_owner_are_recovered(path: Path, python: Python) -> None:
    program = (
        "import sys\nfrom hoop.memory import Arena, dtype\n"
        "arena = Arena.create(sys.argv[1], 65536)\n"
        "for name in ('weights', 'grads', 'adam'):\n"
        "    buffer = arena.allocate(name, 4000)\n"
        "    arena.array(buffer.address, dtype('float32'), 1000)[:] = len(name)\n"
        "arena.free('grads')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = python(program, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(FailedPrecondition, match="another process owns it"):
        Arena.open(path)
    child.kill()
    assert child.wait(timeout=300) == -signal.SIGKILL
    with Arena.open(path) as arena:
        assert [buffer.name for buffer in arena.buffers()] == ["adam", "weights"]
        for buffer in arena.buffers():
            values = arena.array(buffer.address, dtype("float32"), 1000)
            assert (values == len(buffer.name)).all()


def test_an_arena_whose_creator_was_killed_is_refused_or_recreated(path: Path, python: Python) -> None:
    program = (
        "import os, signal, sys\nfrom hoop.memory import Arena\nfrom hoop.memory.arena import BufferTable\n"
        "save = BufferTable.save\n"
        "def die(self, spans):\n    save(self, spans)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "BufferTable.save = die\n"
        "Arena.create(sys.argv[1], 65536)\n"
    )
    child = python(program, path)
    child.communicate(timeout=300)
    assert child.returncode == -signal.SIGKILL
    assert path.stat().st_size == Geometry(CAPACITY).file_size
    for enter in (Arena.open, Arena.attach):
        with pytest.raises(FailedPrecondition, match="superblock is empty, its creation never finished"):
            enter(path)
    with pytest.raises(FailedPrecondition, match="already exists"):
        Arena.create(path, CAPACITY)
    with Arena.open_or_create(path, 2 * CAPACITY) as arena:
        assert arena.capacity == 2 * CAPACITY
        assert arena.buffers() == []
    Arena.open(path).close()
