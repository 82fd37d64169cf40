"""File writes are atomic: after a crash or on a full disk a file is complete or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from hoop.errors import FailedPrecondition, ResourceExhausted
from hoop.files import Appender, FileLock, atomic_write, make_folder, remove_partial_files, write_text


def disk_full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")
    write_text(path, "new – ü")
    assert path.read_text("utf-8") == "new – ü"
    assert names(path.parent) == ["file.txt"]


def test_a_folder_for_results_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a" / "b", "--out")
    assert names(folder) == []
    assert make_folder(folder, "--out") == folder


def test_a_folder_that_takes_no_files_is_refused_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match=r"^--out: .*/file: no file can be written there: it is a file; name"):
        make_folder(tmp_path / "file", "--out")
    with pytest.raises(FailedPrecondition, match=r"^--out: .*/file/x: no file .*: Not a directory; name another"):
        make_folder(tmp_path / "file" / "x", "--out")

    def read_only(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(FailedPrecondition, match="Read-only file system"):
        make_folder(tmp_path, "--out")
    monkeypatch.setattr(os, "open", disk_full)
    with pytest.raises(ResourceExhausted, match="No space left"):
        make_folder(tmp_path, "--out")


def test_readers_see_the_old_file_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_an_error_in_the_block_keeps_the_old_file_and_is_raised_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(FileNotFoundError, match="other"), atomic_write(path) as file:
        file.write(b"half" + (tmp_path / "other").read_bytes())
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    monkeypatch.setattr(os, call, disk_full)
    with pytest.raises(ResourceExhausted, match=f"{path}.*No space left.*make room"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_writing_to_dev_full_is_reported() -> None:
    with (
        Appender("/dev/full") as file,
        pytest.raises(ResourceExhausted, match="/dev/full: cannot write: No space left"),
    ):
        file.append(b"x")


def test_an_unwritable_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("a file")
    with pytest.raises(FailedPrecondition, match=r"plain/below.*choose a folder"):
        write_text(tmp_path / "plain" / "below", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FailedPrecondition, match="folder"):
        write_text(tmp_path / "folder", "x")
    assert names(tmp_path) == ["folder", "plain"]


def test_mode_and_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    write_text(path, "secret", mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_partial_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    block = atomic_write(tmp_path / "file")
    block.__enter__()  # the process is killed here
    (partial,) = names(tmp_path)
    (tmp_path / ".hidden").touch()
    assert [path.name for path in remove_partial_files(tmp_path)] == [partial]
    assert names(tmp_path) == [".hidden"]
    with pytest.raises(FailedPrecondition, match="cannot write"):
        block.__exit__(None, None, None)


def test_an_interrupted_rename_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "file", "x")
    assert names(tmp_path) == []


def test_a_lock_is_of_one_owner_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = FileLock(path, "stop it")
    with pytest.raises(FailedPrecondition, match=rf"^{path}: process {os.getpid()} on .* has it open; stop it$"):
        FileLock(path, "stop it")
    first.release()
    first.release()
    assert names(tmp_path) == []
    FileLock(path, "stop it").release()


def test_a_lock_file_that_its_owner_removes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner releases between the open and the lock of the next one: that must lock the new file, not the old."""
    path = tmp_path / "file"
    first, real = FileLock(path, ""), fcntl.flock
    opened: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and not opened:
            opened.append(os.fstat(descriptor).st_ino)
            first.release()
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    second = FileLock(path, "")
    assert opened
    assert second.path.exists()
    with pytest.raises(FailedPrecondition, match="has it open"):
        FileLock(path, "")
    second.release()


def test_a_lock_takes_no_pipe_and_follows_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.lock")
    (tmp_path / "link.lock").symlink_to(tmp_path / "victim")
    for name in ("pipe", "link"):
        with pytest.raises(FailedPrecondition, match=rf"{name}\.lock: cannot write: "):
            FileLock(tmp_path / name, "")
    assert names(tmp_path) == ["link.lock", "pipe.lock"]


def test_an_appended_record_is_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Appender(path) as file:
        file.append(b"one\n")
        assert path.read_bytes() == b"one\n"
        file.sync()
    with Appender(path) as file:
        file.append(b"two\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\n"
    with pytest.raises(FailedPrecondition, match="exists"):
        Appender(path, new=True)


def test_a_partial_record_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    with Appender(path) as file:
        file.append(b"one\n")
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:2]))
        with pytest.raises(ResourceExhausted, match="No space left"):
            file.append(b"two\n")
        monkeypatch.undo()
        assert path.read_bytes() == b"one\n"
        file.append(b"three\n")
    assert path.read_bytes() == b"one\nthree\n"
