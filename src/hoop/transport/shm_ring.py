"""A stream of bytes through a few blocks of shared memory: one way, from one rank to another.

    sender                                  receiver
    takes a post of ``free``                takes a post of ``filled``
    copies bytes into the next block        copies them out
    rings ``filled``, then the door         rings ``free``, then the door

A rank has one door, which every peer rings after a link's own bell: whoever waits for several links at once waits
there, and then looks at each. A post of the door is taken with each post of a link, so that they do not pile up;
it carries nothing, and taking one too many is safe as long as the links are looked at before the next sleep.

Each block starts with its number and its length. The number tells a real post from one that was only made to wake
the receiver up.
"""

from __future__ import annotations

import struct
from collections import deque

from hoop.transport.base import PendingBuffers
from hoop.transport.semaphore import Semaphore
from hoop.transport.shm_segment import BLOCK_BYTES, BLOCKS

_HEAD = struct.Struct("<QQ")
_ROOM = BLOCK_BYTES - _HEAD.size


class RingWriter:
    """The sender's end."""

    def __init__(self, blocks: list[memoryview], door: Semaphore, free: Semaphore, filled: Semaphore) -> None:
        self._blocks = blocks
        self.free = free
        self.filled = filled
        self._door = door
        self.their_door: Semaphore | None = None
        """Known when the receiver has come."""
        self._number = 0
        self.queue: deque[PendingBuffers] = deque()

    @property
    def used(self) -> bool:
        """Whether anything was ever sent."""
        return self._number > 0 or bool(self.queue)

    def push(self) -> bool:
        """Puts what fits into blocks that are free now; whether anything did."""
        assert self.their_door is not None, "nothing is sent before the receiver has come"
        before = self._number
        while self.queue and (self._number < BLOCKS or self._take_free()):
            self._fill(self._blocks[self._number % BLOCKS])
            self._number += 1
            self.filled.ring()
            self.their_door.ring()
        return self._number > before

    def _take_free(self) -> bool:
        if not self.free.take(False):
            return False
        self._door.take(False)
        return True

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


class RingReader:
    """The receiver's end."""

    def __init__(
        self,
        blocks: list[memoryview],
        door: Semaphore,
        free: Semaphore,
        filled: Semaphore,
        their_door: Semaphore,
    ) -> None:
        self._blocks = blocks
        self.free = free
        self.filled = filled
        self._door = door
        self._their_door = their_door
        self._number = 0
        self._rest = memoryview(b"")

    def opened(self) -> bool:
        """Looks at the block behind a post of ``filled`` just taken; false if there was none behind it."""
        self._door.take(False)
        block = self._blocks[self._number % BLOCKS]
        number, length = _HEAD.unpack_from(block)
        if number != self._number or not 0 < length <= _ROOM:
            return False
        self._rest = block[_HEAD.size : _HEAD.size + length]
        return True

    def look(self) -> bool:
        """Whether there is something to read now."""
        return bool(self._rest.nbytes) or (self.filled.take(False) and self.opened())

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
            self._their_door.ring()
        return into[taken:]
