"""Atomic file writes: after a crash a file has its old or its new content, never part of it.

    atomic_write  writes a temporary file beside the old one, syncs it, then renames it over the old one
    Appender      appends records to a file, each completely or not at all

When the disk is full the old content stays, and the error says so.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from hoop.errors import FailedPrecondition, HoopError, ResourceExhausted

_NO_SPACE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PARTIAL_SUFFIX = ".part"
BEFORE_WRITE_HOOKS: list[Callable[[Path], None]] = []
"""Called with the path before a file is written. A hook may raise: fault injection makes disks fail with it."""


@contextmanager
def atomic_write(path: Path | str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file to write; at the end of the block it replaces ``path``, unless the block raised.

    The umask applies to ``mode``; use 0o600 for secrets.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name[:80]}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL_SUFFIX}")
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
    except OSError as error:
        _discard(temporary)
        raise _write_error(path, error) from error


def write_bytes(path: Path | str, data: bytes, mode: int = 0o666) -> None:
    with atomic_write(path, mode) as file:
        file.write(data)


def write_text(path: Path | str, text: str, mode: int = 0o666) -> None:
    write_bytes(path, text.encode(), mode)


def remove_partial_files(folder: Path) -> list[Path]:
    """Remove the temporary files of killed writers. No other process may be writing in the folder."""
    partial = sorted(folder.glob(f".*{_PARTIAL_SUFFIX}"))
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
        """Append a record; on an error truncate the file to its old size and raise."""
        old_size = os.fstat(self._descriptor).st_size
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
