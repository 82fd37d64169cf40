"""Partitions the model, and checks before the first step that each rank's memory holds its part.

``setup.py`` calls it when a run starts and after a membership change. Collective where it says so: all ranks compute
the same partition from the same costs and the same free memory, and raise alike if the job does not fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from hoop.collectives.communicator import all_gather_object
from hoop.collectives.rank_context import RankContext
from hoop.collectives.registry import Operation
from hoop.config import format_size
from hoop.engine.fault_tolerance.replication import check_memory, copies_bytes, gpu_copies_bytes
from hoop.engine.gradient_slots import gradient_memory_for
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.state import shared_parameters
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.memory.dtypes import dtype
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import all_strategies
from hoop.strategies.memory_fit import (
    MIB,
    Fit,
    advice,
    enough_memory,
    fit,
    fitting_strategies,
    gpu_bytes,
    gpu_shard_bytes,
)

GPU_SPARE_SHARE = 4
"""A rank takes at most this part of a GPU's memory that no rank needs: activations are there too."""
GROWING_SPARE = 256 * MIB
"""Most bytes that a rank uses beyond what it needs, to be faster, if its arena grows with the job."""


@dataclass(frozen=True)
class KeptVersions:
    """Versions of the state of before a membership change, which stay in the arena where there is room for them."""

    bytes: int
    make_room: Callable[[int], None]
    """``make_room(needed)`` moves versions out of the arena until ``needed`` bytes are free in one piece."""


def partition(
    context: RankContext,
    settings: Settings,
    strategy: Strategy,
    costs: list[Block],
    plan: Plan,
    blocks: list[nn.Module],
    kept: KeptVersions | None = None,
) -> tuple[Fit, int]:
    """Collective. The partition, and the bytes of this rank's arena that remain free.

    A rank that sets up alone is checked for the ranks that it will train with, as if they all had its memory.
    Uses ``settings.cut`` if it is given, else balances measured costs within every rank's free memory. After a
    membership change (``kept``) a run goes on even if its snapshots may not fit any more. The versions that are kept
    count as free, and make room before this rank allocates anything.
    """
    gradients = gradient_memory_for(settings.balance, clipped=bool(settings.optimizer.clip))
    used = context.arena.used - (kept.bytes if kept is not None else 0)
    mine = np.array([context.arena.capacity - used], np.int64)
    free = np.zeros(context.size, np.int64)
    context.communicator.run(Operation("all_gather", 1, dtype("int64")), mine, free, settings.timeout_s)
    memory = [int(one) for one in free]
    if context.future_size:
        plan, memory = future_plan(context, strategy, plan), memory * context.future_size
    replicates = settings.replicate and not strategy.replicated and context.wait_reassignment is not None
    replicas = settings.replicas if replicates else 0
    try:
        found = fit(strategy, plan, costs, memory, cuts=settings.cut or None, gradient_buffers=gradients)
    except FailedPrecondition as error:
        others = fitting_strategies(all_strategies(plan.size), costs, memory, plan.num_microbatches, gradients)
        unlimited = fit(
            strategy, plan, costs, [None] * plan.size, cuts=settings.cut or None, gradient_buffers=gradients
        )
        needed = used + _enough_memory(context, plan, unlimited, costs, replicas)
        raise FailedPrecondition(f"{error}. {advice(others, needed)}") from None
    if replicas:
        check_memory(plan, found, costs, memory, context.hosts, context.persistent_memory, replicas)
    if kept is None and not plan.servers:  # servers, not workers, make the snapshots of a parameter server
        needed = used + _enough_memory(context, plan, found, costs, replicas)
        copies = _copies_bytes(context, plan, found, costs, replicas)
        check_snapshots(settings, plan, found, costs, memory, copies, needed)
    bounds = [stage.blocks.start for stage in found.stages]
    for first, second in shared_parameters(blocks):
        if any(first < bound <= second for bound in bounds):
            raise InvalidArgument(
                f"cut: blocks {first} and {second} share a parameter and cannot be in different stages; "
                "give a cut that keeps them together, or use data parallel"
            )
    spare = memory[context.rank] - found.bytes[context.rank]
    if plan.sharded_update:
        spare -= _copies_bytes(context, plan, found, costs, replicas)[context.rank]
        spare -= 2 * _snapshot_bytes(plan, found, costs)[context.rank]
    if context.arena.grows:  # what is free here may be needed by others
        spare = min(spare, GROWING_SPARE)
    if kept is not None:
        kept.make_room(_enough_memory(context, plan, found, costs, replicas))
    return found, max(0, spare)


def future_plan(context: RankContext, strategy: Strategy, plan: Plan) -> Plan:
    """The plan that this rank will train with: ``plan``, or another one if it sets up alone."""
    return strategy.plan(context.future_size, plan.num_microbatches) if context.future_size else plan


def needed_gpu_bytes(context: RankContext, settings: Settings, found: Fit, plan: Plan, costs: list[Block]) -> int:
    """Bytes of this rank on its GPU: its state and gradients, and the replicas that it updates."""
    if found.strategy.replicated:
        return gpu_bytes(costs, plan, context.rank)
    gradients = gradient_memory_for(settings.balance)(found.strategy, plan)
    replicates = settings.replicate and context.wait_reassignment is not None
    replicas = settings.replicas if replicates else 0
    copies = gpu_copies_bytes(plan, found, costs, context.hosts, replicas)
    return gpu_shard_bytes(found, plan, costs, gradients, context.rank) + copies[context.rank]


def check_gpu_memory(
    context: RankContext, settings: Settings, accelerator: Accelerator, needed: int, resharding: bool
) -> None:
    """Collective. Raises unless each rank's state fits in its memory on its GPU, and each GPU has that of its ranks.

    A rank whose arena grows takes what it needs on its GPU too, and something more where there is room: tensors for
    peers are there. ``needed``: bytes of this rank. The GPUs are not asked after a loss (``resharding``): the driver
    may not have freed the memory of a killed process yet.
    """
    free, total = accelerator.memory()
    host = context.hosts[context.rank] if context.hosts else ""
    grows = context.arena.grows
    mine = [needed, needed if grows else accelerator.capacity, f"{host} {accelerator.identity}", free]
    ranks = all_gather_object(context.communicator, mine, settings.timeout_s)
    if grows:
        sharing = [rank for rank, memory in enumerate(ranks) if memory[2] == mine[2]]
        left = min(ranks[rank][3] for rank in sharing) - sum(ranks[rank][1] for rank in sharing)
        more = min(max(needed // 2, GROWING_SPARE), max(0, left) // (GPU_SPARE_SHARE * len(sharing)))
        accelerator.capacity = -(-(needed + more) // MIB) * MIB
    for rank, (needed, capacity, _, _) in enumerate(ranks):
        if needed > capacity:
            size = -(-needed // MIB)
            raise FailedPrecondition(
                f"memory: rank {rank} needs {format_size(needed)} on its GPU for weights, optimizer state, the "
                f"gradients of its shards and replicas, and has {format_size(capacity)} there; use --memory {size}MiB "
                "(memory= of hoop.train), or fewer shards"
            )
    if resharding or not accelerator.cuda:
        return
    for gpu in dict.fromkeys(one[2] for one in ranks):
        sharing = [rank for rank, one in enumerate(ranks) if one[2] == gpu]
        wanted, there = sum(ranks[rank][1] for rank in sharing), min(ranks[rank][3] for rank in sharing)
        if wanted > there:
            raise FailedPrecondition(
                f"memory: the devices of ranks {', '.join(map(str, sharing))} want {format_size(wanted)} on one GPU "
                f"({accelerator.name}, {format_size(total)}), and {format_size(there)} is free there; use a smaller "
                "--memory, fewer devices, or end other programs that use it"
            )


def _enough_memory(context: RankContext, plan: Plan, fit: Fit, costs: list[Block], replicas: int) -> int:
    """Bytes that are enough for the state of every rank, with its replicas and two snapshots of its weights."""
    copies = _copies_bytes(context, plan, fit, costs, replicas)
    snapshots = [2 * one for one in _snapshot_bytes(plan, fit, costs)]
    return max(map(sum, zip(fit.bytes, copies, snapshots, strict=True)))


def _copies_bytes(context: RankContext, plan: Plan, fit: Fit, costs: list[Block], replicas: int) -> list[int]:
    """Bytes that each rank keeps to survive the loss of others: replicas, or in data parallel a second total buffer."""
    if replicas:
        return copies_bytes(plan, fit, costs, context.hosts, context.persistent_memory, replicas)
    elastic = context.wait_reassignment is not None and plan.size > 1 and fit.strategy.replicated
    gradients = (one.weight_bytes if one.gradient_bytes is None else one.gradient_bytes for one in costs)
    return [sum(gradients) if elastic else 0] * plan.size


def _snapshot_bytes(plan: Plan, fit: Fit, costs: list[Block]) -> list[int]:
    """Bytes of one snapshot of each rank's weights and optimizer state.

    With a sharded update a rank has the optimizer state of the parameters that begin in its slice, and one of them may
    be large; the first rank has the weights, and any rank may become the first.
    """
    if plan.sharded_update:
        moments = [one.optimizer_bytes for one in costs]
        most = min(sum(moments), -(-sum(moments) // len(plan.holders[0])) + max(moments))
        return [sum(one.weight_bytes for one in costs) + most] * plan.size
    states = [sum(costs[one].weight_bytes + costs[one].optimizer_bytes for one in stage.blocks) for stage in fit.stages]
    return [sum(states[stage] for stage in plan.held_by(rank)) for rank in range(plan.size)]


def check_snapshots(
    settings: Settings,
    plan: Plan,
    found: Fit,
    costs: list[Block],
    memory: Sequence[int],
    copies: Sequence[int],
    needed: int,
) -> None:
    """Raises FailedPrecondition if snapshots do not fit in a rank's arena beside its state and its replicas.

    The final snapshot needs one buffer; snapshots at epochs take turns with it in a second one. Any holder of a stage
    may have to make its snapshot, if the first one is lost. ``needed``: bytes of a device that are enough.
    """
    buffers = 2 if settings.checkpoint_every and settings.epochs > settings.checkpoint_every else 1
    cuts = [stage.blocks.start for stage in found.stages][1:] or None
    # Activations count in ``found``, and are not in the arena.
    light = [dataclasses.replace(one, activation_bytes=0) for one in costs]
    gradients = gradient_memory_for(settings.balance, clipped=bool(settings.optimizer.clip))
    arena = fit(found.strategy, plan, light, [None] * plan.size, cuts=cuts, gradient_buffers=gradients).bytes
    snapshots = [buffers * one for one in _snapshot_bytes(plan, found, costs)]
    for rank, parts in enumerate(zip(arena, copies, snapshots, strict=True)):
        if sum(parts) > memory[rank]:
            count = "two snapshots" if buffers == 2 else "a snapshot"
            state, free = format_size(parts[0] + parts[1]), format_size(memory[rank])
            raise FailedPrecondition(
                f"memory: rank {rank} needs {state} for its state and {format_size(parts[2])} for {count} of it, and "
                f"has {free}. {enough_memory(needed)}"
            )
