"""Files that are whole or not there: a reader, or whoever restarts after a crash, never meets half of one.

    replacing     a new file beside the old one, synced, then renamed over it
    Appender      records at the end of a file, each there completely or not at all

A full disk leaves what was there before, and the error says so.
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

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PART = ".part"
BEFORE_WRITING: list[Callable[[Path], None]] = []
"""Called before a file is written, and may raise: what goes wrong with a disk in tests."""


@contextmanager
def replacing(path: Path | str, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write; at the end of the block it takes the place of ``path``, unless the block raised.

    ``mode`` is what the umask still leaves of it: 0o600 for what others must not read.
    """
    path = Path(path)
    fresh = path.with_name(f".{path.name[:80]}.{os.getpid()}-{secrets.token_hex(4)}{_PART}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        with open(descriptor, "wb") as file:
            for look in BEFORE_WRITING:
                look(path)
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        _discard(fresh)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _refused(path, error) from error
        raise  # the block's own error: not about this file
    try:
        os.replace(fresh, path)
        sync_folder(path.parent)
    except OSError as error:
        _discard(fresh)
        raise _refused(path, error) from error


def write_bytes(path: Path | str, data: bytes, mode: int = 0o666) -> None:
    with replacing(path, mode) as file:
        file.write(data)


def write_text(path: Path | str, text: str, mode: int = 0o666) -> None:
    write_bytes(path, text.encode(), mode)


def remove_leftovers(folder: Path) -> list[Path]:
    """Removes what a killed writer left unfinished. Only for a folder in which nobody else is writing."""
    left = sorted(folder.glob(f".*{_PART}"))
    for path in left:
        _discard(path)
    return left


def sync_folder(folder: Path) -> None:
    """Makes a rename in this folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Appender:
    """A file that grows by whole records; nothing is buffered, so a killed process loses none."""

    def __init__(self, path: Path | str, mode: int = 0o666, *, new: bool = False) -> None:
        """Opens the file, or creates it; ``new``: one that is there already is a mistake."""
        self.path = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if new else 0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, flags, mode)
        except OSError as error:
            raise _refused(self.path, error) from error

    def append(self, record: bytes) -> None:
        """Writes a record, or leaves the file as it was and raises."""
        good = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, record)
            if written < len(record):  # a disk takes part only when there is no room for the rest
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):  # a pipe or a device cannot; what it refused is what is to be told
                os.ftruncate(self._descriptor, good)
            raise _refused(self.path, error) from error

    def sync(self) -> None:
        """Makes what was appended outlast a power cut."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file; again is no harm."""
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


def _refused(path: Path, error: OSError) -> HoopError:
    why = error.strerror or str(error)
    if error.errno in _FULL:
        return ResourceExhausted(
            f"{path}: cannot write: {why}; what was there is as it was; make room and try again"
        )
    return FailedPrecondition(f"{path}: cannot write: {why}; choose a folder that can be written to")
