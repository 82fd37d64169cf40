"""The frames of the data plane: a fixed header, then the payload.

    magic  version kind lane   communicator generation source sequence length payload-crc call header-crc
    4s     u8      u8   u16    u64          u32        u32    u64      u64    u32         u64  u32

A link carries frames in one direction, from the rank that dialled it. Every frame holds its communicator, generation,
source rank and sequence number, so the receiver detects a stale, duplicated, lost or reordered frame instead of summing
it. ``call`` is the stamp of the collective that a message belongs to (transport/call_check.py), 0 outside collectives.
``lane`` is 0 but for the frames of lanes, the additional sockets of a link (transport/tcp_lanes.py). The header has its
own checksum, which is verified before the length is used. ``transport/tcp_endpoint.py`` checks payloads and requests
damaged frames again.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from hoop.errors import LinkCorrupted

_LAYOUT = struct.Struct("<4sBBHQIIQQIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _LAYOUT.size + _CRC.size
MAGIC = b"HOOP"
VERSION = 3
MAX_PAYLOAD = 1 << 40
MAX_LANES = 15
"""Maximum number of lanes of a link, beside its own socket."""


class FrameKind(IntEnum):
    """The purpose of a frame."""

    HELLO = 1
    """The first frame on a link: the dialling rank and its communicator; ``sequence`` is the dialled rank. A payload of
    16 random bytes requests a CHALLENGE (transport/auth_handshake.py)."""
    DATA = 2
    REFUSAL = 3
    """The dialled end sends it before it closes the link; the payload is the reason as text."""
    CHECKED = 5
    """DATA with a checksum (CRC-32C) of its payload: a message, or its last part."""
    PART = 8
    """A part of a message, but not its last one; otherwise like CHECKED."""
    ACK = 6
    """The dialled end has received every CHECKED and PART before ``sequence`` intact."""
    RETRANSMIT = 7
    """The dialled end found frame ``sequence`` damaged or missing: dial again and resume with it."""
    GOODBYE = 4
    """An ACK from an endpoint that closes; ``sequence`` is the number of messages it has sent the other way."""
    ASK = 10
    """Question on a separate connection, otherwise like HELLO: which collective is running? ``sequence`` is the dialled
    rank."""
    CALL = 11
    """Answer to ASK: the stamp of that collective (0: none) in ``call``, its description as the payload."""
    MISMATCH = 12
    """Answer to ASK: the ranks called different collectives; the payload describes them. As the first frame of a
    connection, like HELLO: the sender has detected a mismatch; a frame of the same kind follows with the payload, and
    one comes back. On a link: sent instead of GOODBYE by an endpoint that closes because of a mismatch."""
    LANE = 13
    """Opens lane ``lane`` of the link between the same two ranks on a new connection, otherwise like HELLO. The dialled
    end sends it back, with the two ranks exchanged, when it has accepted the lane."""
    STRIPED = 14
    """First part of a message whose other parts follow on the link's lanes 1 to ``lane``, otherwise like DATA;
    ``length`` is that of the whole message."""
    STRIPE = 15
    """The part of a STRIPED message on lane ``lane``; ``length`` is that of the part, the rest as in its message."""
    CHALLENGE = 16
    """Answer to HELLO on an authenticated link: random bytes, and the proof of the dialled end."""


def pack_header(
    kind: int,
    communicator: int,
    generation: int,
    source: int,
    sequence: int,
    length: int,
    checksum: int = 0,
    call: int = 0,
    lane: int = 0,
) -> bytes:
    """Encode a header without making a FrameHeader: the object costs more than the encoding."""
    head = _LAYOUT.pack(MAGIC, VERSION, kind, lane, communicator, generation, source, sequence, length, checksum, call)
    return head + _CRC.pack(zlib.crc32(head))


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a frame."""

    kind: int
    communicator: int
    generation: int
    source: int
    sequence: int
    length: int
    checksum: int = 0
    call: int = 0
    lane: int = 0

    def pack(self) -> bytes:
        return pack_header(
            self.kind,
            self.communicator,
            self.generation,
            self.source,
            self.sequence,
            self.length,
            self.checksum,
            self.call,
            self.lane,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> FrameHeader:
        if len(data) != HEADER_BYTES:
            raise LinkCorrupted(f"a frame header has {HEADER_BYTES} bytes, got {len(data)}")
        head = bytes(data[: _LAYOUT.size])
        (crc,) = _CRC.unpack_from(data, _LAYOUT.size)
        check_start(head[: len(MAGIC)])
        if zlib.crc32(head) != crc:
            raise LinkCorrupted("a frame header's checksum does not hold")
        check_start(head)
        _, _, kind, lane, communicator, generation, source, sequence, length, checksum, call = _LAYOUT.unpack(head)
        if kind not in FrameKind.__members__.values():
            raise LinkCorrupted(f"unknown frame kind {kind}")
        if length > MAX_PAYLOAD:
            raise LinkCorrupted(f"a frame of {length} bytes, over the limit of {MAX_PAYLOAD}")
        if lane > MAX_LANES:
            raise LinkCorrupted(f"a frame of lane {lane}, over the limit of {MAX_LANES}")
        return cls(kind, communicator, generation, source, sequence, length, checksum, call, lane)


def check_start(head: bytes | bytearray) -> None:
    """Raise LinkCorrupted unless the first bytes of a frame, as many as there are, have this magic and version."""
    magic = bytes(head[: len(MAGIC)])
    if len(magic) == len(MAGIC) and magic != MAGIC:
        raise LinkCorrupted(f"not a Hoop frame: it starts with {magic!r}, not {MAGIC!r}")
    if len(head) > len(MAGIC) and head[len(MAGIC)] != VERSION:
        raise LinkCorrupted(f"frame version {head[len(MAGIC)]}, this side speaks {VERSION}: update the older one")
