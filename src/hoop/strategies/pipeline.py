"""Pipeline: the model's stages on one device each, micro-batches passed along under a written schedule.

1F1B, 3 stages, 4 micro-batches; what it looks like on a clock is in docs/plans.md:

    rank 0 | 0L0 0F0 0L1 0F1 0L2 0F2 0B0 0L3 0F3 0B1 0B2 0B3 0A  0U
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1A  1U
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2A  2U

Only activations and their gradients travel, and no device holds the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule
from hoop.plan.weave import weave
from hoop.strategies.schedules import SCHEDULES
from hoop.strategies.strategy import check_sizes


@dataclass(frozen=True)
class Pipeline:
    """Stages under a written schedule: 1f1b, gpipe, interleaved or zero-bubble."""

    schedule: str = "1f1b"
    slices: int = 2
    """Stages a device, where the schedule is interleaved; the others have one."""

    name: ClassVar[str] = "pipeline"

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.slices)

    @property
    def synchronous(self) -> bool:
        return True

    @property
    def versions(self) -> int:
        return 1

    @property
    def spec(self) -> str:
        return f"{self.name}:schedule={self.schedule}" + (f",slices={self.slices}" if self._sliced else "")

    @property
    def _sliced(self) -> bool:
        return self.schedule == "interleaved"

    def describe(self) -> str:
        sliced = f", {self.slices} slices a device" if self._sliced else ""
        return f"pipeline: the model's stages on one device each, under the {self.schedule} schedule{sliced}"

    def stages(self, devices: int) -> int:
        return devices * (self.slices if self._sliced else 1)

    def plan(self, devices: int, micros: int, speeds: Sequence[float] | None = None) -> Plan:
        """Speeds make no difference here: they decide where the model is cut."""
        check_sizes(devices, micros, speeds)
        holders = [(stage % devices,) for stage in range(self.stages(devices))]
        order = SCHEDULES[self.schedule]
        lines = [list(order(rank, devices, range(micros), self.slices)) for rank in range(devices)]
        return weave(micros, holders, lines)

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return None


def check_schedule(schedule: str, slices: int) -> None:
    if schedule not in SCHEDULES:
        raise InvalidArgument(f"schedule: {schedule!r} is none; choose {', '.join(SCHEDULES)}")
    if slices < 1:
        raise InvalidArgument(f"slices: {slices}; a device holds at least 1")
