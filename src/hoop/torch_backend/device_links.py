"""How the ranks of one host read and write each other's tensors on their GPUs, for one process group.

A collective on a GPU is one round:

    window     this rank's elements in memory that others can map: the tensor itself, or a copy in a staging block
    barrier    publish the window in shared memory; ranks compare their calls, and map each other's windows
    meet       all windows have their elements
    work       kernels read and write the windows of all ranks
    meet       all results are in place, and no rank uses a window of another any more

Hosts meet once, in the barrier. GPUs meet by flags, 32-bit numbers that count meetings: a rank's stream writes its flag
in the memory of every other rank, and waits until theirs have come. The host does not wait for them: a synchronous
operation is ordered on the caller's current stream, as with NCCL. When a rank is lost, the others set all of their own
flags, so that no stream waits for it, and raise. Devices without such flags meet through their hosts: each waits for
its own GPU and enters a barrier.

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
from hoop.torch_backend.device_memory import HANDLE_BYTES, Block, DeviceMemory, Meeting
from hoop.torch_backend.group_links import GroupLinks
from hoop.torch_backend.tensor_views import Described, adjacent, is_plain, split
from hoop.transport.base import SharedEndpoint
from hoop.transport.call_check import length_mismatch_error

MOST_MAPPED = 64
"""Maximum number of allocations of other ranks that a group keeps mapped."""
MEET_ON_DEVICE = True
"""Whether GPUs meet by flags where they can; False: hosts meet (for tests and measurements)."""
_LEAST_STAGING_BYTES = 2 << 20
_MOST_VIEWS = 1024
_DESCRIPTION = struct.Struct(f"<QQQQ{HANDLE_BYTES}s")
ADDRESS_BYTES = _DESCRIPTION.size
_FLAGS_AT = 1024
"""Offset in bytes of a rank's flags in its block."""
_FAR_AHEAD = 1 << 30
_POLL_S = 0.0005
_TOKEN_BYTES = 16
_PROBE = struct.Struct(f"<{ADDRESS_BYTES}s{_TOKEN_BYTES}s240s")
BYTES = dtype("uint8")


class HostStagingWarning(UserWarning):
    """CUDA tensors of a group travel through host memory."""


class WindowAddress(NamedTuple):
    """Where a window is, in the terms of the process that owns it."""

    number: int
    """Number of the allocation that contains the window."""
    capacity: int
    """Size of the allocation in bytes."""
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
"""Packed address of an empty window."""


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
        """Copies ``flat`` to the tensors, after the round; the copy is in the order of the current stream."""
        for tensor, part in self._copies:
            tensor.copy_(part.view(tensor.shape))


class Windows(list[torch.Tensor]):
    """The windows of all ranks in one round, as bytes."""

    def __init__(self, windows: list[torch.Tensor], addresses: tuple[bytes, ...]) -> None:
        super().__init__(windows)
        self.addresses = addresses
        """Packed address of each rank's window; equal addresses are the same memory. Empty in a group of one rank."""


class DeviceLinks:
    """One rank's windows and mapped memory in one process group, for one device."""

    def __init__(self, links: GroupLinks, memory: DeviceMemory) -> None:
        self.links, self.memory = links, memory
        self.rank, self.size = links.rank, links.size
        self.host_reason = ""
        """Reason why tensors go through host memory; empty: they do not."""
        self._decided = links.size == 1
        self._in_round = False
        self._flags: Block | None = None
        """This rank's flags, one 32-bit number a rank; other ranks write theirs when their GPU comes to a meeting."""
        self._own_flags: list[int] = []
        """Addresses, in this process, of the other ranks' flags."""
        self._meet: Meeting
        """Function that lets the GPUs meet by flags; set before the first round, if they can (``_ordered``)."""
        self._ordered = False
        """Whether GPUs meet by flags; else hosts meet, each after waiting for its GPU."""
        self._meetings = 1
        self._last_stream: Any = None
        self.generation = 0
        """Number that grows when memory is unmapped: views that were made before are invalid."""
        self._staging: Block | None = None
        self._lock = threading.RLock()
        """Lock that is held while mappings are changed; rounds and messages run in different threads."""
        self._mapped: dict[tuple[int, int], tuple[int, int]] = {}
        """Address in this process and bytes of each mapped allocation, by rank and number, least recently used
        first."""
        self._views: dict[tuple[int, bytes], tuple[tuple[int, int] | None, torch.Tensor]] = {}
        """Windows by rank and packed address, each with the mapped allocation that contains it, if it is of another
        rank."""
        self._packed: dict[tuple[int, int, int], bytes] = {}
        """Packed addresses of this rank's windows, by number of the allocation, address and bytes."""
        self._slots: list[list[memoryview]] = []
        """Memory in which each rank publishes the address of its window, one list for each turn; empty before the first
        round."""
        self._nothing = torch.empty(0, dtype=torch.uint8, device=memory.device)
        links.on_close.append(self.close)
        links.on_break.append(self._release)
        links.before_close.append(self._finish)

    # ---- windows

    def window(self, tensors: Sequence[torch.Tensor], copy_in: bool = True, factor: Any = None) -> Window:
        """A window with the elements of these tensors, one after the other.

        ``copy_in``: a window that is not the tensors' own memory starts with their elements; with a ``factor``,
        multiplied by it.
        """
        self.follow_last_round()  # which may still use the staging block
        tensors = [tensor.detach() for tensor in tensors]
        kind, lengths = tensors[0].dtype, [tensor.numel() for tensor in tensors]
        if not sum(lengths):
            return Window(torch.empty(0, dtype=kind, device=tensors[0].device), None)
        flat = None
        if factor is None:
            flat = tensors[0].view(-1) if len(tensors) == 1 and is_plain(tensors[0]) else adjacent(tensors)
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

    def _published(self, window: Window | None) -> tuple[bytes, torch.Tensor]:
        """The packed address of this rank's window, and its memory as bytes."""
        if window is None or window.allocation is None:
            return NOWHERE, self._nothing
        address, size = window.flat.data_ptr(), window.flat.numel() * window.flat.element_size()
        packed = self._packed_address(window.allocation, address, size)
        _, view = self._views.get((self.rank, packed), (None, None))
        if view is None:  # not the tensor itself: the view is kept, and would keep it alive
            view = self.memory.bytes_at(address, size)
            with self._lock:
                self._keep_view((self.rank, packed), None, view)
        return packed, view

    def _keep_view(self, key: tuple[int, bytes], allocation: tuple[int, int] | None, view: torch.Tensor) -> None:
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        self._views[key] = allocation, view

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
    def round(self, description: Described, timeout: float, window: Window | None) -> Iterator[Windows]:
        """One round; yields the windows of all ranks as bytes, those of ranks that pass None empty.

        All ranks must pass the same ``description``. When the context ends without an error, all ranks have ended it.
        """
        deadline = time.monotonic() + timeout
        if self.size == 1:
            has_elements = window is not None and window.flat.numel()
            yield Windows([window.flat.view(torch.uint8) if window and has_elements else self._nothing], ())
            return
        if not self._ordered:
            self.memory.synchronize()
        endpoint = self._shared_endpoint
        if not self._slots:
            endpoint.wait_for_peers(deadline)  # the segments of all ranks are mapped from here on
            self._slots = [
                [segment.slots[turn].data[:ADDRESS_BYTES] for segment in endpoint.segments] for turn in (0, 1)
            ]
        endpoint.publish_count = publication = endpoint.publish_count + 1
        slots = self._slots[publication & 1]
        slots[self.rank][:], own = self._published(window)
        endpoint.barrier(deadline, self.links.call(description))
        addresses = tuple(map(bytes, slots))
        self._in_round = True  # nothing is unmapped until the kernels are done
        windows = [own if rank == self.rank else self.view(rank, one) for rank, one in enumerate(addresses)]
        if self._ordered:
            if window is None:  # making one has done this
                self.follow_last_round()
            self._meet_on_device()
            yield Windows(windows, addresses)
            self._meet_on_device()
        else:
            yield Windows(windows, addresses)
            self.memory.synchronize()
            endpoint.barrier(deadline)
        self._in_round = False
        self._forget_oldest()

    def follow_last_round(self) -> None:
        """Orders the current stream after the last round, if that ran on another one."""
        if not self._ordered:
            return
        stream = self.memory.current_stream()
        if self._last_stream is not None and stream != self._last_stream:
            self.memory.follow(self._last_stream)
        self._last_stream = stream

    def _meet_on_device(self) -> None:
        """The stream goes on when the streams of all ranks have come here; the host does not wait."""
        self._meetings += 1
        self._meet(self._last_stream, self._meetings)
        if self.links.broken:
            self._release()  # the group broke before this meeting was awaited

    def _release(self) -> None:
        """Lets streams go on that wait for a rank that will not come; called when the group is broken."""
        if self._flags is not None and self._ordered:
            with contextlib.suppress(HoopError, RuntimeError):
                self.memory.release(self._flags.address + _FLAGS_AT, self._meetings + _FAR_AHEAD, self.size)

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
        gather = self.links.prepared("all_gather", own.nbytes, BYTES, description=description)
        gather(own.view(np.uint8), found.view(np.uint8), time.monotonic() + timeout)
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
                if allocation is not None:
                    self._mapped[allocation] = self._mapped.pop(allocation)  # the most recently used one is the last
                return view
            address = WindowAddress.unpack(packed)
            allocation = rank, address.number
            mapped = self._mapped.pop(allocation, None) or self._map(rank, address)
            self._mapped[allocation] = mapped
            view = self.memory.bytes_at(mapped[0] + address.offset, address.size)
            self._keep_view((rank, packed), allocation, view)
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
            if len(self._mapped) > MOST_MAPPED:
                self.memory.synchronize()
            while len(self._mapped) > MOST_MAPPED:
                self._unmap(next(iter(self._mapped)))

    def _unmap(self, allocation: tuple[int, int]) -> None:
        self.generation += 1
        self._views = {key: found for key, found in self._views.items() if found[0] != allocation}
        self.memory.unmap(*self._mapped.pop(allocation))

    def _finish(self) -> None:
        """Waits for the last round on the GPU: until then ranks use each other's memory."""
        deadline = time.monotonic() + self.links.timeout
        with contextlib.suppress(RuntimeError):
            while self._last_stream is not None and not self.memory.is_done(self._last_stream):
                if time.monotonic() > deadline:
                    self._release()
                    return
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Unmaps the memory of other ranks and frees the staging block."""
        self._slots = []
        # After a CUDA error, and while the interpreter ends, every call of the driver fails.
        with contextlib.suppress(HoopError, RuntimeError), self._lock, self.memory.on_device():
            self._views.clear()
            while self._mapped:
                self._unmap(next(iter(self._mapped)))
            for block in (self._staging, self._flags):
                if block is not None:
                    block.close()
            self._staging = self._flags = None

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
            self._flags = self.memory.allocate(_FLAGS_AT + 4 * self.size)
            block = self.memory.bytes_at(self._flags.address, _FLAGS_AT + 4 * self.size).zero_()
            block[:_TOKEN_BYTES].copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
            self.memory.synchronize()
            address = self.address_of(block)
            problem = f"rank {self.rank} cannot share its GPU memory" if address == NOWHERE else ""
        except (HoopError, RuntimeError) as error:
            problem = f"rank {self.rank}: {error}"
        probes = self._exchange_probes(address, token, problem, description, timeout)
        if not any(text for _, _, text in probes):
            problem = self._check_mappings(probes)
            can_signal = not problem and self._try_signals([packed for packed, _, _ in probes])
            probes = self._exchange_probes(address, bytes([can_signal]), problem, description, timeout)
        obstacle = next((text for _, _, text in probes if text), "")
        if not obstacle:
            signalled = all(first[0] for _, first, _ in probes) and self._signals_have_come()
            probes = self._exchange_probes(address, bytes([signalled]), "", description, timeout)
            self._ordered = all(first[0] for _, first, _ in probes)
        return obstacle

    def _try_signals(self, addresses: Sequence[bytes]) -> bool:
        """Sets this rank's flag at every other rank; whether the device can."""
        assert self._flags is not None, "allocated above"
        if not MEET_ON_DEVICE:
            return False
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._own_flags, peer_flags = [self._flags.address + _FLAGS_AT + 4 * rank for rank in peers], []
        for rank in peers:
            address = WindowAddress.unpack(addresses[rank])
            mapped, _ = self._mapped.pop((rank, address.number))  # stays mapped until the process ends
            peer_flags.append(mapped + address.offset + _FLAGS_AT + 4 * self.rank)
        try:
            self.memory.meeting(peer_flags, [])(self.memory.current_stream(), self._meetings)
            self.memory.synchronize()
        except HoopError:
            return False
        self._meet = self.memory.meeting(peer_flags, self._own_flags)
        return True

    def _signals_have_come(self) -> bool:
        """Called after all ranks have set their flags: whether this rank sees them."""
        assert self._flags is not None, "allocated above"
        flags = self.memory.bytes_at(self._flags.address + _FLAGS_AT, 4 * self.size).view(torch.int32).tolist()
        if any(flag != self._meetings for rank, flag in enumerate(flags) if rank != self.rank):
            return False
        try:
            self.memory.meeting([], self._own_flags)(self.memory.current_stream(), self._meetings)
            self.memory.synchronize()
        except HoopError:
            return False
        return True

    def _exchange_probes(
        self, address: bytes, token: bytes, problem: str, description: Described, timeout: float
    ) -> list[tuple[bytes, bytes, str]]:
        """Collective. The staging block of each rank, the token at its start, and the problem that the rank has."""
        own = np.frombuffer(_PROBE.pack(address, token, problem.encode()[:240]), np.uint8)
        found = np.empty(own.size * self.size, np.uint8)
        gather = self.links.prepared("all_gather", own.size, BYTES, description=description)
        gather(own.copy(), found, time.monotonic() + timeout)
        probes = [_PROBE.unpack(row.tobytes()) for row in found.reshape(self.size, own.size)]
        return [(packed, first, text.rstrip(b"\0").decode(errors="ignore")) for packed, first, text in probes]

    def _check_mappings(self, probes: Sequence[tuple[bytes, bytes, str]]) -> str:
        """Reads the staging block of every rank; returns what is wrong."""
        for rank, (address, token, _) in enumerate(probes):
            if rank == self.rank:
                continue
            try:
                found = bytes(self.view(rank, address)[:_TOKEN_BYTES].cpu().tolist())
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
