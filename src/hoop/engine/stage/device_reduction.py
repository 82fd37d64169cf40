"""All-reduce of a stage's gradients on the GPUs of one host: each rank adds the rows of all ranks in the tree's order.

    each rank    wait for its GPU | meet | add the rows of all ranks | wait for its GPU | sum the tails in the arenas

The ranks meet when their rows are complete. The tails (metrics, votes, provenance) are summed in host memory. That sum
begins with a barrier, after which all ranks have read all rows: the next step may overwrite them.

The sum has the bits of ``GradientReducer``, which adds the same nodes in the same order in host memory, and is used
where a rank cannot map the memory of another.
"""

from __future__ import annotations

from collections.abc import Sequence

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.shard_tree import MergePlan, Sum, sum_expression
from hoop.engine.stage.gpu_stage import GpuStageState
from hoop.engine.stage.peer_memory import PeerMemory
from hoop.engine.stage.peer_rows import MappedRows
from hoop.transport.base import SharedEndpoint, WaitingWork, remaining


class SlotRows(MappedRows):
    """The rows of all ranks' gradient slots: a node is in the row of its slot. There is one set."""

    @staticmethod
    def _sum_over(plans: Sequence[MergePlan], shards: int) -> Sum:
        return sum_expression(plans, shards)

    def close(self) -> None:
        self._rows = []


class DeviceGradientReducer:
    """Reduces the gradients of one stage on the GPU. ``open_device_reducer`` makes it."""

    num_buckets = 0
    """0: no part of the gradient is reduced during the backward."""

    def __init__(self, stage_state: GpuStageState, rows: SlotRows, tails: OrderedAllReduce) -> None:
        self._accelerator, self._rows, self._tails = stage_state.accelerator, rows, tails
        self._total = stage_state.select_device_total()
        self._bytes_read = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes read from other ranks' memory."""
        return self._bytes_read + self._tails.bytes_moved

    def start(self, bucket: int, micro: int, deadline: float) -> None:
        raise AssertionError("there are no buckets")

    def __call__(self, deadline: float, work: WaitingWork | None = None) -> float:
        """Reduce; returns the seconds that it waited for other ranks. ``work``: done while it waits."""
        self._accelerator.synchronize()
        waited = self._rows.meet(0, deadline)
        self._rows.sum_into(self._total, 0)
        self._accelerator.synchronize()
        self._bytes_read += self._rows.bytes_per_step
        return waited + self._tails(deadline, work)

    def close(self) -> None:
        self._rows.close()


def open_device_reducer(
    group: Communicator,
    ranks: Sequence[int],
    holdings: Sequence[MergePlan],
    shards: int,
    stage_state: GpuStageState,
    memory: PeerMemory,
    deadline: float,
) -> DeviceGradientReducer | None:
    """Collective over ``group``, the ranks that hold the stage; None if they cannot read each other's memory.

    ``ranks``: their numbers in the whole communicator. ``holdings``, ``shards``: see ``GradientReducer``.
    """
    others = set(ranks) - {memory.rank}
    possible = isinstance(group.endpoint, SharedEndpoint) and others <= memory.peers
    own = [memory.place(stage_state.rows), len(stage_state.rows)] if possible else None
    found = all_gather_object(group, own, remaining(deadline))
    if any(one is None for one in found):
        return None
    layout = stage_state.layout
    rows = [
        memory.at(rank, place, count * layout.state).view(1, count, layout.state)
        for rank, (place, count) in zip(ranks, found, strict=True)
    ]
    tail = layout.state, layout.total
    slots, total = stage_state.slots, stage_state.total_buffer
    return DeviceGradientReducer(
        stage_state,
        SlotRows(group, holdings, shards, rows),
        OrderedAllReduce(group, holdings, shards, slots, total, deadline, tail),
    )
