"""The sender's copies of checked frames, stored until the receiver acknowledges them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hoop.transport.base import PendingBuffers

PIECE_BYTES = 256 * 1024
"""Bytes moved in one direction before the other direction gets a turn. A piece that one core wrote is then read by the
other core while it is in the cache, and both directions of a link flow at the same time. Measured in benchmarks/tcp."""
CHECKED_BYTES = 1 << 20
"""The largest payload of a frame with a checksum. Smaller frames cost more headers, larger ones leave the cache."""
SPARE_BYTES = 32 << 20
"""Limit of the memory that is reused for copies; fresh memory costs more than the copy."""


class CheckedFrame(PendingBuffers):
    """A frame with its own copy of the payload, which may be sent more than once."""

    def __init__(self, sequence: int, header: bytes, payload: bytearray) -> None:
        self.sequence, self.header, self.payload = sequence, header, payload
        super().__init__([])
        self.rewind()

    def rewind(self) -> None:
        """Makes all of the frame unsent again."""
        self.parts = [memoryview(self.header), memoryview(self.payload)][: 2 if self.payload else 1]


class CheckedMessage(PendingBuffers):
    """A message that is sent as several frames; each frame is copied and checksummed when the link is ready for it."""

    def __init__(
        self, payload: memoryview, make_frame: Callable[[memoryview, bool], CheckedFrame], busy: threading.RLock
    ) -> None:
        """``make_frame``: called with a payload and whether more frames follow. ``busy``: the endpoint's lock; the
        thread that sends holds it, which need not be the rank's own thread."""
        super().__init__([])
        self._busy = busy
        self._unframed: memoryview | None = payload
        self._make_frame = make_frame

    @property
    def done(self) -> bool:
        return not self.parts and self._unframed is None

    def detach(self) -> None:
        with self._busy:
            if self._unframed is not None:
                self._unframed = memoryview(bytes(self._unframed))

    def prepare(self) -> None:
        if not self.parts and self._unframed is not None:
            piece, rest = self._unframed[:CHECKED_BYTES], self._unframed[CHECKED_BYTES:]
            self._unframed = rest if rest.nbytes else None
            self.parts = self._make_frame(piece, self._unframed is not None).parts

    def drop_current_frame(self) -> bool:
        """Drops the frame in progress, which the retransmit buffer sends again; whether unframed bytes remain."""
        self.parts = []
        return not self.done


class RetransmitBuffer:
    """The frames of one link that its receiver has not acknowledged."""

    def __init__(self) -> None:
        self._frames: deque[CheckedFrame] = deque()
        self._spare: dict[int, list[bytearray]] = {}
        self._spare_bytes = 0
        self.retransmits = 0
        """How often the oldest frame has been sent again."""

    def __len__(self) -> int:
        return len(self._frames)

    def copy(self, payload: memoryview) -> bytearray:
        """A copy of the payload, in reused memory if there is a spare buffer of its size."""
        spare = self._spare.get(payload.nbytes)
        if not spare:
            return bytearray(payload)
        self._spare_bytes -= payload.nbytes
        reused = spare.pop()
        memoryview(reused)[:] = payload  # assigning to a slice of the bytearray itself would copy twice
        return reused

    def add(self, frame: CheckedFrame) -> CheckedFrame:
        self._frames.append(frame)
        return frame

    def acknowledge(self, sequence: int) -> None:
        """Drops every frame before ``sequence``: the receiver has them, with correct checksums."""
        while self._frames and self._frames[0].sequence < sequence:
            payload = self._frames.popleft().payload
            self.retransmits = 0
            if self._spare_bytes + len(payload) > SPARE_BYTES:  # the spare sizes may be out of use
                self._spare, self._spare_bytes = {}, 0
            if 0 < len(payload) <= SPARE_BYTES:
                self._spare.setdefault(len(payload), []).append(payload)
                self._spare_bytes += len(payload)

    def rewind_all(self) -> list[CheckedFrame]:
        """All frames, rewound to be sent once more."""
        for frame in self._frames:
            frame.rewind()
        return list(self._frames)
