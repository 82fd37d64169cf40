"""A step of training as data: for each rank its instructions, for each stage who holds it.

What a plan holds and moves, counted without running it.
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
    """What every rank does in one step."""

    micros: int
    """How many micro-batches (shards) the global batch is cut into."""
    holders: tuple[tuple[int, ...], ...]
    """For each stage the ranks that hold its weights, one a replica."""
    ranks: tuple[tuple[Instruction, ...], ...]
    """For each rank its instructions, in order."""
    servers: tuple[int, ...] = ()
    """For each slice of the weights the parameter server that keeps it; empty where there is none.

    The workers of a parameter server hold the whole model, as stage 0.
    """

    @property
    def stages(self) -> int:
        return len(self.holders)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[tuple[int, Instruction]]:
        """Every instruction with its rank."""
        return ((rank, one) for rank, instructions in enumerate(self.ranks) for one in instructions)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages whose weights this rank holds."""
        return tuple(stage for stage, ranks in enumerate(self.holders) if rank in ranks)

    def computed_by(self, rank: int, stage: int) -> tuple[int, ...]:
        """The micro-batches whose gradient of this stage this rank computes, in that order."""
        return tuple(
            one.micro for one in self.ranks[rank] if one.kind in GRADIENT_KINDS and one.stage == stage
        )

    def grid(self, messages: bool = False) -> str:
        """The instructions as a table, a line a rank; messages only when asked for."""
        rows = [
            [str(one) for one in instructions if messages or one.kind not in WITH_PEER]
            for instructions in self.ranks
        ]
        width = max((len(cell) for row in rows for cell in row), default=1)
        edge = len(str(len(rows) - 1))
        return "\n".join(
            f"rank {rank:>{edge}} | " + " ".join(f"{cell:<{width}}" for cell in row).rstrip()
            for rank, row in enumerate(rows)
        )

    def to_json(self) -> str:
        data = {
            "micros": self.micros,
            "holders": self.holders,
            "ranks": [" ".join(map(str, instructions)) for instructions in self.ranks],
        }
        return json.dumps(data | ({"servers": self.servers} if self.servers else {}))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of ``to_json``; what is missing or malformed is named."""
        try:
            data = parse_json(text)
            micros, holders, ranks = data["micros"], data["holders"], data["ranks"]
            return cls(
                int(micros),
                tuple(tuple(int(rank) for rank in group) for group in holders),
                tuple(tuple(map(Instruction.parse, line.split())) for line in ranks),
                tuple(int(rank) for rank in data.get("servers", ())),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"plan: not a plan in JSON: {error!r}") from None


def split_evenly(items: int, parts: int) -> list[range]:
    """``items`` numbers as ``parts`` contiguous, nearly equal ranges; the first ones take the remainder."""
    size, rest = divmod(items, parts)
    bounds = [index * size + min(index, rest) for index in range(parts + 1)]
    return [range(bounds[index], bounds[index + 1]) for index in range(parts)]


def split_by(items: int, speeds: Sequence[float]) -> list[range]:
    """``items`` numbers as contiguous ranges that finish together, given each part's speed.

    Each item goes to whoever would finish it first, so nobody waits longer for the slowest than one item takes.
    """
    for part, speed in enumerate(speeds):
        if not 0 < speed < math.inf:
            raise InvalidArgument(f"speeds: {speed} of part {part} is not a number above 0")
    counts = [0] * len(speeds)
    ends = [(1 / speed, part) for part, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(items):
        part = ends[0][1]
        counts[part] += 1
        heapq.heapreplace(ends, ((counts[part] + 1) / speeds[part], part))
    starts = itertools.accumulate(counts, initial=0)
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


def in_flight(plan: Plan, rank: int, stage: int | None = None) -> int:
    """The most micro-batches whose activations a rank holds at a time, of one stage or summed over all it has.

    They are held from the forward to the end of the backward; where it is cut in two, to the end of the second half.
    """
    now = peak = 0
    for one in plan.ranks[rank]:
        if stage is None or one.stage == stage:
            now += (one.kind is InstructionKind.FORWARD) - (one.kind in GRADIENT_KINDS)
            peak = max(peak, now)
    return peak


@dataclass(frozen=True)
class RankTraffic:
    """What one rank sends in a step."""

    bytes: int
    messages: int
    activation_bytes: int
    """Of them, outputs and gradients of stages."""
    weight_bytes: int
    """Of them, weights and their gradients: reductions, pushes and gives."""


def traffic(plan: Plan, output_bytes: Sequence[int], weight_bytes: Sequence[int]) -> list[RankTraffic]:
    """What each rank sends in a step.

    ``output_bytes`` has, for each stage, what it hands on of one micro-batch (its gradient comes back as large; the
    last one's is never sent and may be left out). ``weight_bytes`` has the weights of each stage, or with a parameter
    server of each slice. A reduction among R replicas is counted as a ring's: 2(R-1)/R of the weights, in 2(R-1)
    messages.
    """
    parts = len(plan.servers) or plan.stages
    if len(weight_bytes) != parts:
        raise InvalidArgument(f"weight_bytes: {len(weight_bytes)} of them for {parts} stages or slices")
    if len(output_bytes) < plan.stages - 1:
        raise InvalidArgument(f"output_bytes: {len(output_bytes)} of them for {plan.stages} stages")
    found = []
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
        found.append(RankTraffic(activations + weights, messages, activations, weights))
    return found
