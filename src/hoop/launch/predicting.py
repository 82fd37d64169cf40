"""What the simulator expects of a run, beside what happened.

Before the first step the rank that reports has profiled the blocks and the machine (engine/pricing.py) and told it.
From that a step is simulated here, while the job already runs; at the end both figures stand side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from hoop.engine.settings import Settings
from hoop.errors import HoopError
from hoop.simulate.cluster import Cluster, Host, Link
from hoop.simulate.costs import BlockCost, Costs, Line, Machine
from hoop.simulate.run import simulate
from hoop.strategies.catalog import parse

WARM_UP = 10
"""Steps at the beginning that are not compared, where there are enough."""
MOST_INSTRUCTIONS = 200_000
Told = Mapping[str, Any]


class Prediction:
    """A step as it was predicted, and steps as they were."""

    def __init__(self, settings: Settings, costs: Costs | None = None) -> None:
        """``costs``: what to predict from; None: what is profiled before the first step."""
        self._settings, self._costs = settings, costs
        self._expected: float | None = None
        self._seconds: list[float] = []

    def note(self, kind: str, told: Told) -> None:
        """An event of the job."""
        if kind == "started" and told.get("costs"):
            self._expected = predicted(told["costs"], self._settings, self._costs)
        elif kind == "steps":
            self._seconds += told["seconds"]

    def result(self) -> dict[str, float | None]:
        """For the run's summary; an error of 0.1 means that a step took 10 % longer than predicted."""
        warm = self._seconds[WARM_UP:] if len(self._seconds) > 3 * WARM_UP else self._seconds
        measured = median(warm) if warm else None
        both = self._expected is not None and measured
        return {
            "step_seconds": measured,
            "predicted_step_seconds": self._expected,
            "prediction_error": measured / self._expected - 1
            if both and measured and self._expected
            else None,
        }


def predicted(told: Told, settings: Settings, given: Costs | None = None) -> float | None:
    """Seconds of a step; None where there is nothing to simulate from, or too much.

    ``given``: costs to take instead of those that were told; where devices are is told in any case.
    """
    costs = costs_told(told) if given is None else given.of(told["rows"])
    cluster = cluster_told(told, settings)
    strategy = parse(settings.strategy)
    size = 6 * settings.micros * strategy.stages(cluster.size) * (1 if strategy.synchronous else 32)
    if size > MOST_INSTRUCTIONS:
        return None
    how: dict[str, Any] = {"micros": settings.micros, "cuts": settings.cut or None, "trace": False}
    how["mirror"] = settings.mirror
    try:
        even = simulate(strategy, costs, cluster, **how).step_seconds
        if strategy.name != "data" or not settings.balance or settings.slowdown:
            return even
        return min(even, simulate(strategy, costs, cluster, **how, dealt=_with_cores(cluster)).step_seconds)
    except HoopError:
        return None  # a prediction that cannot be made is no reason to fail


def _with_cores(cluster: Cluster) -> list[float] | None:
    """Where devices share cores: shards end up with as many as there are cores, once they follow measured speed."""
    if all(host.devices <= (host.cores or host.devices) for host in cluster.hosts):
        return None
    return [
        1.0 if index < (host.cores or host.devices) else 1e-9
        for host in cluster.hosts
        for index in range(host.devices)
    ]


def costs_told(told: Told, machine: Machine | None = None) -> Costs:
    """The simulator's costs of what ``engine/pricing.py`` measured."""
    rows, blocks = told["rows"], told["blocks"]
    fixed = fixed_share(blocks, told)
    return Costs(
        tuple(
            BlockCost(
                one["name"],
                _line(one["forward_s"], fixed, rows),
                _line(one["backward_s"], fixed, rows),
                one["weight_bytes"],
                one["optimizer_bytes"],
                one["gradient_bytes"],
                Line(0.0, one["activation_bytes"] / rows),
                Line(0.0, one["output_bytes"] / rows),
            )
            for one in blocks
        ),
        rows,
        machine_told(told, machine or Machine()),
        Line.through(told["load"]),
        Line.through(told["loss"]),
        told["update_s"],
        told["update_fixed_s"],
        joint=max(1, told["joint"]) if told["joint_s"] else 1,
        source="profiled before the first step",
    )


def machine_told(told: Told, usual: Machine) -> Machine:
    """What was measured of the machine, and the rest as usual."""
    measured = ("copy_s", "add_s", "message_s", "byte_s", "agree_s", "meeting_s")
    changes: dict[str, Any] = {name: told[name] for name in measured if name in told}
    for name in ("copy_at", "add_at"):
        changes[name] = tuple((float(size), float(seconds)) for size, seconds in told[name])
    return replace(usual, **changes)


def _line(seconds: float, fixed: float, rows: int) -> Line:
    return Line(fixed * seconds, (1 - fixed) * seconds / rows)


def fixed_share(blocks: Sequence[Told], told: Told) -> float:
    """What part of a shard's time a further shard, computed at once with it, does not pay again."""
    alone = float(sum(one["forward_s"] + one["backward_s"] for one in blocks))
    joint, together = int(told["joint"]), float(told["joint_s"])
    if joint < 2 or not together or not alone:
        return 0.0
    return min(1.0, max(0.0, 1 - (together - alone) / (joint - 1) / alone))


def cluster_told(told: Told, settings: Settings) -> Cluster:
    """Where the job runs: who shares a host, and how many cores each host has."""
    seats: Sequence[int] = told["hosts"]
    slow = [1 / one for one in settings.slowdown]
    speeds = [*slow, *[1.0] * len(seats)][: len(seats)]
    cores = max(1, told["cores"] // settings.threads_per_device)
    hosts = []
    for host in dict.fromkeys(seats):
        mine = tuple(speed for speed, seat in zip(speeds, seats, strict=True) if seat == host)
        hosts.append(Host(len(mine), cores, speeds=mine if slow else ()))
    return Cluster(tuple(hosts), Link(1e9, 20e-6))
