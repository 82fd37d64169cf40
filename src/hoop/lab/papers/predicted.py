"""What the simulator says of a study's job: costs measured on one core here, the engine's plans, other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hoop.engine.job import Job
from hoop.errors import UserError
from hoop.runs.prediction import calibrated
from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.cost_model import Costs, Machine
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

ETHERNET = Link.parse("1Gbps,0.5ms")
INFINIBAND = Link.parse("56Gbps,2us")


def costs_of(job: Job, rows: int) -> Costs:
    """A job's costs on one core of this machine, measured with shards of so many samples."""
    settings = job.defaults("given").replaced({"batch_size": rows, "shards": 1, "optimizer": "sgd"})
    return calibrated(job, settings, Machine())


def curve(
    costs: Costs, specs: Mapping[str, str], nodes: Sequence[int], micros: int, link: Link
) -> dict[str, list[SimulationResult | None]]:
    """Each strategy on each number of nodes, a core each; None where it cannot run, or the model cannot be cut so."""
    found: dict[str, list[SimulationResult | None]] = {}
    for name, spec in specs.items():
        found[name] = []
        for count in nodes:
            try:
                outcome = simulate(
                    parse(spec), costs, Cluster.even(count, link=link), micros=micros, trace=False
                )
            except UserError:
                found[name].append(None)
            else:
                found[name].append(outcome)
    return found


def all_reduce_seconds(count: int, devices: int, algorithm: str, link: Link) -> float:
    """One all-reduce of so many float32, a host a device: a step of data parallel in which nothing else costs time."""
    costs = Costs.uniform(1, 0.0, 0.0, weight_bytes=4 * count, machine=Machine(instruction_s=0.0, step_s=0.0))
    cluster = Cluster.even(devices, link=link)
    outcome = simulate(
        parse("data"), costs, cluster, micros=devices, all_reduce=algorithm, trace=False, most_messages=10**6
    )
    return outcome.step_seconds


def figures(
    curves: Mapping[str, Sequence[SimulationResult | None]], nodes: Sequence[int]
) -> list[dict[str, Any]]:
    """The curves as rows of a table."""
    return [
        {
            "": name,
            "nodes": count,
            "step": 1000 * one.step_seconds,
            "speed-up": one.speedup,
            "idle": 100 * workers_idle(one),
            "sent a step": one.bytes / 1e6,
            "how": "simulated",
        }
        for name, outcomes in curves.items()
        for count, one in zip(nodes, outcomes, strict=True)
        if one is not None
    ]


def workers_idle(one: SimulationResult) -> float:
    """The mean over those who compute; a server waits for work by design."""
    workers = [share for rank, share in enumerate(one.idle) if rank not in one.plan.servers]
    return sum(workers) / len(workers)
