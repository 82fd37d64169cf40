"""The frames of the data plane: a fixed header, then the payload.

    magic  version kind flags  communicator generation source sequence length payload-crc call header-crc
    4s     u8      u8   u16    u64          u32        u32    u64      u64    u32         u64  u32

A link carries frames one way, from the rank that dialled it. Every frame names its communicator,
generation, source rank and place in the sequence, so that a stale, duplicated, lost or reordered
one is refused and named instead of being summed. ``call`` is the stamp of the collective that a
message belongs to (transport/calls.py), 0 outside of collectives. The header has a checksum of its own: no length is
believed before it holds.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from hoop.errors import LinkCorrupted

_LAYOUT = struct.Struct("<4sBBHQIIQQIQ")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size + _CHECK.size
MAGIC = b"HOOP"
VERSION = 2
MAX_PAYLOAD = 1 << 40


class FrameKind(IntEnum):
    """What a frame is for."""

    HELLO = 1
    """The first frame on a link: who dials, for which communicator; ``sequence`` is the rank dialled. With a payload,
    16 random bytes, it asks for a CHALLENGE (transport/auth_handshake.py)."""
    DATA = 2
    REFUSAL = 3
    """Sent back once before the link is closed; the payload is a sentence."""
    CHECKED = 5
    """DATA with a checksum (CRC-32C) of its payload: a message, or the last piece of one."""
    PART = 8
    """A piece of a message that is not its last one; otherwise like CHECKED."""
    RECEIVED = 6
    """Back from the dialled end: every CHECKED and PART before ``sequence`` has come as it was sent."""
    AGAIN = 7
    """Back from the dialled end: ``sequence`` has not; dial anew, and go on from it."""
    GOODBYE = 4
    """The same from an endpoint that ends; ``sequence`` is how many messages it has sent the other way."""
    ASK = 10
    """Like HELLO, on a connection of its own: which collective is under way at ``sequence``, the rank dialled?"""
    CALL = 11
    """The answer to ASK: the stamp of that collective (0: none) in ``call``, its text as the payload."""
    MISMATCH = 12
    """As the answer to ASK: calls did not match, the payload says which. As the first frame of a connection, like
    HELLO: the sender has found that; a frame of the same kind follows with the payload, and one comes back. On a link:
    in the place of GOODBYE, where that is why the endpoint ends."""
    CHALLENGE = 16
    """The answer to a HELLO on a link that authenticates: random bytes, and a proof of one's own."""


def pack_header(
    kind: int,
    communicator: int,
    generation: int,
    source: int,
    sequence: int,
    length: int,
    checksum: int = 0,
    call: int = 0,
) -> bytes:
    """A header as bytes; for those who need no more of it, because an object takes longer to make than its bytes."""
    head = _LAYOUT.pack(
        MAGIC, VERSION, kind, 0, communicator, generation, source, sequence, length, checksum, call
    )
    return head + _CHECK.pack(zlib.crc32(head))


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A frame's header, as it stands on the wire."""

    kind: int
    communicator: int
    generation: int
    source: int
    sequence: int
    length: int
    checksum: int = 0
    call: int = 0

    def pack(self) -> bytes:
        place = (self.communicator, self.generation, self.source, self.sequence)
        return pack_header(self.kind, *place, self.length, self.checksum, self.call)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        if len(data) != HEADER_BYTES:
            raise LinkCorrupted(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
        head = bytes(data[: _LAYOUT.size])
        (check,) = _CHECK.unpack_from(data, _LAYOUT.size)
        check_start(head[: len(MAGIC)])
        if zlib.crc32(head) != check:
            raise LinkCorrupted("a frame header's checksum does not hold")
        check_start(head)
        _, _, kind, _, communicator, generation, source, sequence, length, checksum, call = _LAYOUT.unpack(
            head
        )
        if kind not in FrameKind.__members__.values():
            raise LinkCorrupted(f"unknown frame kind {kind}")
        if length > MAX_PAYLOAD:
            raise LinkCorrupted(f"a frame of {length} bytes, over the limit of {MAX_PAYLOAD}")
        return cls(kind, communicator, generation, source, sequence, length, checksum, call)


def check_start(head: bytes | bytearray) -> None:
    """Refuses the first bytes of something that is no frame of this version, however long its header would be."""
    magic = bytes(head[: len(MAGIC)])
    if len(magic) == len(MAGIC) and magic != MAGIC:
        raise LinkCorrupted(f"not a Hoop frame: it starts with {magic!r}, not {MAGIC!r}")
    if len(head) > len(MAGIC) and head[len(MAGIC)] != VERSION:
        raise LinkCorrupted(
            f"frame version {head[len(MAGIC)]}, this side speaks {VERSION}: update the older one"
        )
