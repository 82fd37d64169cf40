"""A damaged arena file: an intact table is used, anything else is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition
from hoop.memory import Arena
from hoop.memory.arena import BufferTable
from hoop.memory.storage import PAGE, Geometry

CAPACITY = 64 * 1024


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change the file of a closed arena."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(offset: int) -> Callable[[bytearray], None]:
    """Return a change that inverts one byte."""

    def change(content: bytearray) -> None:
        content[offset] ^= 0xFF

    return change


def slot(index: int) -> int:
    """Return the file offset of a table slot."""
    return PAGE + index * Geometry(CAPACITY).table_size


@pytest.fixture
def tables(path: Path) -> tuple[int, int]:
    """Return the offsets of both slots of a closed arena: the older table has buffer a, the newer a and b."""
    with Arena.create(path, CAPACITY) as arena:
        arena.allocate("a", 8)
        arena.allocate("b", 8)
    content = path.read_bytes()
    sequences = [int.from_bytes(content[slot(index) : slot(index) + 8], "little") for index in (0, 1)]
    assert sorted(sequences) == [3, 4]
    return slot(sequences.index(3)), slot(sequences.index(4))


@pytest.mark.parametrize("byte", [0, 8, 15, 16, 19, 20, 25])
def test_the_older_table_is_used_if_the_newer_one_is_damaged(path: Path, tables: tuple[int, int], byte: int) -> None:
    edit(path, flip(tables[1] + byte))
    with Arena.open(path) as arena:
        assert [buffer.name for buffer in arena.buffers()] == ["a"]
        arena.allocate("c", 8)
    with Arena.open(path) as arena:
        assert [buffer.name for buffer in arena.buffers()] == ["c", "a"]


def test_a_damaged_older_table_changes_nothing(path: Path, tables: tuple[int, int]) -> None:
    edit(path, flip(tables[0] + 20))
    with Arena.open(path) as arena:
        assert [buffer.name for buffer in arena.buffers()] == ["b", "a"]


def test_an_update_torn_at_any_byte_leaves_the_table_before_or_after_it(path: Path) -> None:
    with Arena.create(path, CAPACITY) as arena:
        arena.allocate("a", 8)
        before = path.read_bytes()
        arena.allocate("b", 8)
    after = path.read_bytes()
    changed = [offset for offset in range(slot(2)) if before[offset] != after[offset]]
    seen = []
    for cut in range(changed[0], changed[-1] + 2):
        path.write_bytes(after[:cut] + before[cut:])
        with Arena.open(path) as arena:
            seen.append("".join(buffer.name for buffer in arena.buffers()))
    assert seen == ["a"] * (len(seen) - 1) + ["ba"]


def test_two_damaged_tables_are_refused(path: Path, tables: tuple[int, int]) -> None:
    edit(path, flip(tables[0] + 20))
    edit(path, flip(tables[1] + 15))
    for enter in (Arena.open, Arena.attach, lambda path: Arena.open_or_create(path, CAPACITY)):
        with pytest.raises(FailedPrecondition) as caught:
            enter(path)
        message = str(caught.value)
        assert f"arena {path}: arena header is damaged: table slot 0 " in message
        assert "does not match its checksum" in message
        assert "says " in message
        assert "restore the file from a copy, or delete it" in message


@pytest.mark.parametrize(
    "payload",
    [
        '{"buffers":[["a",0,99999999]],"labels":{}}',
        '{"buffers":[["a",0,8],["b",4,8]],"labels":{}}',
        '{"buffers":[["a"]],"labels":{}}',
        '{"buffers":[["a",1e999,0]],"labels":{}}',
        '{"buffers":7,"labels":{}}',
        '{"buffers":[],"labels":[]}',
        '{"buffers":[]}',
        '{"labels":{}}',
        "[]",
        "7",
        "[[",
    ],
)
def test_invalid_table_content_is_ignored_despite_a_valid_checksum(
    path: Path, payload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Arena.create(path, CAPACITY) as arena:
        arena.allocate("a", 8)
        arena.allocate("b", 8)
        header = arena._header
        assert header is not None
        monkeypatch.setattr("hoop.memory.arena.json.dumps", lambda *_, **__: payload)
        header.save([])
        monkeypatch.undo()
    with Arena.open(path) as arena:
        assert [buffer.name for buffer in arena.buffers()] == ["b", "a"]


def test_damage_to_any_byte_of_the_superblock_is_refused(path: Path, tables: tuple[int, int]) -> None:
    for byte in range(len(Geometry(CAPACITY).pack())):
        edit(path, flip(byte))
        with pytest.raises(FailedPrecondition, match="arena header is damaged: the superblock"):
            Arena.open(path)
        edit(path, flip(byte))
    Arena.open(path).close()


def test_another_format_version_is_refused(path: Path, tables: tuple[int, int]) -> None:
    edit(path, flip(8))
    with pytest.raises(FailedPrecondition, match="format version 254, this Hoop reads 1"):
        Arena.open(path)


def test_an_invalid_superblock_is_refused_despite_its_checksum(path: Path, tables: tuple[int, int]) -> None:
    def impossible(content: bytearray) -> None:
        superblock = Geometry(CAPACITY, min_address=0x1001).pack()
        content[: len(superblock)] = superblock

    edit(path, impossible)
    with pytest.raises(FailedPrecondition, match=r"superblock is impossible \(.*min_address is 0x1001"):
        Arena.open(path)


@pytest.mark.parametrize("left", [1, 44, PAGE - 1, PAGE, slot(1) + 5, Geometry(CAPACITY).file_size - 1])
def test_a_truncated_file_is_refused(path: Path, tables: tuple[int, int], left: int) -> None:
    os.truncate(path, left)
    for enter in (Arena.open, Arena.attach, lambda path: Arena.open_or_create(path, CAPACITY)):
        with pytest.raises(FailedPrecondition, match=f"damaged: the .*{left}"):
            enter(path)
    assert path.stat().st_size == left


def test_a_table_whose_write_failed_is_not_used(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BufferTable, start: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    arena.allocate("a", 8)
    with monkeypatch.context() as patch:
        patch.setattr(BufferTable, "_flush", fail)
        with pytest.raises(OSError, match="Input/output error"):
            arena.allocate("b", 8)
        with pytest.raises(OSError, match="Input/output error"):
            arena.free("a")
    assert [buffer.name for buffer in arena.buffers()] == ["a"]
    arena.allocate("b", 8)
