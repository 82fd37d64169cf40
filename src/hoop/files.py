"""Atomic file writes: after a crash a file has its old or its new content, never part of it.

    atomic_write  writes a temporary file beside the old one, syncs it, then renames it over the old one
    Appender      appends records to a file, each completely or not at all
    FileLock      lets one process at a time write a file

When the disk is full the old content stays, and the error says so.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from hoop.errors import FailedPrecondition, FileGone, HoopError, ResourceExhausted
from hoop.texts import printable

_NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PARTIAL_SUFFIX = ".part"
_NAME_CHARACTERS = 80
"""Number of characters of a file's name that its temporary file has too."""
_OWNER_BYTES = 512
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of a file system without locks."""
BEFORE_WRITE_HOOKS: list[Callable[[Path], None]] = []
"""Functions that are called with the path before a file is written. A hook may raise: fault injection makes disks fail
with it."""


@contextmanager
def atomic_write(path: Path | str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file to write; at the end of the block it replaces ``path``, unless the block raised.

    The umask applies to ``mode``; use 0o600 for secrets.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:_NAME_CHARACTERS]}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise _write_error(path, error) from error
    try:
        with open(descriptor, "wb") as file:
            for hook in BEFORE_WRITE_HOOKS:
                hook(path)
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        _discard(temporary)
        if isinstance(error, OSError) and error.errno in _NO_SPACE_ERRORS:
            raise _write_error(path, error) from error
        raise  # an error of the block, not of this file
    try:
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        _discard(temporary)
        if isinstance(error, OSError):
            raise _write_error(path, error) from error
        raise


def link_file(path: Path, name: Path) -> None:
    """Give a file a second name, in place of the file that has it: a hard link, or a copy where there are none."""
    temporary = name.with_name(f".{name.name[:_NAME_CHARACTERS]}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL_SUFFIX}")
    try:
        os.link(path, temporary)
    except OSError:
        write_bytes(name, path.read_bytes())
        return
    os.replace(temporary, name)
    sync_folder(name.parent)


def make_folder(path: Path | str, field: str) -> Path:
    """Make a folder, with its parents, for files that are written later; raises if no file can be created in it.

    Called before the work whose results go there. ``field``: the option that named the folder, for the error.
    """
    path = Path(path)
    probe = path / f".{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL_SUFFIX}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        probe.unlink()
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
        kind = ResourceExhausted if error.errno in _NO_SPACE_ERRORS else FailedPrecondition
        raise kind(f"{field}: {path}: no file can be written there: {reason}; name another folder") from error
    return path


def write_bytes(path: Path | str, data: bytes, mode: int = 0o666) -> None:
    with atomic_write(path, mode) as file:
        file.write(data)


def write_parts(path: Path | str, parts: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write these bytes, one part after the other."""
    with atomic_write(path, mode) as file:
        for part in parts:
            file.write(part)


def write_text(path: Path | str, text: str, mode: int = 0o666) -> None:
    write_bytes(path, text.encode(), mode)


def remove_partial_files(folder: Path, name: str = "") -> list[Path]:
    """Remove the temporary files of killed writers: of the file ``name``, or of all files in the folder.

    No other process may be writing them.
    """
    of_file = re.compile(rf"\.{re.escape(name[:_NAME_CHARACTERS])}\.\d+-[0-9a-f]{{8}}{re.escape(_PARTIAL_SUFFIX)}")
    partial = sorted(path for path in folder.glob(f".*{_PARTIAL_SUFFIX}") if not name or of_file.fullmatch(path.name))
    for path in partial:
        _discard(path)
    return partial


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_at(status: os.stat_result, path: Path) -> bool:
    """Whether this is the file or folder that has the path."""
    try:
        return os.path.samestat(status, os.stat(path))
    except OSError:
        return False


class Appender:
    """A file that grows by whole records. Nothing is buffered, so a killed process loses no record."""

    def __init__(self, path: Path | str, mode: int = 0o666, *, new: bool = False) -> None:
        """Open or create the file. With ``new`` an existing file is an error."""
        self.path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, flags, mode)
        except OSError as error:
            raise _write_error(self.path, error) from error

    def append(self, record: bytes) -> None:
        """Append a record; on an error truncate the file to its old size and raise.

        Raises ``FileGone`` if the file is not at its path any more: what is written to it then is lost.
        """
        status = os.fstat(self._descriptor)
        if not _is_at(status, self.path):
            raise FileGone(f"{self.path}: it was deleted, moved or replaced while it was being written")
        old_size = status.st_size
        try:
            written = os.write(self._descriptor, record)
            if written < len(record):  # a short write to a disk means that it is full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):  # a pipe or a device cannot be truncated; report the write error
                os.ftruncate(self._descriptor, old_size)
            raise _write_error(self.path, error) from error

    def sync(self) -> None:
        """Make the appended records durable."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class FileLock:
    """The right to write ``path``, of one process at a time: a lock on a file that names the process.

    That is ``path.lock``, or ``.lock`` in ``path`` if it is a folder. The kernel releases the lock when the process
    ends, however it ends; a lock file that a killed process left is used again. Forked children do not have the lock.
    """

    def __init__(self, path: Path, remedy: str, required: bool = True) -> None:
        """Take the lock. FailedPrecondition names the process that has it, then says the ``remedy``.

        Without ``required`` a file system that has no locks is no error: see ``exclusive``.
        """
        self.path = path / ".lock" if path.is_dir() else path.with_name(f"{path.name}.lock")
        self.exclusive = True
        """False on a file system that has no locks."""
        self._process, self._descriptor = os.getpid(), -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._locked_file(required)
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {self._process} on {os.uname().nodename}".encode())
        except BlockingIOError:
            raise FailedPrecondition(f"{path}: {self._owner()} has it open; {remedy}") from None
        except OSError as error:
            self.release()
            raise _write_error(self.path, error) from error
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether the lock file is still there: nobody has deleted or replaced it, or its folder."""
        return self._descriptor >= 0 and _is_at(os.fstat(self._descriptor), self.path)

    def _locked_file(self, required: bool) -> int:
        while True:
            # Follows no link, and opens a named pipe without waiting for its other end.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self.path, flags, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(errno.EINVAL, "not a file")
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if required or error.errno not in _NO_LOCKS:
                        raise
                    self.exclusive = False
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path, follow_symlinks=False)):
                    return descriptor
            except FileNotFoundError:
                pass  # its owner removed it between our open and our lock
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _owner(self) -> str:
        try:
            with open(self.path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
                return printable(file.read(_OWNER_BYTES).decode(errors="replace")) or "another process"
        except OSError:
            return "another process"

    def release(self) -> None:
        """Release the lock and remove the lock file. May be called again. In a forked child it only closes the file."""
        if self._descriptor < 0:
            return
        if os.getpid() == self._process:
            if self.held:  # else it is another process's
                _discard(self.path)
            if self.exclusive:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """A child that outlives this process would keep its locks."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def _discard(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _write_error(path: Path, error: OSError) -> HoopError:
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE_ERRORS:
        return ResourceExhausted(
            f"{path}: cannot write: {reason}; the previous content is unchanged; make room and try again"
        )
    return FailedPrecondition(f"{path}: cannot write: {reason}; choose a folder that can be written to")
