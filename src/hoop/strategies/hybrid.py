"""Hybrid: a mesh of replicas x stages. Each replica is a pipeline; gradients are all-reduced across a stage's replicas.

Rank = replica · stages + stage. 2 replicas of 2 stages, 4 micro-batches:

    rank 0 | 0L0 0F0 0L1 0F1 0B0 0B1 0A  0U      replica 0, stage 0 ┐
    rank 1 | 1F0 1B0 1F1 1B1 1A  1U              replica 0, stage 1 │┐
    rank 2 | 0L2 0F2 0L3 0F3 0B2 0B3 0A  0U      replica 1, stage 0 ┘│  0A among ranks 0 and 2
    rank 3 | 1F2 1B2 1F3 1B3 1A  1U              replica 1, stage 1  ┘  1A among ranks 1 and 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.builder import build_plan
from hoop.plan.plan import Plan
from hoop.strategies.base import SynchronousStrategy, check_count, check_sizes, split_microbatches
from hoop.strategies.pipeline import SCHEDULES, check_schedule


@dataclass(frozen=True)
class Hybrid(SynchronousStrategy):
    """Data-parallel replicas, each a pipeline; each replica computes its share of the shards."""

    replicas: int = 2
    schedule: str = "1f1b"
    slices: int = 2
    """Stages per device under the interleaved schedule; other schedules use 1."""

    name: ClassVar[str] = "hybrid"
    replicated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.slices)
        check_count("replicas", self.replicas, "there is at least 1")

    @property
    def spec(self) -> str:
        slices = f",slices={self.slices}" if self._interleaved else ""
        return f"{self.name}:replicas={self.replicas},schedule={self.schedule}{slices}"

    @property
    def _interleaved(self) -> bool:
        return self.schedule == "interleaved"

    def describe(self) -> str:
        return (
            f"hybrid: {self.replicas} replicas, each a pipeline under the {self.schedule} schedule; "
            "gradients are added up across replicas"
        )

    def stages(self, devices: int) -> int:
        return self._depth(devices) * (self.slices if self._interleaved else 1)

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        """Shards are split by replica speed; a replica is as fast as its slowest device."""
        check_sizes(devices, num_microbatches, speeds, self.stages)
        depth = self._depth(devices)
        replica_speeds = speeds and [min(speeds[first : first + depth]) for first in range(0, devices, depth)]
        order = SCHEDULES[self.schedule]
        lines = [
            list(order(rank, depth, share, self.slices))
            for share in split_microbatches(num_microbatches, self.replicas, replica_speeds)
            for rank in range(depth)
        ]
        holders = [range(stage % depth, devices, depth) for stage in range(self.stages(devices))]
        return build_plan(num_microbatches, holders, lines)

    def _depth(self, devices: int) -> int:
        """Devices per replica."""
        if devices < self.replicas or devices % self.replicas:
            raise InvalidArgument(
                f"devices: {devices} cannot be {self.replicas} equal replicas; take a multiple of {self.replicas}, "
                f"or a number of replicas that divides {devices}"
            )
        return devices // self.replicas
