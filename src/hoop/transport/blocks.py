"""A stream of bytes through a few blocks of shared memory: one way, from one rank to another.

    sender                                  receiver
    takes a post of ``free``                takes a post of ``filled``
    copies bytes into the next block        copies them out
    rings ``filled``                        rings ``free``

Each block starts with its number and its length. The number tells a real post from one that was only made to wake
the receiver up.
"""

from __future__ import annotations

import struct
from collections import deque

from hoop.transport.bell import Bell
from hoop.transport.mailbox import BLOCK_BYTES, BLOCKS
from hoop.transport.parcel import Parcel

_HEAD = struct.Struct("<QQ")
_ROOM = BLOCK_BYTES - _HEAD.size


class Outgoing:
    """The sender's end."""

    def __init__(self, blocks: list[memoryview], free: Bell, filled: Bell) -> None:
        self._blocks = blocks
        self.free = free
        self.filled = filled
        self._number = 0
        self.queue: deque[Parcel] = deque()

    @property
    def used(self) -> bool:
        """Whether anything was ever sent."""
        return self._number > 0 or bool(self.queue)

    def push(self) -> None:
        """Puts what fits into blocks that are free now."""
        while self.queue and (self._number < BLOCKS or self.free.take(False)):
            self._fill(self._blocks[self._number % BLOCKS])
            self._number += 1
            self.filled.ring()

    def _fill(self, block: memoryview) -> None:
        at = _HEAD.size
        while self.queue and at < BLOCK_BYTES:
            parcel = self.queue[0]
            taken = min(parcel.parts[0].nbytes, BLOCK_BYTES - at)
            block[at : at + taken] = parcel.parts[0][:taken]
            at += taken
            parcel.advance(taken)
            if parcel.done:
                self.queue.popleft()
        _HEAD.pack_into(block, 0, self._number, at - _HEAD.size)


class Incoming:
    """The receiver's end."""

    def __init__(self, blocks: list[memoryview], free: Bell, filled: Bell) -> None:
        self._blocks = blocks
        self.free = free
        self.filled = filled
        self._number = 0
        self._rest = memoryview(b"")

    def opened(self) -> bool:
        """Looks at the block behind a post of ``filled``; false if there was none behind it."""
        block = self._blocks[self._number % BLOCKS]
        number, length = _HEAD.unpack_from(block)
        if number != self._number or not 0 < length <= _ROOM:
            return False
        self._rest = block[_HEAD.size : _HEAD.size + length]
        return True

    @property
    def waiting(self) -> bool:
        """Whether the next byte needs another block."""
        return not self._rest.nbytes

    def read(self, into: memoryview) -> memoryview:
        """Copies what is there; the part of ``into`` that is still to be filled."""
        taken = min(into.nbytes, self._rest.nbytes)
        into[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        if not self._rest.nbytes:
            self._number += 1
            self.free.ring()
        return into[taken:]
