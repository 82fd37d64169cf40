"""A writer of TensorBoard event files (scalars only) that does not need TensorBoard.

An event file is a sequence of records. A record is (all little-endian)

    length: uint64 | masked CRC-32C of the length: uint32 | an Event | masked CRC-32C of the Event: uint32

An Event is a small protobuf message; these fields are used:

    Event      1 wall_time: double   2 step: int64   3 file_version: string   5 summary   7 session_log
    Summary    1 value: { 1 tag: string   2 simple_value: float }
    SessionLog 1 status: START = 1, "discard the earlier events from this step on"
"""

from __future__ import annotations

import math
import os
import struct
import time
from pathlib import Path

from crc32c import crc32c

from hoop.files import Appender

_MASK = 0xA282EAD8


def _masked_crc(data: bytes) -> bytes:
    """The checksum in the format of a record: rotated and offset, so that a record can contain records."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


def record(event: bytes) -> bytes:
    length = struct.pack("<Q", len(event))
    return length + _masked_crc(length) + event + _masked_crc(event)


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
    except OverflowError:  # beyond float32, such as 1e39: infinity
        return struct.pack("<f", math.copysign(math.inf, value))


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + content


class TensorBoardLog(Appender):
    """A new event file in ``directory``. Each run, and each resumption of a run, writes another file."""

    def __init__(self, directory: Path | str, *, resumes_after: int | None = None) -> None:
        """``resumes_after``: the step after which the run resumes; TensorBoard discards old points of later steps."""
        # TensorBoard reads the files of a directory in the order of their names.
        seconds, rest = divmod(time.time_ns(), 10**9)
        super().__init__(Path(directory) / f"events.out.tfevents.{seconds:010d}.{rest:09d}.{os.getpid()}", new=True)
        self.append(record(_event(time.time(), 0, _nested(3, b"brain.Event:2"))))
        if resumes_after is not None:
            start = _nested(7, b"\x08\x01")
            self.append(record(_event(time.time(), resumes_after + 1, start)))

    def scalar(self, tag: str, value: float, step: int, wall_time: float | None = None) -> None:
        """Append one point of the curve ``tag``; a slash makes groups, as in ``loss/train``."""
        point = _nested(1, tag.encode()) + b"\x15" + _float32(value)
        now = time.time() if wall_time is None else wall_time
        self.append(record(_event(now, step, _nested(5, _nested(1, point)))))
