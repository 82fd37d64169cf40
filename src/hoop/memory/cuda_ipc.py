"""Memory of a GPU that another library has allocated, shared between processes of one host through CUDA IPC.

``CudaArena`` shares a block of its own. This module shares the allocation that holds any address, for example the one
in which PyTorch has placed a tensor:

    owner    allocation_of(address), export(allocation.base)      peer     open_handle(handle), close_handle(address)

Not every allocation can be shared: memory of ``cudaMallocAsync`` and of PyTorch's expandable segments cannot. The
calling thread must have a current CUDA context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from hoop.errors import HoopError
from hoop.memory.gpu_driver import HANDLE_BYTES, IpcHandle, call_driver

_BUFFER_ID = 7
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1
_WAIT_VALUE, _WRITE_VALUE = 1, 2
_MASK = 0xFFFFFFFF


class Allocation(NamedTuple):
    """A range of memory that was allocated in one piece."""

    number: int
    """Number that is unique in this process: memory that is allocated later at the same address has another one."""
    base: int
    size: int


def allocation_number(address: int) -> int:
    """The number of the allocation that holds an address."""
    number = ctypes.c_uint64()
    call_driver("cuPointerGetAttribute", ctypes.byref(number), ctypes.c_int(_BUFFER_ID), ctypes.c_uint64(address))
    return number.value


def allocation_of(address: int) -> Allocation:
    """The allocation that holds an address."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    return Allocation(allocation_number(address), base.value, size.value)


def export(base: int) -> bytes | None:
    """The handle with which another process maps the allocation at ``base``; None if it cannot be shared."""
    handle = IpcHandle()
    try:
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
    except HoopError:
        return None
    return bytes(handle)


def open_handle(handle: bytes) -> int:
    """Map the allocation of another process; returns its address here."""
    pointer = ctypes.c_uint64()
    opened = IpcHandle.from_buffer_copy(handle[:HANDLE_BYTES])
    call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return pointer.value


class _StreamOperation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` of the driver, for writing a 32-bit number and for waiting for one."""

    _fields_ = [
        ("operation", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    ]


class StreamMeeting:
    """Lets streams of several processes meet: a stream goes on when all of them have come.

    Each process writes the number of the meeting to its flag in the memory of every other one, and waits until all
    flags in its own memory have reached it (cyclically: their difference to it, as signed, is not negative).
    """

    def __init__(self, peer_flags: Sequence[int], own_flags: Sequence[int]) -> None:
        """Addresses of 32-bit flags: of this process in the memory of the others, and of the others here."""
        operations = [_StreamOperation(_WRITE_VALUE, address) for address in peer_flags]
        operations += [_StreamOperation(_WAIT_VALUE, address) for address in own_flags]
        self._operations = (_StreamOperation * len(operations))(*operations)
        self._count = ctypes.c_uint(len(operations))

    def __call__(self, stream: int, number: int) -> None:
        """Does not wait. What the stream did before is visible to the other processes when they go on."""
        for one in self._operations:
            one.value = number & _MASK
        call_driver("cuStreamBatchMemOp_v2", ctypes.c_void_p(stream), self._count, self._operations, ctypes.c_uint(0))


def fill_at_once(address: int, value: int, count: int) -> None:
    """Write 32-bit numbers on a stream of its own, whatever other streams wait for."""
    stream = ctypes.c_void_p()
    call_driver("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
    call_driver("cuMemsetD32Async", ctypes.c_uint64(address), ctypes.c_uint(value), ctypes.c_size_t(count), stream)
    call_driver("cuStreamDestroy_v2", stream)  # the write is done first


def close_handle(address: int) -> None:
    """Unmap what ``open_handle`` has mapped. No kernel may use it any more."""
    call_driver("cuIpcCloseMemHandle", ctypes.c_uint64(address))
