"""Written schedules of a pipeline: the order in which each rank computes. p ranks, m micro-batches, v slices a rank.

A forward costs 1, a backward 2, its halves 1 each; the bubble is what a rank waits, as a share of what it computes.

    schedule      bubble            activations held by rank r
    gpipe         (p-1)/m           m
    1f1b          (p-1)/m           p-r
    interleaved   (p-1)/(m v)       up to (p-r-1)·2 + (v-1)p + 1 of a slice    (m a multiple of p)
    zero-bubble   (p-1)/(3m)        about p                                    (ZB-H1; m >= p)

``zero-bubble`` is ZB-H1: a backward is cut in two, the gradient of the input, which the rank before waits for, and the
gradient of the weights, which nobody waits for and which therefore fills what would be a bubble.

Pipeline: the model's stages on one device each, micro-batches passed along under a written schedule.

1F1B, 3 stages, 4 micro-batches; what it looks like on a clock is in docs/plans.md:

    rank 0 | 0L0 0F0 0L1 0F1 0L2 0F2 0B0 0L3 0F3 0B1 0B2 0B3 0A  0U
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1A  1U
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2A  2U

Only activations and their gradients travel, and no device holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.builder import build_plan
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule
from hoop.strategies.base import check_sizes

Order = Iterator[Instruction]


def gpipe(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """All forwards, then all backwards."""
    for micro in micros:
        yield Instruction(InstructionKind.FORWARD, rank, micro)
    for micro in micros:
        yield Instruction(InstructionKind.BACKWARD, rank, micro)


def one_forward_one_backward(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """As many forwards as there are stages behind this one, then a forward and a backward in turn."""
    forwards = [Instruction(InstructionKind.FORWARD, rank, micro) for micro in micros]
    backwards = [Instruction(InstructionKind.BACKWARD, rank, micro) for micro in micros]
    return _alternate(forwards, backwards, ranks - rank - 1)


def interleaved(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """1F1B where rank r holds the stages r, r + p, r + 2p …: micro-batches go round in groups of p.

    Where m is not a multiple of p, the order is that of the next multiple with the micro-batches that do not exist left
    out: what is legal with them is legal without.
    """
    groups = [range(start, start + ranks) for start in range(micros.start, micros.stop, ranks)]
    held = range(rank, ranks * slices, ranks)
    forwards = [
        Instruction(InstructionKind.FORWARD, stage, micro)
        for group in groups
        for stage in held
        for micro in group
    ]
    backwards = [
        Instruction(InstructionKind.BACKWARD, stage, micro)
        for group in groups
        for stage in reversed(held)
        for micro in group
    ]
    order = _alternate(forwards, backwards, (ranks - rank - 1) * 2 + (slices - 1) * ranks)
    return (one for one in order if one.micro in micros)


def zero_bubble(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """1F1B with split backwards: the weights' half of rank r runs r micro-batches late, and the rest at the end."""
    forwards = [Instruction(InstructionKind.FORWARD, rank, micro) for micro in micros]
    backwards = [Instruction(InstructionKind.BACKWARD_INPUT, rank, micro) for micro in micros]
    late = iter(micros)
    done = 0
    for one in _alternate(forwards, backwards, ranks - rank - 1):
        yield one
        if one.kind is InstructionKind.BACKWARD_INPUT:
            done += 1
            if done > rank:
                yield Instruction(InstructionKind.BACKWARD_WEIGHT, rank, next(late))
    for micro in late:
        yield Instruction(InstructionKind.BACKWARD_WEIGHT, rank, micro)


def _alternate(forwards: list[Instruction], backwards: list[Instruction], ahead: int) -> Order:
    """Forwards stay ``ahead`` of backwards, and one more while a backward is awaited."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


SCHEDULES: dict[str, Callable[[int, int, range, int], Order]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


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
        return build_plan(micros, holders, lines)

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return None


def check_schedule(schedule: str, slices: int) -> None:
    if schedule not in SCHEDULES:
        raise InvalidArgument(f"schedule: {schedule!r} is none; choose {', '.join(SCHEDULES)}")
    if slices < 1:
        raise InvalidArgument(f"slices: {slices}; a device holds at least 1")
