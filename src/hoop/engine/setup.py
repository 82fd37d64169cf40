"""Sets up one rank before the first step: builds the model, has it partitioned, and makes the executor and the role.

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.communicator import all_gather_object
from hoop.collectives.rank_context import RankContext
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import merge_plan
from hoop.data.dataset import Batch, Dataset, Splits
from hoop.data.sampler import SampleOrder
from hoop.engine.cost_probe import (
    ShardComputation,
    measure_agreement,
    measure_communication,
    measure_costs,
    measure_gpu_step,
    measure_lateness,
    measure_reduction,
    measure_shard_overhead,
    measure_step_overhead,
    profile_blocks,
)
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.custom.setup import check_strategy, prepare_parts
from hoop.engine.executor import PartitionedModel, PlanExecutor, RankRuntime
from hoop.engine.job import Job, blocks_of, build_model
from hoop.engine.numeric_probe import rank_environment
from hoop.engine.partitioning import KeptVersions, check_gpu_memory, future_plan, needed_gpu_bytes, partition
from hoop.engine.rehearsal import measure_steps
from hoop.engine.roles.base import RankRole, StandbyRole
from hoop.engine.roles.parameter_server import ASYNC_STRIDE, ParameterServerRole, ServerClientRole
from hoop.engine.roles.resident import ResidentRole
from hoop.engine.roles.ring import AsynchronousRingRole, RingRole
from hoop.engine.roles.sharded_data import ShardedDataRole
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator, select_accelerator
from hoop.engine.stage.gradient_reduction import GradientReducer
from hoop.engine.stage.kept_gpu_memory import kept_overhead
from hoop.engine.stage.linear_chain import layers_of
from hoop.engine.stage.state import StageState, StateVectors
from hoop.engine.step_schedule import StepSchedule
from hoop.engine.update_choice import check_can_shard, is_faster_sharded, may_choose
from hoop.environment import mismatch, rounding_text, rounds_differently
from hoop.errors import FailedPrecondition, InternalError, InvalidArgument
from hoop.memory.dtypes import dtype
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.plan.validation import check
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import parse, plan_for_devices
from hoop.strategies.data_parallel import DataParallel, for_hosts
from hoop.strategies.memory_fit import Fit
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
    """Number of the first block of each stage."""
    strategy: Strategy
    plan: Plan
    executor: PlanExecutor
    role: RankRole
    step_costs: dict[str, Any] | None = None
    """Measured costs of a step, for the prediction of the run's duration; None after resharding."""
    rounding: str = ""
    """Warning that names the ranks whose arithmetic rounds differently; empty: all ranks compute the same bits."""

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
    """Results that ``prepare`` reuses: a built model, and after a membership change parts of the last set-up."""

    model: nn.Module | None = None
    """The job's model; None: it is built."""
    costs: list[Block] | None = None
    """Measured costs of the model's blocks, if this rank has measured them."""
    kept_versions: KeptVersions | None = None
    """Versions of the state that are in the arena after a membership change; None: the run starts."""

    @property
    def resharding(self) -> bool:
        """The membership has changed since the strategy was chosen.

        The strategy is adapted to as many of the ranks as it can use, and the model's initial weights need not be equal
        everywhere.
        """
        return self.kept_versions is not None


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
        runtime = RankRuntime(context, settings, vectors, accelerator)
        return _prepare(runtime, job, data, earlier or EarlierSetup())
    except BaseException:
        if accelerator is not None:
            accelerator.close()
        raise


def _prepare(runtime: RankRuntime, job: Job, data: Splits, earlier: EarlierSetup) -> TrainingSetup:
    """``prepare`` on the accelerator of ``runtime``, which the caller closes after an error."""
    context, settings, accelerator = runtime.context, runtime.settings, runtime.accelerator
    half = settings.precision == "bfloat16" and (accelerator is None or not accelerator.cuda)
    if half and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise FailedPrecondition("precision: bfloat16 needs a processor that computes in it; this one does not")
    model = build_model(job, settings.seed) if earlier.model is None else earlier.model
    if isinstance(job.loss, CustomLoss):
        return _prepare_custom(runtime, job, data, model)
    blocks, resharding, criterion = blocks_of(model), earlier.resharding, job.criterion
    settings, strategy, plan = _choose_plan(context, settings, model, blocks, resharding)
    if criterion is None:
        raise InternalError("a job is prepared before the reduction of its loss is known")
    reduction = f"{criterion.returns} {criterion.minimised}"
    rounding = _check_same_on_all_ranks(context, settings, None if resharding else model, data, reduction)
    runtime = dataclasses.replace(runtime, settings=settings)
    costs = _costs(runtime, blocks, data, earlier)
    check_can_shard(strategy, accelerator=accelerator is not None)
    if not resharding and accelerator is None and may_choose(context, settings, strategy):
        strategy, plan, found, free = _choose_update(context, settings, strategy, costs, blocks)
    else:
        found, free = partition(context, settings, strategy, costs, plan, blocks, earlier.kept_versions)
    bounds = [stage.blocks.start for stage in found.stages]
    resident = accelerator is not None and strategy.replicated
    if accelerator is not None:
        needed = needed_gpu_bytes(context, settings, found, future_plan(context, strategy, plan), costs)
        if resident and accelerator.keeps_state:
            needed += kept_overhead(settings.num_microbatches)
        check_gpu_memory(context, settings, accelerator, needed, resharding)
    executor = PlanExecutor(runtime, PartitionedModel(blocks, bounds), plan, data.train, criterion, resident)
    if (strategy.replicated or plan.sharded_update) and layers_of(blocks) is not None:
        executor.feed.cache_bytes = free
    if (strategy.replicated or plan.sharded_update) and executor.stage_states[0].layout.counters:
        _set_counter_increments(executor.stage_states[0], _sample(settings, data)[0])
    if resident:
        role: RankRole = ResidentRole(executor, data.train, runtime.vectors, sum(one.seconds for one in costs))
    else:
        role = make_role(executor, strategy, blocks, data.train, runtime.vectors)
    setup = TrainingSetup(model, costs, bounds, strategy, plan, executor, role, rounding=rounding)
    if not resharding:  # the run is predicted once, when it starts
        try:
            setup.step_costs = _measure_step_costs(context, settings, job, data, setup)
        except BaseException:
            role.close()
            executor.close()
            raise
    if context.inject_faults is not None:  # not before: they are for the steps of the run, not for rehearsed ones
        context.inject_faults(executor)
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


def _costs(runtime: RankRuntime, blocks: list[nn.Module], data: Splits, earlier: EarlierSetup) -> list[Block]:
    """Collective. The costs of the blocks, the same at every rank: known after a membership change, or measured."""
    context, settings, accelerator = runtime.context, runtime.settings, runtime.accelerator
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


def _prepare_custom(runtime: RankRuntime, job: Job, data: Splits, model: nn.Module) -> TrainingSetup:
    """Collective. Sets up custom training (``engine/custom``). Its blocks are not measured, and it is not predicted."""
    context, settings = runtime.context, runtime.settings
    loss, strategy = job.loss, for_hosts(parse(settings.strategy), context.hosts)
    assert isinstance(loss, CustomLoss)
    check_can_shard(strategy, custom=True)
    check_strategy(strategy)
    plan = strategy.plan(context.size, settings.num_microbatches)
    rounding = _check_same_on_all_ranks(context, settings, model, data, f"{loss.returns} {loss.metric_names}")

    def check_memory(costs: list[Block]) -> None:
        partition(context, settings, strategy, costs, plan, [model])

    executor, role, costs = prepare_parts(runtime, job, data, model, plan, check_memory)
    if context.inject_faults is not None:
        context.inject_faults(executor)
    return TrainingSetup(model, costs, [0], strategy, plan, executor, role, rounding=rounding)


def _choose_update(
    context: RankContext, settings: Settings, strategy: Strategy, costs: list[Block], blocks: list[nn.Module]
) -> tuple[Strategy, Plan, Fit, int]:
    """Collective. The data parallel strategy, with a sharded update if that is faster, or if only then it fits.

    Also its plan, and the results of ``partition``.
    """
    sharded = for_hosts(DataParallel(sharded=True), context.hosts)
    weights = sum(one.weight_bytes for one in costs)
    faster = is_faster_sharded(context, settings, weights, chain=layers_of(blocks) is not None)
    errors: dict[bool, FailedPrecondition] = {}
    for one in (sharded, strategy) if faster else (strategy, sharded):
        plan = one.plan(context.size, settings.num_microbatches)
        try:
            return one, plan, *partition(context, settings, one, costs, plan, blocks)
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
    how = ShardComputation(
        batched_shards,
        # On a core of its own a rank prefetches in time in which it would wait; else in that of another rank.
        in_pieces=executor.prefetches and context.oversubscription > 1,
        on_cores=executor.accelerator is None,
    )
    found = measure_costs(setup.blocks, blocks, data.train, job.loss_function, settings.optimizer, rows, how)
    found |= measure_communication(context.communicator, settings.num_microbatches, settings.timeout_s)
    if executor.accelerator is None and not context.future_size:
        found |= _measure_overheads(context, settings, setup, data.train)
    found["late_share"] = measure_lateness(context.communicator, settings.timeout_s)
    found["hosts"] = list(hosts) if separate else [0] * context.size
    found["strategy"] = setup.strategy.spec
    if executor.accelerator is None and setup.strategy.synchronous and not context.joining and not context.future_size:
        compute_s = sum(one.seconds for one in setup.blocks) * settings.num_microbatches / context.size
        estimate_s = compute_s * max(settings.slowdown, default=1.0)
        if context.size > 1:
            estimate_s += found["byte_s"] * sum(one.weight_bytes for one in setup.blocks) / context.size
        schedule = StepSchedule(settings, len(data.train))
        rehearsed_s = measure_steps(context.communicator, setup.role, schedule, estimate_s, settings.timeout_s)
        if rehearsed_s is not None:
            found["rehearsed_s"] = rehearsed_s
    if isinstance(setup.role, ResidentRole) and not context.joining and not context.future_size:
        estimate = sum(one.seconds for one in setup.blocks) * -(-settings.num_microbatches // context.size)
        order = SampleOrder(settings.seed, len(data.train))
        found["gpu"] = measure_gpu_step(setup.role, order, settings, estimate)
    return found


def _measure_overheads(
    context: RankContext, settings: Settings, setup: TrainingSetup, data: Dataset
) -> dict[str, float | int]:
    """Collective. What a step costs beside computation and messages, measured in the job's own memory."""
    communicator, executor, timeout = context.communicator, setup.executor, settings.timeout_s
    found: dict[str, float | int] = {
        "step_s": measure_step_overhead(executor, data, settings),
        "shard_s": measure_shard_overhead(executor, communicator, timeout),
    }
    plan, shards = setup.plan, settings.num_microbatches
    if not setup.strategy.replicated:
        found["agree_s"] = measure_agreement(setup.role, communicator, shards, timeout)
    elif context.size > 1 and not context.joining and isinstance(communicator.endpoint, SharedEndpoint):
        reducer = executor.reducer(0)
        if isinstance(reducer, GradientReducer) and not reducer.num_buckets:  # else summed during the backward
            found["reduce_s"] = measure_reduction(communicator, reducer, timeout)
            nodes = [merge_plan(plan.computed_by(rank, 0), shards).nodes for rank in plan.holders[0]]
            found["partial_sums"] = sum(map(len, nodes))
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
