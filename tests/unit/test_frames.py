"""Frame headers: pack and unpack round-trip; corrupt or foreign bytes are rejected."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import LinkCorrupted
from hoop.wire.frames import HEADER_BYTES, MAGIC, MAX_PAYLOAD, VERSION, FrameHeader, FrameKind

DATA = FrameHeader(
    FrameKind.DATA,
    communicator=7,
    generation=3,
    source=2,
    sequence=41,
    length=1 << 20,
    checksum=0xDEADBEEF,
    call=0x0123456789ABCDEF,
)
VERSION_AT, KIND_AT, LENGTH_AT = 4, 5, 32

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
headers = st.builds(
    FrameHeader,
    kind=st.sampled_from(FrameKind),
    communicator=u64,
    generation=u32,
    source=u32,
    sequence=u64,
    length=st.integers(0, MAX_PAYLOAD),
    checksum=u32,
    call=u64,
)


def with_checksum(head: bytes) -> bytes:
    """The bytes followed by their valid checksum."""
    return head + struct.pack("<I", zlib.crc32(head))


def modified_header(at: int, value: bytes) -> bytes:
    """A DATA header with ``value`` at offset ``at``, and a valid checksum."""
    head = DATA.pack()[:-4]
    return with_checksum(head[:at] + value + head[at + len(value) :])


@given(headers)
def test_pack_and_unpack_round_trip(header: FrameHeader) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    for data in (packed, bytearray(packed), memoryview(packed)):
        assert FrameHeader.unpack(data) == header


def test_packed_bytes_match_the_documented_layout() -> None:
    packed = DATA.pack()
    assert packed[:-4].hex(" ", 4) == (
        "484f4f50 03020000 07000000 00000000 03000000 02000000 29000000 00000000 00001000 00000000 efbeadde "
        "efcdab89 67452301"
    )
    assert packed == with_checksum(packed[:-4])
    assert (packed[:4], packed[VERSION_AT]) == (MAGIC, VERSION)


@pytest.mark.parametrize(
    "header",
    [DATA, FrameHeader(FrameKind.HELLO, 0, 0, 0, 0, 0), FrameHeader(FrameKind.REFUSAL, 1, 1, 1, 1, 60)],
)
def test_every_single_flipped_bit_is_detected(header: FrameHeader) -> None:
    packed = header.pack()
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LinkCorrupted, match="checksum does not hold" if bit >= 32 else "not a Hoop frame"):
            FrameHeader.unpack(flipped)


@pytest.mark.parametrize("size", [*range(HEADER_BYTES), HEADER_BYTES + 1, 2 * HEADER_BYTES])
def test_a_header_of_another_length_is_rejected(size: int) -> None:
    with pytest.raises(LinkCorrupted, match=f"has {HEADER_BYTES} bytes, got {size}"):
        FrameHeader.unpack((DATA.pack() * 2)[:size])


def test_another_version_is_rejected() -> None:
    for version in set(range(256)) - {VERSION}:
        with pytest.raises(LinkCorrupted, match=f"frame version {version}, this side speaks {VERSION}"):
            FrameHeader.unpack(modified_header(VERSION_AT, bytes([version])))


def test_an_unknown_kind_is_rejected() -> None:
    for kind in range(256):
        data = modified_header(KIND_AT, bytes([kind]))
        if kind in set(FrameKind):
            assert FrameHeader.unpack(data).kind == kind
        else:
            with pytest.raises(LinkCorrupted, match=f"unknown frame kind {kind}$"):
                FrameHeader.unpack(data)


def test_a_payload_length_above_the_limit_is_rejected() -> None:
    assert FrameHeader.unpack(modified_header(LENGTH_AT, struct.pack("<Q", MAX_PAYLOAD))).length == MAX_PAYLOAD
    for length in (MAX_PAYLOAD + 1, 2**63, 2**64 - 1):
        with pytest.raises(LinkCorrupted, match=f"a frame of {length} bytes, over the limit"):
            FrameHeader.unpack(modified_header(LENGTH_AT, struct.pack("<Q", length)))


def test_another_protocol_is_rejected_by_its_first_bytes() -> None:
    with pytest.raises(LinkCorrupted, match="it starts with b'GET ', not b'HOOP'"):
        FrameHeader.unpack(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".ljust(HEADER_BYTES))


fixed = st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES)


@given(st.one_of(st.binary(max_size=2 * HEADER_BYTES), fixed, fixed.map(lambda data: MAGIC + data[4:])))
def test_random_bytes_are_never_a_frame(data: bytes) -> None:
    with pytest.raises(LinkCorrupted):
        FrameHeader.unpack(data)


@given(st.binary(min_size=HEADER_BYTES - 8, max_size=HEADER_BYTES - 8), st.booleans())
def test_random_bytes_with_a_valid_checksum_are_a_valid_frame_or_rejected(data: bytes, valid_version: bool) -> None:
    head = MAGIC + (bytes([VERSION]) + data[1:] if valid_version else data)
    try:
        header = FrameHeader.unpack(with_checksum(head))
    except LinkCorrupted:
        return
    assert header.kind in list(FrameKind)
    assert header.length <= MAX_PAYLOAD
    assert header.pack()[8:-4] == head[8:]
