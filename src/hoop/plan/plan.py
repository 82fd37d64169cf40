"""``Plan``: one training step as data, and what can be counted in it without running it.

Strategies make plans; the engine executes them, the simulator prices them, the report draws them.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.plan.instructions import GRADIENT_KINDS, WITH_PEER, Instruction, InstructionKind
from hoop.texts import parse_json


@dataclass(frozen=True)
class Plan:
    """The instructions of every rank for one step, and the ranks that hold each stage."""

    num_microbatches: int
    """Number of micro-batches (shards) in the global batch."""
    holders: tuple[tuple[int, ...], ...]
    """Ranks that hold the weights of each stage: one rank per replica."""
    ranks: tuple[tuple[Instruction, ...], ...]
    """Instructions of each rank, in order."""
    servers: tuple[int, ...] = ()
    """Rank of the parameter server of each slice of the weights; empty without parameter servers. The workers of a
    parameter server hold the whole model as stage 0."""
    sharded_update: bool = False
    """True if each holder of stage 0 updates only its slice of the weights, and then gathers the slices of the
    others."""

    @property
    def stages(self) -> int:
        return len(self.holders)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[tuple[int, Instruction]]:
        """Pairs of rank and instruction, rank by rank."""
        return ((rank, one) for rank, instructions in enumerate(self.ranks) for one in instructions)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights this rank holds."""
        return tuple(stage for stage, ranks in enumerate(self.holders) if rank in ranks)

    def computed_by(self, rank: int, stage: int) -> tuple[int, ...]:
        """The micro-batches for which this rank computes the stage's weight gradient, in execution order."""
        return tuple(one.micro for one in self.ranks[rank] if one.kind in GRADIENT_KINDS and one.stage == stage)

    def grid(self, messages: bool = False) -> str:
        """The instructions as a text table, one line per rank; sends and receives only if ``messages``."""
        rows = [
            [str(one) for one in instructions if messages or one.kind not in WITH_PEER] for instructions in self.ranks
        ]
        width = max((len(cell) for row in rows for cell in row), default=1)
        rank_width = len(str(len(rows) - 1))
        return "\n".join(
            f"rank {rank:>{rank_width}} | " + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
            for rank, row in enumerate(rows)
        )

    def to_json(self) -> str:
        data = {
            "micros": self.num_microbatches,
            "holders": self.holders,
            "ranks": [" ".join(map(str, instructions)) for instructions in self.ranks],
        }
        data |= {"servers": self.servers} if self.servers else {}
        return json.dumps(data | ({"sharded_update": True} if self.sharded_update else {}))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of ``to_json``; the error names the missing or malformed field."""
        try:
            data = parse_json(text)
            num_microbatches, holders, ranks = data["micros"], data["holders"], data["ranks"]
            return cls(
                int(num_microbatches),
                tuple(tuple(int(rank) for rank in group) for group in holders),
                tuple(tuple(map(Instruction.parse, line.split())) for line in ranks),
                tuple(int(rank) for rank in data.get("servers", ())),
                data.get("sharded_update", False) is True,
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"plan: not a plan in JSON: {error!r}") from None


def split_evenly(items: int, parts: int) -> list[range]:
    """Split ``range(items)`` into ``parts`` contiguous, nearly equal ranges; the first ranges take the remainder."""
    size, rest = divmod(items, parts)
    bounds = [index * size + min(index, rest) for index in range(parts + 1)]
    return [range(bounds[index], bounds[index + 1]) for index in range(parts)]


def split_by_speed(items: int, speeds: Sequence[float]) -> list[range]:
    """Split ``range(items)`` into contiguous ranges, one per part, sized by the parts' speeds.

    Greedy: each item goes to the part that would finish it first. So no part waits for the slowest longer than the
    slowest takes for one item.
    """
    for part, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise InvalidArgument(f"speeds: {speed} of part {part} is not a number above 0")
    counts = [0] * len(speeds)
    finish_times = [(1 / speed, part) for part, speed in enumerate(speeds)]
    heapq.heapify(finish_times)
    for _ in range(items):
        part = finish_times[0][1]
        counts[part] += 1
        heapq.heapreplace(finish_times, ((counts[part] + 1) / speeds[part], part))
    starts = itertools.accumulate(counts, initial=0)
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


def in_flight(plan: Plan, rank: int, stage: int | None = None) -> int:
    """Peak number of micro-batches whose activations a rank holds: of one stage, or summed over its stages.

    Activations live from the forward to the end of the backward, or of its second half where the backward is split.
    """
    current = peak = 0
    for one in plan.ranks[rank]:
        if stage is None or one.stage == stage:
            current += (one.kind is InstructionKind.FORWARD) - (one.kind in GRADIENT_KINDS)
            peak = max(peak, current)
    return peak


@dataclass(frozen=True)
class RankTraffic:
    """Bytes and messages that one rank sends in a step."""

    bytes: int
    messages: int
    activation_bytes: int
    """Part of ``bytes``: outputs of stages and their gradients."""
    weight_bytes: int
    """Part of ``bytes``: weights and their gradients (reductions, pushes, gives)."""


def traffic(plan: Plan, output_bytes: Sequence[int], weight_bytes: Sequence[int]) -> list[RankTraffic]:
    """Bytes and messages that each rank sends in a step.

    output_bytes: for each stage, the size of its output for one micro-batch; the output's gradient has the same size.
        The last stage's output is never sent, so its entry may be missing.
    weight_bytes: size of the weights of each stage, or of each slice with parameter servers.

    A reduction among R replicas counts as a ring all-reduce: 2(R-1)/R of the weights in 2(R-1) messages. A sharded
    update has the same: a reduce-scatter of the gradients, and an all-gather of the weights.
    """
    parts = len(plan.servers) or plan.stages
    if len(weight_bytes) != parts:
        raise InvalidArgument(f"weight_bytes: {len(weight_bytes)} values for {parts} stages or slices")
    if len(output_bytes) < plan.stages - 1:
        raise InvalidArgument(f"output_bytes: {len(output_bytes)} values for {plan.stages} stages")
    result = []
    for rank, instructions in enumerate(plan.ranks):
        activations = weights = messages = 0
        for (kind, stage), times in Counter((one.kind, one.stage) for one in instructions).items():
            match kind:
                case InstructionKind.SEND_OUTPUT:
                    activations += times * output_bytes[stage]
                case InstructionKind.SEND_GRADIENT:
                    activations += times * output_bytes[stage - 1]
                case InstructionKind.PUSH | InstructionKind.GIVE:
                    weights += times * weight_bytes[stage]
                case InstructionKind.REDUCE if rank not in plan.servers:
                    replicas = len(plan.holders[stage])
                    weights += times * 2 * (replicas - 1) * weight_bytes[stage] // replicas
                    messages += times * 2 * (replicas - 1)
                    continue
                case _:
                    continue
            messages += times
        result.append(RankTraffic(activations + weights, messages, activations, weights))
    return result
