"""Checks, before anything runs, whether a model fits into the devices' memory under a strategy, and partitions it.

The bytes of a stage: ``plan/partition.py`` (``required_bytes``). Gradient slots: ``engine/gradient_slots.py``.
Replicas: ``membership/replication.py``. Snapshots: ``engine/partitioning.py`` (``check_snapshots``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument, UserError
from hoop.plan.partition import Block, StageCut, StageDevice, partition, partition_at, required_bytes
from hoop.plan.plan import Plan, in_flight, split_evenly
from hoop.strategies.base import Strategy

MIB = 1 << 20
Memory = Sequence[int | None]
"""Memory of each device in bytes; None: unlimited."""


class Gradients(NamedTuple):
    """Number of gradient buffers that the engine allocates."""

    holder: int
    """Number of buffers per stage on each rank that holds the stage."""
    server: int
    """Number of buffers per slice on its parameter server."""
    update_slice: int = 0
    """Number of buffers for the slice that a rank updates, on each rank of a sharded update."""


GradientBuffers = Callable[[Strategy, Plan], Gradients]
"""Function that returns the number of gradient buffers that the engine allocates for a strategy and its plan."""


def one_gradient_each(strategy: Strategy, plan: Plan) -> Gradients:
    """The minimum: one gradient buffer per stage or slice."""
    return Gradients(1, 1, 1)


@dataclass(frozen=True)
class Fit:
    """A strategy under which a model fits, and the partition."""

    strategy: Strategy
    stages: list[StageCut]
    bytes: list[int]
    """Memory use of each device."""

    def __str__(self) -> str:
        return f"{self.strategy.spec} (at most {format_size(max(self.bytes))} a device)"


def fit(
    strategy: Strategy,
    plan: Plan,
    blocks: Sequence[Block],
    memory: Memory,
    speeds: Sequence[float] | None = None,
    cuts: Sequence[int] | None = None,
    gradient_buffers: GradientBuffers = one_gradient_each,
) -> Fit:
    """Partitions the model for a plan and counts the memory of every device; raises if one is too small.

    cuts: where stages begin; None: choose the fastest partition.
    gradient_buffers: number of gradient buffers that the engine allocates.

    All replicas use the same cuts, chosen for the slowest and smallest device of each stage.
    """
    if len(memory) != plan.size:
        raise InvalidArgument(f"memory: {len(memory)} values for {plan.size} devices; give one each")
    rank_speeds = speeds or [1.0] * plan.size
    devices = []
    in_flights = {
        (rank, stage): in_flight(plan, rank, stage) for stage, ranks in enumerate(plan.holders) for rank in ranks
    }
    for stage, ranks in enumerate(plan.holders):
        limits = [limit for rank in ranks if (limit := memory[rank]) is not None]
        devices.append(
            StageDevice(
                _name(ranks),
                min(rank_speeds[rank] for rank in ranks),
                min(limits, default=None),
                max(in_flights[rank, stage] for rank in ranks),
                strategy.versions,
            )
        )
    gradients = gradient_buffers(strategy, plan)
    if plan.sharded_update:
        sized = [_with_update_slice(block, gradients, len(plan.holders[0])) for block in blocks]
    else:
        sized = [_with_buffers(block, gradients.holder, not plan.servers) for block in blocks]
    stages = partition(sized, devices) if cuts is None else partition_at(sized, devices, cuts)

    @functools.cache
    def stage_bytes(stage: int, in_flight: int) -> int:
        blocks = stages[stage].blocks
        return required_bytes(sized[blocks.start : blocks.stop], replace(devices[stage], in_flight=in_flight))

    rank_bytes = [0] * plan.size
    for stage, ranks in enumerate(plan.holders):
        for rank in ranks:
            rank_bytes[rank] += stage_bytes(stage, in_flights[rank, stage])
    _add_servers(plan, [_with_buffers(block, gradients.server, True) for block in blocks], memory, rank_bytes)
    return Fit(strategy, stages, rank_bytes)


GPU_ROW_SETS = 2
"""Number of sets of gradient rows of a rank on a GPU, if there are several ranks: others read one while it writes the
other."""
GPU_ALIGNMENT = 256


def gpu_bytes(blocks: Sequence[Block], plan: Plan, rank: int) -> int:
    """Bytes of a data parallel rank on its GPU: weights, optimizer state, the sum, and a gradient for each shard.

    Enough also for the case that it is the last rank left, which has all shards. Activations are not counted.
    """
    gradient = sum(block.weight_bytes if block.gradient_bytes is None else block.gradient_bytes for block in blocks)
    state = sum(block.weight_bytes + block.optimizer_bytes for block in blocks)
    shards, alone = len(plan.computed_by(rank, 0)), plan.num_microbatches
    rows = alone if plan.size == 1 else max(alone, GPU_ROW_SETS * shards)
    total = gradient if plan.size > 1 else 0
    return state + total + rows * gradient + 8 * GPU_ALIGNMENT


def gpu_shard_bytes(found: Fit, plan: Plan, blocks: Sequence[Block], gradients: Gradients, rank: int) -> int:
    """Bytes of a rank on its GPU where the state is partitioned: its stages, or its slice as a server. No replicas.

    Weights with their versions, optimizer state, a row for each gradient slot (of a server: for each node that workers
    push), and a total if several ranks sum their gradients. Activations are not counted.
    """

    def state(own: Sequence[Block], rows: float, updates: bool, versions: int = 1) -> int:
        sized = [_with_buffers(block, 1, updates) for block in own]
        weights = sum(block.weight_bytes for block in sized)
        each = sum(block.gradient_bytes or 0 for block in sized)
        return int(versions * weights + sum(block.optimizer_bytes for block in sized) + rows * each)

    needed = 8 * GPU_ALIGNMENT
    if rank in plan.servers:
        needed += -(-state(blocks, 1 + gradients.server, updates=True) // len(plan.servers))
    kept = found.strategy.versions
    for stage in plan.held_by(rank):
        own = [blocks[index] for index in found.stages[stage].blocks]
        # ``gradients`` counts a total for each stage, which a stage with one holder has not: a row is its total.
        rows = gradients.holder - (not plan.servers and len(plan.holders[stage]) == 1)
        needed += state(own, rows, not plan.servers, 1 + kept if kept > 1 else 1) + 8 * GPU_ALIGNMENT
    return needed


def fitting_strategies(
    strategies: Iterable[Strategy],
    blocks: Sequence[Block],
    memory: Memory,
    num_microbatches: int,
    gradient_buffers: GradientBuffers = one_gradient_each,
) -> list[Fit]:
    """The strategies under which the model fits, the one with the smallest peak memory first."""
    found = []
    for strategy in strategies:
        try:
            found.append(
                fit(
                    strategy,
                    strategy.plan(len(memory), num_microbatches),
                    blocks,
                    memory,
                    gradient_buffers=gradient_buffers,
                )
            )
        except UserError:
            continue
    return sorted(found, key=lambda one: max(one.bytes))


def advice(fits: Sequence[Fit], needed: int) -> str:
    """The hint in the error for a model that does not fit.

    ``fits``: strategies under which it would. ``needed``: bytes of a device's memory that are enough.
    """
    memory = enough_memory(needed)
    if not fits:
        return f"{memory}. With what they have no strategy fits; add devices, or cut the batch into more shards"
    return f"{memory}. With what they have it would fit with {', '.join(map(str, fits))}"


def enough_memory(needed: int) -> str:
    """The size of a device's memory that is enough for ``needed`` bytes, as advice."""
    size = needed // MIB + 1
    return f"With replicas and snapshots {size} MiB a device are enough: --memory {size}MiB (memory= of hoop.train)"


def _name(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"each of ranks {listed}"


def _with_buffers(block: Block, gradients: int, updates: bool) -> Block:
    """The block with memory for ``gradients`` gradient buffers, and with optimizer state only if ``updates``.

    The workers of a parameter server do not update weights, so they have no optimizer state.
    """
    each = block.weight_bytes if block.gradient_bytes is None else block.gradient_bytes
    state = block.optimizer_bytes if updates else 0
    return replace(block, gradient_bytes=gradients * each, optimizer_bytes=state)


def _with_update_slice(block: Block, gradients: Gradients, ranks: int) -> Block:
    """The block with the gradient buffers of a rank that updates one of ``ranks`` slices, and its optimizer state.

    A rank sums its slice of the weights' gradients, and all of the tail.
    """
    each = block.weight_bytes if block.gradient_bytes is None else block.gradient_bytes
    tail = each - min(each, block.weight_bytes)
    summed = gradients.update_slice * (-(-(each - tail) // ranks) + tail)
    state = -(-block.optimizer_bytes // ranks)
    return replace(block, gradient_bytes=gradients.holder * each + summed, optimizer_bytes=state)


def _add_servers(plan: Plan, blocks: Sequence[Block], memory: Memory, rank_bytes: list[int]) -> None:
    """Sets the memory of parameter servers: equal slices of weights, gradients and optimizer state."""
    state = sum(block.state_bytes for block in blocks)
    for rank, part in zip(plan.servers, split_evenly(state, max(1, len(plan.servers))), strict=False):
        rank_bytes[rank] = len(part)
        limit = memory[rank]
        if limit is not None and len(part) > limit:
            raise FailedPrecondition(
                f"memory: the server on rank {rank} needs {format_size(len(part))} and has {format_size(limit)}"
            )
