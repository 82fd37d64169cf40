"""Rows that ranks exchange between their GPUs: of several hosts, or of one where GPUs cannot map each other's memory.

    all-to-all    rank j gets slice j of every rank's nodes
    add           rank j adds them as the tree says, on its GPU
    all-gather    every rank gets the slices of the total

A rank sends and receives 2·(n-1)/n of the vector for one node, as in a ring, and every addition is that of the other
kinds of ``PeerRows``: the bits are the same. ``DeviceGroup`` moves the bytes: NCCL between GPUs, Gloo in tests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import MergePlan
from hoop.engine.stage.device_group import DeviceGroup, Work
from hoop.engine.stage.peer_rows import SETS, PeerRows, add_along, row_expression

_NOTHING: Array = np.empty(0, np.float32)


class ExchangedRows(PeerRows):
    """Rows whose slices are exchanged by a ``DeviceGroup``. ``connect`` must succeed at all ranks before ``meet``."""

    captured = False

    def __init__(
        self,
        communicator: Communicator,
        plans: Sequence[MergePlan],
        shards: int,
        count: int,
        device: torch.device,
        group: DeviceGroup,
    ) -> None:
        """``count``: elements of a row. ``group``: has the ranks of the communicator; it is closed with the rows."""
        rank, size, mine = communicator.rank, communicator.size, plans[communicator.rank]
        width = -(-count // size)
        bounds = [min(one * width, count) for one in range(size + 1)]
        self._sent = [high - low for low, high in itertools.pairwise(bounds)]
        """Number of elements of each rank's slice."""
        length = self._sent[rank]
        zeros = partial(torch.zeros, device=device)
        self.own = zeros(SETS, len(mine.order), count)
        self._nodes = [mine.order.index(node.low) for node, _ in mine.nodes]
        """Index of the row that has each node of this rank."""
        self._none = zeros(0)
        self._received: list[tuple[Tensor, list[int]]] = []
        """For the first node of each rank, the second, and so on: this rank's slices of these nodes, and their lengths
        by rank."""
        self._leaves = [[self._none] * len(one.order) for one in plans]
        for index in range(max(len(one.nodes) for one in plans)):
            lengths = [length if index < len(one.nodes) else 0 for one in plans]
            buffer = zeros(sum(lengths))
            self._received.append((buffer, lengths))
            for plan, leaves, part in zip(plans, self._leaves, torch.split(buffer, lengths), strict=True):
                if index < len(plan.nodes):
                    leaves[plan.order.index(plan.nodes[index][0].low)] = part
        self._slice, self._gathered = zeros(width), zeros(size * width)
        self._length, self._count = length, count
        self._expression, self._group = row_expression(plans, shards), group
        orders = " | ".join(" ".join(map(str, one.order)) for one in plans)
        self._barrier = communicator.prepared(
            Operation("barrier"), f"sum of {count} elements between GPUs, shards {orders}"
        )
        others = sum(len(one.nodes) for one in plans) - len(mine.nodes)
        self.bytes_per_step = 4 * (others * length + (size - 1) * width)

    def connect(self, deadline: float) -> str:
        """Collective. Run a first exchange, in which the group connects its ranks; returns why it failed, or ""."""

        def exchange() -> None:
            for work in self._start_all_to_all(0):
                work.wait()
            for work in self._start_all_gather():
                work.wait()

        return self._group.run_on_thread(exchange, deadline)

    def meet(self, number: int, deadline: float) -> float:
        started = time.perf_counter()
        # A rank that is lost before the exchange is found here, by the links.
        self._barrier(_NOTHING, _NOTHING, deadline)
        waited = time.perf_counter() - started
        self._group.run(partial(self._start_all_to_all, number), deadline)
        add_along(self._expression, self._leaves, self._slice[: self._length])
        self._group.run(self._start_all_gather, deadline)
        return waited

    def _start_all_to_all(self, number: int) -> list[Work]:
        works = []
        for index, (buffer, lengths) in enumerate(self._received):
            has_one = index < len(self._nodes)
            source = self.own[number, self._nodes[index]] if has_one else self._none
            sent = self._sent if has_one else [0] * len(self._sent)
            works.append(self._group.start_all_to_all(buffer, source, lengths, sent))
        return works

    def _start_all_gather(self) -> list[Work]:
        return [self._group.start_all_gather(self._gathered, self._slice)]

    def sum_into(self, total: Tensor, number: int) -> None:
        total.copy_(self._gathered[: self._count])

    def close(self) -> None:
        self._group.abort()
