"""A device is restarted on its arena while a peer that was stopped still has the old process's memory mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition, OutOfMemory
from hoop.memory import Arena, storage
from hoop.memory.storage import BackingFile
from hoop.transport.shm_segment import Bytes, map_bytes

CAPACITY = 3 << 20
linux_only = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux has the locks")


@contextmanager
def mapped_by_a_peer(arena: Arena) -> Iterator[Bytes]:
    """The arena's bytes as a peer maps them: with the descriptor of an offer, which it closes at once."""
    descriptor, start = arena.share()
    try:
        memory = map_bytes(descriptor, start, arena.capacity)
    finally:
        os.close(descriptor)
    yield memory


def kill_owner(arena: Arena) -> None:
    """The kernel releases the lock of a killed process."""
    arena.close()


@linux_only
def test_a_peer_goes_on_with_the_memory_of_the_killed_process(path: Path) -> None:
    arena = Arena.create(path, CAPACITY)
    buffer = arena.allocate("weights", 1 << 20)
    arena.write(buffer.address, b"old weights")
    arena.write(arena.min_address, b"raw")
    arena.set_label("id", "7")
    with mapped_by_a_peer(arena) as stale:
        offset = buffer.address - arena.min_address
        kill_owner(arena)
        for _ in range(2):  # restarted once more, it is alone with its copy
            with Arena.open_or_create(path, CAPACITY) as again:
                assert (again.label("id"), again.buffers()) == ("7", [buffer])
                assert again.read(buffer.address, 11) == b"old weights"
                assert again.read(arena.min_address, 3) == b"raw"
                again.write(buffer.address, b"new weights")
                stale[offset : offset + 3] = 0
                assert bytes(stale[offset : offset + 11]) == b"\0\0\0 weights"
                assert again.read(buffer.address, 11) == b"new weights"
                again.write(buffer.address, b"old weights")
    assert sorted(one.name for one in path.parent.iterdir()) == [path.name]


def test_without_a_peer_the_file_stays(path: Path) -> None:
    with Arena.create(path, CAPACITY) as arena, mapped_by_a_peer(arena) as memory:
        del memory
    del arena
    before = path.stat().st_ino
    with Arena.open_or_create(path, CAPACITY):
        assert path.stat().st_ino == before


@linux_only
def test_a_descriptor_on_its_way_to_a_peer_counts(path: Path) -> None:
    """The peer was stopped before it mapped the memory."""
    with Arena.create(path, CAPACITY) as arena:
        descriptor, _ = arena.share()
    try:
        before = path.stat().st_ino
        with Arena.open(path):
            assert path.stat().st_ino != before
    finally:
        os.close(descriptor)


@linux_only
def test_without_room_for_a_copy_it_waits_for_the_peer_and_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_RELEASE_S", 0.0)
    arena = Arena.create(path, CAPACITY)
    arena.write(arena.min_address, b"kept")

    def full(self: BackingFile, size: int) -> None:
        raise OutOfMemory("no room")

    with mapped_by_a_peer(arena):
        kill_owner(arena)
        with monkeypatch.context() as patch:
            patch.setattr(BackingFile, "reserve", full)
            with pytest.raises(FailedPrecondition, match=r"still uses it, .* cannot be copied: no room; end or"):
                Arena.open(path)
        assert sorted(one.name for one in path.parent.iterdir()) == [path.name]
        with Arena.open(path) as again:
            assert again.read(arena.min_address, 4) == b"kept"


@linux_only
def test_a_copy_that_was_interrupted_is_made_again(path: Path) -> None:
    arena = Arena.create(path, CAPACITY)
    arena.write(arena.min_address, b"kept")
    half = path.with_name(f"{path.name}.copy")
    half.write_bytes(b"half")
    with mapped_by_a_peer(arena):
        kill_owner(arena)
        with Arena.open(path) as again:
            assert again.read(arena.min_address, 4) == b"kept"
    assert not half.exists()
