"""A device's memory on a GPU: one block with addresses and named buffers, which other processes map through CUDA IPC.

``CudaArena`` has the interface of ``Arena`` as far as a card permits: capacity, named buffers placed from the top down,
checked addresses, ``used``. Its bytes are read and written by kernels; an address is a pointer on the card.

    owner    CudaArena.create(capacity)            peer     CudaArena.attach(arena.share())
             one cuMemAlloc                                 the same bytes, at another address

A process that maps the block keeps its bytes: after the owner was killed, they stay readable until the last peer closes
it. This module calls the driver (``libcuda``) through ctypes. The calling thread must have a current CUDA context: a
thread that has used a GPU through PyTorch has one.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument, OutOfMemory, OutOfRange
from hoop.memory.allocator import Allocator

HANDLE_BYTES = 64
_GRANULE = 2 << 20
"""The block is a multiple of this, so that the driver shares no page of it with another allocation."""
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1


class IpcHandle(ctypes.Structure):
    """The driver's handle of an allocation."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FailedPrecondition(
            f"accelerator: the CUDA driver cannot be loaded ({error}); look at nvidia-smi"
        ) from None


def call_driver(name: str, *arguments: object) -> None:
    """Call a function of the driver; raises with its name and the driver's text."""
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    message = f"CUDA: {name} failed with error {code}: {(text.value or b'unknown').decode()}"
    raise OutOfMemory(message) if code == _OUT_OF_MEMORY else FailedPrecondition(message)


@dataclass(frozen=True)
class CudaBuffer:
    """A named range of a ``CudaArena``."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class SharedBlock:
    """What another process of the host needs to map an arena."""

    handle: str
    """The IPC handle, in hexadecimal."""
    capacity: int

    def __post_init__(self) -> None:
        if len(self.handle) != 2 * HANDLE_BYTES or not 0 < self.capacity <= 1 << 48:
            raise InvalidArgument(f"CUDA block: {len(self.handle)} digits, {self.capacity} bytes is no IPC handle")


class CudaArena:
    """Memory on a GPU. ``create`` allocates it, ``attach`` maps that of another process."""

    def __init__(self, base: int, capacity: int, owner: bool) -> None:
        self._base, self.capacity, self._owner = base, capacity, owner
        self._allocator = Allocator(capacity, owner="GPU memory")

    @classmethod
    def create(cls, capacity: int) -> CudaArena:
        """Allocate a block on the GPU of the current context, rounded up to 2 MiB."""
        size = -(-capacity // _GRANULE) * _GRANULE
        pointer = ctypes.c_uint64()
        try:
            call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        except OutOfMemory as error:
            raise OutOfMemory(
                f"{error}: {format_size(size)} for a device's arena; use --memory to ask for less"
            ) from None
        return cls(pointer.value, size, owner=True)

    @classmethod
    def attach(cls, block: SharedBlock) -> CudaArena:
        """Map the block of another process of this host. It has no named buffers here."""
        handle, pointer = IpcHandle.from_buffer_copy(bytes.fromhex(block.handle)), ctypes.c_uint64()
        call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return cls(pointer.value, block.capacity, owner=False)

    def share(self) -> SharedBlock:
        handle = IpcHandle()
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._base))
        return SharedBlock(bytes(handle).hex(), self.capacity)

    @property
    def used(self) -> int:
        """Bytes of all named buffers."""
        return self._allocator.used

    def allocate(self, name: str, size: int, alignment: int = 256) -> CudaBuffer:
        span = self._allocator.allocate(name, size, alignment)
        return CudaBuffer(name, self._base + span.offset, span.size)

    def free(self, name: str) -> None:
        self._allocator.free(name)

    def __contains__(self, name: object) -> bool:
        return name in self._allocator

    def offset(self, address: int) -> int:
        """The position of an address in the block: the same in every process that maps it."""
        self.check(address, 0)
        return address - self._base

    def at(self, offset: int, size: int) -> int:
        """The address of ``size`` bytes at a position in the block; raises unless they are inside."""
        return self.check(self._base + offset, size)

    def check(self, address: int, size: int) -> int:
        """The address; raises unless ``[address, address + size)`` is inside the block."""
        if size < 0 or not self._base <= address <= self._base + self.capacity - size:
            raise OutOfRange(
                f"GPU memory: {size} bytes at {address:#x} are outside the block of {format_size(self.capacity)} "
                f"at {self._base:#x}"
            )
        return address

    def close(self) -> None:
        """Free the block, or unmap it. Nothing may use its addresses afterwards."""
        if self._base:
            call_driver("cuMemFree_v2" if self._owner else "cuIpcCloseMemHandle", ctypes.c_uint64(self._base))
            self._base = 0
