"""Searches strategies, meshes, numbers of micro-batches and schedules for a cluster: simulates and ranks each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hoop.config import format_size
from hoop.errors import UserError
from hoop.membership.replication import check_replicas
from hoop.plan.instructions import COMMUNICATE, COMPUTE, IDLE
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs
from hoop.simulate.failure_model import Failures, Goodput, goodput
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import STEPS_BETWEEN_FLUSHES, simulate
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.memory_fit import GradientBuffers, one_gradient_each
from hoop.strategies.parameter_server import MODES, ParameterServer
from hoop.strategies.pipeline import SCHEDULES, Pipeline
from hoop.strategies.ring import RingModel

ASYNC_STEPS = 4
"""Simulated steps of an asynchronous strategy."""
DAY = 24 * 3600.0
"""Seconds of virtual time over which goodput is estimated."""
MAX_INSTRUCTIONS = 400_000
"""A candidate with more instructions is not simulated; its reason says so."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with a number of micro-batches, and its simulation."""

    strategy: Strategy
    num_microbatches: int
    result: SimulationResult | None
    """None: it cannot run on the cluster."""
    goodput: Goodput | None
    """None: failures are not modelled."""
    reason: str
    """Why it ranks behind the best candidate, or cannot run; for the best, why it is fastest."""

    @property
    def seconds(self) -> float:
        """Step time divided by goodput."""
        assert self.result is not None, "a candidate that cannot run has no time"
        useful = self.goodput.useful if self.goodput else 1.0
        return self.result.step_seconds / useful if useful else float("inf")

    def to_dict(self) -> dict[str, Any]:
        found = {"strategy": self.strategy.spec, "micros": self.num_microbatches, "why": self.reason}
        if self.result is None:
            return found | {"runs": False}
        useful = self.goodput.useful if self.goodput else 1.0
        return found | {"runs": True, "goodput": useful} | self.result.to_dict()


def candidates(devices: int, batch_size: int) -> Iterator[tuple[Strategy, int]]:
    """The strategies to try, each with sensible numbers of micro-batches."""
    strategies: list[Strategy] = [DataParallel()]
    if devices > 1:
        strategies.append(DataParallel(sharded=True))
        servers = sorted({1, max(1, devices // 8), max(1, devices // 4)})
        strategies += [ParameterServer(count, mode) for mode in MODES for count in servers if count < devices]
        strategies += [RingModel(), RingModel(slices=2), RingModel(asynchronous=True)]
        strategies += [Pipeline(schedule) for schedule in SCHEDULES]
        divisors = [count for count in range(2, devices) if devices % count == 0]
        strategies += [Hybrid(count, schedule) for count in divisors for schedule in ("1f1b", "zero-bubble")]
    for strategy in strategies:
        replicas = devices if strategy.stages(devices) == 1 else getattr(strategy, "replicas", 1)
        staged = strategy.stages(devices) > 1
        wanted = {replicas * each for each in ((1, 2, 4) if not staged else (4, 8, 16, 32))}
        yield from (
            (strategy, num_microbatches) for num_microbatches in sorted(wanted) if num_microbatches <= batch_size
        )


def search(
    costs: Costs,
    cluster: Cluster,
    batch_size: int,
    failures: Failures | None = None,
    gradient_buffers: GradientBuffers = one_gradient_each,
    progress: Callable[[str], None] = lambda text: None,
    wanted: Sequence[tuple[Strategy, int]] | None = None,
    replicate: bool = False,
    replicas: int = 1,
) -> list[Candidate]:
    """Simulates all candidates: the fastest first, candidates that cannot run last, each with its reason.

    failures: also estimate goodput, and rank by step time divided by goodput.
    gradient_buffers: number of gradient buffers that the engine allocates.
    progress: called with a description of each candidate before its simulation.
    wanted: the candidates; None: ``candidates``.
    replicate: replicate parts of the model, which costs time and memory and saves steps when devices are lost.
    replicas: replicas of each part.
    """
    check_replicas(replicas, cluster.size, replicate)
    tried: list[Candidate] = []
    for strategy, num_microbatches in wanted or list(candidates(cluster.size, batch_size)):
        progress(f"{strategy.spec}, {num_microbatches} micro-batches")
        rows = -(-batch_size // num_microbatches)
        tried.append(
            _simulate_candidate(
                strategy,
                num_microbatches,
                costs.with_rows(rows),
                cluster,
                failures,
                gradient_buffers,
                replicate,
                replicas,
            )
        )
    running = sorted((one for one in tried if one.result is not None), key=lambda one: one.seconds)
    if running:
        best = running[0]
        running = [_with_reason(one, best) for one in running]
    return running + [one for one in tried if one.result is None]


def _simulate_candidate(
    strategy: Strategy,
    num_microbatches: int,
    costs: Costs,
    cluster: Cluster,
    failures: Failures | None,
    gradient_buffers: GradientBuffers,
    replicate: bool,
    replicas: int,
) -> Candidate:
    size = 6 * num_microbatches * strategy.stages(cluster.size) * (1 if strategy.synchronous else ASYNC_STEPS)
    if size > MAX_INSTRUCTIONS:
        return Candidate(strategy, num_microbatches, None, None, f"not simulated: about {size:,} instructions")
    try:
        steps = None if strategy.synchronous else ASYNC_STEPS
        result = simulate(
            strategy,
            costs,
            cluster,
            num_microbatches=num_microbatches,
            steps=steps,
            gradient_buffers=gradient_buffers,
            trace=False,
            replicate=replicate,
            replicas=replicas,
        )
    except UserError as error:
        return Candidate(strategy, num_microbatches, None, None, str(error))
    found = None if failures is None else goodput_with_failures(result, failures, replicated=replicate)
    return Candidate(strategy, num_microbatches, result, found, "")


def goodput_with_failures(
    result: SimulationResult, failures: Failures, total_seconds: float = DAY, replicated: bool = True
) -> Goodput:
    """Goodput of a simulated strategy under failures, over ``total_seconds``.

    The remaining devices share the work of lost ones. ``replicated``: parts of the model are replicated.
    """
    steps = max(1, round(total_seconds / result.step_seconds))
    data_parallel = result.plan.stages == 1 and not result.plan.servers and not result.plan.sharded_update
    elastic = data_parallel or replicated
    replicate_every = (
        0 if data_parallel or not replicated else 1 if parse(result.strategy).synchronous else STEPS_BETWEEN_FLUSHES
    )

    def seconds(alive: int) -> float | None:
        if alive < 1 or (not elastic and alive < result.devices and failures.return_after is not None):
            return None
        return result.step_seconds * result.devices / alive

    return goodput(seconds, result.devices, elastic, failures, steps, replicate_every)


def _with_reason(one: Candidate, best: Candidate) -> Candidate:
    """The candidate with its reason: where it spends more time than the best candidate."""
    assert one.result is not None
    assert best.result is not None
    reasons: list[str] = []
    if one is best:
        share = _shares(one.result)
        reasons.append(f"fastest: computes {share[COMPUTE]:.0%} of the time, waits {share[IDLE]:.0%}")
    else:
        times = one.seconds / best.seconds
        reasons.append(f"{times:.2f}x as long" if times >= 1.005 else "as fast")
        each = {COMPUTE: "computes", COMMUNICATE: "communicates", IDLE: "waits"}
        own, fastest = _seconds(one.result), _seconds(best.result)
        worst = max(each, key=lambda name: own[name] - fastest[name])
        if own[worst] > fastest[worst]:
            reasons.append(f"{each[worst]} {1e3 * (own[worst] - fastest[worst]):.3g} ms more a step")
        lost = [1 - two.goodput.useful if two.goodput else 0.0 for two in (one, best)]
        if lost[0] > lost[1] + 0.01:
            reasons.append(f"loses {lost[0]:.0%} to failures")
        if one.result.peak_memory < best.result.peak_memory / 1.5:
            reasons.append(f"but needs only {format_size(one.result.peak_memory)} a device")
    if not one.strategy.synchronous:
        reasons.append("its weights are stale")
    return dataclasses.replace(one, reason="; ".join(reasons))


def _seconds(result: SimulationResult) -> dict[str, float]:
    """A device's compute, communication and idle time per step, averaged over devices."""
    parts = result.steps * result.devices
    return {name: sum(one.seconds[name] for one in result.accounts) / parts for name in (COMPUTE, COMMUNICATE, IDLE)}


def _shares(result: SimulationResult) -> dict[str, float]:
    return {name: seconds / result.step_seconds for name, seconds in _seconds(result).items()}
