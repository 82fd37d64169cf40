"""Simulation of a study's job on other clusters, with the engine's plans and costs measured on one core here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hoop.engine.job import Job
from hoop.errors import UserError
from hoop.runs.calibration import calibrated
from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.cost_model import Costs, Machine
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

ETHERNET = Link.parse("1Gbps,0.5ms")
INFINIBAND = Link.parse("56Gbps,2us")


def measure_costs(job: Job, rows: int) -> Costs:
    """Measure a job's costs on one core of this machine, with shards of ``rows`` samples."""
    settings = job.defaults("given").replaced({"batch_size": rows, "shards": 1, "optimizer": "sgd"})
    return calibrated(job, settings, Machine())


def simulate_curves(
    costs: Costs, specs: Mapping[str, str], nodes: Sequence[int], num_microbatches: int, link: Link
) -> dict[str, list[SimulationResult | None]]:
    """Simulate each strategy on each number of nodes with one core each; None if the strategy cannot run there."""
    curves: dict[str, list[SimulationResult | None]] = {}
    for name, spec in specs.items():
        curves[name] = []
        for count in nodes:
            try:
                outcome = simulate(
                    parse(spec), costs, Cluster.even(count, link=link), num_microbatches=num_microbatches, trace=False
                )
            except UserError:
                curves[name].append(None)
            else:
                curves[name].append(outcome)
    return curves


def all_reduce_seconds(count: int, devices: int, algorithm: str, link: Link) -> float:
    """Simulated time of one all-reduce of ``count`` float32, one host a device.

    It is a data parallel step in which nothing but the all-reduce takes time.
    """
    costs = Costs.uniform(1, 0.0, 0.0, weight_bytes=4 * count, machine=Machine(instruction_s=0.0, step_s=0.0))
    cluster = Cluster.even(devices, link=link)
    outcome = simulate(
        parse("data"), costs, cluster, num_microbatches=devices, all_reduce=algorithm, trace=False, max_messages=10**6
    )
    return outcome.step_seconds


def curve_rows(curves: Mapping[str, Sequence[SimulationResult | None]], nodes: Sequence[int]) -> list[dict[str, Any]]:
    """The curves as table rows."""
    return [
        {
            "": name,
            "nodes": count,
            "step": 1000 * one.step_seconds,
            "speed-up": one.speedup,
            "idle": 100 * mean_worker_idle(one),
            "sent a step": one.bytes / 1e6,
            "how": "simulated",
        }
        for name, outcomes in curves.items()
        for count, one in zip(nodes, outcomes, strict=True)
        if one is not None
    ]


def mean_worker_idle(one: SimulationResult) -> float:
    """Mean idle fraction of the workers, without parameter servers: those wait by design."""
    workers = [share for rank, share in enumerate(one.idle) if rank not in one.plan.servers]
    return sum(workers) / len(workers)
