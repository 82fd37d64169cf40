"""What a step costs beside computation and messages: where each overhead of ``Machine`` is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import FREE_MACHINE, BlockCost, Costs, LinearCost, Machine
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse


def seconds(spec: str, machine: Machine, devices: int = 1, joint: int = 1, start_s: float = 0.0) -> float:
    """A step of four shards through two blocks; a forward takes 1 and a backward 2, of which a half for each block."""
    block = BlockCost(
        "block", LinearCost(0.0, 0.5), LinearCost(0.0, 1.0), weight_bytes=4, gradient_bytes=4, start_s=start_s
    )
    costs = Costs((block, block), 1, machine, joint=joint)
    return simulate(parse(spec), costs, Cluster.even(devices, devices), num_microbatches=4).step_seconds


def test_a_shard_costs_its_overhead_once_in_a_batch_too() -> None:
    machine = replace(FREE_MACHINE, shard_s=0.25)
    assert seconds("data", machine) == 4 * (3 + 0.25)
    assert seconds("data", machine, joint=4) == 4 * (3 + 0.25)


@pytest.mark.parametrize("spec", ["pipeline:gpipe", "pipeline:1f1b"])
def test_a_shard_costs_its_overhead_on_each_stage(spec: str) -> None:
    added = seconds(spec, replace(FREE_MACHINE, shard_s=0.25), 2) - seconds(spec, FREE_MACHINE, 2)
    assert added == pytest.approx(5 * 0.25), "four shards, and the bubble of another one"


def test_a_computation_between_stages_starts_cold() -> None:
    """In data parallel training shards are computed one right after the other; between stages they follow messages."""
    for spec, devices, added in (("data", 1, 0), ("pipeline:gpipe", 2, 5 * 0.25 + 5 * 0.25)):
        cold = seconds(spec, FREE_MACHINE, devices, start_s=0.25)
        assert cold - seconds(spec, FREE_MACHINE, devices) == pytest.approx(added)


def test_partial_sums_are_added_from_far_caches() -> None:
    """Two shards' gradients were written before other computations: they cost as much a byte as large vectors."""
    machine = replace(FREE_MACHINE, add_at=((4.0, 1.0), (float(1 << 20), 2.0)))
    assert seconds("data", machine) == pytest.approx(4 * 3 + 3 * 8 * 2.0), "three additions of eight bytes"
