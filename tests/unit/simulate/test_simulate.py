"""The simulator: hand-computed cases, formulas, and properties that hold for every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.plan.instructions import Instruction
from hoop.plan.plan import traffic
from hoop.plan.rules import Rule
from hoop.plan.unit_clock import run_rules
from hoop.simulate.cluster import Cluster, Host, Link
from hoop.simulate.cost_model import FREE_MACHINE, BlockCost, Costs, LinearCost, Machine
from hoop.simulate.rank import Outage, SimulatedStragglers
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import all_strategies, parse

FAST = Link(1e30)
UNITS = Costs.uniform(8, 1.0, 2.0, weight_bytes=4000, output_bytes=1000)


def on(devices: int, link: Link = FAST, per_host: int = 1, **host: object) -> Cluster:
    return Cluster.even(devices, per_host, link, **host)


def test_one_device_computes_sequentially() -> None:
    outcome = simulate(parse("data"), UNITS, on(1), num_microbatches=4)
    assert outcome.step_seconds == outcome.single_device_seconds == 4 * 8 * 3
    assert (outcome.speedup, outcome.efficiency, outcome.idle_fraction) == (1.0, 1.0, 0.0)


def test_a_message_takes_time_at_sender_link_and_receiver() -> None:
    machine = replace(FREE_MACHINE, message_s=0.25, copy_s=0.001)
    costs = Costs.uniform(2, 1.0, 2.0, output_bytes=1000, machine=machine)
    outcome = simulate(parse("pipeline:gpipe"), costs, on(2, Link(500.0, 10.0)), num_microbatches=1)
    # forward 1, send 0.25 + 1, wire 2, latency 10, receive 1.25, forward 1, backward 2, the same back, backward 2;
    # then the ranks agree whether to stop: one round trip
    assert outcome.step_seconds == pytest.approx(1 + 14.5 + 3 + 14.5 + 2 + 2 * (2 * 0.25 + 10))


@pytest.mark.parametrize(
    ("spec", "bubble"),
    [
        ("pipeline:gpipe", 3 / 8),
        ("pipeline:1f1b", 3 / 8),
        ("ring", 3 / 8),
        ("pipeline:interleaved", 3 / 16),
        ("pipeline:zero-bubble", 3 / 24),
        ("data", 0),
    ],
)
def test_bubbles_match_the_formulas(spec: str, bubble: float) -> None:
    outcome = simulate(parse(spec), UNITS, on(4), num_microbatches=8)
    busy = outcome.single_device_seconds / 4
    assert outcome.step_seconds == pytest.approx(busy * (1 + bubble))
    assert outcome.idle_fraction == pytest.approx(bubble / (1 + bubble))


@pytest.mark.parametrize("strategy", all_strategies(4), ids=lambda one: one.spec)
def test_bytes_and_messages_match_the_plan(strategy: Strategy) -> None:
    outcome = simulate(strategy, UNITS, on(4), num_microbatches=4, steps=1, all_reduce="ring")
    plan = outcome.plan
    ends = [*outcome.cuts[1:], 8]
    outputs = [1000] * plan.stages
    weights = [4000 * (end - cut) for cut, end in zip(outcome.cuts, ends, strict=True)]
    expected = traffic(plan, outputs, weights if not plan.servers else [32000])
    assert [round(one.bytes) for one in outcome.accounts] == [one.bytes for one in expected]
    assert [one.messages for one in outcome.accounts] == [one.messages for one in expected]


@pytest.mark.parametrize("strategy", all_strategies(4), ids=lambda one: one.spec)
def test_time_falls_with_bandwidth_and_rises_with_latency(strategy: Strategy) -> None:
    machine = Machine()
    costs = Costs.uniform(8, 1e-3, 2e-3, weight_bytes=40_000, output_bytes=10_000, machine=machine)

    def seconds(bandwidth: float, latency: float) -> float:
        link = Link(bandwidth, latency)
        return simulate(strategy, costs, on(4, link), num_microbatches=8, steps=2).step_seconds

    by_bandwidth = [seconds(one, 1e-4) for one in (1e6, 1e7, 1e8, 1e9)]
    by_latency = [seconds(1e8, one) for one in (0.0, 1e-4, 1e-3, 1e-2)]
    assert by_bandwidth == sorted(by_bandwidth, reverse=True)
    assert by_latency == sorted(by_latency)


@pytest.mark.parametrize("spec", ["data", "ring:async", "ps:asp", "hybrid:replicas=2"])
def test_the_same_seed_gives_the_same_timeline(spec: str) -> None:
    costs = Costs.uniform(8, 1e-3, 2e-3, weight_bytes=40_000, output_bytes=10_000, machine=Machine())

    def run(seed: int) -> list[float]:
        stragglers = SimulatedStragglers(0.3, 4.0, seed)
        outcome = simulate(parse(spec), costs, on(4), num_microbatches=8, steps=3, stragglers=stragglers)
        return [span.start for one in outcome.accounts for span in one.spans]

    assert run(7) == run(7) != run(8)


@pytest.mark.parametrize("spec", ["ring", "ring:async", "ring:slices=2", "ps:asp", "ps:ssp,staleness=1,servers=2"])
def test_rules_run_in_the_same_order_as_in_unit_time(spec: str) -> None:
    """The simulator executes the engine's rules in the same order as ``run_rules``."""
    strategy, units = parse(spec), Costs.uniform(8, 1.0, 2.0)
    outcome = simulate(strategy, units, on(4), num_microbatches=6, steps=3)
    if strategy.synchronous:  # rules of one step, three times
        simulated = [[str(span.what) for span in one.spans if "wait" not in str(span.what)] for one in outcome.accounts]
        expected = run_rules(rules_of(strategy, outcome, 1), unit_cost(outcome, 8))
        assert simulated == [[str(one) for one in line] * 3 for line in expected]
        return
    expected = run_rules(rules_of(strategy, outcome, 3), unit_cost(outcome, 8))
    simulated = [[str(span.what) for span in one.spans if span.category != "wait"] for one in outcome.accounts]
    assert simulated == [list(map(str, line)) for line in expected]


def rules_of(strategy: Strategy, outcome: SimulationResult, steps: int) -> list[Rule]:
    rules = [strategy.rule(outcome.plan, rank, steps) for rank in range(4)]
    assert None not in rules, "every rank of this strategy has a rule"
    return [one for one in rules if one is not None]


def unit_cost(outcome: SimulationResult, blocks: int) -> Callable[[int, Instruction], float]:
    ends = [*outcome.cuts[1:], blocks]
    width = [end - start for start, end in zip(outcome.cuts, ends, strict=True)]
    return lambda rank, one: width[one.stage] * {"F": 1.0, "B": 2.0}[one.kind] if one.kind in "FB" else 0.0


def test_devices_that_share_a_core_take_turns() -> None:
    separate = simulate(parse("data"), UNITS, on(4, per_host=4), num_microbatches=4)
    shared = simulate(parse("data"), UNITS, on(4, per_host=4, cores=2), num_microbatches=4)
    assert shared.step_seconds == pytest.approx(2 * separate.step_seconds)
    three = simulate(parse("data"), UNITS, on(3, per_host=3, cores=2), num_microbatches=3)
    assert [one.seconds["idle"] for one in three.accounts] == pytest.approx([24, 24, 0])


def test_a_pipeline_loses_less_than_half_on_shared_cores() -> None:
    """While one device waits, the other device has their core for itself."""
    shared = simulate(parse("pipeline:1f1b"), UNITS, on(4, per_host=4, cores=2), num_microbatches=8)
    separate = simulate(parse("pipeline:1f1b"), UNITS, on(4, per_host=4), num_microbatches=8)
    assert separate.step_seconds < shared.step_seconds < 2 * separate.step_seconds


def test_crowded_cores_are_slower() -> None:
    crowded = Costs.uniform(1, 1.0, 2.0, machine=replace(FREE_MACHINE, crowding=1.5))
    assert simulate(parse("data"), crowded, on(1, per_host=2, cores=2), num_microbatches=2).step_seconds == 6
    assert simulate(parse("data"), crowded, on(2, per_host=2, cores=2), num_microbatches=2).step_seconds == 4.5


def test_faster_devices_get_more_shards() -> None:
    cluster = Cluster((Host(1, speed=3.0), Host(1)), FAST)
    outcome = simulate(parse("data"), UNITS, cluster, num_microbatches=8)
    assert [len(outcome.plan.computed_by(rank, 0)) for rank in range(2)] == [6, 2]
    assert outcome.step_seconds == pytest.approx(2 * 8 * 3)


def test_devices_of_a_host_share_its_nic() -> None:
    costs = Costs.uniform(1, 0.0, 0.0, weight_bytes=4000)
    slow = Link(1000.0)
    alone = simulate(parse("data"), costs, on(4, slow), num_microbatches=4)
    shared = simulate(parse("data"), costs, on(4, slow, per_host=2), num_microbatches=4)
    own = simulate(parse("data"), costs, on(4, Link(1000.0, shared=False), per_host=2), num_microbatches=4)
    assert alone.step_seconds == pytest.approx(2 * 3 * 1.0)  # two rounds of three messages of 1000 bytes
    assert shared.step_seconds == pytest.approx(2 * 2 * 1.0)  # a host sends one vector: two messages in each round
    assert own.step_seconds == pytest.approx(2 * 1 * 1.0)


@pytest.mark.parametrize("link", [Link(1e8, 1e-4), Link(1e10, 1e-6), Link(1e7, 1e-2)], ids=str)
@pytest.mark.parametrize(
    ("algorithm", "size", "per_host"),
    [(algorithm, size, 1) for algorithm in ("ordered", "ring") for size in (2, 5, 16, 40)]
    + [("ordered", 16, 4), ("ordered", 32, 4)],
)
def test_an_estimated_all_reduce_matches_the_executed_one(algorithm: str, link: Link, size: int, per_host: int) -> None:
    costs = Costs.uniform(1, 0.0, 0.0, weight_bytes=4 * 40 * 16 * 5 * 100, machine=Machine(step_s=0))
    results = [
        simulate(
            parse("data"),
            costs,
            on(size, link, per_host=per_host),
            num_microbatches=size,
            all_reduce=algorithm,
            max_messages=limit,
        )
        for limit in (10**9, 0)
    ]
    assert results[0].step_seconds == pytest.approx(results[1].step_seconds, rel=0.02)
    assert results[0].bytes == pytest.approx(results[1].bytes)
    assert results[0].messages == results[1].messages


def test_shards_computed_jointly_pay_the_fixed_cost_once() -> None:
    line = LinearCost(2.0, 0.5)
    costs = Costs((BlockCost("b", line, line),), 4, FREE_MACHINE, joint=3)
    outcome = simulate(parse("data"), costs, on(1), num_microbatches=4)
    assert outcome.step_seconds == 2 * (2 * 2.0 + 4 * 4 * 0.5)  # groups of 3 and 1; forward and backward
    assert simulate(parse("ps:asp"), costs, on(2), num_microbatches=4, steps=1).step_seconds == 2 * 4 * (2.0 + 2.0)


def test_an_outage_delays_a_device_and_its_dependents() -> None:
    normal = simulate(parse("pipeline:1f1b"), UNITS, on(4), num_microbatches=8)
    delayed = simulate(parse("pipeline:1f1b"), UNITS, on(4), num_microbatches=8, outages=[Outage(2, 10.0, 100.0)])
    assert normal.step_seconds + 80 < delayed.step_seconds < normal.step_seconds + 101


def test_asynchronous_workers_do_not_wait_for_a_slow_worker() -> None:
    cluster = Cluster((Host(1, speed=0.25), Host(1), Host(1), Host(1)), FAST)
    progress = {}
    for mode in ("bsp", "asp", "ssp"):
        # Shards are divided evenly: the slow worker stays behind.
        outcome = simulate(
            parse(f"ps:{mode}"), UNITS, on(4), num_microbatches=6, steps=8, outages=[Outage(0, 0.0, 400.0)]
        )
        progress[mode] = [len([at for at in one.steps if at <= 400]) for one in outcome.accounts[:3]]
    assert progress["bsp"] == [0, 1, 1]
    assert progress["asp"] == [0, 8, 8]
    assert progress["ssp"] == [0, 4, 4]  # at most 3 steps ahead of the slowest at the start of a step
    assert simulate(parse("ps:asp"), UNITS, cluster, num_microbatches=6, steps=2).updates == sorted(
        simulate(parse("ps:asp"), UNITS, cluster, num_microbatches=6, steps=2).updates
    )


def test_memory_is_counted_and_a_model_that_does_not_fit_is_refused() -> None:
    costs = Costs.uniform(8, weight_bytes=1000, activation_bytes=10)
    outcome = simulate(parse("pipeline:1f1b"), costs, on(4), num_microbatches=8)
    assert list(outcome.memory) == [2 * 2000 + in_flight * 20 for in_flight in (4, 3, 2, 1)]
    with pytest.raises(FailedPrecondition, match="needs 15"):
        simulate(parse("data"), costs, on(4, memory=5000), num_microbatches=8)


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(InvalidArgument, match="all_reduce: 'star' is unknown"):
        simulate(parse("data"), UNITS, on(2), num_microbatches=2, all_reduce="star")
    with pytest.raises(InvalidArgument, match="outage"):
        simulate(parse("data"), UNITS, on(2), num_microbatches=2, outages=[Outage(5, 0.0, 1.0)])


@pytest.mark.parametrize("spec", ["data", "hybrid:replicas=128", "pipeline:1f1b"])
def test_a_thousand_devices(spec: str) -> None:
    costs = Costs.uniform(1024, 1e-3, 2e-3, weight_bytes=4_000, output_bytes=10_000, machine=Machine())
    num_microbatches = 1024 if spec != "pipeline:1f1b" else 8
    outcome = simulate(parse(spec), costs, on(1024, Link(1e9, 1e-5), per_host=8), num_microbatches=num_microbatches)
    assert outcome.devices == len(outcome.memory) == 1024
    assert 0 < outcome.efficiency < 1
