"""The GPU operations that a device's memory uses: blocks of memory, copies to and from them, pinned host memory.

    CudaGpu       a GPU, through the CUDA driver (``libcuda``), called by ctypes
    EmulatedGpu   host memory with the same methods, for machines without a GPU

Both check nothing: ``CudaArena`` checks every address before it calls them. Copies are complete when a method returns.
They run on a stream of their own and do not wait for kernels of the same process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, OutOfMemory

Bytes = NDArray[np.uint8]
HANDLE_BYTES = 64
KINDS = ("cpu", "auto", "cuda", "emulated")
"""Kinds of memory that a device may have (``hoop device --accelerator``); ``cuda:N`` names a GPU."""
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_PORTABLE = 1
_NAME_BYTES = 128
_ON_DEVICE, _PINNED, _FILE_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3
"""Constants of the driver's functions for virtual memory (``CUmemLocation`` and others)."""


class IpcHandle(ctypes.Structure):
    """The driver's handle of an allocation."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Location(ctypes.Structure):
    """``CUmemLocation``: on which GPU."""

    _fields_ = [("type", ctypes.c_int), ("number", ctypes.c_int)]


class _AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_type", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


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
    try:
        function = getattr(driver, name)
    except AttributeError:
        raise FailedPrecondition(f"CUDA: the driver has no {name}; install one of CUDA 12 or later") from None
    code = function(*arguments)
    if code == 0:
        return
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    message = f"CUDA: {name} failed with error {code}: {(text.value or b'unknown').decode()}"
    raise OutOfMemory(message) if code == _OUT_OF_MEMORY else FailedPrecondition(message)


class Gpu(ABC):
    """Memory of a GPU. Addresses are those of the GPU."""

    name: str
    """Name of the GPU for users."""

    @abstractmethod
    def allocate(self, size: int) -> int:
        """Allocate a block; its bytes are undefined."""

    @abstractmethod
    def free(self, address: int) -> None: ...

    @abstractmethod
    def allocate_described(self, size: int) -> tuple[int, int]:
        """Allocate a block that has a file descriptor; returns its address and the descriptor.

        The bytes live as long as any process has the descriptor open, or the block mapped. The caller closes the
        descriptor.
        """

    @abstractmethod
    def map_described(self, descriptor: int, size: int) -> int:
        """Map a block of ``allocate_described``, of this process or another; returns its address here."""

    @abstractmethod
    def unmap_described(self, address: int, size: int) -> None:
        """Unmap a block that ``allocate_described`` or ``map_described`` has mapped."""

    @abstractmethod
    def clear(self, address: int, size: int) -> None: ...

    @abstractmethod
    def write(self, address: int, data: Bytes) -> None:
        """Copy host memory to the GPU."""

    @abstractmethod
    def read(self, address: int, into: Bytes) -> None:
        """Copy from the GPU to host memory."""

    @abstractmethod
    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within the GPU, or between memory of two GPUs that is mapped here. The ranges must not overlap."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """Bytes that no process has allocated, and bytes in all."""

    @abstractmethod
    def pin(self, size: int) -> Bytes:
        """Allocate host memory that the GPU copies from and to directly."""

    @abstractmethod
    def unpin(self, buffer: Bytes) -> None: ...

    @abstractmethod
    def export(self, address: int) -> bytes:
        """A handle of an allocated block, with which another process of this host maps it."""

    @abstractmethod
    def map(self, handle: bytes) -> int:
        """Map the block of another process; returns its address here."""

    @abstractmethod
    def unmap(self, address: int) -> None: ...

    def close(self) -> None:  # noqa: B027 - only a GPU has something to release
        """Release the GPU. All blocks are freed before."""


def count_driver_gpus() -> int:
    """GPUs that this process can use through the driver; 0 without a driver. Initialises CUDA in this process."""
    count = ctypes.c_int()
    try:
        call_driver("cuInit", ctypes.c_uint(0))
        call_driver("cuDeviceGetCount", ctypes.byref(count))
    except FailedPrecondition:
        return 0
    return count.value


def open_gpu(kind: str) -> Gpu | None:
    """The GPU for a device's memory; None: it has none, by ``cpu`` or by ``auto`` on a machine without one."""
    name, _, number = kind.partition(":")
    if name not in KINDS or (number and (name != "cuda" or not number.isdecimal())):
        raise InvalidArgument(f"--accelerator: {kind!r} is unknown; known: {', '.join(KINDS)}, cuda:N")
    if name == "emulated":
        return EmulatedGpu()
    if name == "cpu" or (name == "auto" and not count_driver_gpus()):
        return None
    return CudaGpu(int(number or 0))


class CudaGpu(Gpu):
    """A GPU of this host.

    With a number it has the primary context of that GPU, which PyTorch uses too, and any thread may call it. Without
    one it works in the current context of the calling thread: a thread that has used a GPU through PyTorch has one.
    """

    def __init__(self, number: int | None = None) -> None:
        self._context = ctypes.c_void_p()
        self._device = ctypes.c_int(number or 0)
        self._stream = ctypes.c_void_p()
        self._lock = threading.Lock()
        self.name = "GPU"
        if number is None:
            return
        call_driver("cuInit", ctypes.c_uint(0))
        count = ctypes.c_int()
        call_driver("cuDeviceGetCount", ctypes.byref(count))
        if number >= count.value:
            raise FailedPrecondition(
                f"accelerator: cuda:{number} was asked for, and {count.value} GPUs are visible, from cuda:0 on; look "
                "at nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
        call_driver("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(number))
        text = ctypes.create_string_buffer(_NAME_BYTES)
        call_driver("cuDeviceGetName", text, ctypes.c_int(_NAME_BYTES), self._device)
        self.name = text.value.decode(errors="replace")
        call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def _enter(self) -> None:
        """Make the context current in this thread."""
        if self._context:
            call_driver("cuCtxSetCurrent", self._context)

    def _copy_stream(self) -> ctypes.c_void_p:
        """The stream for copies, in the context of this thread; it is made when first used."""
        self._enter()
        with self._lock:
            if not self._stream:
                call_driver("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))
        return self._stream

    def _wait(self) -> None:
        call_driver("cuStreamSynchronize", self._stream)

    def allocate(self, size: int) -> int:
        self._enter()
        pointer = ctypes.c_uint64()
        call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, address: int) -> None:
        self._enter()
        call_driver("cuMemFree_v2", ctypes.c_uint64(address))

    def allocate_described(self, size: int) -> tuple[int, int]:
        self._enter()
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int(-1)
        properties = _AllocationProperties(_PINNED, _FILE_DESCRIPTOR, self._location)
        no_flags = ctypes.c_uint64(0)
        call_driver("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), no_flags)
        try:
            call_driver("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _FILE_DESCRIPTOR, no_flags)
            return self._map_handle(handle, size), descriptor.value
        except HoopError:
            if descriptor.value >= 0:
                os.close(descriptor.value)
            raise
        finally:
            call_driver("cuMemRelease", handle)  # the mapping and the descriptor keep the memory

    def map_described(self, descriptor: int, size: int) -> int:
        self._enter()
        handle = ctypes.c_uint64()
        shared = ctypes.c_void_p(descriptor)
        call_driver("cuMemImportFromShareableHandle", ctypes.byref(handle), shared, _FILE_DESCRIPTOR)
        try:
            return self._map_handle(handle, size)
        finally:
            call_driver("cuMemRelease", handle)

    def _map_handle(self, handle: ctypes.c_uint64, size: int) -> int:
        address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
        length, none = ctypes.c_size_t(size), ctypes.c_size_t(0)
        call_driver("cuMemAddressReserve", ctypes.byref(address), length, none, zero, zero)
        try:
            call_driver("cuMemMap", address, length, none, handle, zero)
            try:
                access = _Access(self._location, _READ_WRITE)
                call_driver("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
            except HoopError:
                call_driver("cuMemUnmap", address, length)
                raise
        except HoopError:
            call_driver("cuMemAddressFree", address, length)
            raise
        return address.value

    @property
    def _location(self) -> _Location:
        return _Location(_ON_DEVICE, self._device.value)

    def unmap_described(self, address: int, size: int) -> None:
        self._enter()
        call_driver("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))
        call_driver("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def clear(self, address: int, size: int) -> None:
        stream = self._copy_stream()
        call_driver("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(size), stream)
        self._wait()

    def write(self, address: int, data: Bytes) -> None:
        stream = self._copy_stream()
        source = ctypes.c_void_p(data.ctypes.data)
        call_driver("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(data.nbytes), stream)
        self._wait()

    def read(self, address: int, into: Bytes) -> None:
        stream = self._copy_stream()
        target = ctypes.c_void_p(into.ctypes.data)
        call_driver("cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(into.nbytes), stream)
        self._wait()

    def copy(self, to: int, source: int, size: int) -> None:
        stream = self._copy_stream()
        call_driver("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), stream)
        self._wait()

    def memory(self) -> tuple[int, int]:
        self._enter()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call_driver("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def pin(self, size: int) -> Bytes:
        self._enter()
        pointer = ctypes.c_void_p()
        call_driver("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
        assert pointer.value is not None, "the driver has returned memory"
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer.value))

    def unpin(self, buffer: Bytes) -> None:
        self._enter()
        call_driver("cuMemFreeHost", ctypes.c_void_p(buffer.ctypes.data))

    def export(self, address: int) -> bytes:
        self._enter()
        handle = IpcHandle()
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        self._enter()
        pointer = ctypes.c_uint64()
        call_driver(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            IpcHandle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return pointer.value

    def unmap(self, address: int) -> None:
        self._enter()
        call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def close(self) -> None:
        if self._stream:
            self._enter()
            call_driver("cuStreamDestroy_v2", self._stream)
            self._stream = ctypes.c_void_p()
        if self._context:
            call_driver("cuDevicePrimaryCtxRelease_v2", self._device)
            self._context = ctypes.c_void_p()


class EmulatedGpu(Gpu):
    """Host memory in place of a GPU's. An address is that of the host memory; blocks are not shared."""

    name = "emulated GPU"

    def __init__(self) -> None:
        self._blocks: dict[int, Bytes] = {}

    def allocate(self, size: int) -> int:
        try:
            memory = mmap.mmap(-1, size)
        except OSError as error:
            raise OutOfMemory(f"emulated GPU: {size} bytes cannot be allocated: {error}") from None
        block = np.frombuffer(memory, np.uint8)
        address = int(block.ctypes.data)
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    def allocate_described(self, size: int) -> tuple[int, int]:
        descriptor = os.memfd_create("hoop-gpu")
        os.ftruncate(descriptor, size)
        return self.map_described(descriptor, size), descriptor

    def map_described(self, descriptor: int, size: int) -> int:
        try:
            block = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
        except (OSError, ValueError) as error:
            raise FailedPrecondition(f"emulated GPU: {size} bytes cannot be mapped: {error}") from None
        address = int(block.ctypes.data)
        self._blocks[address] = block
        return address

    def unmap_described(self, address: int, size: int) -> None:
        del self._blocks[address]

    def _view(self, address: int, size: int) -> Bytes:
        """The bytes at an address of an allocated block."""
        base = max(one for one in self._blocks if one <= address)
        return self._blocks[base][address - base : address - base + size]

    def clear(self, address: int, size: int) -> None:
        self._view(address, size)[:] = 0

    def write(self, address: int, data: Bytes) -> None:
        self._view(address, data.nbytes)[:] = data

    def read(self, address: int, into: Bytes) -> None:
        into[:] = self._view(address, into.nbytes)

    def copy(self, to: int, source: int, size: int) -> None:
        self._view(to, size)[:] = self._view(source, size)

    def memory(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def pin(self, size: int) -> Bytes:
        return np.empty(size, np.uint8)

    def unpin(self, buffer: Bytes) -> None:
        """Nothing to do: the buffer is ordinary memory."""

    def export(self, address: int) -> bytes:
        raise FailedPrecondition("emulated GPU: its memory is not shared between processes")

    def map(self, handle: bytes) -> int:
        raise FailedPrecondition("emulated GPU: its memory is not shared between processes")

    def unmap(self, address: int) -> None:
        raise FailedPrecondition("emulated GPU: its memory is not shared between processes")
