"""The table of buffers inside an arena's file, so that a restarted device finds them where they were.

It has two slots. An update goes to the slot that is not current and becomes current by its higher sequence
number and its checksum, so a process that dies halfway leaves the previous table in force. The superblock is
written once, after the first tables: a file without one was never finished. Nothing here is believed without
its checksum.

One device's memory: a fixed range of addresses over a file that the processes of a host can share.

    address   0x1000 = min_address                             max_address
                 |   weights   |   grads   |     free     |  …  |
    file      … data_offset                                     end of file

The bytes written here are not flushed, only the header is: they are in the page cache, which survives the
death of a process (a restart needs that) though not of the machine (a checkpoint is for that).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument, OutOfRange, ResourceExhausted
from hoop.memory.allocator import MAX_NAME, Allocator, Span
from hoop.memory.dtypes import DType
from hoop.memory.storage import MIN_ADDRESS, PAGE, TABLE_SIZE, BackingFile, Geometry, check_uint64, damaged
from hoop.texts import parse_json

_SLOT = struct.Struct("<QQ")  # sequence, payload length
_CRC = struct.Struct("<I")  # of those two and the payload
# An attached process may look while the owner writes; the owner would have to finish two whole updates inside
# one look, this many times in a row, for both slots to seem damaged.
_LOOKS = 16


class BufferTable:
    """The table of buffers in a mapped arena file."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry, who: str) -> None:
        self._mapping = mapping
        self._geometry = geometry
        self._who = who
        self._sequence = 0
        self.labels: dict[str, str] = {}
        """Small facts that are kept with the table."""

    def format(self) -> None:
        """Write an empty table into both slots, and then the superblock that makes them an arena."""
        self.save([])
        self.save([])
        superblock = self._geometry.pack()
        self._mapping[: len(superblock)] = superblock
        self._flush(0, PAGE)

    def load(self) -> Allocator:
        """The newest table that is whole."""
        for _ in range(_LOOKS):
            tables: list[tuple[int, Allocator, dict[str, str]]] = []
            reasons: list[str] = []
            for slot in (0, 1):
                try:
                    tables.append(self._read(slot))
                except ValueError as error:
                    reasons.append(f"table slot {slot} {error}")
            if tables:
                self._sequence, allocator, self.labels = max(tables, key=lambda table: table[0])
                return allocator
        raise damaged(self._who, " and ".join(reasons))

    def save(self, spans: Iterable[Span]) -> None:
        """Make this the current table."""
        rows = [[span.name, span.offset, span.size] for span in spans]
        table = {"buffers": rows, "labels": self.labels}
        payload = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
        room = self._geometry.table_size - _SLOT.size - _CRC.size
        if len(payload) > room:
            raise ResourceExhausted(
                f"{self._who}: the table of {len(rows)} buffers needs {len(payload)} bytes and has {room}; "
                "use fewer buffers or shorter names, or create the arena with a larger table_size"
            )
        sequence = self._sequence + 1
        head = _SLOT.pack(sequence, len(payload))
        record = head + _CRC.pack(zlib.crc32(payload, zlib.crc32(head))) + payload
        start = self._slot(sequence % 2)
        self._mapping[start : start + len(record)] = record
        self._flush(start, len(record))
        self._sequence = sequence

    def set_label(self, key: str, value: str, spans: Iterable[Span]) -> None:
        """Keep a small fact with the table, or leave everything as it was."""
        if any(not text.isprintable() or len(text) > MAX_NAME for text in (key, value)):
            raise InvalidArgument(
                f"{self._who}: label {key!r}: keys and values are up to {MAX_NAME} printable characters"
            )
        before, self.labels = self.labels, {**self.labels, key: value}
        try:
            self.save(spans)
        except BaseException:
            self.labels = before
            raise

    def _read(self, slot: int) -> tuple[int, Allocator, dict[str, str]]:
        start = self._slot(slot)
        # One copy, checked and then decoded: the owner may be writing the original at this moment.
        record = self._mapping[start : start + self._geometry.table_size]
        sequence, length = _SLOT.unpack_from(record)
        head = _SLOT.size + _CRC.size
        if length > len(record) - head:
            raise ValueError(f"says {length} bytes of {len(record) - head}")
        payload = record[head : head + length]
        if _CRC.unpack_from(record, _SLOT.size) != (zlib.crc32(payload, zlib.crc32(record[: _SLOT.size])),):
            raise ValueError("does not match its checksum")
        try:
            table = parse_json(payload)
            spans = [Span(str(name), int(offset), int(size)) for name, offset, size in table["buffers"]]
            labels = {str(key): str(value) for key, value in table["labels"].items()}
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"is not a table: {error}") from error
        return sequence, Allocator.restore(self._geometry.capacity, spans, owner=self._who), labels

    def _slot(self, index: int) -> int:
        return PAGE + index * self._geometry.table_size

    def _flush(self, start: int, size: int) -> None:
        first = start - start % mmap.PAGESIZE  # flushing begins at a page, and a page may be more than 4 KiB
        self._mapping.flush(first, start + size - first)


@dataclass(frozen=True)
class ArenaBuffer:
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
        header = BufferTable(mapping, geometry, self._who)
        if blank:
            header.format()
        self._allocator = header.load()
        # Closing drops these references and never closes the mapping, which would fail while a view of it
        # lives and break a thread in the middle of a read; the last view to go unmaps it.
        self._header: BufferTable | None = header
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

    def allocate(self, name: str, size: int, alignment: int = 64, *, reuse: bool = False) -> ArenaBuffer:
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

    def buffer(self, name: str) -> ArenaBuffer:
        """The buffer with this name."""
        with self._lock:
            self._memory()
            return self._buffer(self._allocator.find(name))

    def buffers(self) -> list[ArenaBuffer]:
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

    def _owned(self, doing: str) -> BufferTable:
        self._memory()
        if self._header is None or not self._file.exclusive:
            raise FailedPrecondition(
                f"{self._who}: cannot {doing}: this process is attached and does not own it; ask its owner"
            )
        return self._header

    def _reused(self, span: Span, size: int, alignment: int) -> ArenaBuffer:
        if span.size != size or span.offset % alignment:
            raise FailedPrecondition(
                f"{self._who}: buffer {span.name!r} exists with {span.size} bytes at "
                f"{self.min_address + span.offset:#x}, asked for {size} bytes aligned to {alignment}; "
                "free it first or choose another name"
            )
        return self._buffer(span)

    def _buffer(self, span: Span) -> ArenaBuffer:
        return ArenaBuffer(span.name, self.min_address + span.offset, span.size)
