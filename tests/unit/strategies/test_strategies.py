"""Every strategy gives valid plans for any number of devices and micro-batches; traffic and memory of each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan, in_flight, traffic
from hoop.plan.rules import ListRule
from hoop.plan.unit_clock import run_rules, timeline
from hoop.plan.validation import check
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import all_strategies, parse
from hoop.strategies.data_parallel import DataParallel, for_hosts
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.parameter_server import ParameterServer
from hoop.strategies.pipeline import SCHEDULES, Pipeline
from hoop.strategies.ring import RingModel

schedules = st.sampled_from(list(SCHEDULES))
slices = st.integers(1, 4)
STRATEGIES = st.one_of(
    st.builds(DataParallel, st.booleans()),
    st.builds(Pipeline, schedules, slices),
    st.builds(RingModel, slices, st.none() | st.integers(1, 9), st.booleans()),
    st.builds(Hybrid, st.integers(1, 4), schedules, slices),
    st.builds(ParameterServer, st.integers(1, 3), st.sampled_from(["bsp", "asp", "ssp"]), st.integers(0, 4)),
)


def fits(strategy: Strategy, devices: int) -> bool:
    """Return whether the strategy can use this number of devices."""
    match strategy:
        case Hybrid():
            return devices % strategy.replicas == 0
        case ParameterServer():
            return devices > strategy.servers
        case _:
            return True


@given(STRATEGIES, st.integers(1, 8), st.integers(1, 16), st.data())
@settings(max_examples=300)
def test_every_plan_is_valid(strategy: Strategy, devices: int, micros: int, data: st.DataObject) -> None:
    speeds = data.draw(st.none() | st.lists(st.sampled_from([0.5, 1, 3]), min_size=devices, max_size=devices))
    if not fits(strategy, devices):
        with pytest.raises(InvalidArgument, match=f"devices: {devices}"):
            strategy.plan(devices, micros, speeds)
        return
    plan = strategy.plan(devices, micros, speeds)
    assert check(plan) == []
    assert (plan.size, plan.num_microbatches, plan.stages) == (devices, micros, strategy.stages(devices))
    assert Plan.from_json(plan.to_json()) == plan
    assert strategy.plan(devices, micros, speeds) == plan


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("micros", range(1, 17))
def test_one_plan_of_each_strategy_is_valid(devices: int, micros: int) -> None:
    for strategy in all_strategies(devices):
        assert check(strategy.plan(devices, micros)) == [], strategy.spec


@given(STRATEGIES, st.integers(1, 6), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=200)
def test_rules_over_several_steps_compute_everything_once(
    strategy: Strategy, devices: int, micros: int, steps: int
) -> None:
    """Rules, and lists run once per step, compute each step once, even if steps overlap."""
    if not fits(strategy, devices):
        return
    plan = strategy.plan(devices, micros)
    rules = [strategy.rule(plan, rank, steps) for rank in range(devices)]
    if rules[0] is None:
        assert rules == [None] * devices
        lists = [[one for _ in range(steps) for one in line] for line in plan.ranks]
        assert list(map(list, run_rules([ListRule(line) for line in lists]))) == lists
        return
    lines = run_rules([rule for rule in rules if rule is not None])
    computed = sorted(str(one) for line in lines for one in line if one.kind in "FB")
    assert computed == sorted(
        f"{stage}{kind}{micro}" for stage in range(plan.stages) for micro in range(steps * micros) for kind in "FB"
    )
    assert not timeline(Plan(micros * steps, plan.holders, lines, plan.servers)).stuck


@given(STRATEGIES)
def test_specs_round_trip_through_parse(strategy: Strategy) -> None:
    parsed = parse(strategy.spec)
    assert parsed.spec == strategy.spec
    assert type(parsed) is type(strategy)
    assert parsed.describe() == strategy.describe()
    assert parsed.synchronous == strategy.synchronous
    assert strategy.versions == (2 if strategy.name == "ring" and not strategy.synchronous else 1)


@pytest.mark.parametrize("strategy", all_strategies(4), ids=lambda strategy: strategy.spec)
def test_invalid_sizes_are_refused(strategy: Strategy) -> None:
    with pytest.raises(InvalidArgument, match="devices: 0"):
        strategy.plan(0, 4)
    with pytest.raises(InvalidArgument, match="num_microbatches: 0"):
        strategy.plan(4, 0)
    with pytest.raises(InvalidArgument, match="speeds: 3 values for 4 devices"):
        strategy.plan(4, 4, [1, 1, 1])


def test_data_parallel_grid() -> None:
    assert DataParallel().plan(2, 4).grid() == (
        "rank 0 | 0L0 0F0 0B0 0L1 0F1 0B1 0A  0U\n"
        "rank 1 | 0L2 0F2 0B2 0L3 0F3 0B3 0A  0U"
    )  # fmt: skip


def test_fast_devices_get_more_shards() -> None:
    plan = DataParallel().plan(3, 8, [1, 2, 1])
    assert [plan.computed_by(rank, 0) for rank in range(3)] == [(0, 1), (2, 3, 4, 5), (6, 7)]
    mesh = Hybrid(2).plan(4, 8, [3, 3, 1, 5])  # a replica is as fast as its slowest device
    assert [len(mesh.computed_by(rank, rank % 2)) for rank in range(4)] == [6, 6, 2, 2]
    served = ParameterServer().plan(3, 8, [3, 1, 1])
    assert [len(served.computed_by(rank, 0)) for rank in range(3)] == [6, 2, 0]


def test_hybrid_grid() -> None:
    plan = Hybrid(2).plan(4, 4)
    assert plan.holders == ((0, 2), (1, 3))
    assert plan.grid() == (
        "rank 0 | 0L0 0F0 0L1 0F1 0B0 0B1 0A  0U\n"
        "rank 1 | 1F0 1B0 1F1 1B1 1A  1U\n"
        "rank 2 | 0L2 0F2 0L3 0F3 0B2 0B3 0A  0U\n"
        "rank 3 | 1F2 1B2 1F3 1B3 1A  1U"
    )


def test_traffic_of_each_strategy() -> None:
    """4 devices, 8 micro-batches, outputs of 10 bytes, weights of 400."""
    data = traffic(DataParallel().plan(4, 8), [], [400])
    assert [(rank.bytes, rank.messages) for rank in data] == [(600, 6)] * 4
    pipe = traffic(Pipeline().plan(4, 8), [10] * 3, [100] * 4)
    assert [(rank.bytes, rank.messages) for rank in pipe] == [(80, 8), (160, 16), (160, 16), (80, 8)]
    mesh = traffic(Hybrid(2).plan(4, 8), [10], [200] * 2)
    assert [(rank.activation_bytes, rank.weight_bytes) for rank in mesh] == [(40, 200)] * 4
    served = traffic(ParameterServer(2).plan(4, 8), [], [200] * 2)
    assert [(rank.bytes, rank.messages) for rank in served] == [(400, 2)] * 4


def test_micro_batches_in_flight_of_each_strategy() -> None:
    def held(strategy: Strategy) -> list[int]:
        plan = strategy.plan(4, 8)
        return [in_flight(plan, rank) for rank in range(4)]

    assert held(DataParallel()) == [1, 1, 1, 1]
    assert held(Pipeline("gpipe")) == [8, 8, 8, 8]
    assert held(Pipeline("1f1b")) == [4, 3, 2, 1]
    assert held(RingModel()) == [4, 3, 2, 1]
    assert held(RingModel(limit=2)) == [2, 2, 2, 1]
    assert held(Pipeline("zero-bubble")) == [4, 4, 4, 4]
    assert held(Pipeline("interleaved", 2)) == [11, 9, 7, 5]


def test_data_parallel_gives_neighbouring_shards_to_the_ranks_of_a_host() -> None:
    placed = for_hosts(DataParallel(), ["a", "b", "a", "b"])
    assert placed.spec == "data"
    plan = placed.plan(4, 8)
    assert check(plan) == []
    assert [plan.computed_by(rank, 0) for rank in range(4)] == [(0, 1), (4, 5), (2, 3), (6, 7)]
    faster = placed.plan(4, 8, [1, 1, 5, 1])
    assert [len(faster.computed_by(rank, 0)) for rank in range(4)] == [1, 1, 5, 1]
    assert faster.computed_by(2, 0) == (1, 2, 3, 4, 5)
    with pytest.raises(InvalidArgument, match="devices: 3"):
        placed.plan(3, 8)


@pytest.mark.parametrize("hosts", [(), ("a", "a"), ("a", "a", "b"), ("a", "b", "c")])
def test_ranks_in_the_order_of_their_hosts_need_no_other_plan(hosts: tuple[str, ...]) -> None:
    assert for_hosts(DataParallel(), hosts) == DataParallel()
    assert for_hosts(for_hosts(DataParallel(), ["a", "b", "a"]), hosts) == DataParallel()
    assert for_hosts(Pipeline(), ["a", "b", "a"]) == Pipeline()
