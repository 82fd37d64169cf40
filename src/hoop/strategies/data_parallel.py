"""Data parallel: every device holds the whole model and computes its share of the shards; gradients are all-reduced.

    rank 0 | 0L0 0F0 0B0 0L1 0F1 0B1 0A 0U
    rank 1 | 0L2 0F2 0B2 0L3 0F3 0B3 0A 0U

A rank sends 2(n-1)/n times the weights per step and holds one micro-batch's activations at a time. A device twice as
fast gets twice the shards. The result does not change: a shard's gradient has a fixed place in the sum, independent of
the rank that computes it.

With ``sharded`` (ZeRO stage 1) a rank updates only its slice of the weights, and has the optimizer state of that slice
only. Ranks reduce-scatter the gradients and gather the updated slices of the weights: the bytes of an all-reduce.
Updates are elementwise, so the weights are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy, SynchronousStrategy, check_sizes, split_microbatches


@dataclass(frozen=True)
class DataParallel(SynchronousStrategy):
    """Every device holds the model; gradients are all-reduced once per step."""

    sharded: bool = False
    """True if each device updates a slice of the weights, of which it has the optimizer state (ZeRO stage 1)."""

    name: ClassVar[str] = "data"

    @property
    def replicated(self) -> bool:
        return not self.sharded

    @property
    def spec(self) -> str:
        return f"{self.name}:sharded" if self.sharded else self.name

    def describe(self) -> str:
        if self.sharded:
            return "data parallel: every device holds the whole model, and updates a slice of the weights"
        return "data parallel: every device holds the whole model, gradients are added up once a step"

    def stages(self, devices: int) -> int:
        return 1

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        check_sizes(devices, num_microbatches, speeds)
        end = (Instruction(InstructionKind.REDUCE, 0), Instruction(InstructionKind.UPDATE, 0))
        ranks = tuple(
            (*forward_backward(share), *end) for share in split_microbatches(num_microbatches, devices, speeds)
        )
        sharded = self.sharded and devices > 1
        return Plan(num_microbatches, (tuple(range(devices)),), ranks, sharded_update=sharded)


@dataclass(frozen=True)
class HostOrderedDataParallel(DataParallel):
    """Data parallel whose shards are in the order of hosts, where ranks are not.

        hosts A B A B:  rank 0 | shards 0, 1    rank 2 | shards 2, 3    rank 1 | shards 4, 5    rank 3 | shards 6, 7

    The shards of a host are then neighbours in the sum, so that its ranks add them before anything is sent to others.
    """

    hosts: tuple[Hashable, ...] = ()
    """Host of each rank; ranks with equal values share a host."""

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        if len(self.hosts) != devices:
            raise InvalidArgument(f"devices: {devices}, and the hosts of {len(self.hosts)} are known")
        order = host_order(self.hosts)
        ordered = super().plan(devices, num_microbatches, speeds and [speeds[rank] for rank in order])
        ranks = dict(zip(order, ordered.ranks, strict=True))
        return replace(ordered, ranks=tuple(ranks[rank] for rank in range(devices)))


def host_order(hosts: Sequence[Hashable]) -> list[int]:
    """The ranks, host by host; hosts in the order of their first ranks."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))


def for_hosts(strategy: Strategy, hosts: Sequence[Hashable]) -> Strategy:
    """The strategy, with the shards of a data parallel one in the order of these hosts, one for each rank.

    ``hosts``: empty: all ranks are on one host. The engine calls it for every generation.
    """
    if not isinstance(strategy, DataParallel):
        return strategy
    ordered = host_order(hosts) == list(range(len(hosts)))
    if ordered:
        return DataParallel(strategy.sharded)
    return HostOrderedDataParallel(strategy.sharded, tuple(hosts))


def forward_backward(microbatches: Sequence[int]) -> Iterator[Instruction]:
    """Load, forward and backward of each micro-batch in turn, for a device that holds the whole model."""
    for micro in microbatches:
        for kind in (InstructionKind.LOAD, InstructionKind.FORWARD, InstructionKind.BACKWARD):
            yield Instruction(kind, 0, micro)
