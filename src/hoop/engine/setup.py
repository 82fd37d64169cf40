"""Sets up one rank before the first step: builds the model, partitions it, checks memory, and makes the executor.

``prepare`` is called by the trainer when a run starts, and by ``ShardedStateManager.reshard`` after a membership
change. It is collective: ranks compare what they are about to train, agree on block costs and on the partition, and
fail alike if the job cannot run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.communicator import all_gather_object
from hoop.collectives.rank_context import RankContext
from hoop.collectives.registry import Operation
from hoop.config import format_size
from hoop.data.dataset import Batch, Dataset, Splits
from hoop.data.sampler import SampleOrder
from hoop.engine.cost_probe import (
    measure_communication,
    measure_costs,
    measure_gpu_step,
    measure_lateness,
    profile_blocks,
)
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.custom.setup import check_strategy, prepare_parts
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.replication import check_memory, copies_bytes, gpu_copies_bytes
from hoop.engine.gradient_slots import gradient_memory_for
from hoop.engine.job import Job, blocks_of, build_model
from hoop.engine.numeric_probe import rank_environment
from hoop.engine.roles.base import RankRole, StandbyRole
from hoop.engine.roles.parameter_server import ASYNC_STRIDE, ParameterServerRole, ServerClientRole
from hoop.engine.roles.resident import ResidentRole
from hoop.engine.roles.ring import AsynchronousRingRole, RingRole
from hoop.engine.roles.sharded_data import ShardedDataRole
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator, select_accelerator
from hoop.engine.stage.linear_chain import layers_of
from hoop.engine.stage.state import StageState, StateVectors, shared_parameters
from hoop.engine.update_choice import check_can_shard, is_faster_sharded, may_choose
from hoop.environment import mismatch, rounding_text, rounds_differently
from hoop.errors import FailedPrecondition, InternalError, InvalidArgument
from hoop.memory.dtypes import dtype
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.plan.validation import check
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import all_strategies, parse, plan_for_devices
from hoop.strategies.data_parallel import DataParallel, for_hosts
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
from hoop.transport.base import SharedEndpoint, SpanningEndpoint

FIRST_WEIGHTS = "first weights"


def check_stages(strategy: Strategy, plan: Plan, model: nn.Module, blocks: int) -> None:
    """Raises ``InvalidArgument`` if the model has fewer blocks than the plan has stages."""
    if plan.stages <= blocks:
        return
    if isinstance(model, nn.Sequential):
        remedy = "use fewer devices, or an nn.Sequential of more children"
    else:
        remedy = "make it an nn.Sequential, which is cut between its children, or use the strategy data or ps"
    raise InvalidArgument(
        f"strategy: {strategy.spec} needs {plan.stages} stages of at least one block, and the model, "
        f"{type(model).__name__}, is {blocks} block{'s' * (blocks != 1)}; {remedy}"
    )


def check_clipping(strategy: Strategy, plan: Plan, settings: Settings) -> None:
    """Raises ``InvalidArgument`` if gradients are to be clipped and no rank of this strategy can know their norm."""
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


def make_role(
    executor: PlanExecutor, strategy: Strategy, blocks: Sequence[nn.Module], data: Dataset, vectors: StateVectors
) -> RankRole:
    plan = executor.plan
    if executor.rank in plan.servers:
        return ParameterServerRole(executor, strategy, blocks, vectors)
    if not executor.stage_states:
        return StandbyRole(executor, 1 if strategy.synchronous else ASYNC_STRIDE)
    if plan.servers:
        return ServerClientRole(executor, strategy)
    if plan.sharded_update:
        return ShardedDataRole(executor)
    if strategy.rule(plan, executor.rank) is None:
        return RankRole(executor)
    if strategy.synchronous:
        return RingRole(executor, strategy)
    return AsynchronousRingRole(executor, strategy, data, vectors)


@dataclass
class TrainingSetup:
    """Everything that this rank trains with, for one partitioning of the model."""

    model: nn.Module
    blocks: list[Block]
    """Measured cost of each block."""
    bounds: list[int]
    """First block of each stage."""
    strategy: Strategy
    plan: Plan
    executor: PlanExecutor
    role: RankRole
    step_costs: dict[str, Any] | None = None
    """Measured costs of a step, for the prediction of the run's duration; None after resharding."""
    rounding: str = ""
    """Which ranks compute other bits than the others, and what follows; empty: all compute alike."""

    def describe_stages(self) -> list[str]:
        """Text for each stage and each server slice: its blocks and its ranks."""
        ends = [*self.bounds[1:], len(self.blocks)]
        stages = [
            f"blocks {low}..{high - 1} on ranks {', '.join(map(str, ranks))}"
            for low, high, ranks in zip(self.bounds, ends, self.plan.holders, strict=True)
        ]
        servers = enumerate(self.plan.servers)
        stages += [f"slice {number} of the weights on rank {rank}" for number, rank in servers]
        updating = enumerate(self.plan.holders[0] if self.plan.sharded_update else ())
        return stages + [f"slice {number} of the update on rank {rank}" for number, rank in updating]


@dataclass(frozen=True)
class EarlierSetup:
    """What a rank has from before: a model that is built already, or the parts of its last set-up after a change."""

    model: nn.Module | None = None
    """The job's model; None: it is built."""
    costs: list[Block] | None = None
    """The costs of its blocks, if this rank has measured them."""
    resharding: bool = False
    """The membership has changed since the strategy was chosen. The strategy is adapted to as many of the ranks as it
    can use, and the model's initial weights need not be equal everywhere."""
    movable_bytes: int = 0
    """Bytes of the arena that ``make_room`` can free."""
    make_room: Callable[[int], None] = lambda needed: None
    """Called, with the bytes that this rank needs, before any of them are allocated."""


def prepare(
    context: RankContext,
    settings: Settings,
    job: Job,
    data: Splits,
    vectors: StateVectors,
    earlier: EarlierSetup | None = None,
) -> TrainingSetup:
    """Collective. Builds this rank's part of the job; raises at every rank if the job cannot run.

    ``earlier``: what this rank need not build or measure again.
    """
    settings.check()
    accelerator = select_accelerator(context, settings)
    try:
        return _prepare(context, settings, job, data, vectors, accelerator, earlier or EarlierSetup())
    except BaseException:
        if accelerator is not None:
            accelerator.close()
        raise


def _prepare(
    context: RankContext,
    settings: Settings,
    job: Job,
    data: Splits,
    vectors: StateVectors,
    accelerator: Accelerator | None,
    earlier: EarlierSetup,
) -> TrainingSetup:
    """``prepare`` on this accelerator, which the caller closes after an error."""
    half = settings.precision == "bfloat16" and (accelerator is None or not accelerator.cuda)
    if half and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise FailedPrecondition("precision: bfloat16 needs a processor that computes in it; this one does not")
    model = build_model(job, settings.seed) if earlier.model is None else earlier.model
    if isinstance(job.loss, CustomLoss):
        return _prepare_custom(context, settings, job, data, vectors, model, accelerator)
    blocks, resharding, criterion = blocks_of(model), earlier.resharding, job.criterion
    settings, strategy, plan = _choose_plan(context, settings, model, blocks, resharding)
    if criterion is None:
        raise InternalError("a job is prepared before the reduction of its loss is known")
    reduction = f"{criterion.returns} {criterion.minimised}"
    rounding = _check_same_on_all_ranks(context, settings, None if resharding else model, data, reduction)
    costs = _costs(context, settings, blocks, data, accelerator, earlier)
    check_can_shard(strategy, accelerator=accelerator is not None)
    if not resharding and accelerator is None and may_choose(context, settings, strategy):
        strategy, plan, found, free = _choose_update(context, settings, strategy, costs, blocks)
    else:
        found, free = _partition(context, settings, strategy, costs, plan, blocks, earlier)
    bounds = [stage.blocks.start for stage in found.stages]
    resident = accelerator is not None and strategy.replicated
    if accelerator is not None:
        needed = _gpu_bytes(context, settings, found, _future_plan(context, strategy, plan), costs)
        _check_gpu_memory(context, settings, accelerator, needed, resharding)
    executor = PlanExecutor(
        context, settings, blocks, bounds, plan, data.train, criterion, vectors, accelerator, resident
    )
    if (strategy.replicated or plan.sharded_update) and layers_of(blocks) is not None:
        executor.feed.cache_bytes = free
    if (strategy.replicated or plan.sharded_update) and executor.stage_states[0].layout.counters:
        _set_counter_increments(executor.stage_states[0], _sample(settings, data)[0])
    if resident:
        role: RankRole = ResidentRole(executor, data.train, vectors, sum(one.seconds for one in costs))
    else:
        role = make_role(executor, strategy, blocks, data.train, vectors)
    if context.inject_faults is not None:
        context.inject_faults(executor)
    setup = TrainingSetup(model, costs, bounds, strategy, plan, executor, role, rounding=rounding)
    if not resharding:  # the run is predicted once, when it starts
        try:
            setup.step_costs = _measure_step_costs(context, settings, job, data, setup)
        except BaseException:
            role.close()
            executor.close()
            raise
    return setup


def _choose_plan(
    context: RankContext, settings: Settings, model: nn.Module, blocks: list[nn.Module], resharding: bool
) -> tuple[Settings, Strategy, Plan]:
    """The strategy for the ranks of ``context`` and its plan; raises if the model cannot be trained with it.

    ``resharding``: the strategy is adapted to the ranks that there are now. Also returns the settings, without a cut
    that was given for another number of stages.
    """
    strategy = for_hosts(parse(settings.strategy), context.hosts)
    if resharding:
        strategy, plan = plan_for_devices(strategy, context.size, settings.num_microbatches, len(blocks))
        if settings.cut and len(settings.cut) != plan.stages - 1:
            settings = dataclasses.replace(settings, cut=())
    else:
        plan = strategy.plan(context.size, settings.num_microbatches)
    check_stages(strategy, plan, model, len(blocks))
    check_clipping(strategy, plan, settings)
    if problems := check(plan):
        raise InternalError(f"the plan of {settings.strategy} is wrong: {'; '.join(problems[:3])}")
    return settings, strategy, plan


def _costs(
    context: RankContext,
    settings: Settings,
    blocks: list[nn.Module],
    data: Splits,
    accelerator: Accelerator | None,
    earlier: EarlierSetup,
) -> list[Block]:
    """Collective. The costs of the blocks, the same at every rank: known after a membership change, or measured."""
    costs = _known_costs(context, settings, earlier.costs) if earlier.resharding and accelerator is None else None
    if costs is not None:
        return costs
    return _broadcast_costs(context, settings, _profile(blocks, _sample(settings, data), settings, accelerator))


def _sample(settings: Settings, data: Splits) -> Batch:
    """A micro-batch, to measure the model with."""
    rows = -(-settings.batch_size // settings.num_microbatches)
    dataset: Dataset = data.train
    return dataset.batch(np.arange(min(rows, len(dataset)), dtype=np.int64), epoch=0, seed=settings.seed)


def _set_counter_increments(state: StageState, inputs: Tensor) -> None:
    """Data parallel: find out by how much a step advances counters, such as batch norm's number of batches.

    A rank that computes no shard runs no forward that would tell it: there may be more ranks than shards, and a rank
    that joined may have none of the step under way.
    """
    layout = state.layout
    buffers, before = torch.from_numpy(state.state_array[layout.trained :]), [one.clone() for one in layout.counters]
    kept = buffers.clone()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        functools.reduce(lambda values, block: block(values), state.blocks, inputs)
    increments = [
        torch.zeros_like(one) if one.dtype == torch.bool else one - start
        for one, start in zip(layout.counters, before, strict=True)
    ]
    buffers.copy_(kept)
    for one, start in zip(layout.counters, before, strict=True):
        one.copy_(start)
    state.set_counter_increments(increments)


def _prepare_custom(
    context: RankContext,
    settings: Settings,
    job: Job,
    data: Splits,
    vectors: StateVectors,
    model: nn.Module,
    accelerator: Accelerator | None,
) -> TrainingSetup:
    """Collective. Sets up custom training (``engine/custom``). Its blocks are not measured, and it is not predicted."""
    loss, strategy = job.loss, for_hosts(parse(settings.strategy), context.hosts)
    assert isinstance(loss, CustomLoss)
    check_can_shard(strategy, custom=True)
    check_strategy(strategy)
    plan = strategy.plan(context.size, settings.num_microbatches)
    rounding = _check_same_on_all_ranks(context, settings, model, data, f"{loss.returns} {loss.metric_names}")

    def check_memory(costs: list[Block]) -> None:
        _partition(context, settings, strategy, costs, plan, [model], EarlierSetup())

    executor, role, costs = prepare_parts(context, settings, job, data, vectors, model, plan, accelerator, check_memory)
    if context.inject_faults is not None:
        context.inject_faults(executor)
    return TrainingSetup(model, costs, [0], strategy, plan, executor, role, rounding=rounding)


def _choose_update(
    context: RankContext, settings: Settings, strategy: Strategy, costs: list[Block], blocks: list[nn.Module]
) -> tuple[Strategy, Plan, Fit, int]:
    """Collective. The data parallel strategy, with a sharded update if that is faster, or if only then it fits.

    Also its plan, and the results of ``_partition``.
    """
    sharded = for_hosts(DataParallel(sharded=True), context.hosts)
    weights = sum(one.weight_bytes for one in costs)
    faster = is_faster_sharded(context, settings, weights, chain=layers_of(blocks) is not None)
    errors: dict[bool, FailedPrecondition] = {}
    for one in (sharded, strategy) if faster else (strategy, sharded):
        plan = one.plan(context.size, settings.num_microbatches)
        try:
            return one, plan, *_partition(context, settings, one, costs, plan, blocks, EarlierSetup())
        except FailedPrecondition as error:
            errors[one.replicated] = error
    raise errors[True]


def _profile(
    blocks: list[nn.Module], sample: Batch, settings: Settings, accelerator: Accelerator | None
) -> list[Block]:
    """Measure the blocks. On a GPU this also finds out whether all their kernels are deterministic."""
    try:
        return profile_blocks(blocks, sample, settings.optimizer, settings.num_microbatches, accelerator=accelerator)
    except RuntimeError as error:
        if accelerator is None or not accelerator.cuda:
            raise
        accelerator.allow_nondeterministic()
        found = profile_blocks(blocks, sample, settings.optimizer, settings.num_microbatches, accelerator=accelerator)
        warnings.warn(f"accelerator: the weights may differ between runs and numbers of devices: {error}", stacklevel=2)
        return found


def _measure_step_costs(
    context: RankContext, settings: Settings, job: Job, data: Splits, setup: TrainingSetup
) -> dict[str, Any]:
    """Collective. All ranks measure at the same time, so that they disturb each other as they will in training."""
    endpoint, executor, model = context.communicator.endpoint, setup.executor, setup.model
    separate = not isinstance(endpoint, SharedEndpoint)
    hosts = endpoint.hosts if isinstance(endpoint, SpanningEndpoint) else range(context.size)
    rows = -(-settings.batch_size // settings.num_microbatches)
    batched_shards = min(
        executor.max_batched_shards, -(-settings.num_microbatches // max(1, len(executor.plan.holders[0])))
    )
    blocks = blocks_of(model)
    found = measure_costs(setup.blocks, blocks, data.train, job.loss_function, settings.optimizer, rows, batched_shards)
    found |= measure_communication(context.communicator, settings.num_microbatches, settings.timeout_s)
    found["late_share"] = measure_lateness(context.communicator, settings.timeout_s)
    found["hosts"] = list(hosts) if separate else [0] * context.size
    found["strategy"] = setup.strategy.spec
    if isinstance(setup.role, ResidentRole) and not context.joining and not context.future_size:
        estimate = sum(one.seconds for one in setup.blocks) * -(-settings.num_microbatches // context.size)
        order = SampleOrder(settings.seed, len(data.train))
        found["gpu"] = measure_gpu_step(setup.role, order, settings, estimate)
    return found


def _check_same_on_all_ranks(
    context: RankContext, settings: Settings, model: nn.Module | None, data: Splits, reduction: str
) -> str:
    """Collective. Raises unless all ranks have the same settings, loss, data, versions and, if given, ``model``.

    The error names the rank, what differs there, and the remedy. Returns which ranks round differently, in words; their
    first weights may differ by that.
    """
    weights = hashlib.sha256()
    with torch.no_grad():
        for tensor in model.state_dict().values() if model is not None else ():
            weights.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    mine = {
        "settings": settings.to_json(),
        "loss": reduction,
        "training data": data.train.checksum,
        "test data": data.test.checksum,
        FIRST_WEIGHTS: weights.hexdigest(),
    }
    mine = {name: hashlib.sha256(value.encode()).hexdigest()[:16] for name, value in mine.items()}
    place = f"device {context.device} on {socket.gethostname()}"
    ranks = all_gather_object(context.communicator, [mine, rank_environment(), place], settings.timeout_s)
    expected, environment, _ = ranks[0]
    rounding: dict[str, dict[str, str]] = {}
    for rank, (found, its_environment, its_place) in enumerate(ranks):
        differs = "" if settings.allow_mixed else mismatch(its_environment, environment, settings.require_same_bits)
        if differs:
            raise FailedPrecondition(f"job {settings.job}: rank {rank} ({its_place}) has {differs}")
        if rounds_differently(its_environment, environment):
            rounding[its_place] = its_environment
        others = [name for name in expected if found[name] != expected[name]]
        if others and not (others == [FIRST_WEIGHTS] and its_place in rounding):
            raise FailedPrecondition(
                f"job {settings.job}: rank {rank} ({its_place}) has another {', another '.join(others)} than rank 0; "
                "use the same job code and datasets on every machine"
            )
    return rounding_text(list(rounding), next(iter(rounding.values())), environment) if rounding else ""


def _known_costs(context: RankContext, settings: Settings, known: list[Block] | None) -> list[Block] | None:
    """Collective. The costs that the first rank which has some has measured; None if no rank has any.

    In a recovery all ranks wait, and measuring a large model takes longer than to move its state.
    """
    mine = None if known is None else [dataclasses.astuple(one) for one in known]
    found = next(filter(None, all_gather_object(context.communicator, mine, settings.timeout_s)), None)
    return None if found is None else [Block(*row) for row in found]


def _broadcast_costs(context: RankContext, settings: Settings, costs: list[Block]) -> list[Block]:
    """Collective. Rank 0's measurements at every rank, so that all ranks compute the same partition."""
    numbers = np.array(
        [[one.seconds, one.activation_bytes, one.output_bytes, one.forward_seconds or 0.0] for one in costs]
    ).reshape(-1)
    operation = Operation("broadcast", numbers.size, dtype("float64"), root=0)
    context.communicator.run(operation, numbers, numbers, settings.timeout_s)
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


def _partition(
    context: RankContext,
    settings: Settings,
    strategy: Strategy,
    costs: list[Block],
    plan: Plan,
    blocks: list[nn.Module],
    earlier: EarlierSetup,
) -> tuple[Fit, int]:
    """Collective. The partition, and the bytes of this rank's arena that remain free.

    A rank that sets up alone is checked for the ranks that it will train with, as if they all had its memory.
    Uses ``settings.cut`` if it is given, else balances measured costs within every rank's free memory. A run that lost
    devices (``earlier.resharding``) goes on even if its snapshots may not fit any more.
    """
    gradients = gradient_memory_for(settings.balance, clipped=bool(settings.optimizer.clip))
    used = context.arena.used - earlier.movable_bytes
    mine = np.array([context.arena.capacity - used], np.int64)
    free = np.zeros(context.size, np.int64)
    context.communicator.run(Operation("all_gather", 1, dtype("int64")), mine, free, settings.timeout_s)
    memory = [int(one) for one in free]
    if context.future_size:
        plan, memory = _future_plan(context, strategy, plan), memory * context.future_size
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
    if not earlier.resharding and not plan.servers:  # servers, not workers, make the snapshots of a parameter server
        needed = used + _enough_memory(context, plan, found, costs, replicas)
        copies = _copies_bytes(context, plan, found, costs, replicas)
        _check_snapshots(settings, plan, found, costs, memory, copies, needed)
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
    earlier.make_room(_enough_memory(context, plan, found, costs, replicas))
    return found, max(0, spare)


def _future_plan(context: RankContext, strategy: Strategy, plan: Plan) -> Plan:
    """The plan that this rank will train with: ``plan``, or another one if it sets up alone."""
    return strategy.plan(context.future_size, plan.num_microbatches) if context.future_size else plan


def _gpu_bytes(context: RankContext, settings: Settings, found: Fit, plan: Plan, costs: list[Block]) -> int:
    """Bytes of this rank on its GPU: its state and gradients, and the replicas that it updates."""
    if found.strategy.replicated:
        return gpu_bytes(costs, plan, context.rank)
    gradients = gradient_memory_for(settings.balance)(found.strategy, plan)
    replicates = settings.replicate and context.wait_reassignment is not None
    replicas = settings.replicas if replicates else 0
    copies = gpu_copies_bytes(plan, found, costs, context.hosts, replicas)
    return gpu_shard_bytes(found, plan, costs, gradients, context.rank) + copies[context.rank]


def _check_gpu_memory(
    context: RankContext, settings: Settings, accelerator: Accelerator, needed: int, resharding: bool
) -> None:
    """Collective. Raises unless each rank's state fits in its memory on its GPU, and each GPU has that of its ranks.

    ``needed``: bytes of this rank. The GPUs are not asked after a loss (``resharding``): the driver may not have freed
    the memory of a killed process yet.
    """
    free, total = accelerator.memory()
    host = context.hosts[context.rank] if context.hosts else ""
    mine = [needed, accelerator.capacity, f"{host} {accelerator.identity}", free]
    ranks = all_gather_object(context.communicator, mine, settings.timeout_s)
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
    """By rank: what it keeps to survive the loss of others: replicas, or in data parallel a second total buffer."""
    if replicas:
        return copies_bytes(plan, fit, costs, context.hosts, context.persistent_memory, replicas)
    elastic = context.wait_reassignment is not None and plan.size > 1 and fit.strategy.replicated
    gradients = (one.weight_bytes if one.gradient_bytes is None else one.gradient_bytes for one in costs)
    return [sum(gradients) if elastic else 0] * plan.size


def _snapshot_bytes(plan: Plan, fit: Fit, costs: list[Block]) -> list[int]:
    """By rank: the bytes of one snapshot of its weights and optimizer state.

    With a sharded update a rank has the optimizer state of the parameters that begin in its slice, and one of them may
    be large; the first rank has the weights, and any rank may become the first.
    """
    if plan.sharded_update:
        moments = [one.optimizer_bytes for one in costs]
        most = min(sum(moments), -(-sum(moments) // len(plan.holders[0])) + max(moments))
        return [sum(one.weight_bytes for one in costs) + most] * plan.size
    states = [sum(costs[one].weight_bytes + costs[one].optimizer_bytes for one in stage.blocks) for stage in fit.stages]
    return [sum(states[stage] for stage in plan.held_by(rank)) for rank in range(plan.size)]


def _check_snapshots(
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
