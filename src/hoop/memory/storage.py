"""The backing file of an arena: its layout (``Geometry``) and its safe opening, locking and reservation.

    0            4096           + table_size   + table_size  64 KiB aligned
    | superblock | table slot 0 | table slot 1 | (unused) | data: capacity bytes … |
                                                          ^ min_address            ^ max_address

The superblock holds the sizes and a checksum. It is written once.

A rank maps the arenas of its peers, and may be stopped (SIGSTOP) in the middle of reading or writing one. If that
peer's device is killed and restarted on the file meanwhile, the rank must neither read what the new process writes nor
write to it. So every descriptor for another process (``reopen``) has a shared lock, which the kernel keeps as long as
there is a duplicate of the descriptor or a mapping made with it. A new owner that finds such a lock puts a copy in the
place of the file (``leave_to_others``), and the rank goes on with the old one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import tempfile
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Literal

from hoop.config import format_size
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, NotFound, OutOfMemory, OutOfRange
from hoop.resources import arena_shortage, available_memory, in_memory

PAGE = 4096
MIN_ADDRESS = 0x1000
TABLE_SIZE = 256 * 1024  # enough for some thousands of buffers

_DATA_ALIGNMENT = 65536  # the largest page size among the supported platforms
_MAGIC = b"HOOPAREN"
_VERSION = 1
_IDENTITY = struct.Struct("<8sI")  # magic, version: the same in every version
_SIZES = struct.Struct("<QQQ")  # capacity, min address, table size
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Geometry:
    """The sizes that an arena is created with, and the offsets derived from them.

    ``subject`` is the prefix of error messages in every method.
    """

    capacity: int
    min_address: int = MIN_ADDRESS
    table_size: int = TABLE_SIZE

    def check(self, subject: str) -> Geometry:
        """Return self; raises InvalidArgument if the sizes are impossible."""
        if self.capacity < 1:
            raise InvalidArgument(f"{subject}: capacity is {self.capacity} bytes, it must be at least 1")
        if self.min_address < 1 or self.min_address % PAGE:
            raise InvalidArgument(
                f"{subject}: min_address is {self.min_address:#x}, it must be a positive multiple of {PAGE:#x}"
            )
        if self.max_address >= 2**63:
            raise InvalidArgument(
                f"{subject}: min_address {self.min_address:#x} + capacity {self.capacity} "
                f"= {self.max_address:#x} does not fit in 63 bits"
            )
        if self.table_size < PAGE or self.table_size % PAGE:
            raise InvalidArgument(f"{subject}: table_size is {self.table_size}, it must be a multiple of {PAGE}")
        return self

    @cached_property
    def max_address(self) -> int:
        """First address after the arena."""
        return self.min_address + self.capacity

    @cached_property
    def data_offset(self) -> int:
        """File offset of ``min_address``."""
        return -(-(PAGE + 2 * self.table_size) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT

    @property
    def file_size(self) -> int:
        """Size of the whole file in bytes."""
        return self.data_offset + self.capacity

    def locate(self, address: int, size: int, align: int, subject: str) -> int:
        """File offset of ``[address, address + size)``; raises OutOfRange unless the arena contains it."""
        # Convert to Python integers: a sum of NumPy integers could wrap around.
        address, size = index(address), index(size)
        if (address | size) >> 64:  # negative or too large; tested inline, the call would cost more than the rest
            check_uint64(subject, address=address, size=size)
        if address < self.min_address or address + size > self.max_address:
            raise OutOfRange(
                f"{subject}: address {address:#x} with size {size} ends at {address + size:#x} and is not "
                f"inside [{self.min_address:#x}, {self.max_address:#x})"
            )
        if address % align:
            raise InvalidArgument(
                f"{subject}: address {address:#x} is not aligned for elements of {align} bytes; "
                f"use a multiple of {align}, such as {address - address % align:#x}"
            )
        return address - self.min_address + self.data_offset

    def pack(self) -> bytes:
        """Encode as a superblock."""
        body = _IDENTITY.pack(_MAGIC, _VERSION) + _SIZES.pack(self.capacity, self.min_address, self.table_size)
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, page: bytes, file_size: int, subject: str) -> Geometry:
        """Decode a file's first page; raises FailedPrecondition if it is damaged."""
        body = page[: _IDENTITY.size + _SIZES.size]
        crc = page[len(body) : len(body) + _CRC.size]
        if not any(page):
            raise damaged_header(subject, "the superblock is empty, its creation never finished")
        if len(page) < PAGE:
            raise damaged_header(subject, f"the superblock is cut off after {len(page)} of {PAGE} bytes")
        magic, version = _IDENTITY.unpack_from(body)
        if magic != _MAGIC:
            raise damaged_header(subject, f"the superblock begins with {magic!r} instead of {_MAGIC!r}")
        if version != _VERSION:
            raise damaged_header(subject, f"the superblock has format version {version}, this Hoop reads {_VERSION}")
        if _CRC.pack(zlib.crc32(body)) != crc:
            raise damaged_header(subject, "the superblock does not match its checksum")
        try:
            found = cls(*_SIZES.unpack_from(body, _IDENTITY.size)).check(subject)
        except InvalidArgument as error:
            raise damaged_header(subject, f"the superblock is impossible ({error})") from error
        if file_size < found.file_size:
            raise damaged_header(subject, f"the file has {file_size} bytes where the superblock says {found.file_size}")
        return found


def check_uint64(subject: str, **values: int) -> None:
    """Raise InvalidArgument for a value that does not fit in an unsigned 64-bit integer."""
    for what, value in values.items():
        if not 0 <= value < 2**64:
            raise InvalidArgument(f"{subject}: {what} {value:#x} is not a number from 0 to 2**64 - 1")


def damaged_header(subject: str, part: str) -> FailedPrecondition:
    """The error for a file with an invalid header."""
    return FailedPrecondition(
        f"{subject}: arena header is damaged: {part}; nothing in it is trusted: "
        "restore the file from a copy, or delete it and create a new one"
    )


_NO_SPACE_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM}
_FALLOCATE_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 files there are opened without following links, mode 0600
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_RELEASE_S, _POLL_S = 10.0, 0.05
_COPIED_AT_ONCE = 1 << 20
_CREATE = {"never": 0, "missing": os.O_CREAT, "always": os.O_CREAT | os.O_EXCL}


class BackingFile:
    """An open regular file of this user. With ``exclusive`` it holds a lock that excludes other owners."""

    def __init__(self, path: Path, *, create: Literal["never", "missing", "always"], exclusive: bool) -> None:
        self.path = path
        self.exclusive = exclusive
        self._process = os.getpid()
        try:
            # The name is predictable and the directory shared: do not follow a symbolic link of another user.
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | _CREATE[create], 0o600)
        except (OSError, ValueError) as error:
            raise _open_error(path, error) from error
        # A file object instead of a bare descriptor: Python closes a leaked one, with a ResourceWarning.
        self._file = open(fd, "r+b", buffering=0)  # noqa: SIM115
        try:
            if exclusive:
                self._lock()
            self._check()
        except BaseException:
            self._file.close()
            raise

    @property
    def size(self) -> int:
        """Current size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read(self, size: int) -> bytes:
        """The first ``size`` bytes, fewer if the file is shorter."""
        return os.pread(self._file.fileno(), size, 0)

    def reserve(self, size: int) -> None:
        """Make the file ``size`` zero bytes long, with disk space allocated for all of them; raises OutOfMemory."""
        fd = self._file.fileno()
        try:
            os.fchmod(fd, 0o600)  # independent of the umask
            os.ftruncate(fd, 0)
            available = free_space(self.path.parent)
            if available is not None and available < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # In a sparse file a full disk shows only when a page is touched, as a SIGBUS.
            _reserve(fd, size)
        except (OSError, OverflowError) as error:
            full = isinstance(error, OverflowError) or error.errno in _NO_SPACE_ERRORS
            available = free_space(self.path.parent)
            raise (OutOfMemory if full else FailedPrecondition)(
                f"arena {self.path}: cannot reserve {format_size(size)} ({size} bytes): {error}; "
                f"{self.path.parent} has {'an unknown size' if available is None else format_size(available)} free; "
                "use a smaller capacity or another directory"
            ) from error

    def reserve_later(self, size: int) -> None:
        """Make the file ``size`` zero bytes long, without disk space: ``reserve_part`` allocates it."""
        fd = self._file.fileno()
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, size)
        except (OSError, OverflowError) as error:
            raise FailedPrecondition(
                f"arena {self.path}: cannot be {format_size(size)} ({size} bytes) long: {error}; use a smaller "
                "capacity or another directory"
            ) from error

    def reserve_part(self, start: int, size: int) -> None:
        """Allocate disk space for a part of the file, where it has none yet; raises OutOfMemory."""
        try:
            _reserve(self._file.fileno(), size, start)
        except OSError as error:
            available = free_space(self.path.parent)
            raise OutOfMemory(
                f"arena {self.path}: it cannot grow by {format_size(size)} ({size} bytes): {error}; "
                f"{self.path.parent} has {'an unknown size' if available is None else format_size(available)} free; "
                "use fewer devices, or end other programs"
            ) from error

    def map(self, size: int) -> mmap.mmap:
        """Map the first ``size`` bytes as shared memory. The mapping lives as long as its last reference."""
        try:
            return mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            raise OutOfMemory(
                f"arena {self.path}: cannot map {format_size(size)} ({size} bytes): {error}; "
                "use a smaller capacity or raise the limit on address space (ulimit -v)"
            ) from error

    def reopen(self) -> int:
        """Open the same file again and return the descriptor, which does not share the lock, for another process."""
        own = f"/proc/self/fd/{self._file.fileno()}"  # on Linux this works after the name is removed
        path, follow = (own, 0) if os.path.exists(own) else (str(self.path), os.O_NOFOLLOW)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | follow)
        if os.path.samestat(os.fstat(descriptor), os.fstat(self._file.fileno())):
            if sys.platform == "linux":
                with suppress(OSError):  # a file system without these locks
                    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_RDLCK))
            return descriptor
        os.close(descriptor)
        raise FailedPrecondition(f"arena {self.path}: the name means another file now; restart the device")

    @property
    def used_by_others(self) -> bool:
        """Whether a process has a descriptor from ``reopen``, or memory that it mapped with one. Linux only."""
        if sys.platform != "linux":
            return False
        try:
            found = fcntl.fcntl(self._file.fileno(), fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
        except OSError:  # as in ``reopen``
            return False
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def leave_to_others(self) -> BackingFile:
        """The file if no other process uses it; else a copy, which has its name and its lock from now on.

        Where it cannot be copied, it waits for the others, and raises FailedPrecondition after ``_RELEASE_S``.
        """
        deadline = time.monotonic() + _RELEASE_S
        while self.used_by_others:
            try:
                return self._replace_by_copy()
            except (HoopError, OSError) as error:  # no room; or the file is a mount point, and keeps its name
                if time.monotonic() > deadline:
                    raise FailedPrecondition(
                        f"arena {self.path}: a process that shared memory with the last owner still uses it, perhaps "
                        f"a device that is stopped, and it cannot be copied: {error}; end or continue that process, "
                        "or use another path"
                    ) from error
            time.sleep(_POLL_S)
        return self

    def _replace_by_copy(self) -> BackingFile:
        path = self.path.with_name(f"{self.path.name}.copy")
        path.unlink(missing_ok=True)  # of a process that was killed here
        size = self.size
        if (shortage := arena_shortage(size, path.parent, available_memory())) and in_memory(path.parent):
            raise OutOfMemory(shortage)
        with ExitStack() as undo:
            copy = BackingFile(path, create="always", exclusive=True)
            undo.callback(copy.close)
            undo.callback(copy.unlink)
            copy.reserve(size)
            _copy(self._file.fileno(), copy._file.fileno())
            os.rename(path, self.path)  # a process killed before leaves the old file, as it was
            copy.path = self.path
            undo.pop_all()
        self.close()
        return copy

    def unlink(self) -> None:
        """Remove the file's name, if the name still refers to this file."""
        try:
            named = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return
        if os.path.samestat(named, os.fstat(self._file.fileno())):
            os.unlink(self.path)

    def close(self) -> None:
        """Release the lock and close the file."""
        if not self._file.closed:
            # Unlock explicitly: the mapping has a duplicate of the descriptor, which would hold the lock while views
            # exist. A forked child must not unlock: the lock belongs to its parent.
            if self.exclusive and os.getpid() == self._process:
                fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FailedPrecondition(
                f"arena {self.path}: another process owns it (or another Arena of this one); "
                "stop that device, use another path, or attach to share its bytes"
            ) from None
        except OSError as error:
            raise FailedPrecondition(
                f"arena {self.path}: cannot be locked: {error.strerror}; use a path on a local file system"
            ) from error

    def _check(self) -> None:
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise FailedPrecondition(f"arena {self.path}: not a regular file; choose another path")
        if found.st_nlink == 0:  # its owner deleted it between our open and our lock
            raise FailedPrecondition(f"arena {self.path}: deleted while it was being opened; try again")
        user = os.geteuid()
        if user not in (0, found.st_uid) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise FailedPrecondition(
                f"arena {self.path}: user {found.st_uid} owns it with mode "
                f"{stat.S_IMODE(found.st_mode):o}, so others than user {user} can change it; "
                "delete it, or chown and chmod 600 it if it is yours"
            )


def free_space(directory: Path) -> int | None:
    """Free bytes of the directory's file system; None if unknown."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # a tmpfs without a limit reports 0 of 0


def default_directory(needed_bytes: int) -> Path:
    """Directory for arena files of ``needed_bytes``: /dev/shm if it has the space, else the temporary directory."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        available = free_space(_SHARED_MEMORY)
        if available is None or available >= needed_bytes:
            return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


def _reserve(fd: int, size: int, start: int = 0) -> None:
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(fd, start, size)
        except OSError as error:
            if error.errno not in _FALLOCATE_UNSUPPORTED:
                raise
        else:
            return
    if os.fstat(fd).st_size < start + size:
        os.ftruncate(fd, start + size)


def _whole_file(kind: int) -> bytes:
    """The argument of ``fcntl`` for a lock of the whole file."""
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


def _copy(source: int, target: int) -> None:
    """Copy a file to another one, which is zero. Parts that were never written are skipped."""
    stop = 0
    while True:
        try:
            start = os.lseek(source, stop, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # there is no more data
        stop = os.lseek(source, start, os.SEEK_HOLE)
        while start < stop:
            start += os.pwrite(target, os.pread(source, min(_COPIED_AT_ONCE, stop - start), start), start)
    os.fsync(target)


def _open_error(path: Path, error: OSError | ValueError) -> HoopError:
    if isinstance(error, ValueError):
        return InvalidArgument(f"arena {str(path)!r}: not a path: {error}")
    if isinstance(error, FileExistsError):
        return FailedPrecondition(f"arena {path}: the file already exists; open it, or delete it first")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"arena {path}: no such file or directory; create the arena first")
    if error.errno == errno.ELOOP:
        return FailedPrecondition(f"arena {path}: a symbolic link, which is not followed; use the real path")
    return FailedPrecondition(f"arena {path}: cannot be opened: {error.strerror}; choose another path")
