"""Memory of the accelerators of one host, which its ranks read where it is.

    GPU         a rank's ``CudaArena``, mapped by the others through CUDA IPC
    emulated    a rank's arena, which is shared memory

A rank writes its own memory only, and reads that of others. So a rank that was declared dead and still runs changes
nothing that others use. A *place* is the position of a vector in its owner's memory: the same number at all ranks.

``PlanExecutor`` opens it for each partitioning of a model. The memory stays mapped until the accelerator is closed,
which is before the next generation partitions the model again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.state import StateVectors
from hoop.errors import HoopError
from hoop.memory.cuda_arena import CudaArena, SharedBlock
from hoop.transport.base import Endpoint, SharedEndpoint, SpanningEndpoint
from hoop.transport.shm_segment import Bytes


class PeerMemory(ABC):
    """This rank's memory that others of its host read, and theirs. ``open_peer_memory`` makes it."""

    def __init__(self, accelerator: Accelerator, vectors: StateVectors, rank: int, arenas: Mapping[int, Bytes]) -> None:
        """``arenas``: the host memory of each rank of this host that shares it, by rank."""
        self.accelerator, self.rank, self.arenas = accelerator, rank, dict(arenas)
        self.vectors = vectors
        self.peers: frozenset[int] = frozenset()
        """Ranks that read this rank's memory and whose memory this rank reads."""

    def vector(self, name: str, count: int) -> Tensor:
        """Allocate a float32 vector that the peers can read; an earlier vector of that name is freed."""
        return self.accelerator.shared_vector(self.vectors, name, count)

    @abstractmethod
    def share(self) -> list[str | int]:
        """Return what another rank needs to map this rank's memory."""

    @abstractmethod
    def map(self, rank: int, shared: list[str | int]) -> None:
        """Map the memory of a rank, which has shared it; raises if that is not possible."""

    @abstractmethod
    def place(self, vector: Tensor) -> int:
        """Return the place of a vector of this rank."""

    @abstractmethod
    def at(self, rank: int, place: int, count: int) -> Tensor:
        """Return the float32 vector at a place in the memory of a peer, or of this rank."""

    def close(self) -> None:
        """Drop the memory of other ranks; the accelerator unmaps it."""
        self.peers, self.arenas = frozenset(), {}


class EmulatedPeerMemory(PeerMemory):
    """Memory of emulated accelerators, in the ranks' arenas."""

    def share(self) -> list[str | int]:
        return []

    def map(self, rank: int, shared: list[str | int]) -> None:
        """The arenas are mapped already."""

    def place(self, vector: Tensor) -> int:
        return place_in(self.arenas[self.rank], vector.data_ptr()) if vector.numel() else 0

    def at(self, rank: int, place: int, count: int) -> Tensor:
        return torch.from_numpy(self.arenas[rank][place : place + 4 * count].view(np.float32))


class IpcPeerMemory(PeerMemory):
    """Memory of GPUs, mapped through CUDA IPC."""

    def __init__(self, accelerator: Accelerator, vectors: StateVectors, rank: int, arenas: Mapping[int, Bytes]) -> None:
        super().__init__(accelerator, vectors, rank, arenas)
        self._mapped: dict[int, CudaArena] = {}

    def share(self) -> list[str | int]:
        arena = self.accelerator.open_arena()
        self._mapped[self.rank] = arena
        block = arena.share()
        return [block.handle, block.capacity]

    def map(self, rank: int, shared: list[str | int]) -> None:
        handle, capacity = shared
        self._mapped[rank] = self.accelerator.attach(SharedBlock(str(handle), int(capacity)))

    def place(self, vector: Tensor) -> int:
        return self._mapped[self.rank].offset(vector.data_ptr()) if vector.numel() else 0

    def at(self, rank: int, place: int, count: int) -> Tensor:
        return self.accelerator.tensor_at(self._mapped[rank].at(place, 4 * count), count)

    def close(self) -> None:
        super().close()
        self._mapped = {}


def place_in(arena: Bytes, address: int) -> int:
    """Return the position of an address in an arena."""
    start = address - int(arena.__array_interface__["data"][0])
    assert 0 <= start < arena.nbytes, "it is a vector of the arena"
    return start


def ranks_of_host(endpoint: Endpoint) -> tuple[SharedEndpoint | None, list[int]]:
    """Return the endpoint of the ranks of this host, if they share memory, and their ranks in ``endpoint``."""
    if isinstance(endpoint, SharedEndpoint):
        return endpoint, list(range(endpoint.size))
    if isinstance(endpoint, SpanningEndpoint) and endpoint.local is not None:
        own = endpoint.hosts[endpoint.rank]
        return endpoint.local, [rank for rank, host in enumerate(endpoint.hosts) if host == own]
    return None, []


def open_peer_memory(
    communicator: Communicator, accelerator: Accelerator, vectors: StateVectors, used: bool, timeout: float
) -> PeerMemory:
    """Collective. Map the memory of the ranks of this host; ``peers`` says with which of them it was possible.

    ``used``: this rank has a part of the model. Others share nothing.
    """
    local, ranks = ranks_of_host(communicator.endpoint)
    arenas: dict[int, Bytes] = {}
    if local is not None:
        local.wait_for_peers(time.monotonic() + timeout)
        arenas = {rank: one for rank, one in zip(ranks, local.arenas, strict=True) if one is not None}
    kind = IpcPeerMemory if accelerator.cuda else EmulatedPeerMemory
    memory = kind(accelerator, vectors, communicator.rank, arenas)
    own = memory.share() if used and communicator.rank in arenas else None
    mapped = []
    for rank, shared in enumerate(all_gather_object(communicator, own, timeout)):
        if own is None or shared is None or rank == communicator.rank or rank not in arenas:
            continue
        try:
            memory.map(rank, shared)
            mapped.append(rank)
        except HoopError:  # the GPUs cannot map each other's memory: messages go through the host
            continue
    readers = all_gather_object(communicator, mapped, timeout)
    memory.peers = frozenset(rank for rank in mapped if communicator.rank in readers[rank])
    return memory
