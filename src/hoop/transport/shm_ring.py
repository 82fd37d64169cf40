"""A one-way byte stream from one rank to another, through a ring of blocks in shared memory.

    sender                                       receiver
    acquires ``free``                            acquires ``filled``
    copies bytes into the next block             copies them out
    posts ``filled``, then the peer's activity   posts ``free``, then the peer's activity

A rank has one activity semaphore. Every peer posts it after it posts a link's own semaphore. A rank that waits for
several links at once waits for its activity semaphore and then checks each link. It acquires one activity post with
each post of a link, so that activity posts do not pile up. An activity post carries no data; to acquire one too many is
safe as long as the rank checks the links before it sleeps again.

Each block starts with its number and its length. The number distinguishes a real post from one that was only made to
wake the receiver.
"""

from __future__ import annotations

import struct
from collections import deque

from hoop.transport.base import PendingBuffers
from hoop.transport.semaphore import Semaphore
from hoop.transport.shm_segment import BLOCK_BYTES, BLOCKS

_HEAD = struct.Struct("<QQ")
_MAX_PAYLOAD = BLOCK_BYTES - _HEAD.size


class RingWriter:
    """The sender's end."""

    def __init__(self, blocks: list[memoryview], activity: Semaphore, free: Semaphore, filled: Semaphore) -> None:
        self._blocks = blocks
        self.free = free
        self.filled = filled
        self._activity = activity
        self.peer_activity: Semaphore | None = None
        """The receiver's activity semaphore; None until this rank has opened the receiver's memory."""
        self.stopped = False
        """Set by any thread before it posts ``free`` only to wake the sender: the receiver may still read the block."""
        self._number = 0
        self.queue: deque[PendingBuffers] = deque()

    @property
    def used(self) -> bool:
        """Whether any message was sent or queued."""
        return self._number > 0 or bool(self.queue)

    @property
    def blocks_written(self) -> int:
        return self._number

    def push(self) -> bool:
        """Copies queued bytes into the blocks that are free now; whether there were any."""
        assert self.peer_activity is not None, "nothing is sent before the receiver's memory is open"
        before = self._number
        while self.queue and (self._number < BLOCKS or self._acquire_free()):
            self._fill(self._blocks[self._number % BLOCKS])
            self._number += 1
            self.filled.post()
            self.peer_activity.post()
        return self._number > before

    def _acquire_free(self) -> bool:
        if not self.free.acquire(False) or self.stopped:
            return False
        self._activity.acquire(False)
        return True

    def _fill(self, block: memoryview) -> None:
        at = _HEAD.size
        while self.queue and at < BLOCK_BYTES:
            message = self.queue[0]
            taken = min(message.parts[0].nbytes, BLOCK_BYTES - at)
            block[at : at + taken] = message.parts[0][:taken]
            at += taken
            message.advance(taken)
            if message.done:
                self.queue.popleft()
        _HEAD.pack_into(block, 0, self._number, at - _HEAD.size)


class RingReader:
    """The receiver's end."""

    def __init__(
        self,
        blocks: list[memoryview],
        activity: Semaphore,
        free: Semaphore,
        filled: Semaphore,
        peer_activity: Semaphore,
    ) -> None:
        self._blocks = blocks
        self.free = free
        self.filled = filled
        self._activity = activity
        self._peer_activity = peer_activity
        self._number = 0
        self._unread = memoryview(b"")

    @property
    def blocks_read(self) -> int:
        """How many blocks of the sender have been read whole."""
        return self._number

    def open_block(self) -> bool:
        """Opens the block of a post of ``filled`` just acquired; false if the post was only a wake-up."""
        self._activity.acquire(False)
        block = self._blocks[self._number % BLOCKS]
        number, length = _HEAD.unpack_from(block)
        if number != self._number or not 0 < length <= _MAX_PAYLOAD:
            return False
        self._unread = block[_HEAD.size : _HEAD.size + length]
        return True

    def has_data(self) -> bool:
        """Whether there are bytes to read now."""
        return bool(self._unread.nbytes) or (self.filled.acquire(False) and self.open_block())

    @property
    def needs_block(self) -> bool:
        """Whether the next byte is in a block that is not open yet."""
        return not self._unread.nbytes

    def read(self, into: memoryview) -> memoryview:
        """Copies the bytes of the open block; returns the part of ``into`` that is still to be filled."""
        taken = min(into.nbytes, self._unread.nbytes)
        into[:taken] = self._unread[:taken]
        self._unread = self._unread[taken:]
        if not self._unread.nbytes:
            self._number += 1
            self.free.post()
            self._peer_activity.post()
        return into[taken:]
