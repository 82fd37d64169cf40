"""Rows for the gradients of a rank's shards, readable by all ranks: how ranks with a GPU sum in the tree's order.

Every rank has a row for each of its shards, and adds them to the nodes of the reduction tree that it holds. After a
``meet`` it reads the nodes of all ranks and adds them as the tree says, itself: the sum has the same bits everywhere,
and no rank waits for the sum of another.

    ranks                                rows of another rank are read from
    one rank                             (there are none)
    one host, CUDA     IpcRows           its GPU memory, mapped through CUDA IPC
    one host, emulated MappedRows        its arena, which is shared memory
    else, NCCL         ExchangedRows     (not read: ranks exchange slices of their nodes and of the total over NCCL)
    else               StagedRows        rows are copied to the host, and summed by ``OrderedAllReduce``

``peer_row_selection.py`` chooses.

There are two sets of rows, used in turn. A rank overwrites a set two steps later. In between lies a ``meet`` that every
rank enters only after it has read that set, so one ``meet`` a step is enough.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.collectives.ordered_all_reduce import OrderedAllReduce
from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import Leaf, MergePlan, Sum, sum_expression
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.state import StateVectors
from hoop.memory.cuda_arena import CudaArena
from hoop.transport.base import SharedEndpoint

SETS = 2
"""Number of sets of rows: others read one while this rank writes the next."""


class PeerRows(ABC):
    """The exported rows of one generation and plan. All ranks make it and call ``meet`` in the same order."""

    own: Tensor
    """Rows of this rank's shards, in order, by (set, shard, element). A node is in the row of its first shard."""
    bytes_per_step = 0
    """Number of bytes that are read from other ranks in a step."""
    reads_others = False
    """True if ``sum_into`` reads the memory of other ranks."""
    captured = True
    """True if ``sum_into`` consists of kernels only, and may be part of a CUDA graph."""

    @abstractmethod
    def meet(self, number: int, deadline: float) -> float:
        """Wait until all ranks have written their rows of set ``number``; returns the seconds that it waited.

        The rows must be complete: the caller has waited for its GPU.
        """

    @abstractmethod
    def sum_into(self, total: Tensor, number: int) -> None:
        """Write the sum over all ranks' rows of set ``number`` to ``total``."""

    def close(self) -> None:  # noqa: B027 - only some map anything
        """Unmap the rows of other ranks."""


def row_expression(plans: Sequence[MergePlan], shards: int) -> Sum:
    """The sum of all shards over the ranks' nodes; a leaf's ``slot`` is the row of the node's first shard."""
    by_row = [replace(one, nodes=tuple((node, one.order.index(node.low)) for node, _ in one.nodes)) for one in plans]
    return sum_expression(by_row, shards)


def add_along(expression: Sum, leaf: Sequence[Sequence[Tensor]], total: Tensor) -> None:
    """Write the sum of an expression to ``total``; ``leaf[rank][slot]`` are its operands, which stay unchanged."""

    def build(part: Sum, out: Tensor | None) -> Tensor:
        if isinstance(part, Leaf):
            found = leaf[part.rank][part.slot]
            return found if out is None else out.copy_(found)
        left = build(part[0], None)
        right = build(part[1], None)
        return torch.add(left, right) if out is None else torch.add(left, right, out=out)

    build(expression, total)


class MappedRows(PeerRows):
    """Rows that every rank of the host has mapped."""

    reads_others = True

    def __init__(
        self, communicator: Communicator, plans: Sequence[MergePlan], shards: int, rows: Sequence[Tensor]
    ) -> None:
        """``rows``: those of each rank, (set, shard, element)."""
        self._expression = self._sum_over(plans, shards)
        self._rows = rows
        self.own = rows[communicator.rank]
        assert isinstance(communicator.endpoint, SharedEndpoint), "only ranks of one host map each other's memory"
        self._barrier = communicator.endpoint.barrier
        orders = " | ".join(" ".join(map(str, one.order)) for one in plans)
        self._call = communicator.call(f"sum of {self.own.shape[-1]} elements on the GPU, shards {orders}")
        others = sum(len(one.nodes) for one in plans) - len(plans[communicator.rank].nodes)
        self.bytes_per_step = 4 * self.own.shape[-1] * others

    @staticmethod
    def _sum_over(plans: Sequence[MergePlan], shards: int) -> Sum:
        """Return the sum of all shards over the rows."""
        return row_expression(plans, shards)

    def meet(self, number: int, deadline: float) -> float:
        started = time.perf_counter()
        self._barrier(deadline, self._call)
        return time.perf_counter() - started

    def sum_into(self, total: Tensor, number: int) -> None:
        add_along(self._expression, [list(rows[number]) for rows in self._rows], total)


class IpcRows(MappedRows):
    """Rows on GPUs of one host, mapped through CUDA IPC."""

    def __init__(
        self,
        communicator: Communicator,
        plans: Sequence[MergePlan],
        shards: int,
        rows: Sequence[Tensor],
        arenas: Sequence[CudaArena],
    ) -> None:
        super().__init__(communicator, plans, shards, rows)
        self._arenas = list(arenas)

    def close(self) -> None:
        self._rows = []
        for arena in self._arenas:
            arena.close()
        self._arenas = []


class StagedRows(PeerRows):
    """Rows that are summed on the host: ranks of several hosts, or GPUs that cannot map each other's memory."""

    captured = False

    def __init__(
        self,
        communicator: Communicator,
        plans: Sequence[MergePlan],
        shards: int,
        count: int,
        accelerator: Accelerator,
        vectors: StateVectors,
        deadline: float,
    ) -> None:
        """Collective. ``count``: elements of a row."""
        mine = plans[communicator.rank]
        self.own = torch.zeros(SETS, len(mine.order), count, device=accelerator.device)
        self._nodes = [(slot, mine.order.index(node.low)) for node, slot in mine.nodes]
        self._host = accelerator.pinned_buffer(count)
        self._slots: Array = vectors.new("staged.slots", mine.slots * count).reshape(mine.slots, count)
        self._total: Array = vectors.new("staged.total", count)
        self._reduce = OrderedAllReduce(communicator, plans, shards, self._slots, self._total, deadline)
        self._accelerator = accelerator

    def meet(self, number: int, deadline: float) -> float:
        for slot, row in self._nodes:
            torch.from_numpy(self._slots[slot]).copy_(self.own[number, row])
        waited = self._reduce(deadline)
        self._accelerator.synchronize()  # the last upload may still read the pinned buffer
        self._host.copy_(torch.from_numpy(self._reduce.result))
        return waited

    def sum_into(self, total: Tensor, number: int) -> None:
        total.copy_(self._host, non_blocking=True)
