"""What has left and may have to be sent again: copies of pieces, kept until the receiver confirms them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hoop.transport.base import PendingBuffers

PIECE_BYTES = 256 * 1024
"""How much is moved one way before the other way has its turn: what one core wrote is then read by the other while
it is in the cache, and both directions of a link flow at the same time. Measured in benchmarks/tcp."""
CHECKED_BYTES = 1 << 20
"""The largest piece with a checksum. Smaller ones cost more headers, larger ones leave the cache."""
SPARE_BYTES = 32 << 20
"""Copies' memory that is used again: fresh memory costs more than the copy."""


class CheckedFrame(PendingBuffers):
    """A frame in memory of its own, which may have to leave more than once."""

    def __init__(self, sequence: int, header: bytes, payload: bytearray) -> None:
        self.sequence, self.header, self.payload = sequence, header, payload
        super().__init__([])
        self.rewind()

    def rewind(self) -> None:
        """All of it is still to be handed over."""
        self.parts = [memoryview(self.header), memoryview(self.payload)][: 2 if self.payload else 1]


class CheckedMessage(PendingBuffers):
    """A message that leaves in pieces, each of which is copied and checked when its turn comes."""

    def __init__(
        self, payload: memoryview, cut: Callable[[memoryview, bool], CheckedFrame], busy: threading.RLock
    ) -> None:
        """``busy`` is held by whoever hands it over, which need not be the rank's own thread."""
        super().__init__([])
        self._busy = busy
        self._rest: memoryview | None = payload
        self._cut = cut

    @property
    def done(self) -> bool:
        return not self.parts and self._rest is None

    def detach(self) -> None:
        with self._busy:
            if self._rest is not None:
                self._rest = memoryview(bytes(self._rest))

    def prepare(self) -> None:
        if not self.parts and self._rest is not None:
            piece, rest = self._rest[:CHECKED_BYTES], self._rest[CHECKED_BYTES:]
            self._rest = rest if rest.nbytes else None
            self.parts = self._cut(piece, self._rest is not None).parts

    def leave_to(self) -> bool:
        """What was cut is somebody else's now; whether something is left."""
        self.parts = []
        return not self.done


class RetransmitBuffer:
    """What one link has sent and the other end has not confirmed."""

    def __init__(self) -> None:
        self._pieces: deque[CheckedFrame] = deque()
        self._spare: dict[int, list[bytearray]] = {}
        self._spare_bytes = 0
        self.bytes = 0
        self.tries = 0
        """How often the first of them has been sent again."""

    def __len__(self) -> int:
        return len(self._pieces)

    def copy(self, payload: memoryview) -> bytearray:
        """The payload as it is now."""
        spare = self._spare.get(payload.nbytes)
        if not spare:
            return bytearray(payload)
        self._spare_bytes -= payload.nbytes
        found = spare.pop()
        memoryview(found)[:] = payload  # a slice of a bytearray would be given a copy of a copy
        return found

    def keep(self, piece: CheckedFrame) -> CheckedFrame:
        self._pieces.append(piece)
        self.bytes += len(piece.payload)
        return piece

    def confirm(self, sequence: int) -> None:
        """Everything before this one has arrived as it was sent."""
        while self._pieces and self._pieces[0].sequence < sequence:
            payload = self._pieces.popleft().payload
            self.bytes -= len(payload)
            self.tries = 0
            if self._spare_bytes + len(payload) > SPARE_BYTES:  # sizes of the past, perhaps
                self._spare, self._spare_bytes = {}, 0
            if 0 < len(payload) <= SPARE_BYTES:
                self._spare.setdefault(len(payload), []).append(payload)
                self._spare_bytes += len(payload)

    def rewound(self) -> list[CheckedFrame]:
        """All of them, to be sent once more."""
        for piece in self._pieces:
            piece.rewind()
        return list(self._pieces)
