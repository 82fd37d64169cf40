"""The layout of one rank's shared-memory segment in a communicator.

    | control | slot 0 | slot 1 | staging 0 | staging 1 | ring for peer 0 | … | calls 0 | calls 1 | semaphores |
      barrier   small vectors     pieces of large         messages, as a        fingerprints of all
      count,                      vectors                 ring of blocks        ranks' calls; only
      words,                                                                    rank 0's are used
      texts

Slots, staging buffers and calls are double: an operation uses one of each and the next operation the other, so that it
can begin while a peer still reads the last one. The memory has no name: one rank creates it, and its peers receive a
descriptor of it, which ``shm_listener.py`` exchanges.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref

import numpy as np
import numpy.typing as npt

from hoop.transport.semaphore import SEMAPHORE_BYTES

Bytes = npt.NDArray[np.uint8]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value

PAGE = 4096
CONTROL_WORDS = 8
"""How many 64-bit numbers a rank can publish to its peers with each barrier."""
_NATIVE_WORD = 8 + 2 * CONTROL_WORDS
_LEFT_WORD = _NATIVE_WORD + 1
_SLEEPERS_AT = 256
SLOT_BYTES = 16 * 1024
STAGING_BYTES = 1024 * 1024
BLOCK_BYTES = 64 * 1024
BLOCKS = 4
_CALL_TEXT_AT = 1024
_ABORT_REASON_AT = PAGE // 2
_SLOTS_AT = PAGE
_STAGING_AT = _SLOTS_AT + 2 * SLOT_BYTES
_RINGS_AT = _STAGING_AT + 2 * STAGING_BYTES


def barrier_rounds(ranks: int) -> int:
    """Rounds of a barrier: log2 of the number of ranks, rounded up."""
    return (ranks - 1).bit_length()


def semaphore_count(ranks: int) -> int:
    """Semaphores of a rank: two for each round of a barrier, two for each link, and its activity semaphore."""
    return 2 * barrier_rounds(ranks) + 2 * ranks + 1


def _calls_at(ranks: int) -> int:
    return _RINGS_AT + ranks * BLOCKS * BLOCK_BYTES


def _calls_bytes(ranks: int) -> int:
    """Size of one fingerprint row: 8 bytes a rank, rounded up to cache lines."""
    return -(-8 * ranks // 64) * 64


def _semaphores_at(ranks: int) -> int:
    return _calls_at(ranks) + 2 * _calls_bytes(ranks)


def segment_bytes(ranks: int) -> int:
    """Size of a rank's segment."""
    return _semaphores_at(ranks) + semaphore_count(ranks) * SEMAPHORE_BYTES


def create_shared_memory(size: int) -> int:
    """A descriptor of ``size`` bytes of unnamed shared memory; untouched pages cost nothing."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hoop", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def map_bytes(descriptor: int, start: int, size: int) -> Bytes:
    """Maps ``size`` bytes of a file, starting at ``start`` (a multiple of a page), as shared memory.

    The mapping ends with the last array on it. It holds no descriptor: ``mmap.mmap`` would keep a duplicate of it, and
    the arrays of an ended job may stay until the garbage collector finds them.
    """
    if size < 1 or os.fstat(descriptor).st_size < start + size:
        raise ValueError(f"{size} bytes at {start} are not in a file of {os.fstat(descriptor).st_size}")
    address = _LIBC.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, start)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"mapping {size} bytes: {os.strerror(error)}")
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory), np.uint8)


class ShmSegment:
    """One rank's segment, as mapped by this process."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = map_bytes(descriptor, 0, segment_bytes(ranks))
        self._memory = memory
        self._semaphores = memory[_semaphores_at(ranks) :]
        control = memory[:PAGE].view(np.uint64)
        self.barrier_count = memoryview(control[:1])  # type: ignore[arg-type]
        """How many barriers its owner has entered."""
        self.control_words = [control[8 + turn * CONTROL_WORDS : 8 + (turn + 1) * CONTROL_WORDS] for turn in (0, 1)]
        self.native_identity = memoryview(control[_NATIVE_WORD : _NATIVE_WORD + 1])  # type: ignore[arg-type]
        """Which native core its owner has (``NativeLibrary.identity``); 0: none."""
        self.peer_left = memoryview(control[_LEFT_WORD : _LEFT_WORD + 1])  # type: ignore[arg-type]
        """1 + the rank of a peer that has closed its endpoint, which the peer writes; 0: none.

        From then on that peer may change what the owner of this segment reads in its memory.
        """
        self.sleepers = memory[_SLEEPERS_AT : _SLEEPERS_AT + 8]
        """Where ranks sleep in barriers of the native core; only rank 0's segment is used."""
        self._call_text = memory[_CALL_TEXT_AT:_ABORT_REASON_AT]
        self._abort_reason = memory[_ABORT_REASON_AT:PAGE]
        first, width = _calls_at(ranks), _calls_bytes(ranks)
        self.call_fingerprints = [memory[first + turn * width :][: 8 * ranks].data for turn in (0, 1)]
        """For each turn, the call fingerprints of all ranks; only rank 0's segment is used."""
        self.slots = [memory[_SLOTS_AT + turn * SLOT_BYTES :][:SLOT_BYTES] for turn in (0, 1)]
        self.staging_buffers = [memory[_STAGING_AT + turn * STAGING_BYTES :][:STAGING_BYTES] for turn in (0, 1)]

    @property
    def abort_reason(self) -> str:
        """Why its owner aborted; empty if it did not."""
        return _read(self._abort_reason)

    @abort_reason.setter
    def abort_reason(self, text: str) -> None:
        _write(self._abort_reason, text)

    @property
    def call_text(self) -> str:
        """The text of its owner's call, written after fingerprints were found to differ."""
        return _read(self._call_text)

    @call_text.setter
    def call_text(self, text: str) -> None:
        _write(self._call_text, text)

    def ring_blocks(self, peer: int) -> list[memoryview]:
        """The blocks through which its owner sends messages to ``peer``."""
        start = _RINGS_AT + peer * BLOCKS * BLOCK_BYTES
        return [self._memory[start + index * BLOCK_BYTES :][:BLOCK_BYTES].data for index in range(BLOCKS)]

    @property
    def memory(self) -> Bytes:
        """All of it; the mapping lives as long as this array."""
        return self._memory

    def semaphore_place(self, index: int) -> Bytes:
        """The bytes of its owner's semaphore with this index."""
        return self._semaphores[index * SEMAPHORE_BYTES :][:SEMAPHORE_BYTES]


def _read(memory: Bytes) -> str:
    return bytes(memory).partition(b"\0")[0].decode(errors="replace")


def _write(memory: Bytes, text: str) -> None:
    data = text.encode()[: len(memory) - 1] + b"\0"
    memory[: len(data)] = np.frombuffer(data, np.uint8)
