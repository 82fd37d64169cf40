"""How large an arena is and where its addresses are in its file.

    0            4096           + table_size   + table_size  64 KiB aligned
    | superblock | table slot 0 | table slot 1 | (unused) | data: capacity bytes … |
                                                          ^ min_address            ^ max_address

The superblock says so: the sizes, once and for all, with a checksum.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from operator import index

from hoop.errors import FailedPrecondition, InvalidArgument, OutOfRange

PAGE = 4096
MIN_ADDRESS = 0x1000
TABLE_SIZE = 256 * 1024  # room for some thousands of buffers

_DATA_ALIGNMENT = 65536  # the largest page among our platforms
_MAGIC = b"HOOPAREN"
_VERSION = 1
_IDENTITY = struct.Struct("<8sI")  # magic, version: what every version has in common
_SIZES = struct.Struct("<QQQ")  # capacity, min address, table size
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Geometry:
    """The sizes that an arena is created with, and every place that follows from them."""

    capacity: int
    min_address: int = MIN_ADDRESS
    table_size: int = TABLE_SIZE

    def check(self, who: str) -> Geometry:
        """Itself, if these sizes are possible."""
        if self.capacity < 1:
            raise InvalidArgument(f"{who}: capacity is {self.capacity} bytes, it must be at least 1")
        if self.min_address < 1 or self.min_address % PAGE:
            raise InvalidArgument(
                f"{who}: min_address is {self.min_address:#x}, it must be a positive multiple of {PAGE:#x}"
            )
        if self.max_address >= 2**63:
            raise InvalidArgument(
                f"{who}: min_address {self.min_address:#x} + capacity {self.capacity} "
                f"= {self.max_address:#x} does not fit in 63 bits"
            )
        if self.table_size < PAGE or self.table_size % PAGE:
            raise InvalidArgument(f"{who}: table_size is {self.table_size}, it must be a multiple of {PAGE}")
        return self

    @cached_property
    def max_address(self) -> int:
        """The first address after the arena."""
        return self.min_address + self.capacity

    @cached_property
    def data_offset(self) -> int:
        """Where the byte of ``min_address`` is in the file."""
        return -(-(PAGE + 2 * self.table_size) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.capacity

    def locate(self, address: int, size: int, align: int, who: str) -> int:
        """The place in the file of ``[address, address + size)``, if all of that is in the arena."""
        # Python's integers, whatever the caller's are: a sum of NumPy's could wrap around.
        address, size = index(address), index(size)
        if (address | size) >> 64:  # negative or too large; the call itself would cost more than the rest
            check_uint64(who, address=address, size=size)
        if address < self.min_address or address + size > self.max_address:
            raise OutOfRange(
                f"{who}: address {address:#x} with size {size} ends at {address + size:#x} and is not "
                f"inside [{self.min_address:#x}, {self.max_address:#x})"
            )
        if address % align:
            raise InvalidArgument(
                f"{who}: address {address:#x} is not aligned for elements of {align} bytes; "
                f"use a multiple of {align}, such as {address - address % align:#x}"
            )
        return address - self.min_address + self.data_offset

    def pack(self) -> bytes:
        """The superblock."""
        body = _IDENTITY.pack(_MAGIC, _VERSION) + _SIZES.pack(
            self.capacity, self.min_address, self.table_size
        )
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def unpack(cls, page: bytes, file_size: int, who: str) -> Geometry:
        """What a file's first page says, if it can be believed."""
        body = page[: _IDENTITY.size + _SIZES.size]
        crc = page[len(body) : len(body) + _CRC.size]
        if not any(page):
            raise damaged(who, "the superblock is empty, its creation never finished")
        if len(page) < PAGE:
            raise damaged(who, f"the superblock is cut off after {len(page)} of {PAGE} bytes")
        magic, version = _IDENTITY.unpack_from(body)
        if magic != _MAGIC:
            raise damaged(who, f"the superblock begins with {magic!r} instead of {_MAGIC!r}")
        if version != _VERSION:
            raise damaged(who, f"the superblock has format version {version}, this Hoop reads {_VERSION}")
        if _CRC.pack(zlib.crc32(body)) != crc:
            raise damaged(who, "the superblock does not match its checksum")
        try:
            found = cls(*_SIZES.unpack_from(body, _IDENTITY.size)).check(who)
        except InvalidArgument as error:
            raise damaged(who, f"the superblock is impossible ({error})") from error
        if file_size < found.file_size:
            raise damaged(who, f"the file has {file_size} bytes where the superblock says {found.file_size}")
        return found


def check_uint64(who: str, **values: int) -> None:
    """Refuse what no request's 64 bits can hold: that is a mistake in any arena."""
    for what, value in values.items():
        if not 0 <= value < 2**64:
            raise InvalidArgument(f"{who}: {what} {value:#x} is not a number from 0 to 2**64 - 1")


def damaged(who: str, part: str) -> FailedPrecondition:
    """The error for a file that cannot be believed."""
    return FailedPrecondition(
        f"{who}: arena header is damaged: {part}; nothing in it is trusted: "
        "restore the file from a copy, or delete it and create a new one"
    )
