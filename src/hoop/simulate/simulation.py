"""A strategy on a cluster, in virtual time.

>>> costs = Costs.uniform(blocks=4, forward=1.0, backward=2.0)
>>> simulate(parse("pipeline:1f1b"), costs, Cluster.even(4), micros=8).step_seconds
33.0

The plans are the strategies' own, and where they go by rules, the very rules that the engine runs. Nothing here draws
by chance but stragglers, and those by a seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hoop.errors import InternalError, InvalidArgument
from hoop.plan.plan import Plan
from hoop.plan.rules import ListRule, Rule
from hoop.simulate.clock import Clock, Group, Network
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs
from hoop.simulate.instruction_cost import InstructionCosts, ReplicationCosts
from hoop.simulate.rank import Outage, SimulatedRank, SimulatedStragglers
from hoop.simulate.reduction_cost import MOST_MESSAGES, ORDERED, ReductionCosts, check_algorithm
from hoop.simulate.result import SimulationResult
from hoop.strategies.base import Strategy
from hoop.strategies.memory_fit import Fit, Room, fit, one_each

SPAN = 32
"""Steps without a flush where a strategy needs none: as many as the engine runs at a time."""
MOST_TRACED = 100_000
"""Instructions of a simulation that keeps its spans, unless it is told to."""


def simulate(
    strategy: Strategy,
    costs: Costs,
    cluster: Cluster,
    *,
    micros: int,
    steps: int | None = None,
    cuts: Sequence[int] | None = None,
    all_reduce: str = ORDERED,
    stragglers: SimulatedStragglers | None = None,
    outages: Sequence[Outage] = (),
    room: Room = one_each,
    trace: bool | None = None,
    most_messages: int = MOST_MESSAGES,
    mirror: bool = False,
    dealt: Sequence[float] | None = None,
) -> SimulationResult:
    """What a step takes, who waits, and what moves; raises where the model does not fit.

    ``micros``: shards of the global batch, each of ``costs.rows`` samples. ``steps``: one, or 32 where the strategy
    needs no flush. ``all_reduce``: the engine's ordered sum, or an algorithm of the collectives. ``room``: how many
    gradients a device makes room for. ``trace``: whether spans are kept; by default if there are not too many.
    ``dealt``: how fast devices are taken to be when shards are dealt out; None: as fast as they are.
    ``mirror``: what ranks hold of a model is kept elsewhere too, as the engine does it.
    """
    steps = steps or (1 if strategy.synchronous else SPAN)
    speeds = cluster.speeds
    uneven = len(set(speeds)) > 1
    plan = strategy.plan(cluster.size, micros, dealt or (speeds if uneven else None))
    fitted = fit(
        strategy, plan, costs.partition_blocks(), cluster.memory, speeds if uneven else None, cuts, room
    )
    if trace is None:
        trace = steps * sum(map(len, plan.ranks)) <= MOST_TRACED
    for one in outages:
        if not 0 <= one.rank < cluster.size or one.at < 0 or one.seconds < 0:
            raise InvalidArgument(
                f"outage: {one} is of no device or no time; there are {cluster.size} devices"
            )
    found = Simulation(
        strategy, plan, fitted, costs, cluster, steps, check_algorithm(all_reduce), stragglers, outages, trace,
        most_messages, mirror,
    )  # fmt: skip
    return found.run()


class Simulation:
    """What the devices of one simulation have in common."""

    def __init__(
        self,
        strategy: Strategy,
        plan: Plan,
        fitted: Fit,
        costs: Costs,
        cluster: Cluster,
        steps: int,
        algorithm: str,
        stragglers: SimulatedStragglers | None,
        outages: Sequence[Outage],
        trace: bool,
        most_messages: int,
        mirror: bool,
    ) -> None:
        self._strategy, self._plan, self._fit, self._costs = strategy, plan, fitted, costs
        self.machine = costs.machine
        self.clock = Clock(cluster, costs.machine.crowding)
        self.network = Network(cluster, self.clock)
        self.stragglers, self.outages, self.trace = stragglers, outages, trace
        listed = all(strategy.rule(plan, rank) is None for rank in (0, plan.size - 1))
        self.takes_all = not plan.servers or listed
        span = 1 if strategy.synchronous else SPAN
        self.spans = [min(span, steps - done) for done in range(0, steps, span)]
        self._steps = steps
        cuts = [stage.blocks.start for stage in fitted.stages]
        self.prices = InstructionCosts(plan, costs, cuts, listed, strategy.synchronous)
        self.mirrors = None
        self._memory = fitted.bytes
        if mirror and strategy.name != "data":
            self.mirrors = ReplicationCosts(plan, costs, fitted.stages, strategy.synchronous, cluster.host_of)
            self._memory = self.mirrors.memory(fitted.bytes, cluster.memory)
        self._groups: dict[tuple[int, ...], Group] = {}
        self.sums = self._summing(cluster, algorithm, most_messages)
        told_by_sums = plan.stages == 1 and not plan.servers
        self.everybody = None if told_by_sums or plan.size == 1 else Group(tuple(range(plan.size)))
        rounds = 2 * math.ceil(math.log2(plan.size)) if len(cluster.hosts) > 1 else 0
        self.agreeing_s = rounds * (2 * self.machine.message_s + cluster.link.latency)
        slices = len(plan.servers) - 1
        self.last_part = [slices if rank in plan.holders[0] else -1 for rank in range(plan.size)]
        for stage, ranks in enumerate(plan.holders if not plan.servers else ()):
            for rank in ranks:
                self.last_part[rank] = stage

    def _summing(
        self, cluster: Cluster, algorithm: str, most_messages: int
    ) -> dict[tuple[int, int], tuple[ReductionCosts, int, Group]]:
        """For each rank and stage that is added up across replicas: how, and as which member of which group."""
        plan, prices = self._plan, self.prices
        found = {}
        for stage, ranks in enumerate(plan.holders if not plan.servers else ()):
            if len(ranks) == 1:
                continue
            summing = ReductionCosts(
                ranks,
                [plan.computed_by(rank, stage) for rank in ranks],
                [prices.nodes(rank, stage) for rank in ranks],
                plan.micros,
                prices.gradient_bytes[stage],
                cluster,
                self.machine,
                algorithm,
                most_messages,
            )
            group = Group(ranks)
            for index, rank in enumerate(ranks):
                found[rank, stage] = (summing, index, group)
        return found

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The one group of these ranks."""
        if ranks not in self._groups:
            self._groups[ranks] = Group(ranks)
        return self._groups[ranks]

    def rule(self, rank: int, steps: int) -> Rule:
        """What decides for a rank: the strategy's rule, or the plan's list."""
        rule = self._strategy.rule(self._plan, rank, steps)
        return ListRule(self._plan.ranks[rank]) if rule is None else rule

    def run(self) -> SimulationResult:
        devices = [SimulatedRank(self, rank) for rank in range(self._plan.size)]
        stuck = self.clock.run([device.run() for device in devices])
        if stuck:
            raise InternalError(
                f"{self._strategy.spec}: ranks {stuck[:8]} wait for ever; the plan or its rules are wrong"
            )
        end = max(device.account.end for device in devices)
        for device in devices:  # who is done waits for the others
            device.account.seconds["idle"] += end - device.account.end
        return SimulationResult(
            self._strategy.spec,
            self._plan,
            self._steps,
            end,
            [device.account for device in devices],
            self._memory,
            [stage.blocks.start for stage in self._fit.stages],
            alone_seconds(self._costs, self._plan.micros),
        )


def alone_seconds(costs: Costs, micros: int) -> float:
    """A step of one device of speed 1 that holds the whole model."""
    from hoop.strategies.data_parallel import DataParallel

    plan = DataParallel().plan(1, micros)
    prices = InstructionCosts(plan, costs, [0], True, True)
    return costs.machine.step_s + sum(prices.seconds(0, one) for one in plan.ranks[0])
