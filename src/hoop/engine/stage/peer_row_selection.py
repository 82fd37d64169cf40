"""Chooses how ranks with a GPU read each other's rows: the kinds are those of ``peer_rows.py``."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.collectives.shard_tree import MergePlan
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.device_group import DeviceGroup
from hoop.engine.stage.exchanged_rows import ExchangedRows
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.nccl_group import CONNECT_SHARE, agree, open_nccl_group
from hoop.engine.stage.peer_rows import SETS, IpcRows, MappedRows, PeerRows, StagedRows
from hoop.engine.stage.state import StateVectors
from hoop.errors import HoopError
from hoop.memory.cuda_arena import CudaArena, SharedBlock
from hoop.transport.base import SharedEndpoint

log = logging.getLogger("hoop.engine")


def open_peer_rows(
    communicator: Communicator,
    plans: Sequence[MergePlan],
    shards: int,
    state: ResidentStageState,
    vectors: StateVectors,
    deadline: float,
    timeout: float,
) -> PeerRows:
    """Collective. Chooses the way in which these ranks read each other's rows; the same at all of them."""
    count = state.layout.total
    if isinstance(communicator.endpoint, SharedEndpoint):
        rows = (
            _map_over_ipc(communicator, plans, state, timeout)
            if state.accelerator.cuda
            else _map_arenas(communicator, plans, count, vectors, deadline)
        )
        if isinstance(rows, list):
            return MappedRows(communicator, plans, shards, rows)
        if rows is not None:
            return IpcRows(communicator, plans, shards, *rows)
    exchanged = _exchange(communicator, plans, shards, count, state.accelerator, timeout)
    if isinstance(exchanged, PeerRows):
        return exchanged
    log.info("gradients are summed in host memory, not over NCCL: %s", exchanged)
    return StagedRows(communicator, plans, shards, count, state.accelerator, vectors, deadline)


def open_group(communicator: Communicator, accelerator: Accelerator, timeout: float) -> DeviceGroup | str:
    """Collective. A group that moves bytes between these ranks' GPUs, or at all ranks the reason why there is none."""
    return open_nccl_group(communicator, accelerator, timeout) if accelerator.cuda else "the GPU is emulated"


def _exchange(
    communicator: Communicator,
    plans: Sequence[MergePlan],
    shards: int,
    count: int,
    accelerator: Accelerator,
    timeout: float,
) -> ExchangedRows | str:
    """Rows that are exchanged between the GPUs, after a first exchange; or the reason why they cannot be."""
    group = open_group(communicator, accelerator, timeout)
    if isinstance(group, str):
        return group
    rows = ExchangedRows(communicator, plans, shards, count, accelerator.device, group)
    problem = rows.connect(time.monotonic() + CONNECT_SHARE * timeout)
    agreed = agree(communicator, group, problem, timeout)
    return agreed if isinstance(agreed, str) else rows


def _map_arenas(
    communicator: Communicator, plans: Sequence[MergePlan], count: int, vectors: StateVectors, deadline: float
) -> list[Tensor] | None:
    """Rows in the ranks' arenas, which are shared memory; None if not all ranks can map them."""
    mine = plans[communicator.rank]
    own = vectors.new("rows", SETS * len(mine.order) * count)
    preparing = communicator.call(f"map rows of {count} elements")
    unused = vectors.new("rows.unused", 1)
    mapped = communicator.map_peer_buffers(own, unused, deadline, preparing)
    if mapped is None:
        return None
    return [
        torch.from_numpy(rows).view(SETS, len(plan.order), count) for rows, plan in zip(mapped[0], plans, strict=True)
    ]


def _map_over_ipc(
    communicator: Communicator, plans: Sequence[MergePlan], state: ResidentStageState, timeout: float
) -> tuple[list[Tensor], list[CudaArena]] | None:
    """Rows on the ranks' GPUs; None if one of them cannot map another's."""
    mine, count, accelerator = plans[communicator.rank], state.layout.total, state.accelerator
    own = accelerator.vector("rows", SETS * len(mine.order) * count)
    accelerator.synchronize()
    assert accelerator.arena is not None, "vector() made it"
    block = accelerator.arena.share()
    offset = accelerator.arena.offset(own.data_ptr()) if own.numel() else 0
    blocks = all_gather_object(communicator, [block.handle, block.capacity, offset], timeout)
    rows: list[Tensor] = []
    arenas: list[CudaArena] = []
    problem = ""
    try:
        for rank, (handle, capacity, start) in enumerate(blocks):
            size = SETS * len(plans[rank].order) * count
            if rank == communicator.rank:
                rows.append(own.view(SETS, len(mine.order), count))
                continue
            arenas.append(CudaArena.attach(SharedBlock(handle, capacity)))
            address = arenas[-1].at(start, 4 * size)
            rows.append(accelerator.tensor_at(address, size).view(SETS, len(plans[rank].order), count))
    except HoopError as error:
        problem = str(error)
    if any(all_gather_object(communicator, problem, timeout)):
        rows.clear()
        for arena in arenas:
            arena.close()
        return None
    return rows, arenas
