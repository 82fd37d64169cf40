"""One device's memory: a fixed range of addresses over a file that the processes of a host can share.

    address   0x1000 = min_address                             max_address
                 |   weights   |   grads   |     free     |  …  |
    file      … data_offset                                     end of file

The bytes written here are not flushed, only the header is: they are in the page cache, which survives the
death of a process (a restart needs that) though not of the machine (a checkpoint is for that).
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument, OutOfRange
from hoop.memory.allocator import Span
from hoop.memory.backing import BackingFile
from hoop.memory.dtypes import DType
from hoop.memory.geometry import MIN_ADDRESS, PAGE, TABLE_SIZE, Geometry, check_uint64
from hoop.memory.header import Header


@dataclass(frozen=True)
class Buffer:
    """A named range of a device's addresses."""

    name: str
    address: int
    size: int


class Arena:
    """A device's memory; made by ``create``, ``open``, ``open_or_create`` (its owner) or ``attach``."""

    def __init__(self, file: BackingFile, geometry: Geometry, *, blank: bool = False) -> None:
        self.path = file.path
        self.min_address = geometry.min_address
        self.max_address = geometry.max_address
        self.capacity = geometry.capacity
        self._who = f"arena {file.path}"
        self._file = file
        self._geometry = geometry
        self._lock = threading.RLock()
        mapping = file.map(geometry.file_size)
        header = Header(mapping, geometry, self._who)
        if blank:
            header.format()
        self._allocator = header.load()
        # Closing drops these references and never closes the mapping, which would fail while a view of it
        # lives and break a thread in the middle of a read; the last view to go unmaps it.
        self._header: Header | None = header
        self._bytes: memoryview | None = memoryview(mapping)

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        capacity: int,
        min_address: int = MIN_ADDRESS,
        *,
        table_size: int = TABLE_SIZE,
    ) -> Arena:
        """A new arena of this capacity, owned by this process, in a file that must not exist yet."""
        geometry = Geometry(capacity, min_address, table_size).check(f"arena {path}")
        file = BackingFile(Path(path), create="always", exclusive=True)
        return cls._format(file, geometry)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Arena:
        """The arena in an existing file, with its buffers and bytes, owned by this process alone."""
        return cls._load(BackingFile(Path(path), create="never", exclusive=True))

    @classmethod
    def open_or_create(
        cls,
        path: str | os.PathLike[str],
        capacity: int,
        min_address: int = MIN_ADDRESS,
        *,
        table_size: int = TABLE_SIZE,
    ) -> Arena:
        """What a device that may be restarting calls: its arena as it left it, or a new one."""
        geometry = Geometry(capacity, min_address, table_size).check(f"arena {path}")
        file = BackingFile(Path(path), create="missing", exclusive=True)
        # Empty, or reserved and killed before its superblock was written: no arena was ever in it.
        if not any(file.read(PAGE)):
            return cls._format(file, geometry)
        arena = cls._load(file)
        if (arena.capacity, arena.min_address) != (capacity, min_address):
            arena.close()
            raise FailedPrecondition(
                f"arena {path}: it has capacity {format_size(arena.capacity)} ({arena.capacity} bytes) from "
                f"address {arena.min_address:#x}, not {format_size(capacity)} ({capacity} bytes) from "
                f"{min_address:#x}; start with the values it has, or delete it to lose what is in it"
            )
        return arena

    @classmethod
    def attach(cls, path: str | os.PathLike[str]) -> Arena:
        """An arena that another process may own: its bytes to read and write, its buffers to look up."""
        return cls._load(BackingFile(Path(path), create="never", exclusive=False))

    @classmethod
    def _format(cls, file: BackingFile, geometry: Geometry) -> Arena:
        with ExitStack() as undo:
            undo.callback(file.close)
            undo.callback(file.unlink)
            file.reserve(geometry.file_size)
            arena = cls(file, geometry, blank=True)
            undo.pop_all()
        return arena

    @classmethod
    def _load(cls, file: BackingFile) -> Arena:
        with ExitStack() as undo:
            undo.callback(file.close)
            arena = cls(file, Geometry.unpack(file.read(PAGE), file.size, f"arena {file.path}"))
            undo.pop_all()
        return arena

    def share(self) -> tuple[int, int]:
        """A descriptor for another process of this host, which the caller closes, and where the bytes begin in it."""
        self._memory()
        return self._file.reopened(), self._geometry.data_offset

    def unname(self) -> None:
        """Remove the file's name: the memory then ends with the last process that has it, however that ends."""
        self._owned("remove the name")
        self._file.unlink()

    @property
    def used(self) -> int:
        """Bytes that belong to a buffer."""
        return self._allocator.used

    # Addresses -------------------------------------------------------------------------------------------

    def check(self, address: int, size: int, align: int = 1) -> int:
        """The place in the file of ``[address, address + size)``, if all of that is in this memory."""
        return self._geometry.locate(address, size, align, self._who)

    def view(self, address: int, size: int) -> memoryview:
        """These bytes themselves, to read and to write."""
        start = self.check(address, size)
        return self._memory()[start : start + size]

    def array(self, address: int, dtype: DType, count: int) -> NDArray[Any]:
        """These elements themselves as a writable array, in the type that stores them."""
        start = self.check(address, int(count) * dtype.itemsize, dtype.itemsize)
        return np.ndarray((count,), dtype.numpy, buffer=self._memory(), offset=start)

    def read(self, address: int, size: int) -> bytes:
        """A copy of these bytes."""
        return bytes(self.view(address, size))

    def write(self, address: int, data: bytes | bytearray | memoryview | NDArray[Any]) -> None:
        """Copy bytes, or an array's elements in their order, to this address."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        source = memoryview(data)
        if not source.c_contiguous:
            raise InvalidArgument(
                f"{self._who}: the {source.nbytes} bytes for address {address:#x} are not contiguous; "
                "copy them first"
            )
        target = self.view(address, source.nbytes)
        if source.nbytes:  # an empty shape cannot be cast
            target[:] = source.cast("B")

    # Buffers ---------------------------------------------------------------------------------------------

    def allocate(self, name: str, size: int, alignment: int = 64, *, reuse: bool = False) -> Buffer:
        """A new buffer, its bytes as they are; with ``reuse``, the old one if name and size are the same."""
        with self._lock:
            header = self._owned(f"allocate {name!r}")
            if alignment > PAGE:
                raise InvalidArgument(
                    f"{self._who}: buffer {name!r} with alignment {alignment}; {PAGE} is the most"
                )
            if reuse and name in self._allocator:
                return self._reused(self._allocator.find(name), size, alignment)
            span = self._allocator.allocate(name, size, alignment)
            try:
                header.save(self._allocator.spans())
            except BaseException:
                self._allocator.free(name)
                raise
            return self._buffer(span)

    def free(self, name: str) -> None:
        """Give a buffer's bytes back."""
        with self._lock:
            header = self._owned(f"free {name!r}")
            gone = self._allocator.find(name)
            header.save(span for span in self._allocator.spans() if span is not gone)
            self._allocator.free(name)

    def buffer(self, name: str) -> Buffer:
        """The buffer with this name."""
        with self._lock:
            self._memory()
            return self._buffer(self._allocator.find(name))

    def buffers(self) -> list[Buffer]:
        """Every buffer, in the order of their addresses."""
        with self._lock:
            self._memory()
            return [self._buffer(span) for span in self._allocator.spans()]

    def resolve(self, name: str, offset: int, size: int) -> int:
        """The address of ``size`` bytes that begin ``offset`` bytes into a buffer, all of them inside it."""
        buffer = self.buffer(name)
        check_uint64(f"{self._who}: buffer {name!r}", offset=offset, size=size)
        if offset + size > buffer.size:
            raise OutOfRange(
                f"{self._who}: offset {offset} with size {size} ends at {offset + size}, past the end of "
                f"buffer {name!r} of {buffer.size} bytes"
            )
        return buffer.address + offset

    def label(self, key: str) -> str:
        """A small fact kept with the arena (whose it is), or an empty string."""
        with self._lock:
            self._memory()
            return self._header.labels.get(key, "") if self._header is not None else ""

    def set_label(self, key: str, value: str) -> None:
        """Keep a small fact with the arena."""
        with self._lock:
            self._owned(f"set label {key!r}").set_label(key, value, self._allocator.spans())

    def refresh(self) -> None:
        """Look again at which buffers there are, where another process owns them."""
        with self._lock:
            self._memory()
            if self._header is not None and not self._file.exclusive:
                self._allocator = self._header.load()

    # The end ---------------------------------------------------------------------------------------------

    def close(self, *, delete: bool = False) -> None:
        """Give the arena up, and with ``delete`` its file; views that are still held stay valid."""
        with self._lock:
            if self._bytes is None:
                return
            if delete:
                self._owned("delete the file")
                self._file.unlink()
            self._bytes = self._header = None
            self._file.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _memory(self) -> memoryview:
        memory = self._bytes
        if memory is None:
            raise FailedPrecondition(f"{self._who}: it is closed; open it again")
        return memory

    def _owned(self, doing: str) -> Header:
        self._memory()
        if self._header is None or not self._file.exclusive:
            raise FailedPrecondition(
                f"{self._who}: cannot {doing}: this process is attached and does not own it; ask its owner"
            )
        return self._header

    def _reused(self, span: Span, size: int, alignment: int) -> Buffer:
        if span.size != size or span.offset % alignment:
            raise FailedPrecondition(
                f"{self._who}: buffer {span.name!r} exists with {span.size} bytes at "
                f"{self.min_address + span.offset:#x}, asked for {size} bytes aligned to {alignment}; "
                "free it first or choose another name"
            )
        return self._buffer(span)

    def _buffer(self, span: Span) -> Buffer:
        return Buffer(span.name, self.min_address + span.offset, span.size)
