"""One rank's part of the shared memory of a communicator: what it lays out for the others to take.

    | control | slot 0 | slot 1 | stage 0 | stage 1 | blocks for peer 0 | … | calls 0 | calls 1 | bells |
      told,     small vectors     large vectors       messages, as a          every rank's word   semaphores
      call's text, last word                          stream of blocks        of its call, in rank 0's

Slots and stages are used in turn, so that the next operation can begin while a peer still reads the last one.
The memory has no name: it is made by one rank, and the others get a descriptor of it.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt

from hoop.transport.semaphore import SEMAPHORE_BYTES

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
TEXT_BYTES = 8
"""Numbers that a rank can tell the others with each meeting."""
SLOT_BYTES = 16 * 1024
STAGE_BYTES = 1024 * 1024
BLOCK_BYTES = 64 * 1024
BLOCKS = 4
_TEXT = 1024
_WORD = PAGE // 2
_SLOTS = PAGE
_STAGES = _SLOTS + 2 * SLOT_BYTES
_BLOCKS = _STAGES + 2 * STAGE_BYTES


def levels_for(ranks: int) -> int:
    """Rounds of a meeting: log2 of the number of ranks, rounded up."""
    return (ranks - 1).bit_length()


def bells_for(ranks: int) -> int:
    """Semaphores of a rank: two a level of a meeting, two a link, and its door."""
    return 2 * levels_for(ranks) + 2 * ranks + 1


def _calls_at(ranks: int) -> int:
    return _BLOCKS + ranks * BLOCKS * BLOCK_BYTES


def _calls_bytes(ranks: int) -> int:
    """Of one turn: a word a rank, in cache lines of their own."""
    return -(-8 * ranks // 64) * 64


def _bells_at(ranks: int) -> int:
    return _calls_at(ranks) + 2 * _calls_bytes(ranks)


def size_for(ranks: int) -> int:
    """Bytes of a rank's segment."""
    return _bells_at(ranks) + bells_for(ranks) * SEMAPHORE_BYTES


def new_memory(size: int) -> int:
    """A descriptor of shared memory without a name; pages that nobody touches cost nothing."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hoop", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def map_bytes(descriptor: int, start: int, size: int) -> Bytes:
    """``size`` bytes of a file from ``start`` (a multiple of a page) on, shared with whoever else maps them."""
    return np.frombuffer(mmap.mmap(descriptor, size, offset=start), np.uint8)


class ShmSegment:
    """One rank's shared memory, as this process maps it."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = map_bytes(descriptor, 0, size_for(ranks))
        self._memory = memory
        self._bells = memory[_bells_at(ranks) :]
        control = memory[:PAGE].view(np.uint64)
        self.arrived = memoryview(control[:1])  # type: ignore[arg-type]
        """How many meetings its owner has come to."""
        self.told = [control[8 + turn * TEXT_BYTES : 8 + (turn + 1) * TEXT_BYTES] for turn in (0, 1)]
        self._text = memory[_TEXT:_WORD]
        self._word = memory[_WORD:PAGE]
        first, width = _calls_at(ranks), _calls_bytes(ranks)
        self.calls = [memory[first + turn * width :][: 8 * ranks].data for turn in (0, 1)]
        """For each turn, the words of all ranks' calls; only rank 0's are used."""
        self.slots = [memory[_SLOTS + turn * SLOT_BYTES :][:SLOT_BYTES] for turn in (0, 1)]
        self.stages = [memory[_STAGES + turn * STAGE_BYTES :][:STAGE_BYTES] for turn in (0, 1)]

    @property
    def last_word(self) -> str:
        """Why its owner gave up, if it said so before it went."""
        return _read(self._word)

    @last_word.setter
    def last_word(self, text: str) -> None:
        _write(self._word, text)

    @property
    def call_text(self) -> str:
        """What its owner called, once words were found to differ."""
        return _read(self._text)

    @call_text.setter
    def call_text(self, text: str) -> None:
        _write(self._text, text)

    def blocks(self, peer: int) -> list[memoryview]:
        """Where its owner puts what it sends to ``peer``."""
        start = _BLOCKS + peer * BLOCKS * BLOCK_BYTES
        return [self._memory[start + index * BLOCK_BYTES :][:BLOCK_BYTES].data for index in range(BLOCKS)]

    def bell(self, index: int) -> Bytes:
        """Where its owner's semaphore of this number lies."""
        return self._bells[index * SEMAPHORE_BYTES :][:SEMAPHORE_BYTES]


def _read(memory: Bytes) -> str:
    return bytes(memory).partition(b"\0")[0].decode(errors="replace")


def _write(memory: Bytes, text: str) -> None:
    said = text.encode()[: len(memory) - 1] + b"\0"
    memory[: len(said)] = np.frombuffer(said, np.uint8)
