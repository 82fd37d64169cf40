"""Simulates a strategy on a cluster in virtual time.

>>> costs = Costs.uniform(blocks=4, forward=1.0, backward=2.0)
>>> simulate(parse("pipeline:1f1b"), costs, Cluster.even(4), num_microbatches=8).step_seconds
33.01

The plans are the strategies' own, and strategies with rules run the same rules as in the engine. The simulation is
deterministic; stragglers are the only random part, and they follow a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InternalError, InvalidArgument
from hoop.membership.replication import check_replicas
from hoop.plan.instructions import IDLE
from hoop.plan.plan import Plan
from hoop.plan.rules import ListRule, Rule
from hoop.simulate.clock import Clock, Group, Network
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs
from hoop.simulate.instruction_cost import (
    MAX_EXECUTED_MESSAGES,
    ORDERED,
    InstructionCosts,
    ReductionCosts,
    ReplicationCosts,
    check_algorithm,
)
from hoop.simulate.rank import GroupReduction, Outage, SimulatedRank, SimulatedStragglers, SimulationContext
from hoop.simulate.result import SimulationResult
from hoop.strategies.base import Strategy
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.memory_fit import Fit, GradientBuffers, fit, gpu_bytes, one_gradient_each

STEPS_BETWEEN_FLUSHES = 32
"""Steps that an asynchronous strategy runs between two flushes; the engine uses the same number."""
MAX_TRACED_INSTRUCTIONS = 100_000
"""Simulations with more instructions keep no spans unless ``trace`` is True."""


def simulate(
    strategy: Strategy,
    costs: Costs,
    cluster: Cluster,
    *,
    num_microbatches: int,
    steps: int | None = None,
    cuts: Sequence[int] | None = None,
    all_reduce: str = ORDERED,
    stragglers: SimulatedStragglers | None = None,
    outages: Sequence[Outage] = (),
    gradient_buffers: GradientBuffers = one_gradient_each,
    trace: bool | None = None,
    max_messages: int = MAX_EXECUTED_MESSAGES,
    replicate: bool = False,
    replicas: int = 1,
    plan: Plan | None = None,
) -> SimulationResult:
    """Step time, idle time, traffic and memory of a strategy on a cluster; raises if the model does not fit.

    num_microbatches: shards of the global batch, each of ``costs.rows`` samples.
    steps: None: 1, or 32 for asynchronous strategies.
    cuts: where stages begin; None: choose the fastest partition.
    all_reduce: the engine's ordered sum, or an all-reduce algorithm of ``collectives``.
    gradient_buffers: number of gradient buffers that the engine allocates.
    trace: whether to keep spans; None: if the simulation has at most ``MAX_TRACED_INSTRUCTIONS``.
    max_messages: reductions with more messages use their closed-form time.
    replicate: whether ranks replicate their part of the model, as the engine does.
    replicas: replicas of each part.
    plan: one of the strategy, with shards where a load balancer has moved them; None: by the devices' speeds.
    """
    check_replicas(replicas, cluster.size, replicate)
    if costs.gpu is not None:
        cluster = cluster.on_gpus(costs.gpu.memory)
    steps = steps or (1 if strategy.synchronous else STEPS_BETWEEN_FLUSHES)
    speeds = cluster.speeds
    uneven = len(set(speeds)) > 1
    if plan is None:
        plan = strategy.plan(cluster.size, num_microbatches, speeds if uneven else None)
    fitted = fit(
        strategy,
        plan,
        costs.partition_blocks(),
        cluster.memory,
        speeds=speeds if uneven else None,
        cuts=cuts,
        gradient_buffers=gradient_buffers,
    )
    if costs.gpu is not None and plan.sharded_update:
        raise FailedPrecondition(f"strategy: {strategy.spec} cannot be used with the state on a GPU; use data")
    if costs.gpu is not None and strategy.replicated:
        fitted = _fit_gpus(fitted, plan, costs, cluster)
    if trace is None:
        trace = steps * sum(map(len, plan.ranks)) <= MAX_TRACED_INSTRUCTIONS
    for one in outages:
        if not 0 <= one.rank < cluster.size or one.at < 0 or one.seconds < 0:
            raise InvalidArgument(f"outage: {one} is of no device or no time; there are {cluster.size} devices")
    options = SimulationOptions(
        steps=steps,
        algorithm=check_algorithm(all_reduce),
        stragglers=stragglers,
        outages=outages,
        trace=trace,
        max_messages=max_messages,
        replicas=replicas if replicate else 0,
    )
    return Simulation(strategy, plan, fitted, costs, cluster, options).run()


def _fit_gpus(fitted: Fit, plan: Plan, costs: Costs, cluster: Cluster) -> Fit:
    """The memory of each device on its GPU; raises if a GPU is too small for the devices that share it."""
    needed = [gpu_bytes(costs.partition_blocks(), plan, rank) for rank in range(plan.size)]
    for rank, (size, (limit, sharing)) in enumerate(zip(needed, cluster.gpu_memory, strict=True)):
        if limit is not None and size > limit // sharing:
            raise FailedPrecondition(
                f"memory: device {rank} needs {format_size(size)} on its GPU, and has {format_size(limit // sharing)}: "
                f"{sharing} devices share {format_size(limit)}"
            )
    return replace(fitted, bytes=needed)


@dataclass(frozen=True)
class SimulationOptions:
    """The options of ``simulate`` that ``Simulation`` needs, with defaults filled in."""

    steps: int
    algorithm: str
    stragglers: SimulatedStragglers | None
    outages: Sequence[Outage]
    trace: bool
    max_messages: int
    replicas: int
    """Replicas of each rank's part of the model; 0: none."""


class Simulation:
    """Builds the shared context of a simulation, runs its ranks, and collects the result."""

    def __init__(
        self, strategy: Strategy, plan: Plan, fitted: Fit, costs: Costs, cluster: Cluster, options: SimulationOptions
    ) -> None:
        self._strategy, self._plan, self._fit, self._costs = strategy, plan, fitted, costs
        self._steps = options.steps
        clock = Clock(cluster, costs.machine)
        fixed_lists = all(strategy.rule(plan, rank) is None for rank in (0, plan.size - 1))
        span = 1 if strategy.synchronous else STEPS_BETWEEN_FLUSHES
        instruction_costs = InstructionCosts(
            plan,
            costs,
            cuts=[stage.blocks.start for stage in fitted.stages],
            fixed_lists=fixed_lists,
            synchronous=strategy.synchronous,
        )
        replication = None
        self._memory = fitted.bytes
        if options.replicas and not strategy.replicated:
            replication = ReplicationCosts(
                plan, costs, fitted.stages, strategy.synchronous, cluster.host_of, options.replicas
            )
            self._memory = replication.memory(fitted.bytes, cluster.memory)
        sum_carries_vote = plan.stages == 1 and not plan.servers and not plan.sharded_update
        vote_rounds = 2 * math.ceil(math.log2(plan.size)) if len(cluster.hosts) > 1 else 0
        self._context = SimulationContext(
            clock=clock,
            network=Network(cluster, clock),
            machine=costs.machine,
            instruction_costs=instruction_costs,
            replication=replication,
            reductions=self._reductions(cluster, instruction_costs, options),
            rule=self._rule,
            span_lengths=[min(span, options.steps - done) for done in range(0, options.steps, span)],
            stop_vote_group=None if sum_carries_vote or plan.size == 1 else Group(tuple(range(plan.size))),
            stop_vote_s=vote_rounds * (2 * costs.machine.message_s + cluster.link.latency),
            last_part=_last_parts(plan),
            take_all_messages=not plan.servers or fixed_lists,
            trace=options.trace,
            stragglers=options.stragglers,
            outages=options.outages,
        )

    def _reductions(
        self, cluster: Cluster, instruction_costs: InstructionCosts, options: SimulationOptions
    ) -> dict[tuple[int, int], GroupReduction]:
        """The reduction of each (rank, stage) whose stage has several replicas."""
        plan = self._plan
        found = {}
        for stage, ranks in enumerate(plan.holders if not plan.servers else ()):
            if len(ranks) == 1:
                continue
            costs = ReductionCosts(
                ranks,
                shares=[plan.computed_by(rank, stage) for rank in ranks],
                partial_sums=[instruction_costs.num_partial_sums(rank, stage) for rank in ranks],
                num_microbatches=plan.num_microbatches,
                size=instruction_costs.gradient_bytes[stage],
                cluster=cluster,
                machine=self._costs.machine,
                algorithm=options.algorithm,
                max_messages=options.max_messages,
                gpu=instruction_costs.gpu,
            )
            group = Group(ranks)
            for index, rank in enumerate(ranks):
                found[rank, stage] = GroupReduction(costs, index, group)
        return found

    def _rule(self, rank: int, steps: int) -> Rule:
        """The strategy's rule for a rank, or the plan's list as a rule."""
        rule = self._strategy.rule(self._plan, rank, steps)
        return ListRule(self._plan.ranks[rank]) if rule is None else rule

    def run(self) -> SimulationResult:
        ranks = [SimulatedRank(self._context, rank) for rank in range(self._plan.size)]
        stuck = self._context.clock.run([rank.run() for rank in ranks])
        if stuck:
            raise InternalError(
                f"{self._strategy.spec}: ranks {stuck[:8]} wait for ever; the plan or its rules are wrong"
            )
        end = max(rank.account.end for rank in ranks)
        for rank in ranks:  # a finished rank is idle until the last one finishes
            rank.account.seconds[IDLE] += end - rank.account.end
        return SimulationResult(
            strategy=self._strategy.spec,
            plan=self._plan,
            steps=self._steps,
            seconds=end,
            accounts=[rank.account for rank in ranks],
            memory=self._memory,
            cuts=[stage.blocks.start for stage in self._fit.stages],
            single_device_seconds=single_device_seconds(self._costs, self._plan.num_microbatches),
        )


def _last_parts(plan: Plan) -> list[int]:
    """For each rank, the stage or slice whose update or push ends a step; -1 for parameter servers."""
    last_slice = len(plan.servers) - 1
    found = [last_slice if rank in plan.holders[0] else -1 for rank in range(plan.size)]
    for stage, ranks in enumerate(plan.holders if not plan.servers else ()):
        for rank in ranks:
            found[rank] = stage
    return found


def single_device_seconds(costs: Costs, num_microbatches: int) -> float:
    """Time of a step on one device of speed 1 that holds the whole model."""
    plan = DataParallel().plan(1, num_microbatches)
    prices = InstructionCosts(plan, costs, cuts=[0], fixed_lists=True, synchronous=True)
    overhead = costs.machine.step_s if costs.gpu is None else costs.gpu.step_s
    return overhead + sum(prices.seconds(0, one) for one in plan.ranks[0])
