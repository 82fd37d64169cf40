"""Memory of a GPU that the ranks of one host share: allocate, map, view as a tensor, and wait for the GPU.

``device_links`` and ``device_collectives`` hold all of the logic and call a GPU only through ``DeviceMemory``:

    CudaMemory       tensors on a CUDA GPU, shared through CUDA IPC
    EmulatedMemory   tensors in host memory, shared through mapped files: the same logic, tested without a GPU

``MEMORIES`` says which one takes the tensors of a device type.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from hoop.errors import HoopError, InvalidArgument
from hoop.memory import cuda_ipc
from hoop.memory.cuda_arena import CudaArena
from hoop.memory.cuda_ipc import Allocation

HANDLE_BYTES = 128
"""Bytes reserved for a handle of any kind of memory."""
Meeting = Callable[[Any, int], None]
"""Function ``meet(stream, number)``; it raises HoopError if the device cannot do it."""


class StreamOrder:
    """A context for the work of an operation: ordered after all that the caller's current stream had to do.

    The thread that carries out the operation enters it. On a device without streams there is nothing to order.
    """

    def before_queue(self) -> None:
        """Called where the operation is called, if another thread may enter the context."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pass


class Block(ABC):
    """Memory that this process has allocated, and other processes of the host can map."""

    address: int
    size: int

    @abstractmethod
    def close(self) -> None:
        """Free it."""


class DeviceMemory(ABC):
    """The memory of one device, as one process uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def allocate(self, size: int) -> Block:
        """Allocate shareable memory."""

    @abstractmethod
    def allocation(self, address: int) -> Allocation | None:
        """The allocation that holds an address of a tensor; None if other processes cannot map it."""

    @abstractmethod
    def export(self, allocation: Allocation) -> bytes:
        """The handle with which another process of the host maps an allocation; at most ``HANDLE_BYTES``."""

    @abstractmethod
    def map(self, handle: bytes, size: int) -> int:
        """Map an allocation of another process; returns its address here."""

    @abstractmethod
    def unmap(self, address: int, size: int) -> None:
        """Unmap what ``map`` has mapped. Nothing may use it any more."""

    @abstractmethod
    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """The memory at an address as a vector of bytes. It does not own the memory."""

    @abstractmethod
    def stream_order(self) -> StreamOrder:
        """Called where an operation is called; its work is done inside of this context."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done the work of the current stream."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream to which this thread gives work."""

    @abstractmethod
    def is_done(self, stream: Any) -> bool:
        """Whether a stream has done all of its work."""

    @abstractmethod
    def follow(self, stream: Any) -> None:
        """Order the current stream after another one."""

    @abstractmethod
    def meeting(self, peer_flags: Sequence[int], own_flags: Sequence[int]) -> Meeting:
        """Prepare meetings of the streams of several processes; see ``cuda_ipc.StreamMeeting``."""

    @abstractmethod
    def release(self, address: int, value: int, count: int) -> None:
        """Write numbers that a stream may wait for, although the stream is waiting."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the device the current one of this thread."""

    @abstractmethod
    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in host memory, from and to which the device copies fast."""


# ---- CUDA


class _ArenaBlock(Block):
    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._arena = CudaArena.create(size)
        self.size = self._arena.capacity
        self.address = self._arena.at(0, self.size)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            self._arena.close()


class _CudaStreamOrder(StreamOrder):
    """The work of the caller's current stream on a GPU."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory, self._caller = memory, threading.get_ident()
        self._event: Any = None

    def before_queue(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(self._memory.device))

    def __enter__(self) -> None:
        device = self._memory.device
        self._contexts = contextlib.ExitStack()
        self._stream: Any = None
        if torch.cuda.current_device() != device.index:
            self._contexts.enter_context(torch.cuda.device(device))
        if threading.get_ident() != self._caller:  # where the stream of the call is not the current one
            self._stream = self._memory.queue_stream()
            self._stream.wait_event(self._event)
            self._contexts.enter_context(torch.cuda.stream(self._stream))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._contexts:
            if self._stream is not None and kind is None:
                self._stream.synchronize()  # a finished operation's results are visible to every stream


class CudaMemory(DeviceMemory):
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._exported: dict[int, tuple[Allocation, bytes] | None] = {}
        """Allocations with their handles, by number; None: it cannot be shared."""
        self._stream: Any = None
        """Stream of the operations that the caller's thread does not run itself."""

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def allocate(self, size: int) -> Block:
        torch.cuda.current_stream(self.device).synchronize()  # gives this thread a CUDA context
        return _ArenaBlock(size, self.device)

    def allocation(self, address: int) -> Allocation | None:
        try:
            number = cuda_ipc.allocation_number(address)
        except HoopError:  # a GPU without this driver
            return None
        if number not in self._exported:
            if len(self._exported) >= _MOST_EXPORTED:
                self._exported.clear()
            found = cuda_ipc.allocation_of(address)
            handle = cuda_ipc.export(found.base)
            self._exported[number] = (found, handle) if handle is not None else None
        exported = self._exported[number]
        return exported[0] if exported is not None else None

    def export(self, allocation: Allocation) -> bytes:
        exported = self._exported.get(allocation.number)
        handle = exported[1] if exported is not None else cuda_ipc.export(allocation.base)
        assert handle is not None, "allocation() has exported it"
        return handle

    def map(self, handle: bytes, size: int) -> int:
        return cuda_ipc.open_handle(handle)

    def unmap(self, address: int, size: int) -> None:
        cuda_ipc.close_handle(address)

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        # The storage is labelled with this rank's GPU: a kernel there may read another GPU's memory over peer access.
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, size)
        empty = torch.empty(0, dtype=torch.uint8, device=self.device)
        return empty.set_(storage, 0, (size,), (1,))

    def stream_order(self) -> StreamOrder:
        return _CudaStreamOrder(self)

    def queue_stream(self) -> Any:
        """The stream of operations that another thread than the caller's runs."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def current_stream(self) -> Any:
        return torch._C._cuda_getCurrentRawStream(self.device.index)  # a stream object takes 10 times as long to make

    def is_done(self, stream: Any) -> bool:
        return bool(self._stream_object(stream).query())

    def follow(self, stream: Any) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream_object(stream))

    def _stream_object(self, handle: int) -> Any:
        return torch.cuda.ExternalStream(handle, self.device)  # type: ignore[no-untyped-call]

    def meeting(self, peer_flags: Sequence[int], own_flags: Sequence[int]) -> Meeting:
        return cuda_ipc.StreamMeeting(peer_flags, own_flags)

    def release(self, address: int, value: int, count: int) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.current_stream(self.device).query()  # gives this thread a CUDA context
            cuda_ipc.fill_at_once(address, value, count)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


_MOST_EXPORTED = 4096
_POLL_S = 20e-6


# ---- emulated


class _MappedFile(Block):
    """Memory of a file without a name, or, where a process cannot open another's files, of a temporary file."""

    def __init__(self, size: int, on_close: Callable[[], object]) -> None:
        self.size = size
        self._on_close = on_close
        if os.path.isdir("/proc/self/fd") and hasattr(os, "memfd_create"):
            self._descriptor, self._file = os.memfd_create("hoop-device"), ""
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self._file = tempfile.mkstemp(prefix="hoop-device-")
            self.path = self._file
        os.ftruncate(self._descriptor, size)
        self.memory = mmap.mmap(self._descriptor, size)
        self.address = _address_of(self.memory)

    def close(self) -> None:
        self._on_close()
        os.close(self._descriptor)
        if self._file:
            os.unlink(self._file)


class EmulatedMemory(DeviceMemory):
    """Host memory in the place of a GPU: allocations can be shared, other tensors cannot.

    ``tensor`` makes a tensor that other processes can map, as every ordinary tensor on a GPU can be.
    """

    _numbers = itertools.count(1)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._blocks: dict[int, _MappedFile] = {}
        """Mapped files of the allocations, by number."""
        self._mapped: dict[int, mmap.mmap] = {}
        self.mappings = 0
        """Number of calls of ``map``."""

    def tensor(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of zeros in shareable memory, which lives as long as this object."""
        block = self.allocate(max(1, count * dtype.itemsize))
        return self.bytes_at(block.address, count * dtype.itemsize).view(dtype)

    def on_device(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def allocate(self, size: int) -> Block:
        number = next(self._numbers)
        block = self._blocks[number] = _MappedFile(size, lambda: self._blocks.pop(number))
        return block

    def allocation(self, address: int) -> Allocation | None:
        for number, block in list(self._blocks.items()):
            if block.address <= address < block.address + block.size:
                return Allocation(number, block.address, block.size)
        return None

    def export(self, allocation: Allocation) -> bytes:
        return self._blocks[allocation.number].path.encode()

    def map(self, handle: bytes, size: int) -> int:
        path = handle.rstrip(b"\0").decode()
        try:
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), size)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"emulated device: {path} cannot be mapped: {error}") from None
        self.mappings += 1
        address = _address_of(memory)
        self._mapped[address] = memory
        return address

    def unmap(self, address: int, size: int) -> None:
        del self._mapped[address]  # the pages go with the last tensor in them

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        memory = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def stream_order(self) -> StreamOrder:
        return StreamOrder()

    def synchronize(self) -> None:
        """Nothing to wait for: host memory is written when the call returns."""

    def current_stream(self) -> Any:
        return None

    def is_done(self, stream: Any) -> bool:
        return True

    def follow(self, stream: Any) -> None:
        """There is one stream: the host's own order."""

    def meeting(self, peer_flags: Sequence[int], own_flags: Sequence[int]) -> Meeting:
        def meet(stream: Any, number: int) -> None:
            """Waits itself, because there is no stream that could."""
            for address in peer_flags:
                ctypes.c_uint32.from_address(address).value = number
            flags = [ctypes.c_int32.from_address(address) for address in own_flags]
            while any(flag.value < number for flag in flags):
                time.sleep(_POLL_S)

        return meet

    def release(self, address: int, value: int, count: int) -> None:
        for index in range(count):
            ctypes.c_uint32.from_address(address + 4 * index).value = value

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


MEMORIES: dict[str, type[DeviceMemory]] = {"cuda": CudaMemory}
"""Classes of shareable memory, by device type of a tensor. A test adds ``"cpu": EmulatedMemory``."""
