"""Scalars that TensorBoard shows, written without TensorBoard.

A file of events is a sequence of records, and a record is (all little-endian)

    length: uint64 | masked CRC-32C of it: uint32 | an Event | masked CRC-32C of that: uint32

An Event is a small protobuf message; of its fields four are used here:

    Event      1 wall_time: double   2 step: int64   3 file_version: string   5 summary   7 session_log
    Summary    1 value: { 1 tag: string   2 simple_value: float }
    SessionLog 1 status: START = 1, "whatever was noted from this step on does not count any more"
"""

from __future__ import annotations

import math
import os
import struct
import time
from pathlib import Path

from hoop.files import Appender

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_MASK = 0xA282EAD8


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_table_entry(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum. Records are some fifty bytes, for which a table in Python is fast enough."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    """The checksum as records hold it: rotated and shifted, so that a record can hold records."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked(length) + event + _masked(event)


def _varint(number: int) -> bytes:
    number &= 0xFFFFFFFFFFFFFFFF  # a negative int64 is ten bytes
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _nested(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # a loss of 1e39 has left float32, and is shown as what it is there
        return struct.pack("<f", math.copysign(math.inf, value))


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + content


class TensorBoardLog(Appender):
    """An events file of its own in a directory; each run, and each resumption of one, writes another."""

    def __init__(self, directory: Path | str, *, resumes_after: int | None = None) -> None:
        """``resumes_after``: the step from which the run goes on; what was shown of later ones disappears."""
        # TensorBoard reads a directory's files in the order of their names.
        seconds, rest = divmod(time.time_ns(), 10**9)
        super().__init__(
            Path(directory) / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{os.getpid()}", new=True
        )
        self.append(record(_event(time.time(), 0, _nested(3, b"brain.Event:2"))))
        if resumes_after is not None:
            start = _nested(7, b"\x08\x01")
            self.append(record(_event(time.time(), resumes_after + 1, start)))

    def scalar(self, tag: str, value: float, step: int, wall_time: float | None = None) -> None:
        """One point of the curve named ``tag``; a slash in it makes groups, as in ``loss/train``."""
        point = _nested(1, tag.encode()) + b"\x15" + _float32(value)
        now = time.time() if wall_time is None else wall_time
        self.append(record(_event(now, step, _nested(5, _nested(1, point)))))
