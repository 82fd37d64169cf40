"""Devices that share cores: time slices in virtual time, and the shards that a load balancer moves between them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.engine.settings import Settings
from hoop.plan.instructions import Instruction
from hoop.plan.plan import Plan
from hoop.runs.prediction import measured_machine, predicted_step, usual_seconds
from hoop.simulate.cluster import Cluster
from hoop.simulate.cost_model import FREE_MACHINE, Costs, Machine
from hoop.simulate.instruction_cost import sum_and_copy_seconds
from hoop.simulate.rank import SHM_BLOCK_BYTES, SHM_RING_BYTES
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.balancing import MAX_RATIO, better_plan, shares
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel


def on_one_core(devices: int, slice_s: float, seconds: float = 3.0) -> SimulationResult:
    """A step of data parallel devices on one core: a forward of 1/3 and a backward of 2/3 of ``seconds`` on each."""
    costs = Costs.uniform(1, seconds / 3, 2 * seconds / 3, machine=replace(FREE_MACHINE, slice_s=slice_s))
    return simulate(parse("data"), costs, Cluster.even(devices, devices, cores=1), num_microbatches=devices)


def computed(outcome: SimulationResult, rank: int) -> tuple[float, float]:
    """When a rank begins its first computation, and when it ends its last one."""
    spans = [one for one in outcome.accounts[rank].spans if isinstance(one.what, Instruction) and one.what.micro >= 0]
    return spans[0].start, spans[-1].start + spans[-1].seconds


@pytest.mark.parametrize("slice_s", [0.0, 3.5])
def test_a_device_keeps_its_core_until_it_waits_or_its_slice_ends(slice_s: float) -> None:
    outcome = on_one_core(2, slice_s)
    assert computed(outcome, 0)[1] == 3
    assert computed(outcome, 1)[1] == outcome.step_seconds == 6
    assert outcome.accounts[0].seconds["idle"] == 3, "it waits for the other one at the sum"


def test_devices_take_turns_slice_by_slice() -> None:
    outcome = on_one_core(2, slice_s=1.0)
    assert computed(outcome, 0)[1] == 5, "1 here, 1 there, 1 here, 1 there, 1 here"
    assert computed(outcome, 1)[1] == outcome.step_seconds == 6


@pytest.mark.parametrize("slice_s", [0.0, 0.25, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_core_is_never_idle_while_a_device_wants_it(devices: int, slice_s: float) -> None:
    assert on_one_core(devices, slice_s).step_seconds == pytest.approx(3 * devices)


def test_a_device_that_waits_leaves_its_core_to_the_next_one() -> None:
    """Of a pipeline of two stages on one core one device computes while the other one waits for it."""
    costs = Costs.uniform(2, 1.0, 2.0)
    outcome = simulate(parse("pipeline:gpipe"), costs, Cluster.even(2, 2, cores=1), num_microbatches=4)
    assert outcome.step_seconds == pytest.approx(4 * 2 * 3.0)


def transfer(size: int, cores: int, forward: float = 1.0) -> SimulationResult:
    """A parameter server of ``size`` bytes of weights and two workers; a byte takes 1e-6 s at each end."""
    machine = replace(FREE_MACHINE, byte_s=1e-6)
    costs = Costs.uniform(1, forward, 0.0, weight_bytes=size, machine=machine)
    return simulate(parse("ps:bsp"), costs, Cluster.even(3, 3, cores=cores), num_microbatches=2, steps=1)


def test_a_message_larger_than_the_ring_needs_its_sender_to_the_end() -> None:
    """On cores of their own sender and receiver copy at the same time; the end of one is that of the other."""
    seconds = SHM_RING_BYTES * 4e-6
    large, alone = transfer(4 * SHM_RING_BYTES, cores=3), seconds + SHM_BLOCK_BYTES * 1e-6
    assert large.step_seconds >= 2 * alone + 1, "there and back"
    assert large.step_seconds <= 2 * (2 * alone) + 1, "the server copies for one worker after the other"


@pytest.mark.parametrize("spec", ["ps:bsp", "ps:asp", "pipeline:1f1b", "pipeline:gpipe", "ring", "hybrid:replicas=2"])
@pytest.mark.parametrize("cores", [1, 2, 4])
def test_messages_larger_than_the_ring_arrive(spec: str, cores: int) -> None:
    machine = replace(FREE_MACHINE, byte_s=1e-9)
    size = 3 * SHM_RING_BYTES
    costs = Costs.uniform(4, 1e-3, 2e-3, weight_bytes=size, output_bytes=size, machine=machine)
    outcome = simulate(parse(spec), costs, Cluster.even(4, 4, cores=cores), num_microbatches=4, replicate=True)
    assert outcome.step_seconds > 4 * 4 * 3e-3 / cores
    assert sum(outcome.idle) <= 4


def measured(devices: int, forward_s: float, **more: Any) -> dict[str, Any]:
    """What ranks measure before the first step, on two cores; the machine costs nothing."""
    block = {
        "name": "block",
        "forward_s": forward_s,
        "backward_s": 2 * forward_s,
        "weight_bytes": 0,
        "optimizer_bytes": 0,
        "gradient_bytes": 0,
        "activation_bytes": 0,
        "output_bytes": 0,
    }
    free = dict.fromkeys(("copy_s", "add_s", "message_s", "agree_s", "meeting_s", "step_s", "shard_s", "update_s"), 0.0)
    empty: dict[str, Any] = {"load": [(1, 0.0)], "loss": [(1, 0.0)], "copy_at": [(1, 0.0)], "add_at": [(1, 0.0)]}
    about: dict[str, Any] = {"rows": 1, "update_fixed_s": 0.0, "joint": 1, "joint_s": 0.0, "cores": 2}
    return {**free, **empty, **about, "blocks": [block], "hosts": [0] * devices, **more}


def prediction(devices: int, shards: int, forward_s: float) -> SimulationResult:
    settings = Settings("mnist", batch_size=shards, shards=shards)
    outcome = predicted_step(measured(devices, forward_s), settings, trace=True)
    assert outcome is not None
    return outcome


@pytest.mark.parametrize(("shards", "forward_s", "expected"), [(6, 1e-4, [3, 3, 0]), (16, 5e-3, [8, 8, 0])])
def test_a_prediction_gives_shards_to_one_device_a_core(shards: int, forward_s: float, expected: list[int]) -> None:
    outcome = prediction(3, shards, forward_s)
    assert shares(outcome.plan) == expected
    even = simulate(
        parse("data"),
        Costs.uniform(1, forward_s, 2 * forward_s),
        Cluster.even(3, 3, cores=2),
        num_microbatches=shards,
        plan=DataParallel().plan(3, shards),
    )
    assert outcome.step_seconds < even.step_seconds


def test_the_best_plan_for_equal_devices_is_the_even_one() -> None:
    strategy = DataParallel()
    even = strategy.plan(3, 6)
    assert better_plan(strategy, even, even, [1.0, 1.0, 1.0]) is None
    moved = better_plan(strategy, even, even, [4.0, 1.0, 4.0])
    assert moved is not None
    assert shares(moved)[1] > 2
    assert better_plan(strategy, moved, even, [1.0, 1.0, 1.0]) == even


@given(st.lists(st.sampled_from([0.5, 1.0, 1.3, 2.0, 4.0, 1e9]), min_size=2, max_size=6), st.integers(1, 12))
def test_every_plan_that_is_enough_of_a_gain_is_found(seconds: list[float], shards: int) -> None:
    strategy = DataParallel()
    even = strategy.plan(len(seconds), shards)

    def step(plan: Plan) -> float:
        return max(count * one for count, one in zip(shares(plan), seconds, strict=True))

    best = strategy.plan(len(seconds), shards, [1 / one for one in seconds])
    expected = best if step(best) <= MAX_RATIO * step(even) else None
    assert better_plan(strategy, even, even, seconds) == expected


def test_a_measured_sum_is_its_additions_its_copies_and_an_overhead() -> None:
    at = [(1 << 20, 1e-9)]
    found = measured(2, 1e-3, copy_at=at, add_at=at, meeting_s=5e-6, reduce_s=150e-6, partial_sums=2)
    found["blocks"][0]["gradient_bytes"] = 40_000
    machine = measured_machine(found, Machine())
    modelled = sum_and_copy_seconds(machine, ranks=2, partial_sums=2, size=40_000)
    assert modelled == pytest.approx(20_000 * 1e-9 * 2)
    assert machine.reduce_s == pytest.approx(150e-6 - modelled - 2 * 5e-6)
    assert measured_machine({**found, "reduce_s": 1e-6}, Machine()).reduce_s == 0


def test_a_sum_in_shared_memory_takes_its_overhead_on_every_device() -> None:
    machine = replace(FREE_MACHINE, reduce_s=0.5)
    costs = Costs.uniform(1, 1.0, 2.0, weight_bytes=4000, machine=machine)
    assert simulate(parse("data"), costs, Cluster.even(2, 2), num_microbatches=2).step_seconds == 3.5
    one_core = Cluster.even(2, 2, cores=1)
    assert simulate(parse("data"), costs, one_core, num_microbatches=2).step_seconds == 7.0


def test_a_usual_step_is_the_mean_of_steps_that_alternate() -> None:
    assert usual_seconds([2.0, 6.0] * 20) == 4
    assert usual_seconds([2.0, 6.0] * 20 + [90.0] * 8) == 4, "a hiccup does not count"
    assert usual_seconds([3.0]) == 3
    assert usual_seconds([]) is None
