"""Which strategy, mesh, number of micro-batches and schedule suits a cluster: each is simulated and ranked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hoop.config import format_size
from hoop.errors import UserError
from hoop.plan.instructions import COMMUNICATE, COMPUTE, IDLE
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import Costs
from hoop.simulate.failure_model import Failures, Goodput, goodput
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import SPAN, simulate
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.memory_fit import Room, one_each
from hoop.strategies.parameter_server import MODES, ParameterServer
from hoop.strategies.pipeline import SCHEDULES, Pipeline
from hoop.strategies.ring import RingModel

STEPS = 4
"""Of asynchronous strategies so many steps are simulated."""
DAY = 24 * 3600.0
"""Of virtual time, for what failures cost."""
MOST_INSTRUCTIONS = 400_000
"""A candidate with more is left out, and says so."""


@dataclass(frozen=True)
class Candidate:
    """One way to train on a cluster."""

    strategy: Strategy
    micros: int
    outcome: SimulationResult | None
    """None: it cannot run here."""
    among_failures: Goodput | None
    why: str
    """What it lost by; of the first, what it won by."""

    @property
    def seconds(self) -> float:
        """A step, failures included."""
        assert self.outcome is not None, "only what runs has a time"
        useful = self.among_failures.useful if self.among_failures else 1.0
        return self.outcome.step_seconds / useful if useful else float("inf")

    def to_dict(self) -> dict[str, Any]:
        found = {"strategy": self.strategy.spec, "micros": self.micros, "why": self.why}
        if self.outcome is None:
            return found | {"runs": False}
        useful = self.among_failures.useful if self.among_failures else 1.0
        return found | {"runs": True, "goodput": useful} | self.outcome.to_dict()


def candidates(devices: int, batch_size: int) -> Iterator[tuple[Strategy, int]]:
    """Strategies with numbers of micro-batches that make sense for them."""
    strategies: list[Strategy] = [DataParallel()]
    if devices > 1:
        servers = sorted({1, max(1, devices // 8), max(1, devices // 4)})
        strategies += [ParameterServer(count, mode) for mode in MODES for count in servers if count < devices]
        strategies += [RingModel(), RingModel(slices=2), RingModel(asynchronous=True)]
        strategies += [Pipeline(schedule) for schedule in SCHEDULES]
        divisors = [count for count in range(2, devices) if devices % count == 0]
        strategies += [Hybrid(count, schedule) for count in divisors for schedule in ("1f1b", "zero-bubble")]
    for strategy in strategies:
        lanes = devices if strategy.stages(devices) == 1 else getattr(strategy, "replicas", 1)
        deep = strategy.stages(devices) > 1
        wanted = {lanes * each for each in ((1, 2, 4) if not deep else (4, 8, 16, 32))}
        yield from ((strategy, micros) for micros in sorted(wanted) if micros <= batch_size)


def search(
    costs: Costs,
    cluster: Cluster,
    batch_size: int,
    failures: Failures | None = None,
    room: Room = one_each,
    progress: Callable[[str], None] = lambda text: None,
    wanted: Sequence[tuple[Strategy, int]] | None = None,
    mirror: bool = False,
) -> list[Candidate]:
    """All candidates, the best first; those that cannot run last, each with its reason.

    ``mirror``: parts of a model are kept elsewhere too, which costs time and memory, and saves steps where
    devices are lost.
    """
    tried: list[Candidate] = []
    for strategy, micros in wanted or list(candidates(cluster.size, batch_size)):
        progress(f"{strategy.spec}, {micros} micro-batches")
        rows = -(-batch_size // micros)
        tried.append(_tried(strategy, micros, costs.of(rows), cluster, failures, room, mirror))
    running = sorted((one for one in tried if one.outcome is not None), key=lambda one: one.seconds)
    if running:
        best = running[0]
        running = [_judged(one, best) for one in running]
    return running + [one for one in tried if one.outcome is None]


def _tried(
    strategy: Strategy,
    micros: int,
    costs: Costs,
    cluster: Cluster,
    failures: Failures | None,
    room: Room,
    mirror: bool,
) -> Candidate:
    size = 6 * micros * strategy.stages(cluster.size) * (1 if strategy.synchronous else STEPS)
    if size > MOST_INSTRUCTIONS:
        return Candidate(strategy, micros, None, None, f"not simulated: about {size:,} instructions")
    try:
        steps = None if strategy.synchronous else STEPS
        outcome = simulate(
            strategy, costs, cluster, micros=micros, steps=steps, room=room, trace=False, mirror=mirror
        )
    except UserError as error:
        return Candidate(strategy, micros, None, None, str(error))
    found = None if failures is None else among_failures(outcome, failures, mirrored=mirror)
    return Candidate(strategy, micros, outcome, found, "")


def among_failures(
    outcome: SimulationResult, failures: Failures, seconds_in_all: float = DAY, mirrored: bool = True
) -> Goodput:
    """A simulated step repeated among failures; those who are left share the work of who is not there."""
    steps = max(1, round(seconds_in_all / outcome.step_seconds))
    replicas = outcome.plan.stages == 1 and not outcome.plan.servers
    elastic = replicas or mirrored
    copied_every = 0 if replicas or not mirrored else 1 if parse(outcome.strategy).synchronous else SPAN

    def seconds(alive: int) -> float | None:
        if alive < 1 or (not elastic and alive < outcome.devices and failures.back_after is not None):
            return None
        return outcome.step_seconds * outcome.devices / alive

    return goodput(seconds, outcome.devices, elastic, failures, steps, copied_every)


def _judged(one: Candidate, best: Candidate) -> Candidate:
    """With the reason: where its time goes that the best one's does not."""
    assert one.outcome is not None
    assert best.outcome is not None
    said: list[str] = []
    if one is best:
        share = _shares(one.outcome)
        said.append(f"fastest: computes {share[COMPUTE]:.0%} of the time, waits {share[IDLE]:.0%}")
    else:
        times = one.seconds / best.seconds
        said.append(f"{times:.2f}x as long" if times >= 1.005 else "as fast")
        each = {COMPUTE: "computes", COMMUNICATE: "communicates", IDLE: "waits"}
        mine, theirs = _seconds(one.outcome), _seconds(best.outcome)
        more = max(each, key=lambda name: mine[name] - theirs[name])
        if mine[more] > theirs[more]:
            said.append(f"{each[more]} {1e3 * (mine[more] - theirs[more]):.3g} ms more a step")
        lost = [1 - two.among_failures.useful if two.among_failures else 0.0 for two in (one, best)]
        if lost[0] > lost[1] + 0.01:
            said.append(f"loses {lost[0]:.0%} to failures")
        if one.outcome.peak_memory < best.outcome.peak_memory / 1.5:
            said.append(f"but needs only {format_size(one.outcome.peak_memory)} a device")
    if not one.strategy.synchronous:
        said.append("its weights are stale")
    return dataclasses.replace(one, why="; ".join(said))


def _seconds(outcome: SimulationResult) -> dict[str, float]:
    """Where a device's time goes in a step, over all devices."""
    parts = outcome.steps * outcome.devices
    return {
        name: sum(one.seconds[name] for one in outcome.accounts) / parts
        for name in (COMPUTE, COMMUNICATE, IDLE)
    }


def _shares(outcome: SimulationResult) -> dict[str, float]:
    return {name: seconds / outcome.step_seconds for name, seconds in _seconds(outcome).items()}
