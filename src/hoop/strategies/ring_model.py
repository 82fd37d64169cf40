"""RingTMP, ring model parallel: stages round a ring, and every device decides by what its neighbours delivered.

There is no schedule and no scheduler. With v slices a device the ring closes on itself: 3 devices, 2 slices:

    stage 0 ──▶ stage 1 ──▶ stage 2          rank 0 holds stages 0 and 3
       rank 0      rank 1      rank 2        rank 1 holds stages 1 and 4
       ▲                         │           rank 2 holds stages 2 and 5
       └── stage 3 ◀─────────────┘

Synchronously it ends each step with a flush, and trains exactly like one device. Asynchronously the next step's
micro-batches follow at once, with weights one update old (strategies/ring_rule.py says which, and why nobody waits for
ever).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan
from hoop.plan.rehearse import rehearse
from hoop.plan.rules import Rule
from hoop.strategies.ring_rule import RingRule
from hoop.strategies.strategy import check_sizes


@dataclass(frozen=True)
class RingModel:
    """Stages round a ring, each device deciding by its neighbours alone."""

    slices: int = 1
    """Stages a device."""
    limit: int | None = None
    """Micro-batches a device may hold; None: as many as keep it busy if all devices are equally fast."""
    asynchronous: bool = False

    name: ClassVar[str] = "ring"

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise InvalidArgument(f"slices: {self.slices}; a device holds at least 1")
        if self.limit is not None and self.limit < 1:
            raise InvalidArgument(f"limit: {self.limit}; a device must be allowed at least 1 micro-batch")

    @property
    def synchronous(self) -> bool:
        return not self.asynchronous

    @property
    def versions(self) -> int:
        return 2 if self.asynchronous else 1

    @property
    def spec(self) -> str:
        limit = [] if self.limit is None else [f"limit={self.limit}"]
        return f"{self.name}:" + ",".join(
            ["async" if self.asynchronous else "sync", f"slices={self.slices}", *limit]
        )

    def describe(self) -> str:
        how = "no flush, weights one update old" if self.asynchronous else "a flush a step"
        return (
            f"RingTMP: the model's stages round a ring, each device deciding by its neighbours alone; {how}"
        )

    def stages(self, devices: int) -> int:
        return devices * self.slices

    def may_hold(self, rank: int, devices: int) -> int:
        """How many micro-batches a device may hold.

        With one slice a micro-batch comes back to rank r of p after 3(p-r) units of time and asks for 3 of the
        device's, so p-r of them keep it busy, and the order that follows is 1F1B's. With several slices a device meets
        the same micro-batch again in between and never knows when: twice the ring loses little.
        """
        if self.limit is not None:
            return self.limit
        return devices - rank if self.slices == 1 else 2 * devices

    def plan(self, devices: int, micros: int, speeds: Sequence[float] | None = None) -> Plan:
        """One step, in the order that the rules find when all devices are equally fast."""
        check_sizes(devices, micros, speeds)
        holders = tuple((stage % devices,) for stage in range(self.stages(devices)))
        empty = Plan(micros, holders, ((),) * devices)
        return Plan(micros, holders, rehearse([self._rule(empty, rank, 1) for rank in range(devices)]))

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return self._rule(plan, rank, steps)

    def _rule(self, plan: Plan, rank: int, steps: int) -> RingRule:
        return RingRule(plan, rank, steps, self.may_hold(rank, plan.size), int(self.asynchronous))
