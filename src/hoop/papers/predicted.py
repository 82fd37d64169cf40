"""What the simulator says of a study's job: costs measured on one core here, the engine's plans, other machines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hoop.engine.job import Job, blocks_of
from hoop.engine.optimizer import OptimizerSettings
from hoop.engine.profile import profile
from hoop.errors import UserError
from hoop.plan.partition import Block
from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.costs import BlockCost, Costs, Machine
from hoop.simulate.costs import Line as Cost
from hoop.simulate.outcome import Outcome
from hoop.simulate.run import simulate
from hoop.strategies.catalog import parse

ETHERNET = Link.parse("1Gbps,0.5ms")
INFINIBAND = Link.parse("56Gbps,2us")
_FORWARD = 1 / 3
"""Of a block's forward and backward together: a backward is two matrix products for the forward's one."""


def costs_of(job: Job, rows: int) -> Costs:
    """A job's blocks, measured on one core of this machine at ``rows`` samples and at half of that."""
    data = job.data().train
    blocks = blocks_of(job.model(0))
    measured: list[tuple[int, float, list[Block]]] = []
    for count in (max(2, rows // 2), max(4, rows)):
        indices = np.arange(count, dtype=np.int64)
        data.batch(indices, epoch=0, seed=0)
        began = time.perf_counter()
        batch = data.batch(indices, epoch=0, seed=0)
        loading = time.perf_counter() - began
        measured.append((count, loading, profile(blocks, batch, OptimizerSettings())))
    (few, few_load, small), (many, many_load, large) = measured
    priced = [
        BlockCost(
            one.name,
            Cost.through([(few, _FORWARD * one.seconds), (many, _FORWARD * other.seconds)]),
            Cost.through([(few, (1 - _FORWARD) * one.seconds), (many, (1 - _FORWARD) * other.seconds)]),
            other.weight_bytes,
            0,
            other.gradient_bytes or other.weight_bytes,
            Cost.through([(few, one.activation_bytes), (many, other.activation_bytes)]),
            Cost.through([(few, one.output_bytes), (many, other.output_bytes)]),
        )
        for one, other in zip(small, large, strict=True)
    ]
    load = Cost.through([(few, few_load), (many, many_load)])
    return Costs(tuple(priced), rows, load=load, update_s=_update_seconds(), source="measured on one core")


def _update_seconds(count: int = 1 << 20) -> float:
    """A byte of weights, updated by plain SGD."""
    weights, gradient = torch.zeros(count), torch.zeros(count)
    best = math.inf
    for _ in range(5):
        began = time.perf_counter()
        weights.add_(gradient, alpha=-0.1)
        best = min(best, time.perf_counter() - began)
    return best / (4 * count)


def curve(
    costs: Costs, specs: Mapping[str, str], nodes: Sequence[int], micros: int, link: Link
) -> dict[str, list[Outcome | None]]:
    """Each strategy on each number of nodes, a core each; None where it cannot run, or the model cannot be cut so."""
    found: dict[str, list[Outcome | None]] = {}
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


def figures(curves: Mapping[str, Sequence[Outcome | None]], nodes: Sequence[int]) -> list[dict[str, Any]]:
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


def workers_idle(one: Outcome) -> float:
    """The mean over those who compute; a server waits for work by design."""
    workers = [share for rank, share in enumerate(one.idle) if rank not in one.plan.servers]
    return sum(workers) / len(workers)
