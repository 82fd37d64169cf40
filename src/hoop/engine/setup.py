"""Which role each rank of a strategy has, and what a role cannot do, said before the first step.

Before the first step: the model, its cut, whether it fits, and whether all ranks hold the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hoop.collectives.registry import Operation
from hoop.data.dataset import Dataset, Splits
from hoop.engine.cost_probe import measured_costs, profile, rehearsed_step
from hoop.engine.executor import PlanExecutor, room_for
from hoop.engine.fault_tolerance.replication import check_room
from hoop.engine.job import Job, blocks_of
from hoop.engine.rank_context import RankContext
from hoop.engine.roles.base import RankRole, StandbyRole
from hoop.engine.roles.parameter_server import SPAN, ParameterServerRole, ServerClientRole
from hoop.engine.roles.ring import AsynchronousRingRole, RingRole
from hoop.engine.settings import Settings
from hoop.engine.stage.gpu import accelerator_of
from hoop.engine.stage.linear_chain import layers_of
from hoop.engine.stage.state import StateVectors, shared_parameters
from hoop.errors import FailedPrecondition, InternalError, InvalidArgument
from hoop.memory.dtypes import dtype
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.plan.validation import check
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import every, parse, usable
from hoop.strategies.memory_fit import advice, fit, fitting_strategies
from hoop.transport.base import SharedEndpoint, SpanningEndpoint


def check_role(strategy: Strategy, plan: Plan, settings: Settings) -> None:
    """Raises where these settings ask for something that ranks of this strategy cannot know."""
    clip = settings.optimizer.clip
    if clip and len(plan.servers) > 1:
        raise InvalidArgument(
            f"clip: {clip} needs the norm of the whole gradient, and each of {len(plan.servers)} parameter servers "
            "has a slice of it; use servers=1, strategy data, or clip 0"
        )
    if clip and not plan.servers and not strategy.synchronous:
        raise InvalidArgument(
            f"clip: {clip} needs the norm over all stages, and with {strategy.spec} no moment has all of a step's "
            "gradients; use ring:sync, or clip 0"
        )


def role_of(
    worker: PlanExecutor,
    strategy: Strategy,
    blocks: Sequence[nn.Module],
    data: Dataset,
    vectors: StateVectors,
) -> RankRole:
    """This rank's role."""
    plan = worker.plan
    if worker.rank in plan.servers:
        return ParameterServerRole(worker, strategy, blocks, vectors)
    if not worker.held:
        return StandbyRole(worker, 1 if strategy.synchronous else SPAN)
    if plan.servers:
        return ServerClientRole(worker, strategy)
    if strategy.rule(plan, worker.rank) is None:
        return RankRole(worker)
    if strategy.synchronous:
        return RingRole(worker, strategy)
    return AsynchronousRingRole(worker, strategy, data, vectors)


@dataclass
class TrainingSetup:
    """All that a run needs."""

    model: nn.Module
    blocks: list[Block]
    bounds: list[int]
    """Where each stage begins."""
    strategy: Strategy
    plan: Plan
    worker: PlanExecutor
    role: RankRole
    priced: dict[str, Any] | None = None
    """What a step costs, for whoever predicts it; None where the model was cut anew."""

    @property
    def told(self) -> dict[str, Any]:
        """For whoever follows the run."""
        parameters = sum(one.numel() for one in self.model.parameters())
        return {"parameters": parameters, "stages": self.describe(), "costs": self.priced}

    def describe(self) -> list[str]:
        """Each stage's blocks and who holds them."""
        ends = [*self.bounds[1:], len(self.blocks)]
        said = [
            f"blocks {low}..{high - 1} on ranks {', '.join(map(str, ranks))}"
            for low, high, ranks in zip(self.bounds, ends, self.plan.holders, strict=True)
        ]
        served = enumerate(self.plan.servers)
        return said + [f"slice {number} of the weights on rank {rank}" for number, rank in served]


def prepare(
    world: RankContext, settings: Settings, job: Job, data: Splits, vectors: StateVectors, anew: bool = False
) -> TrainingSetup:
    """Builds this rank's worker; raises, at every rank alike, if the job cannot run.

    ``anew``: the devices are no longer those that the strategy was chosen for; as many are used as can be.
    """
    settings.check()
    accelerator = accelerator_of(world, settings)
    half = settings.precision == "bfloat16" and (accelerator is None or not accelerator.cuda)
    if half and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise FailedPrecondition(
            "precision: bfloat16 needs a processor that computes in it; this one does not"
        )
    model = job.model(settings.seed)
    blocks = blocks_of(model)
    strategy = parse(settings.strategy)
    if anew:
        strategy, plan = usable(strategy, world.size, settings.micros, len(blocks))
        if settings.cut and len(settings.cut) != plan.stages - 1:
            settings = dataclasses.replace(settings, cut=())  # it was for another number of stages
    else:
        plan = strategy.plan(world.size, settings.micros)
    check_role(strategy, plan, settings)
    if problems := check(plan):
        raise InternalError(f"the plan of {settings.strategy} is wrong: {'; '.join(problems[:3])}")
    criterion = job.criterion
    if criterion is None:
        raise InternalError("a job is prepared before the reduction of its loss is known")
    reduction = f"{criterion.returns} {criterion.minimised}"
    _agree(world, settings, None if anew else model, data, reduction)
    rows = -(-settings.batch_size // settings.micros)
    sample = data.train.batch(
        np.arange(min(rows, len(data.train)), dtype=np.int64), epoch=0, seed=settings.seed
    )
    found = profile(blocks, sample, settings.optimizer, settings.micros, accelerator=accelerator)
    costs = _shared(world, settings, found)
    bounds, spare = _bounds(world, settings, strategy, costs, plan, blocks)
    worker = PlanExecutor(world, settings, blocks, bounds, plan, data.train, criterion, vectors, accelerator)
    if strategy.name == "data" and layers_of(blocks) is not None:
        worker.feed.room = spare
    role = role_of(worker, strategy, blocks, data.train, vectors)
    if world.befall is not None:
        world.befall(worker)
    ready = TrainingSetup(model, costs, bounds, strategy, plan, worker, role)
    if not anew:  # a run is predicted once, when it starts
        ready.priced = _priced(world, settings, job, data, ready)
    return ready


def _priced(
    world: RankContext, settings: Settings, job: Job, data: Splits, ready: TrainingSetup
) -> dict[str, Any]:
    """Every rank measures, at the same time as the others, as they will compute."""
    endpoint, worker, model = world.communicator.endpoint, ready.worker, ready.model
    apart = not isinstance(endpoint, SharedEndpoint)
    hosts = endpoint.hosts if isinstance(endpoint, SpanningEndpoint) else range(world.size)
    rows = -(-settings.batch_size // settings.micros)
    joint = min(worker.joint_most, -(-settings.micros // max(1, len(worker.plan.holders[0]))))
    blocks = blocks_of(model)
    found = measured_costs(
        ready.blocks, blocks, data.train, job.loss_function, settings.optimizer, rows, joint
    )
    found |= rehearsed_step(world.communicator, settings.micros, settings.timeout_s)
    return found | {"hosts": list(hosts) if apart else [0] * world.size}


def _agree(
    world: RankContext, settings: Settings, model: nn.Module | None, data: Splits, reduction: str
) -> None:
    """All ranks have the same settings, loss, first weights (of a ``model``) and data, or an error says who differs."""
    digest = hashlib.sha256(settings.to_json().encode() + reduction.encode())
    digest.update(data.train.checksum.encode() + data.test.checksum.encode())
    with torch.no_grad():
        for tensor in model.state_dict().values() if model is not None else ():
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    mine = np.frombuffer(digest.digest()[:8], np.int64).copy()
    seen = np.zeros(world.size, np.int64)
    world.communicator.run(Operation("all_gather", 1, dtype("int64")), mine, seen, settings.timeout_s)
    if len(set(seen.tolist())) > 1:
        raise FailedPrecondition(
            f"job {settings.job}: rank {world.rank} has another loss, other settings, first weights or data than "
            f"some other rank (fingerprints {[f'{one & 0xFFFF:04x}' for one in seen.tolist()]}); use the same Hoop, "
            "PyTorch, job code and datasets on every machine"
        )


def _shared(world: RankContext, settings: Settings, costs: list[Block]) -> list[Block]:
    """Rank 0's measurements at every rank, so that all cut alike."""
    numbers = np.array(
        [[one.seconds, one.activation_bytes, one.output_bytes, one.forward_seconds or 0.0] for one in costs]
    ).reshape(-1)
    operation = Operation("broadcast", numbers.size, dtype("float64"), root=0)
    world.communicator.run(operation, numbers, numbers, settings.timeout_s)
    return [
        Block(
            one.name,
            float(seconds),
            one.weight_bytes,
            one.optimizer_bytes,
            int(activation),
            int(output),
            one.gradient_bytes,
            float(forward),
        )
        for one, (seconds, activation, output, forward) in zip(costs, numbers.reshape(-1, 4), strict=True)
    ]


def _bounds(
    world: RankContext,
    settings: Settings,
    strategy: Strategy,
    costs: list[Block],
    plan: Plan,
    blocks: list[nn.Module],
) -> tuple[list[int], int]:
    """Where the stages begin, by hand, or by measured cost within everybody's memory; what is left of this rank's."""
    gradients = room_for(settings.balance)
    mine = np.array([world.arena.capacity - world.arena.used], np.int64)
    room = np.zeros(world.size, np.int64)
    world.communicator.run(Operation("all_gather", 1, dtype("int64")), mine, room, settings.timeout_s)
    memory = [int(one) for one in room]
    try:
        found = fit(strategy, plan, costs, memory, cuts=settings.cut or None, room=gradients)
    except FailedPrecondition as error:
        others = fitting_strategies(every(plan.size), costs, memory, plan.micros, gradients)
        raise FailedPrecondition(f"{error}. {advice(others)}") from None
    if settings.mirror and strategy.name != "data" and world.reseated is not None:
        check_room(plan, found, costs, memory, world.hosts, world.outlives)
    bounds = [stage.blocks.start for stage in found.stages]
    for first, second in shared_parameters(blocks):
        if any(first < bound <= second for bound in bounds):
            raise InvalidArgument(
                f"cut: blocks {first} and {second} share a parameter and cannot be in different stages; "
                "give a cut that keeps them together, or use data parallel"
            )
    return bounds, memory[world.rank] - found.bytes[world.rank]
