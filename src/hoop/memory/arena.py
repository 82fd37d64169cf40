"""A device's memory: a fixed address range over a file that the processes of one host can share.

    address   0x1000 = min_address                             max_address
                 |   weights   |   grads   |     free     |  …  |
    file      … data_offset                                     end of file

``BufferTable`` stores the names and offsets of the buffers in the file's header, so that a restarted device
finds its buffers again. The table has two slots. An update writes the slot that is not current; its higher
sequence number and valid checksum make it current, so a process that dies during an update leaves the previous
table valid. The superblock is written once, after the first tables: a file without a superblock was never
finished. A slot without a valid checksum is ignored.

Only the header is flushed. Buffer bytes stay in the page cache, which survives the death of a process (a restart
needs that) but not the death of the machine (checkpoints cover that).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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
from hoop.memory.storage import MIN_ADDRESS, PAGE, TABLE_SIZE, BackingFile, Geometry, check_uint64, damaged_header
from hoop.texts import parse_json

_SLOT = struct.Struct("<QQ")  # sequence, payload length
_CRC = struct.Struct("<I")  # over sequence, length and payload
# An attached process may read while the owner writes. Both slots seem damaged only if the owner finishes two whole
# updates during one read; with this many attempts that would have to happen as many times in a row.
_READ_ATTEMPTS = 16


READS, WRITES, CHECKS = "reads", "writes", "checks"
"""What the caller of ``host_view`` does with the bytes: reads them, writes them, or only checks their number and
place."""


class BufferTable:
    """The crash-safe table of buffers and labels in a mapped arena file."""

    def __init__(self, mapping: mmap.mmap, geometry: Geometry, subject: str) -> None:
        self._mapping = mapping
        self._geometry = geometry
        self._subject = subject  # prefix of error messages
        self._sequence = 0
        self.labels: dict[str, str] = {}
        """Key-value strings that are stored with the table."""

    def format(self) -> None:
        """Write an empty table into both slots, then the superblock that marks the file as an arena."""
        self.save([])
        self.save([])
        superblock = self._geometry.pack()
        self._mapping[: len(superblock)] = superblock
        self._flush(0, PAGE)

    def load(self) -> Allocator:
        """Load the newest table with a valid checksum; raises FailedPrecondition if neither slot has one."""
        for _ in range(_READ_ATTEMPTS):
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
        raise damaged_header(self._subject, " and ".join(reasons))

    def save(self, spans: Iterable[Span]) -> None:
        """Write ``spans`` and the labels as the current table."""
        rows = [[span.name, span.offset, span.size] for span in spans]
        table = {"buffers": rows, "labels": self.labels}
        payload = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
        max_payload = self._geometry.table_size - _SLOT.size - _CRC.size
        if len(payload) > max_payload:
            raise ResourceExhausted(
                f"{self._subject}: the table of {len(rows)} buffers needs {len(payload)} bytes and has {max_payload}; "
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
        """Set a label and save the table. If saving fails, the old labels stay."""
        if any(not text.isprintable() or len(text) > MAX_NAME for text in (key, value)):
            raise InvalidArgument(
                f"{self._subject}: label {key!r}: keys and values are up to {MAX_NAME} printable characters"
            )
        previous, self.labels = self.labels, {**self.labels, key: value}
        try:
            self.save(spans)
        except BaseException:
            self.labels = previous
            raise

    def _read(self, slot: int) -> tuple[int, Allocator, dict[str, str]]:
        start = self._slot(slot)
        # Check and decode one copy: the owner may be writing the slot at this moment.
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
        return sequence, Allocator.restore(self._geometry.capacity, spans, owner=self._subject), labels

    def _slot(self, index: int) -> int:
        return PAGE + index * self._geometry.table_size

    def _flush(self, start: int, size: int) -> None:
        first = start - start % mmap.PAGESIZE  # msync needs a page boundary, and a page may exceed 4 KiB
        self._mapping.flush(first, start + size - first)


@dataclass(frozen=True)
class ArenaBuffer:
    """A named address range of an arena."""

    name: str
    address: int
    size: int


class Arena:
    """A device's memory.

    The owner makes it with ``create``, ``open`` or ``open_or_create``; other processes use ``attach``.
    """

    def __init__(self, file: BackingFile, geometry: Geometry, *, blank: bool = False) -> None:
        self.path = file.path
        self.min_address = geometry.min_address
        self.max_address = geometry.max_address
        self.capacity = geometry.capacity
        self._subject = f"arena {file.path}"
        self._file = file
        self._geometry = geometry
        self._lock = threading.RLock()
        self.grows = False
        """Whether memory is reserved when a buffer is allocated; else all of it was reserved at the beginning."""
        mapping = file.map(geometry.file_size)
        header = BufferTable(mapping, geometry, self._subject)
        if blank:
            header.format()
        self._allocator = header.load()
        # close() drops these references and never closes the mapping: that would fail while a view exists, and
        # break a thread in the middle of a read. The mapping is unmapped with its last view.
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
        grows: bool = False,
    ) -> Arena:
        """Create an arena of ``capacity`` bytes, owned by this process. The file must not exist yet.

        ``grows``: memory is reserved for each buffer when it is allocated, not for all bytes now; what is written
        outside of buffers may end the process if there is no memory.
        """
        geometry = Geometry(capacity, min_address, table_size).check(f"arena {path}")
        file = BackingFile(Path(path), create="always", exclusive=True)
        return cls._format(file, geometry, grows)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Arena:
        """Open an existing arena with its buffers and bytes, as its only owner."""
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
        """Open the arena of a restarting device, or create it. ``capacity`` and ``min_address`` must match."""
        geometry = Geometry(capacity, min_address, table_size).check(f"arena {path}")
        file = BackingFile(Path(path), create="missing", exclusive=True)
        # A new file, or the creator was killed before it wrote the superblock: the file holds no arena.
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
        """Map an arena that another process may own: read and write bytes, look up buffers, change no buffers."""
        return cls._load(BackingFile(Path(path), create="never", exclusive=False))

    @classmethod
    def _format(cls, file: BackingFile, geometry: Geometry, grows: bool = False) -> Arena:
        with ExitStack() as undo:
            undo.callback(file.close)
            undo.callback(file.unlink)
            if grows:
                file.reserve_later(geometry.file_size)
                file.reserve_part(0, geometry.data_offset)
            else:
                file.reserve(geometry.file_size)
            arena = cls(file, geometry, blank=True)
            arena.grows = grows
            undo.pop_all()
        return arena

    @classmethod
    def _load(cls, file: BackingFile) -> Arena:
        with ExitStack() as undo:
            undo.callback(lambda: file.close())
            geometry = Geometry.unpack(file.read(PAGE), file.size, f"arena {file.path}")
            if file.exclusive:
                file = file.leave_to_others()
            arena = cls(file, geometry)
            undo.pop_all()
        return arena

    def share(self) -> tuple[int, int]:
        """A file descriptor for another process of this host, and the offset of the first data byte in the file.

        The caller closes the descriptor.
        """
        self._memory()
        return self._file.reopen(), self._geometry.data_offset

    def unlink(self) -> None:
        """Remove the file's name. The kernel frees the memory when the last process that maps it ends."""
        self._require_owner("remove the name")
        self._file.unlink()

    @property
    def used(self) -> int:
        """Allocated bytes."""
        return self._allocator.used

    @property
    def largest_free(self) -> int:
        """Bytes of the largest piece that can be allocated."""
        return self._allocator.largest_free

    # Addresses -------------------------------------------------------------------------------------------

    def check(self, address: int, size: int, align: int = 1) -> int:
        """File offset of ``[address, address + size)``; raises OutOfRange unless the arena contains it."""
        return self._geometry.locate(address, size, align, "arena")  # callers from elsewhere learn no path

    def view(self, address: int, size: int) -> memoryview:
        """A writable view of ``size`` bytes at ``address``, without a copy."""
        start = self.check(address, size)
        return self._memory()[start : start + size]

    def array(self, address: int, dtype: DType, count: int) -> NDArray[Any]:
        """A writable array over ``count`` elements at ``address``, without a copy, in the storage type of ``dtype``."""
        start = self.check(address, int(count) * dtype.itemsize, dtype.itemsize)
        return np.ndarray((count,), dtype.numpy, buffer=self._memory(), offset=start)

    @contextmanager
    def host_view(self, address: int, size: int, access: str = WRITES) -> Iterator[NDArray[np.uint8]]:
        """A writable array over ``size`` bytes at ``address``, without a copy. ``access`` is for memory on a GPU."""
        start = self.check(address, size)
        yield np.ndarray((size,), np.uint8, buffer=self._memory(), offset=start)

    def read(self, address: int, size: int) -> bytes:
        """A copy of ``size`` bytes at ``address``."""
        return bytes(self.view(address, size))

    def write(self, address: int, data: bytes | bytearray | memoryview | NDArray[Any]) -> None:
        """Copy bytes, or an array's elements in C order, to ``address``."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        source = memoryview(data)
        if not source.c_contiguous:
            raise InvalidArgument(
                f"{self._subject}: the {source.nbytes} bytes for address {address:#x} are not contiguous; "
                "copy them first"
            )
        target = self.view(address, source.nbytes)
        if source.nbytes:  # memoryview.cast refuses a shape with a zero in it
            target[:] = source.cast("B")

    # Buffers ---------------------------------------------------------------------------------------------

    def allocate(self, name: str, size: int, alignment: int = 64, *, reuse: bool = False) -> ArenaBuffer:
        """Allocate a buffer; its bytes are not cleared.

        With ``reuse`` an existing buffer with this name is returned if size and alignment match.
        """
        with self._lock:
            header = self._require_owner(f"allocate {name!r}")
            if alignment > PAGE:
                raise InvalidArgument(
                    f"{self._subject}: buffer {name!r} with alignment {alignment}; {PAGE} is the most"
                )
            if reuse and name in self._allocator:
                return self._reuse(self._allocator.find(name), size, alignment)
            span = self._allocator.allocate(name, size, alignment)
            try:
                if self.grows:
                    self._file.reserve_part(self._geometry.data_offset + span.offset, max(1, span.size))
                header.save(self._allocator.spans())
            except BaseException:
                self._allocator.free(name)
                raise
            return self._buffer(span)

    def free(self, name: str) -> None:
        """Free the buffer called ``name``."""
        with self._lock:
            header = self._require_owner(f"free {name!r}")
            freed = self._allocator.find(name)
            header.save(span for span in self._allocator.spans() if span is not freed)
            self._allocator.free(name)

    def buffer(self, name: str) -> ArenaBuffer:
        """The buffer called ``name``; raises NotFound."""
        with self._lock:
            self._memory()
            return self._buffer(self._allocator.find(name))

    def buffers(self) -> list[ArenaBuffer]:
        """Every buffer, sorted by address."""
        with self._lock:
            self._memory()
            return [self._buffer(span) for span in self._allocator.spans()]

    def resolve(self, name: str, offset: int, size: int) -> int:
        """Address of byte ``offset`` of a buffer; raises OutOfRange unless ``size`` bytes follow inside the buffer."""
        buffer = self.buffer(name)
        check_uint64(f"{self._subject}: buffer {name!r}", offset=offset, size=size)
        if offset + size > buffer.size:
            raise OutOfRange(
                f"{self._subject}: offset {offset} with size {size} ends at {offset + size}, past the end of "
                f"buffer {name!r} of {buffer.size} bytes"
            )
        return buffer.address + offset

    def label(self, key: str) -> str:
        """The stored label ``key`` (such as the device id), or an empty string."""
        with self._lock:
            self._memory()
            return self._header.labels.get(key, "") if self._header is not None else ""

    def set_label(self, key: str, value: str) -> None:
        """Store a label in the arena's header."""
        with self._lock:
            self._require_owner(f"set label {key!r}").set_label(key, value, self._allocator.spans())

    def refresh(self) -> None:
        """Read the buffer table again; only needed by a process that is attached."""
        with self._lock:
            self._memory()
            if self._header is not None and not self._file.exclusive:
                self._allocator = self._header.load()

    # Closing ---------------------------------------------------------------------------------------------

    def close(self, *, delete: bool = False) -> None:
        """Close the arena and release its lock; with ``delete`` remove the file. Existing views stay valid."""
        with self._lock:
            if self._bytes is None:
                return
            if delete:
                self._require_owner("delete the file")
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
            raise FailedPrecondition(f"{self._subject}: it is closed; open it again")
        return memory

    def _require_owner(self, action: str) -> BufferTable:
        self._memory()
        if self._header is None or not self._file.exclusive:
            raise FailedPrecondition(
                f"{self._subject}: cannot {action}: this process is attached and does not own it; ask its owner"
            )
        return self._header

    def _reuse(self, span: Span, size: int, alignment: int) -> ArenaBuffer:
        if span.size != size or span.offset % alignment:
            raise FailedPrecondition(
                f"{self._subject}: buffer {span.name!r} exists with {span.size} bytes at "
                f"{self.min_address + span.offset:#x}, asked for {size} bytes aligned to {alignment}; "
                "free it first or choose another name"
            )
        return self._buffer(span)

    def _buffer(self, span: Span) -> ArenaBuffer:
        return ArenaBuffer(span.name, self.min_address + span.offset, span.size)
