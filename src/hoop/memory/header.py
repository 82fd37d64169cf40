"""The table of buffers inside an arena's file, so that a restarted device finds them where they were.

It has two slots. An update goes to the slot that is not current and becomes current by its higher sequence
number and its checksum, so a process that dies halfway leaves the previous table in force. The superblock is
written once, after the first tables: a file without one was never finished. Nothing here is believed without
its checksum.
"""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from collections.abc import Iterable

from hoop.errors import InvalidArgument, ResourceExhausted
from hoop.memory.allocator import MAX_NAME, Allocator, Span
from hoop.memory.geometry import PAGE, Geometry, damaged
from hoop.texts import parse_json

_SLOT = struct.Struct("<QQ")  # sequence, payload length
_CRC = struct.Struct("<I")  # of those two and the payload
# An attached process may look while the owner writes; the owner would have to finish two whole updates inside
# one look, this many times in a row, for both slots to seem damaged.
_LOOKS = 16


class Header:
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
