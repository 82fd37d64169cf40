"""The rest of a message that a link has not taken yet."""

from __future__ import annotations

from hoop.transport.base import Pending


class Parcel(Pending):
    """Some pieces of memory, handed over from the front."""

    def __init__(self, parts: list[memoryview]) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        return not self.parts

    def detach(self) -> None:
        self.parts = [memoryview(bytes(part)) for part in self.parts]

    def prepare(self) -> None:
        """Its turn has come to be handed over."""

    def advance(self, taken: int) -> None:
        """The link has taken so many bytes more."""
        while self.parts and taken >= self.parts[0].nbytes:
            taken -= self.parts.pop(0).nbytes
        if taken:
            self.parts[0] = self.parts[0][taken:]
