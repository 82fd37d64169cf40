"""Messages that have left and may have to be sent again: copies, kept until the receiver confirms them."""

from __future__ import annotations

from collections import deque

from hoop.transport.parcel import Parcel

SPARE_BYTES = 32 << 20
"""Copies' memory that is used again: fresh memory costs more than the copy."""


class Copy(Parcel):
    """A message of its own memory, which may have to leave more than once."""

    def __init__(self, sequence: int, header: bytes, payload: bytearray) -> None:
        self.sequence, self.header, self.payload = sequence, header, payload
        super().__init__([])
        self.rewind()

    def rewind(self) -> None:
        """All of it is still to be handed over."""
        self.parts = [memoryview(self.header), memoryview(self.payload)][: 2 if self.payload else 1]

    def detach(self) -> None:
        """The caller may overwrite what is its own at any time."""


class Kept:
    """What one link has sent and the other end has not confirmed."""

    def __init__(self) -> None:
        self._messages: deque[Copy] = deque()
        self._spare: dict[int, list[bytearray]] = {}
        self._spare_bytes = 0
        self.bytes = 0
        self.tries = 0
        """How often the first of them has been sent again."""

    def __len__(self) -> int:
        return len(self._messages)

    def copy(self, payload: memoryview) -> bytearray:
        """The payload as it is now."""
        spare = self._spare.get(payload.nbytes)
        if not spare:
            return bytearray(payload)
        self._spare_bytes -= payload.nbytes
        found = spare.pop()
        found[:] = payload
        return found

    def keep(self, message: Copy) -> Copy:
        self._messages.append(message)
        self.bytes += len(message.payload)
        return message

    def confirm(self, sequence: int) -> None:
        """Everything before this one has arrived as it was sent."""
        while self._messages and self._messages[0].sequence < sequence:
            payload = self._messages.popleft().payload
            self.bytes -= len(payload)
            self.tries = 0
            if self._spare_bytes + len(payload) > SPARE_BYTES:  # sizes of the past, perhaps
                self._spare, self._spare_bytes = {}, 0
            if 0 < len(payload) <= SPARE_BYTES:
                self._spare.setdefault(len(payload), []).append(payload)
                self._spare_bytes += len(payload)

    def rewound(self) -> list[Copy]:
        """All of them, to be sent once more."""
        for message in self._messages:
            message.rewind()
        return list(self._messages)
