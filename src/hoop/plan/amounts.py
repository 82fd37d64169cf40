"""What a plan holds and moves, counted without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.plan.instructions import GRADIENT_KINDS, Kind
from hoop.plan.plan import Plan


def in_flight(plan: Plan, rank: int, stage: int | None = None) -> int:
    """The most micro-batches whose activations a rank holds at a time, of one stage or summed over all it has.

    They are held from the forward to the end of the backward; where it is cut in two, to the end of the second half.
    """
    now = peak = 0
    for one in plan.ranks[rank]:
        if stage is None or one.stage == stage:
            now += (one.kind is Kind.FORWARD) - (one.kind in GRADIENT_KINDS)
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
                case Kind.SEND_OUTPUT:
                    activations += times * output_bytes[stage]
                case Kind.SEND_GRADIENT:
                    activations += times * output_bytes[stage - 1]
                case Kind.PUSH | Kind.GIVE:
                    weights += times * weight_bytes[stage]
                case Kind.REDUCE if rank not in plan.servers:
                    replicas = len(plan.holders[stage])
                    weights += times * 2 * (replicas - 1) * weight_bytes[stage] // replicas
                    messages += times * 2 * (replicas - 1)
                    continue
                case _:
                    continue
            messages += times
        found.append(RankTraffic(activations + weights, messages, activations, weights))
    return found
