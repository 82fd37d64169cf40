"""Whether a model fits on devices under a strategy, and where its stages then go: asked before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument, UserError
from hoop.plan.partition import Block, StageCut, StageDevice, cut, needs, partition
from hoop.plan.plan import Plan, in_flight, split_evenly
from hoop.strategies.base import Strategy

Memory = Sequence[int | None]
"""For each device its bytes; None: no limit."""


class Gradients(NamedTuple):
    """How many gradients there is room for: of a stage at each who holds it, of a slice at a server."""

    holder: int
    server: int


Room = Callable[[Strategy, Plan], Gradients]
"""What an engine makes room for under a strategy."""


def one_each(strategy: Strategy, plan: Plan) -> Gradients:
    """The least."""
    return Gradients(1, 1)


@dataclass(frozen=True)
class Fit:
    """A strategy under which a model fits."""

    strategy: Strategy
    stages: list[StageCut]
    bytes: list[int]
    """What each device then holds."""

    def __str__(self) -> str:
        return f"{self.strategy.spec} (at most {format_size(max(self.bytes))} a device)"


def fit(
    strategy: Strategy,
    plan: Plan,
    blocks: Sequence[Block],
    memory: Memory,
    speeds: Sequence[float] | None = None,
    cuts: Sequence[int] | None = None,
    room: Room = one_each,
) -> Fit:
    """Cuts the model for a plan, by cost or by hand, and counts what every device holds; raises where one is too small.

    With several replicas they all have the same cuts, which suit the slowest and smallest device of each stage.
    """
    if len(memory) != plan.size:
        raise InvalidArgument(f"memory: {len(memory)} of them for {plan.size} devices; give one each")
    paces = speeds or [1.0] * plan.size
    places = []
    flights = {
        (rank, stage): in_flight(plan, rank, stage)
        for stage, ranks in enumerate(plan.holders)
        for rank in ranks
    }
    for stage, ranks in enumerate(plan.holders):
        caps = [cap for rank in ranks if (cap := memory[rank]) is not None]
        places.append(
            StageDevice(
                _name(ranks),
                min(paces[rank] for rank in ranks),
                min(caps, default=None),
                max(flights[rank, stage] for rank in ranks),
                strategy.versions,
            )
        )
    gradients = room(strategy, plan)
    held = [_with(block, gradients.holder, not plan.servers) for block in blocks]
    stages = partition(held, places) if cuts is None else cut(held, places, cuts)

    @functools.cache
    def held_bytes(stage: int, micros: int) -> int:
        blocks = stages[stage].blocks
        return needs(held[blocks.start : blocks.stop], replace(places[stage], in_flight=micros))

    bytes_held = [0] * plan.size
    for stage, ranks in enumerate(plan.holders):
        for rank in ranks:
            bytes_held[rank] += held_bytes(stage, flights[rank, stage])
    _serve(plan, [_with(block, gradients.server, True) for block in blocks], memory, bytes_held)
    return Fit(strategy, stages, bytes_held)


def fitting_strategies(
    strategies: Iterable[Strategy],
    blocks: Sequence[Block],
    memory: Memory,
    micros: int,
    room: Room = one_each,
) -> list[Fit]:
    """Those of the strategies under which the model fits, the least demanding first."""
    found = []
    for strategy in strategies:
        try:
            found.append(fit(strategy, strategy.plan(len(memory), micros), blocks, memory, room=room))
        except UserError:
            continue
    return sorted(found, key=lambda one: max(one.bytes))


def advice(fits: Sequence[Fit]) -> str:
    """What to tell somebody whose model does not fit."""
    if not fits:
        return "no strategy fits on these devices; add devices or memory, or cut the batch into more shards"
    return f"it would fit with {', '.join(map(str, fits))}"


def _name(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"device {listed}" if len(ranks) == 1 else f"each of devices {listed}"


def _with(block: Block, gradients: int, updates: bool) -> Block:
    """A block with room for so many gradients; the workers of a parameter server have no optimizer state."""
    each = block.weight_bytes if block.gradient_bytes is None else block.gradient_bytes
    state = block.optimizer_bytes if updates else 0
    return replace(block, gradient_bytes=gradients * each, optimizer_bytes=state)


def _serve(plan: Plan, blocks: Sequence[Block], memory: Memory, bytes_held: list[int]) -> None:
    """Adds what the servers hold: equal slices of weights, gradients and optimizer state."""
    state = sum(block.state_bytes for block in blocks)
    for rank, part in zip(plan.servers, split_evenly(state, max(1, len(plan.servers))), strict=False):
        bytes_held[rank] = len(part)
        cap = memory[rank]
        if cap is not None and len(part) > cap:
            raise FailedPrecondition(
                f"memory: the server on device {rank} needs {format_size(len(part))} and has {format_size(cap)}"
            )
