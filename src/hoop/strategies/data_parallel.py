"""Data parallel: every device holds the whole model and computes its share of the shards; gradients are added up.

    rank 0 | 0L0 0F0 0B0 0L1 0F1 0B1 0A 0U
    rank 1 | 0L2 0F2 0B2 0L3 0F3 0B3 0A 0U

A rank sends 2(n-1)/n times the weights a step, and holds one micro-batch's activations at a time. A device twice as
fast gets twice the shards; the result is the same, because a shard's gradient has its place in the sum whoever
computes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule
from hoop.strategies.base import check_sizes, shares


@dataclass(frozen=True)
class DataParallel:
    """Every device holds the model; gradients are all-reduced once a step."""

    name: ClassVar[str] = "data"

    @property
    def synchronous(self) -> bool:
        return True

    @property
    def versions(self) -> int:
        return 1

    @property
    def spec(self) -> str:
        return self.name

    def describe(self) -> str:
        return "data parallel: every device holds the whole model, gradients are added up once a step"

    def stages(self, devices: int) -> int:
        return 1

    def plan(self, devices: int, micros: int, speeds: Sequence[float] | None = None) -> Plan:
        check_sizes(devices, micros, speeds)
        end = (Instruction(InstructionKind.REDUCE, 0), Instruction(InstructionKind.UPDATE, 0))
        ranks = tuple((*whole_model(share), *end) for share in shares(micros, devices, speeds))
        return Plan(micros, (tuple(range(devices)),), ranks)

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return None


def whole_model(micros: Sequence[int]) -> Iterator[Instruction]:
    """Each micro-batch in turn through a model that is all on one device."""
    for micro in micros:
        for kind in (InstructionKind.LOAD, InstructionKind.FORWARD, InstructionKind.BACKWARD):
            yield Instruction(kind, 0, micro)
