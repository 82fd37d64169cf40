"""How the ranks of one host read and write each other's tensors on their GPUs, for one process group.

A collective on a GPU is one round:

    window     this rank's elements in memory that others can map: the tensor itself, or a copy in a staging block
    meet       wait for this GPU; publish the window in shared memory; a barrier, in which ranks compare their calls
    work       kernels read and write the windows of all ranks, which are mapped here
    meet       wait for this GPU; a barrier: all results are in place, and no rank reads a window any more

The host waits for its own GPU twice in a round, and for no other: a rank that is killed is noticed in a barrier, as
without a GPU, and no stream ever waits for an event of a process that may be gone. So a finished operation's results
are visible to every stream.

Mapped memory stays mapped: the next round with a tensor of the same allocation costs no call of the driver. Beyond
``MOST_MAPPED`` allocations the least recently used one is unmapped. Until then the GPU keeps the memory, even if its
owner has freed it.

Where ranks cannot map each other's memory (several hosts, GPUs without IPC), all ranks of the group decide so at the
first operation, with one warning, and tensors go through pinned host memory and the group's links.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hoop.errors import HoopError, PeerLost
from hoop.memory.cuda_ipc import Allocation
from hoop.memory.dtypes import dtype
from hoop.torch_backend.device_memory import HANDLE_BYTES, Block, DeviceMemory
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.tensor_views import Described, adjacent, split
from hoop.transport.base import SharedEndpoint
from hoop.transport.call_check import length_mismatch_error

MOST_MAPPED = 64
"""Allocations of other ranks that a group keeps mapped."""
_LEAST_STAGING_BYTES = 2 << 20
_MOST_VIEWS = 1024
_DESCRIPTION = struct.Struct(f"<QQQQ{HANDLE_BYTES}s")
ADDRESS_BYTES = _DESCRIPTION.size
_TOKEN_BYTES = 16
_PROBE = struct.Struct(f"<{ADDRESS_BYTES}s{_TOKEN_BYTES}s240s")
BYTES = dtype("uint8")


class HostStagingWarning(UserWarning):
    """CUDA tensors of a group travel through host memory."""


class WindowAddress(NamedTuple):
    """Where a window is, in the terms of the process that owns it."""

    number: int
    """Of the allocation."""
    capacity: int
    """Bytes of the allocation."""
    offset: int
    size: int
    handle: bytes

    def pack(self) -> bytes:
        return _DESCRIPTION.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> WindowAddress:
        found = cls(*_DESCRIPTION.unpack(packed))
        if found.offset + found.size > found.capacity:
            raise PeerLost(f"GPU memory: {found.size} bytes at {found.offset} of an allocation of {found.capacity}")
        return found


NOWHERE = WindowAddress(0, 0, 0, 0, b"").pack()
"""The address of an empty window."""


class Window:
    """The elements that one rank brings to a collective, contiguous and in memory that the other ranks can map."""

    def __init__(
        self,
        flat: torch.Tensor,
        allocation: Allocation | None,
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """``allocation``: in which ``flat`` is; None: it is empty, or the group has one rank.

        ``copies``: tensors with their parts of ``flat``, if it is not their own memory.
        """
        self.flat, self.allocation = flat, allocation
        self._copies = copies

    def copy_back(self) -> None:
        """Copies ``flat`` to the tensors, after the round."""
        for tensor, part in self._copies:
            tensor.copy_(part.view(tensor.shape))


class DeviceLinks:
    """One rank's windows and mapped memory in one process group, for one device."""

    def __init__(self, links: GroupLinks, memory: DeviceMemory) -> None:
        self.links, self.memory = links, memory
        self.rank, self.size = links.rank, links.size
        self.host_reason = ""
        """Why tensors go through host memory; empty: they do not."""
        self._decided = links.size == 1
        self._in_round = False
        self._staging: Block | None = None
        self._lock = threading.RLock()
        """Held while mappings are changed; rounds and messages run in different threads."""
        self._mapped: dict[tuple[int, int], tuple[int, int]] = {}
        """By rank and number of the allocation, least recently used first: its address here, and its bytes."""
        self._views: dict[tuple[int, bytes], tuple[tuple[int, int], torch.Tensor]] = {}
        """By rank and packed address: windows of other ranks, and the allocations in which they are."""
        self._packed: dict[tuple[int, int, int], bytes] = {}
        """By number of the allocation, address and bytes: packed addresses of this rank's windows."""
        self._nothing = torch.empty(0, dtype=torch.uint8, device=memory.device)
        links.on_close.append(self.close)

    # ---- windows

    def window(self, tensors: Sequence[torch.Tensor], copy_in: bool = True, factor: Any = None) -> Window:
        """A window with the elements of these tensors, one after the other.

        ``copy_in``: a window that is not the tensors' own memory starts with their elements; with a ``factor``,
        multiplied by it.
        """
        tensors = [tensor.detach() for tensor in tensors]
        kind, lengths = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        if not sum(lengths):
            return Window(torch.empty(0, dtype=kind, device=tensors[0].device), None)
        flat = adjacent(tensors) if factor is None else None
        if flat is not None:
            allocation = self.memory.allocation(flat.data_ptr()) if self.size > 1 else None
            if allocation is not None or self.size == 1:
                return Window(flat, allocation)
        flat = self._staged(sum(lengths) * kind.itemsize).view(kind)
        copies = list(zip(tensors, split(flat, lengths), strict=True))
        for tensor, part in copies if copy_in else ():
            part.view(tensor.shape).copy_(tensor if factor is None else tensor * _on_device(factor, tensor.device))
        return Window(flat, self.memory.allocation(flat.data_ptr()), copies)

    def _staged(self, size: int) -> torch.Tensor:
        """The first ``size`` bytes of the staging block, which grows as needed."""
        if self._staging is None or self._staging.size < size:
            grown = max(size, 2 * self._staging.size if self._staging else _LEAST_STAGING_BYTES)
            if self._staging is not None:
                self._staging.close()
                self._staging = None
            self._staging = self.memory.allocate(grown)
        return self.memory.bytes_at(self._staging.address, size)

    def address_of(self, window: torch.Tensor) -> bytes:
        """The packed address of a vector of bytes of this rank; NOWHERE if other ranks cannot map it."""
        return self._packed_address(self.memory.allocation(window.data_ptr()), window.data_ptr(), window.numel())

    def _packed_address(self, allocation: Allocation | None, address: int, size: int) -> bytes:
        """Where a window of this rank is: a packed ``WindowAddress`` for other ranks."""
        if allocation is None:
            return NOWHERE
        key = allocation.number, address, size
        packed = self._packed.get(key)
        if packed is None:
            offset, handle = address - allocation.base, self.memory.export(allocation)
            if len(self._packed) >= _MOST_VIEWS:
                self._packed.clear()
            packed = self._packed[key] = WindowAddress(allocation.number, allocation.size, offset, size, handle).pack()
        return packed

    # ---- rounds

    @contextlib.contextmanager
    def round(self, description: Described, timeout: float, window: Window | None) -> Iterator[list[torch.Tensor]]:
        """One round; yields the windows of all ranks as bytes, those of ranks that pass None empty.

        All ranks must pass the same ``description``. When the context ends without an error, all ranks have ended it.
        """
        deadline = time.monotonic() + timeout
        own = window.flat.view(torch.uint8) if window is not None and window.flat.numel() else self._nothing
        self.memory.synchronize()
        if self.size == 1:
            yield [own]
            self.memory.synchronize()
            return
        endpoint = self._shared_endpoint
        endpoint.wait_for_peers(deadline)  # the segments of all ranks are mapped from here on
        endpoint.publish_count = publication = endpoint.publish_count + 1
        slots = [segment.slots[publication & 1] for segment in endpoint.segments]
        packed = self._packed_address(window.allocation if window else None, own.data_ptr(), own.numel())
        slots[self.rank][:ADDRESS_BYTES] = np.frombuffer(packed, np.uint8)
        endpoint.barrier(deadline, self.links.call(description))
        self._in_round = True  # nothing is unmapped until the kernels are done
        yield [
            own if rank == self.rank else self.view(rank, slot[:ADDRESS_BYTES].tobytes())
            for rank, slot in enumerate(slots)
        ]
        self.memory.synchronize()
        self._in_round = False
        endpoint.barrier(deadline)
        self._forget_oldest()

    @property
    def _shared_endpoint(self) -> SharedEndpoint:
        assert isinstance(self.links.endpoint, SharedEndpoint), "only ranks of one host map each other's memory"
        return self.links.endpoint

    def exchange_sizes(
        self, description: Described, sent: Sequence[int], received: Sequence[int], timeout: float
    ) -> list[int]:
        """Collective. At which byte of each rank's window the part for this rank begins.

        ``sent``, ``received``: bytes to and from each rank. Raises CollectiveMismatch at all ranks unless every rank
        expects the bytes that are sent to it.
        """
        own = np.array([sent, received], np.int64).reshape(-1)
        found = np.empty(own.size * self.size, np.int64)
        self.links.run(
            "all_gather", own.nbytes, BYTES, own.view(np.uint8), found.view(np.uint8), timeout, description=description
        )
        sizes = found.reshape(self.size, 2, self.size)
        different = np.argwhere(sizes[:, 0] != sizes[:, 1].T)
        if len(different):
            sender, receiver = (int(one) for one in different[0])
            expected, actual = int(sizes[receiver, 1, sender]), str(sizes[sender, 0, receiver])
            raise length_mismatch_error(self.links.call(description), receiver, sender, expected, actual)
        return [int(row[0, : self.rank].sum()) for row in sizes]

    # ---- memory of other ranks

    def view(self, rank: int, packed: bytes) -> torch.Tensor:
        """A window of another rank as bytes, mapped here; ``packed``: its address."""
        if packed == NOWHERE:
            return self._nothing
        with self._lock:
            found = self._views.get((rank, packed))
            if found is not None:
                allocation, view = found
                self._mapped[allocation] = self._mapped.pop(allocation)  # the most recently used one is the last
                return view
            address = WindowAddress.unpack(packed)
            allocation = rank, address.number
            mapped = self._mapped.pop(allocation, None) or self._map(rank, address)
            self._mapped[allocation] = mapped
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            view = self.memory.bytes_at(mapped[0] + address.offset, address.size)
            self._views[rank, packed] = allocation, view
            return view

    def copy_from(self, rank: int, packed: bytes, tensor: torch.Tensor) -> None:
        """Copies a window of another rank to a tensor, and waits for it."""
        with self._lock:  # no mapping goes away meanwhile
            tensor.detach().copy_(self.view(rank, packed).view(tensor.dtype).view(tensor.shape))
            self.memory.synchronize()
            if not self._in_round:
                self._forget_oldest()

    def _map(self, rank: int, address: WindowAddress) -> tuple[int, int]:
        try:
            return self.memory.map(address.handle, address.capacity), address.capacity
        except HoopError as error:
            raise PeerLost(f"the GPU memory of {self.links.rank_label(rank)} cannot be mapped: {error}") from error

    def _forget_oldest(self) -> None:
        """Unmaps what was not used for longest; called between rounds, when no kernel uses it."""
        with self._lock:
            while len(self._mapped) > MOST_MAPPED:
                self._unmap(next(iter(self._mapped)))

    def _unmap(self, allocation: tuple[int, int]) -> None:
        self._views = {key: found for key, found in self._views.items() if found[0] != allocation}
        self.memory.unmap(*self._mapped.pop(allocation))

    def close(self) -> None:
        """Unmaps the memory of other ranks and frees the staging block."""
        # After a CUDA error, and while the interpreter ends, every call of the driver fails.
        with contextlib.suppress(HoopError, RuntimeError), self._lock, self.memory.on_device():
            self._views.clear()
            while self._mapped:
                self._unmap(next(iter(self._mapped)))
            if self._staging is not None:
                staging, self._staging = self._staging, None
                staging.close()

    # ---- the first operation: can these ranks map each other's memory?

    def uses_host(self, description: Described, timeout: float) -> bool:
        """Whether tensors go through host memory. The first call is collective, and part of that operation."""
        if not self._decided:
            self.host_reason = self._find_obstacle(description, timeout)
            self._decided = True
            if self.host_reason:
                self._warn()
        return bool(self.host_reason)

    def _find_obstacle(self, description: Described, timeout: float) -> str:
        """Collective. Why these ranks cannot map each other's memory, the same text at all ranks; empty: they can."""
        if not isinstance(self.links.endpoint, SharedEndpoint):
            return "its ranks do not share memory: they are on several hosts, or HOOP_TRANSPORT excludes it"
        token, problem, address = os.urandom(_TOKEN_BYTES), "", NOWHERE
        try:
            block = self._staged(_TOKEN_BYTES)
            block.copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
            self.memory.synchronize()
            address = self.address_of(block)
            problem = f"rank {self.rank} cannot share its GPU memory" if address == NOWHERE else ""
        except (HoopError, RuntimeError) as error:
            problem = f"rank {self.rank}: {error}"
        probes = self._exchange_probes(address, token, problem, description, timeout)
        if not any(text for _, _, text in probes):
            problem = self._check_mappings(probes)
            probes = self._exchange_probes(address, token, problem, description, timeout)
        return next((text for _, _, text in probes if text), "")

    def _exchange_probes(
        self, address: bytes, token: bytes, problem: str, description: Described, timeout: float
    ) -> list[tuple[bytes, bytes, str]]:
        """Collective. The staging block of each rank, the token at its start, and the problem that the rank has."""
        own = np.frombuffer(_PROBE.pack(address, token, problem.encode()[:240]), np.uint8)
        found = np.empty(own.size * self.size, np.uint8)
        self.links.run("all_gather", own.size, BYTES, own.copy(), found, timeout, description=description)
        probes = [_PROBE.unpack(row.tobytes()) for row in found.reshape(self.size, own.size)]
        return [(packed, first, text.rstrip(b"\0").decode(errors="ignore")) for packed, first, text in probes]

    def _check_mappings(self, probes: Sequence[tuple[bytes, bytes, str]]) -> str:
        """Reads the staging block of every rank; returns what is wrong."""
        for rank, (address, token, _) in enumerate(probes):
            if rank == self.rank:
                continue
            try:
                found = bytes(self.view(rank, address).cpu().tolist())
            except (HoopError, RuntimeError) as error:
                return f"rank {self.rank}: {error}"
            if found != token:
                return f"rank {self.rank} reads other bytes in the memory of rank {rank} than it wrote"
        return ""

    def _warn(self) -> None:
        if self.rank:
            return  # one warning for each group
        warnings.warn(
            f"hoop: {self.memory.device.type} tensors of group {self.links.name!r} are copied to host memory, sent "
            "from there, and copied back: two copies over the bus for each operation, and sums on the CPU. "
            f"The reason: {self.host_reason}. For GPUs of several hosts use init_process_group('cpu:hoop,cuda:nccl')",
            HostStagingWarning,
            stacklevel=2,
        )

    def through_host(
        self, function: Callable[..., None], outputs: Sequence[torch.Tensor], *arguments: Any, timeout: float
    ) -> None:
        """Runs a function of ``collectives`` on copies in host memory, and copies ``outputs`` back."""
        copies: dict[int, torch.Tensor] = {}

        def on_host(argument: Any) -> Any:
            if isinstance(argument, torch.Tensor):
                return self.host_copy(argument, copies)
            return [on_host(one) for one in argument] if isinstance(argument, list | tuple) else argument

        host_arguments = [on_host(argument) for argument in arguments]
        self.memory.synchronize()
        function(self.links, *host_arguments, timeout)
        for tensor in outputs:
            tensor.detach().copy_(copies[id(tensor)])
        self.memory.synchronize()

    def host_copy(self, tensor: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        """A copy in host memory, complete after a ``synchronize``; made once for each tensor of ``copies``."""
        if id(tensor) not in copies:
            host = self.memory.host_buffer(tuple(tensor.shape), tensor.dtype)
            copies[id(tensor)] = host.copy_(tensor.detach(), non_blocking=True)
        return copies[id(tensor)]


def _on_device(factor: Any, device: torch.device) -> Any:
    return factor.to(device) if isinstance(factor, torch.Tensor) else factor
