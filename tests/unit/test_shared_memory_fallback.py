"""A device without room in /dev/shm, or without shared memory, starts with a warning: arena on disk, links over TCP."""

from __future__ import annotations

import dataclasses
import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hoop.errors import OutOfMemory, ResourceExhausted
from hoop.memory import Arena, storage
from hoop.servers import device
from hoop.servers.device import DeviceConfig, open_arena
from hoop.topology import Address
from hoop.transport.semaphore import Semaphore
from hoop.transport.shm_listener import open_shm_transport


def test_an_arena_that_does_not_fit_in_shared_memory_is_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Devices that start together all see the same free space: it may be taken when one of them reserves its arena."""
    shared, elsewhere = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(storage, "_SHARED_MEMORY", shared)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    reserve = storage.BackingFile.reserve

    def full(file: storage.BackingFile, size: int) -> None:
        if file.path.parent == shared:
            raise OutOfMemory("no space left")
        reserve(file, size)

    monkeypatch.setattr(storage.BackingFile, "reserve", full)
    config = DeviceConfig(Address("127.0.0.1", 1), memory=4096)
    arena = open_arena(config)
    assert arena.path.parent == elsewhere
    assert "no space left. The arena is in" in caplog.text
    assert list(shared.iterdir()) == []
    arena.close(delete=True)
    with pytest.raises(OutOfMemory):  # a file that the user named is never replaced by another
        open_arena(dataclasses.replace(config, arena=shared / "given.arena"))


def test_a_device_that_promises_more_memory_than_there_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(device, "in_memory", lambda folder: folder == tmp_path)
    given = DeviceConfig(Address("127.0.0.1", 1), memory=2 << 20, arena=tmp_path / "given.arena")
    with pytest.raises(ResourceExhausted) as refused:
        open_arena(given)
    assert str(refused.value) == (
        f"memory: an arena of 2 MiB in {tmp_path}, and 1 MiB of memory is available on this machine; choose a smaller "
        "--memory, or a file on a disk with --arena"
    )
    assert not (tmp_path / "given.arena").exists()
    monkeypatch.setattr(device, "in_memory", lambda folder: False)
    arena = open_arena(given)  # a file on a disk can be larger than memory
    assert "training will read and write the disk all the time" in caplog.text
    arena.close()
    caplog.clear()
    open_arena(given).close()  # it exists: its bytes are not needed once more
    assert not caplog.text


@pytest.mark.parametrize("missing", ["memfd_create", "semaphores"])
def test_without_shared_memory_a_device_has_tcp_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if missing == "semaphores":
        monkeypatch.setattr(Semaphore, "create", fail)
    else:
        monkeypatch.setattr(os, "memfd_create", fail, raising=False)
    arena = Arena.create(tmp_path / "arena", 4096)
    assert open_shm_transport(Address("127.0.0.1", 4021), arena) is None
    assert "no shared memory ([Errno 28] No space left on device): this device's links are TCP" in caplog.text
    arena.close(delete=True)
