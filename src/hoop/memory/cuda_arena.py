"""A device's memory on a GPU: one block with addresses and named buffers, which other processes map through CUDA IPC.

``CudaArena`` has the interface of ``Arena`` as far as a GPU permits: capacity, named buffers placed from the top down,
checked addresses, ``used``, ``read``, ``write``. Kernels read and write its bytes; an address is a pointer on the GPU.

    owner    CudaArena.create(capacity)            peer     CudaArena.attach(arena.share())
             one cuMemAlloc                                 the same bytes, at another address

A process that maps the block keeps its bytes: after the owner was killed, they stay readable until the last peer closes
it. Without a ``Gpu`` the arena is on the GPU of the calling thread's CUDA context: a thread that has used a GPU through
PyTorch has one.

``GpuMemory`` is the memory of a device that keeps its named buffers, and the memory of the lab's calls, on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hoop.config import format_size
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, OutOfMemory, OutOfRange
from hoop.memory.allocator import Allocator
from hoop.memory.arena import CHECKS, WRITES, Arena, ArenaBuffer
from hoop.memory.gpu_driver import HANDLE_BYTES, Bytes, CudaGpu, Gpu
from hoop.memory.storage import PAGE, check_uint64

GRANULE = 2 << 20
"""Allocations have a multiple of this number of bytes, so that the driver shares no page of one with another."""


def granules(size: int) -> int:
    """``size``, rounded up to whole granules."""
    return -(-size // GRANULE) * GRANULE


@dataclass(frozen=True)
class SharedBlock:
    """What another process of the host needs to map an arena."""

    handle: str
    """CUDA IPC handle of the block, in hexadecimal."""
    capacity: int

    def __post_init__(self) -> None:
        if len(self.handle) != 2 * HANDLE_BYTES or not 0 < self.capacity <= 1 << 48:
            raise InvalidArgument(f"CUDA block: {len(self.handle)} digits, {self.capacity} bytes is no IPC handle")


class CudaArena:
    """Memory on a GPU. ``create`` allocates it, ``attach`` maps that of another process."""

    def __init__(self, base: int, capacity: int, owner: bool, gpu: Gpu | None = None, described: bool = False) -> None:
        """``described``: the block has a file descriptor (``Gpu.allocate_described``)."""
        self._base, self.capacity, self._owner, self._described = base, capacity, owner, described
        self.gpu = gpu or CudaGpu()
        self._allocator = Allocator(capacity, owner="GPU memory")

    @classmethod
    def create(cls, capacity: int, gpu: Gpu | None = None) -> CudaArena:
        """Allocate a block; ``gpu`` None: on the GPU of the current context."""
        size = granules(capacity)
        gpu = gpu or CudaGpu()
        try:
            base = gpu.allocate(size)
        except OutOfMemory as error:
            raise OutOfMemory(
                f"{error}: {format_size(size)} for a device's arena; use --memory to ask for less"
            ) from None
        return cls(base, capacity, owner=True, gpu=gpu)

    @classmethod
    def attach(cls, block: SharedBlock, gpu: Gpu | None = None) -> CudaArena:
        """Map the block of another process of this host. It has no named buffers here."""
        gpu = gpu or CudaGpu()
        return cls(gpu.map(bytes.fromhex(block.handle)), block.capacity, owner=False, gpu=gpu)

    @classmethod
    def create_described(cls, capacity: int, gpu: Gpu) -> tuple[CudaArena, int]:
        """Allocate a block that lives as long as a process has its file descriptor open, and return that too.

        The caller closes the descriptor. ``capacity`` is rounded up to whole granules.
        """
        size = granules(capacity)
        base, descriptor = gpu.allocate_described(size)
        return cls(base, size, owner=True, gpu=gpu, described=True), descriptor

    @classmethod
    def attach_described(cls, descriptor: int, capacity: int, gpu: Gpu) -> CudaArena:
        """Map a block of ``create_described``, also one whose owner has ended. It has no named buffers here."""
        return cls(gpu.map_described(descriptor, capacity), capacity, owner=False, gpu=gpu, described=True)

    def share(self) -> SharedBlock:
        return SharedBlock(self.gpu.export(self._base).hex(), self.capacity)

    @property
    def used(self) -> int:
        """Bytes of all named buffers."""
        return self._allocator.used

    @property
    def min_address(self) -> int:
        return self._base

    @property
    def max_address(self) -> int:
        """First address after the block."""
        return self._base + self.capacity

    # ---- buffers

    def allocate(self, name: str, size: int, alignment: int = 256) -> ArenaBuffer:
        span = self._allocator.allocate(name, size, alignment)
        return ArenaBuffer(name, self._base + span.offset, span.size)

    def free(self, name: str) -> None:
        self._allocator.free(name)

    def buffer(self, name: str) -> ArenaBuffer:
        """The buffer called ``name``; raises NotFound."""
        span = self._allocator.find(name)
        return ArenaBuffer(name, self._base + span.offset, span.size)

    def buffers(self) -> list[ArenaBuffer]:
        """Every buffer, sorted by address."""
        return [ArenaBuffer(span.name, self._base + span.offset, span.size) for span in self._allocator.spans()]

    def __contains__(self, name: object) -> bool:
        return name in self._allocator

    # ---- addresses and bytes

    def offset(self, address: int) -> int:
        """The position of an address in the block: the same in every process that maps it."""
        self.check(address, 0)
        return address - self._base

    def at(self, offset: int, size: int) -> int:
        """The address of ``size`` bytes at a position in the block; raises unless they are inside."""
        return self.check(self._base + offset, size)

    def check(self, address: int, size: int, align: int = 1) -> int:
        """The address; raises unless ``[address, address + size)`` is inside the block."""
        address, size = index(address), index(size)
        if not self._base:
            raise FailedPrecondition("GPU memory: it is closed")
        if size < 0 or not self._base <= address <= self.max_address - size:
            raise OutOfRange(
                f"GPU memory: address {address:#x} with size {size} is not inside "
                f"[{self._base:#x}, {self.max_address:#x}), the block of {format_size(self.capacity)}"
            )
        if address % align:
            raise InvalidArgument(
                f"GPU memory: address {address:#x} is not aligned for elements of {align} bytes; use a multiple of "
                f"{align}, such as {address - address % align:#x}"
            )
        return address

    def read(self, address: int, size: int) -> bytes:
        """A copy of ``size`` bytes at ``address``."""
        into = np.empty(size, np.uint8)
        self.read_into(address, into)
        return into.tobytes()

    def read_into(self, address: int, into: Bytes) -> None:
        """Copy bytes at ``address`` to host memory."""
        self.check(address, into.nbytes)
        if into.nbytes:
            self.gpu.read(address, into)

    def write(self, address: int, data: bytes | bytearray | memoryview | NDArray[Any]) -> None:
        """Copy host memory to ``address``."""
        source = np.frombuffer(data, np.uint8)
        self.check(address, source.nbytes)
        if source.nbytes:
            self.gpu.write(address, source)

    def copy_from(self, address: int, source: CudaArena, source_address: int, size: int) -> None:
        """Copy ``size`` bytes of another arena, or of this one, to ``address``, on the GPU."""
        self.check(address, size)
        source.check(source_address, size)
        if source is self and abs(address - source_address) < size:
            raise InvalidArgument(
                f"GPU memory: {size} bytes at {source_address:#x} and at {address:#x} overlap; copy them in two steps"
            )
        if size:
            self.gpu.copy(address, source_address, size)

    def clear(self) -> None:
        """Set all bytes to 0."""
        self.gpu.clear(self._base, self.capacity)

    def close(self) -> None:
        """Free the block, or unmap it. Nothing may use its addresses afterwards."""
        if self._base and self._described:
            self.gpu.unmap_described(self._base, self.capacity)
        elif self._base:
            self.gpu.free(self._base) if self._owner else self.gpu.unmap(self._base)
        self._base = 0


_STAGING_KEPT = 256 << 20
"""Maximum bytes of pinned host memory that are kept for later copies."""
_SMALLEST_STAGING = 64 << 10


class _Staging:
    """Pinned host memory for copies, kept for reuse: the driver needs long to pin memory."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def buffer(self, size: int) -> Iterator[Bytes]:
        """Host memory of ``size`` bytes; ordinary memory, if no more can be pinned."""
        if not size:  # the driver pins no empty block
            yield np.empty(0, np.uint8)
            return
        with self._lock:
            fitting = [one for one in self._free if one.nbytes >= size]
            whole = min(fitting, key=lambda one: one.nbytes, default=None)
            if whole is not None:
                self._free = [one for one in self._free if one is not whole]
        pinned = True
        if whole is None:
            try:
                whole = self._gpu.pin(max(_SMALLEST_STAGING, 1 << (size - 1).bit_length()))
            except HoopError:
                whole, pinned = np.empty(size, np.uint8), False
        try:
            yield whole[:size]
        finally:
            if pinned:
                self._give_back(whole)

    def _give_back(self, buffer: Bytes) -> None:
        with self._lock:
            kept = buffer.nbytes + sum(one.nbytes for one in self._free) <= _STAGING_KEPT
            if kept:
                self._free.append(buffer)
        if not kept:
            self._gpu.unpin(buffer)

    def close(self) -> None:
        with self._lock:
            buffers, self._free = self._free, []
        for one in buffers:
            self._gpu.unpin(one)


class GpuMemory:
    """A device's memory on a GPU, beside its arena in host memory.

    It has the methods of ``Arena`` with which servers read, write and allocate. New buffers, and all addresses that
    clients may use, are on the GPU. Buffers of jobs (checkpoints) are in the host arena, and are found by their names.
    """

    def __init__(self, host: Arena, gpu: Gpu, capacity: int) -> None:
        """Allocates ``capacity`` bytes on the GPU, all of them 0."""
        self.host, self.gpu = host, gpu
        free, total = gpu.memory()
        if capacity > free:
            raise OutOfMemory(
                f"--memory: {format_size(capacity)} on {gpu.name}, which has {format_size(free)} free of "
                f"{format_size(total)}; choose a smaller --memory, or end other programs that use it"
            )
        self.arena = CudaArena.create(capacity, gpu)
        self.arena.clear()
        self._staging = _Staging(gpu)
        self.min_address, self.max_address = self.arena.min_address, self.arena.max_address
        self.capacity = capacity

    @property
    def used(self) -> int:
        """Bytes of named buffers on the GPU."""
        return self.arena.used

    # ---- addresses

    def check(self, address: int, size: int, align: int = 1) -> int:
        """The address; raises OutOfRange unless ``[address, address + size)`` is in the memory on the GPU."""
        address, size = index(address), index(size)
        check_uint64("GPU memory", address=address, size=size)
        if address < self.min_address or address + size > self.max_address:
            raise OutOfRange(
                f"GPU memory: address {address:#x} with size {size} ends at {address + size:#x} and is not inside "
                f"[{self.min_address:#x}, {self.max_address:#x})"
            )
        return self.arena.check(address, size, align)

    def resolve(self, name: str, offset: int, size: int) -> int:
        """Address of byte ``offset`` of a buffer; raises OutOfRange unless ``size`` bytes follow inside the buffer."""
        if name not in self.arena:
            return self.host.resolve(name, offset, size)
        buffer = self.arena.buffer(name)
        check_uint64(f"GPU memory: buffer {name!r}", offset=offset, size=size)
        if offset + size > buffer.size:
            raise OutOfRange(
                f"GPU memory: offset {offset} with size {size} ends at {offset + size}, past the end of buffer "
                f"{name!r} of {buffer.size} bytes"
            )
        return buffer.address + offset

    def _on_host(self, address: int) -> bool:
        """Whether an address that ``check`` or ``resolve`` returned is in the host arena."""
        return self.host.min_address <= address <= self.host.max_address

    # ---- bytes

    def read(self, address: int, size: int) -> bytes:
        """A copy of ``size`` bytes at ``address``."""
        return self.host.read(address, size) if self._on_host(address) else self.arena.read(address, size)

    def write(self, address: int, data: bytes | bytearray | memoryview | NDArray[Any]) -> None:
        """Copy bytes to ``address``."""
        self.host.write(address, data) if self._on_host(address) else self.arena.write(address, data)

    @contextlib.contextmanager
    def host_view(self, address: int, size: int, access: str = WRITES) -> Iterator[Bytes]:
        """``size`` bytes as host memory; changes reach the GPU when the block ends without an error.

        ``access``: ``READS``: changes are dropped. ``CHECKS``: the bytes are undefined, only sizes and overlaps count.
        """
        if self._on_host(address):
            with self.host.host_view(address, size) as view:
                yield view
        elif access == CHECKS:
            self.check(address, size)
            yield np.empty(size, np.uint8)
        else:
            self.check(address, size)
            with self._staging.buffer(size) as staged:
                self.arena.read_into(address, staged)
                yield staged
                if access == WRITES:
                    self.arena.write(address, staged)

    # ---- buffers

    def allocate(self, name: str, size: int, alignment: int = 64, *, reuse: bool = False) -> ArenaBuffer:
        """Allocate a buffer on the GPU; with ``reuse``, or one with this name and size that exists."""
        if alignment > PAGE:
            raise InvalidArgument(f"GPU memory: buffer {name!r} with alignment {alignment}; {PAGE} is the most")
        if reuse and name in self.arena:
            found = self.arena.buffer(name)
            if found.size != size or found.address % alignment:
                raise FailedPrecondition(
                    f"GPU memory: buffer {name!r} exists with {found.size} bytes at {found.address:#x}, asked for "
                    f"{size} bytes aligned to {alignment}; free it first or choose another name"
                )
            return found
        return self.arena.allocate(name, size, alignment)

    def free(self, name: str) -> None:
        """Free the buffer called ``name``."""
        self.arena.free(name) if name in self.arena else self.host.free(name)

    def buffer(self, name: str) -> ArenaBuffer:
        """The buffer called ``name``; raises NotFound."""
        return self.arena.buffer(name) if name in self.arena else self.host.buffer(name)

    def buffers(self) -> list[ArenaBuffer]:
        """Every buffer: those of jobs in host memory, then those on the GPU."""
        return [*self.host.buffers(), *self.arena.buffers()]

    def close(self) -> None:
        """Free the memory on the GPU. The host arena stays open."""
        with contextlib.suppress(HoopError):  # after a CUDA error every call fails with it
            self._staging.close()
            self.arena.close()
            self.gpu.close()
