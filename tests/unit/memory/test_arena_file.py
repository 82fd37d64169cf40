"""Creation of an arena: its file is new, private and fully reserved."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument, NotFound, OutOfMemory
from hoop.memory import Arena, default_directory, storage
from hoop.memory.storage import Geometry

CAPACITY = 64 * 1024
MIB = 1 << 20
GROWING = 1 << 34
SHARED_MEMORY = Path("/dev/shm")
Python = Callable[..., subprocess.Popen[str]]


def test_a_new_arena_is_empty_private_and_fully_reserved(arena: Arena, path: Path) -> None:
    assert (arena.path, arena.capacity, arena.used, arena.buffers()) == (path, CAPACITY, 0, [])
    assert (arena.min_address, arena.max_address) == (0x1000, 0x1000 + CAPACITY)
    assert arena.read(arena.min_address, CAPACITY) == bytes(CAPACITY)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == Geometry(CAPACITY).file_size
    assert found.st_blocks * 512 >= found.st_size or not hasattr(os, "posix_fallocate")


def test_a_growing_arena_reserves_memory_for_its_buffers_only(path: Path) -> None:
    with Arena.create(path, GROWING, grows=True) as arena:
        assert path.stat().st_size == Geometry(GROWING).file_size
        before = path.stat().st_blocks * 512
        assert before < 16 * MIB
        buffer = arena.allocate("weights", 20 * MIB)
        if hasattr(os, "posix_fallocate"):
            assert 20 * MIB <= path.stat().st_blocks * 512 - before < 21 * MIB
        arena.write(buffer.address, b"x" * buffer.size)
        with Arena.attach(path) as attached:
            assert attached.read(attached.buffer("weights").address, 1) == b"x"


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no /dev/shm")
def test_a_growing_arena_says_when_there_is_no_memory() -> None:
    """Else the first access would end the process by SIGBUS."""
    found = os.statvfs(SHARED_MEMORY)
    size = (found.f_blocks + 1) * found.f_frsize
    path = SHARED_MEMORY / f"hoop-test-{os.getpid()}.arena"
    with Arena.create(path, 2 * size, grows=True) as arena:
        try:
            with pytest.raises(OutOfMemory, match=r"it cannot grow by .* free; use fewer devices"):
                arena.allocate("weights", size)
            assert (arena.used, arena.buffers()) == (0, [])
            arena.allocate("weights", MIB)
        finally:
            arena.close(delete=True)


def test_an_existing_file_is_not_overwritten(path: Path) -> None:
    path.write_bytes(b"dear diary")
    with pytest.raises(FailedPrecondition, match=r"device.arena: the file already exists"):
        Arena.create(path, CAPACITY)
    with pytest.raises(FailedPrecondition, match="damaged: the superblock is cut off after 10 of 4096"):
        Arena.open_or_create(path, CAPACITY)
    assert path.read_bytes() == b"dear diary"


@pytest.mark.parametrize(
    ("capacity", "min_address", "why"),
    [
        (0, 0x1000, "capacity is 0 bytes"),
        (-5, 0x1000, "capacity is -5"),
        (64, 0, "min_address is 0x0, it must be a positive multiple of 0x1000"),
        (64, 0x1800, "min_address is 0x1800"),
        (64, -0x1000, "min_address is -0x1000"),
        (2**63 - 0x1000, 0x1000, "0x8000000000000000 does not fit in 63 bits"),
        (64, 2**63, "63 bits"),
    ],
)
def test_invalid_sizes_and_addresses_are_refused(path: Path, capacity: int, min_address: int, why: str) -> None:
    for make in (Arena.create, Arena.open_or_create):
        with pytest.raises(InvalidArgument, match=why):
            make(path, capacity, min_address)
    with pytest.raises(InvalidArgument, match="table_size is 100"):
        Arena.create(path, 64, table_size=100)
    assert not path.exists()


def test_an_address_range_may_end_at_63_bits(path: Path) -> None:
    with Arena.create(path, 4095, min_address=2**63 - 4096) as arena:
        arena.write(arena.max_address - 1, b"!")
        assert arena.max_address == 2**63 - 1
        assert arena.read(2**63 - 2, 1) == b"!"


@pytest.mark.parametrize("capacity", [2**55, 2**63 - 1 - 0x1000])
def test_create_fails_at_once_if_the_disk_has_too_little_space(path: Path, capacity: int) -> None:
    with pytest.raises(OutOfMemory, match=r"cannot reserve .* \(\d+ bytes\).* free; use a smaller"):
        Arena.create(path, capacity)
    assert not path.exists()


def test_free_space_is_checked_where_it_cannot_be_reserved(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    monkeypatch.setattr(storage, "free_space", lambda directory: CAPACITY)
    with pytest.raises(OutOfMemory, match=r"No space left on device; .* has 64 KiB free"):
        Arena.create(path, CAPACITY)  # fits without its header only
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve")
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, OutOfMemory), (errno.EDQUOT, OutOfMemory), (errno.EIO, FailedPrecondition)],
)
def test_a_reservation_that_fails_halfway_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def fail(fd: int, offset: int, size: int) -> None:
        os.ftruncate(fd, size // 2)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    for make in (Arena.create, Arena.open_or_create):
        with pytest.raises(kind, match=os.strerror(number)):
            make(path, CAPACITY)
        assert not path.exists()


def test_a_limit_on_the_file_size_leaves_no_file(path: Path, python: Python) -> None:
    program = (
        "import resource, sys\n"
        "from hoop.errors import OutOfMemory\n"
        "from hoop.memory import Arena\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    Arena.create(sys.argv[1], 1 << 21)\n"
        "except OutOfMemory as error:\n    print(error)\n"
    )
    child = python(program, path)
    output, _ = child.communicate(timeout=300)
    assert "cannot reserve 2.6 MiB" in output
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system cannot reserve")
def test_a_file_system_that_cannot_reserve_still_works(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with Arena.create(path, CAPACITY) as arena:
        arena.write(arena.max_address - 1, b"!")
    monkeypatch.delattr(os, "posix_fallocate")
    with Arena.create(path.with_suffix(".mac"), CAPACITY) as arena:
        arena.write(arena.max_address - 1, b"!")


def test_a_failure_after_reserving_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: storage.BackingFile, size: int) -> None:
        raise OutOfMemory("no address space")

    monkeypatch.setattr(storage.BackingFile, "map", refuse)
    with pytest.raises(OutOfMemory, match="no address space"):
        Arena.create(path, CAPACITY)
    assert not path.exists()


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file or directory"):
        Arena.create(tmp_path / "missing" / "a", CAPACITY)
    for enter in (Arena.open, Arena.attach):
        with pytest.raises(NotFound, match=r"nothing: no such file"):
            enter(tmp_path / "nothing")
        with pytest.raises(FailedPrecondition, match="cannot be opened: Is a directory"):
            enter(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(FailedPrecondition, match="pipe: not a regular file"):
        Arena.open_or_create(tmp_path / "pipe", CAPACITY)
    with pytest.raises(InvalidArgument, match="not a path"):
        Arena.open(tmp_path / "a\0b")


def test_symbolic_links_and_files_writable_by_others_are_refused(arena: Arena, path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    arena.close()
    for enter in (Arena.open, Arena.attach):
        with pytest.raises(FailedPrecondition, match="link: a symbolic link"):
            enter(link)
    path.chmod(0o620)
    with pytest.raises(FailedPrecondition, match="with mode 620, so others than user"):
        Arena.open(path)


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shm"
    monkeypatch.setattr(storage, "_SHARED_MEMORY", shared)
    elsewhere = Path(tempfile.gettempdir())
    assert default_directory(1) == elsewhere
    shared.mkdir()
    assert default_directory(1) == shared
    assert default_directory(2**62) == elsewhere
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert default_directory(1) == elsewhere
