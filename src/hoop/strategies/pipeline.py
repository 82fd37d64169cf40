"""Pipeline parallelism: one stage (or several slices) of the model per device, micro-batches under a fixed schedule.

A schedule gives the order in which each rank computes. p ranks, m micro-batches, v slices per rank. A forward costs 1
unit, a backward 2, each half of a backward 1; the bubble is a rank's waiting time as a fraction of its compute time.

    schedule      bubble            activations held by rank r
    gpipe         (p-1)/m           m
    1f1b          (p-1)/m           p-r
    interleaved   (p-1)/(m v)       up to (p-r-1)·2 + (v-1)p + 1 of a slice    (m a multiple of p)
    zero-bubble   (p-1)/(3m)        about p                                    (ZB-H1; m >= p)

``zero-bubble`` is ZB-H1: a backward is split into the input gradient, for which the previous rank waits, and the weight
gradient, for which no rank waits and which therefore fills bubbles.

1F1B, 3 stages, 4 micro-batches (docs/plans.md has the timeline):

    rank 0 | 0L0 0F0 0L1 0F1 0L2 0F2 0B0 0L3 0F3 0B1 0B2 0B3 0A  0U
    rank 1 | 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1A  1U
    rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2A  2U

Ranks send only activations and their gradients, and no device holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.builder import build_plan
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.strategies.base import SynchronousStrategy, check_sizes, check_slices

Order = Iterator[Instruction]
"""Function that returns a rank's forwards and backwards in order. ``ranks`` below is p, ``slices`` is v."""


def gpipe(rank: int, ranks: int, microbatches: range, slices: int = 1) -> Order:
    """All forwards, then all backwards."""
    for micro in microbatches:
        yield Instruction(InstructionKind.FORWARD, rank, micro)
    for micro in microbatches:
        yield Instruction(InstructionKind.BACKWARD, rank, micro)


def one_forward_one_backward(rank: int, ranks: int, microbatches: range, slices: int = 1) -> Order:
    """One forward for each later stage to fill the pipeline, then one forward and one backward in turn."""
    forwards = [Instruction(InstructionKind.FORWARD, rank, micro) for micro in microbatches]
    backwards = [Instruction(InstructionKind.BACKWARD, rank, micro) for micro in microbatches]
    return _alternate(forwards, backwards, ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: range, slices: int = 1) -> Order:
    """1F1B where rank r holds stages r, r + p, r + 2p …; micro-batches pass through the slices in groups of p.

    If m is not a multiple of p, the order is that of the next multiple without the micro-batches that do not exist;
    removing them keeps the order valid.
    """
    groups = [range(start, start + ranks) for start in range(microbatches.start, microbatches.stop, ranks)]
    held = range(rank, ranks * slices, ranks)
    forwards = [
        Instruction(InstructionKind.FORWARD, stage, micro) for group in groups for stage in held for micro in group
    ]
    backwards = [
        Instruction(InstructionKind.BACKWARD, stage, micro)
        for group in groups
        for stage in reversed(held)
        for micro in group
    ]
    order = _alternate(forwards, backwards, (ranks - rank - 1) * 2 + (slices - 1) * ranks)
    return (one for one in order if one.micro in microbatches)


def zero_bubble(rank: int, ranks: int, microbatches: range, slices: int = 1) -> Order:
    """1F1B with split backwards: on rank r weight gradients run r micro-batches late, the rest at the end."""
    forwards = [Instruction(InstructionKind.FORWARD, rank, micro) for micro in microbatches]
    backwards = [Instruction(InstructionKind.BACKWARD_INPUT, rank, micro) for micro in microbatches]
    weight_micros = iter(microbatches)
    num_input_halves = 0
    for one in _alternate(forwards, backwards, ranks - rank - 1):
        yield one
        if one.kind is InstructionKind.BACKWARD_INPUT:
            num_input_halves += 1
            if num_input_halves > rank:
                yield Instruction(InstructionKind.BACKWARD_WEIGHT, rank, next(weight_micros))
    for micro in weight_micros:
        yield Instruction(InstructionKind.BACKWARD_WEIGHT, rank, micro)


def _alternate(forwards: list[Instruction], backwards: list[Instruction], ahead: int) -> Order:
    """``ahead`` forwards first, then one forward and one backward in turn, then the remaining backwards."""
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
class Pipeline(SynchronousStrategy):
    """Pipeline stages under a fixed schedule: 1f1b, gpipe, interleaved or zero-bubble."""

    schedule: str = "1f1b"
    slices: int = 2
    """Stages per device under the interleaved schedule; other schedules use 1."""

    name: ClassVar[str] = "pipeline"
    replicated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_schedule(self.schedule, self.slices)

    @property
    def spec(self) -> str:
        return f"{self.name}:schedule={self.schedule}" + (f",slices={self.slices}" if self._interleaved else "")

    @property
    def _interleaved(self) -> bool:
        return self.schedule == "interleaved"

    def describe(self) -> str:
        slices = f", {self.slices} slices a device" if self._interleaved else ""
        return f"pipeline: the model's stages on one device each, under the {self.schedule} schedule{slices}"

    def stages(self, devices: int) -> int:
        return devices * (self.slices if self._interleaved else 1)

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        """Speeds do not change the plan; they change where the model is cut."""
        check_sizes(devices, num_microbatches, speeds, self.stages)
        holders = [(stage % devices,) for stage in range(self.stages(devices))]
        order = SCHEDULES[self.schedule]
        lines = [list(order(rank, devices, range(num_microbatches), self.slices)) for rank in range(devices)]
        return build_plan(num_microbatches, holders, lines)


def check_schedule(schedule: str, slices: int) -> None:
    if schedule not in SCHEDULES:
        raise InvalidArgument(f"schedule: {schedule!r} is unknown; choose {', '.join(SCHEDULES)}")
    check_slices(slices)
