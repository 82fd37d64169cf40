"""The failure model with hand-computed goodput, and the strategy search with its reasons."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.cost_model import Costs, Machine
from hoop.simulate.failure_model import Failures, goodput
from hoop.simulate.search import goodput_with_failures, search
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse


def step_seconds(seconds: float, devices: int) -> Callable[[int], float | None]:
    return lambda alive: seconds * devices / alive if alive else None


def test_without_failures_all_time_is_useful() -> None:
    found = goodput(step_seconds(2.0, 4), 4, True, Failures(), steps=100)
    assert (found.seconds, found.steps, found.losses, found.useful) == (200.0, 100, 0, 1.0)


def test_an_elastic_job_pauses_and_continues_with_fewer_devices() -> None:
    failures = Failures(at=[10.5], return_after=None, pause=3.0)
    found = goodput(step_seconds(1.0, 4), 4, True, failures, steps=20)
    # 10 steps; a failure at 10.5, a pause of 3, a quarter of the step repeated, then 10 steps on three devices
    assert found.seconds == pytest.approx(10.5 + 3 + 0.25 * 1 + 10 * 4 / 3)
    assert (found.steps, found.losses, found.repeated) == (20, 1, 0)


def test_a_returning_device_is_used_again() -> None:
    failures = Failures(at=[10.5], return_after=5.0, pause=1.0)
    found = goodput(step_seconds(1.0, 2), 2, True, failures, steps=20)
    # failure at 10.5, resumed at 12 (pause, half a step repeated); device back at 16.5 after two steps of 2 s; pause;
    # 8 steps left
    assert found.seconds == pytest.approx(16.5 + 1 + 8)


def test_a_non_elastic_job_restarts_from_its_checkpoint() -> None:
    failures = Failures(at=[10.5], return_after=7.0, pause=1.0, restart=20.0, checkpoint_every=8)
    found = goodput(step_seconds(1.0, 4), 4, False, failures, steps=20)
    # 10 steps, 2 of them lost; a pause and a restart, during which the device returns; 12 steps
    assert found.seconds == pytest.approx(10.5 + 1 + 20 + 12)
    assert found.repeated == 2


def test_a_job_with_replicas_continues_from_its_last_replica() -> None:
    failures = Failures(at=[10.5], return_after=7.0, pause=1.0, reshard=2.0)
    found = goodput(step_seconds(1.0, 4), 4, True, failures, steps=20, replicate_every=4)
    # 10 steps, 2 of them lost; a pause and resharding to three; 4 steps on three devices (4/3 s each) until the device
    # is back, which costs another pause and resharding; 8 steps on four devices
    assert found.repeated == 2
    assert found.seconds == pytest.approx(18.5 + 1 + 2 + 9)
    without = goodput(step_seconds(1.0, 4), 4, False, failures, steps=20)
    assert found.useful > without.useful


def test_random_failures_depend_on_the_seed() -> None:
    outcome = simulate(parse("data"), Costs.uniform(2, 1.0, 2.0), Cluster.even(4), num_microbatches=4)
    first, again, other = (goodput_with_failures(outcome, Failures(per_hour=0.5, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert 0 < first.useful < 1
    assert first.losses > 10


def test_the_useful_fraction_falls_with_the_failure_rate() -> None:
    for spec in ("data", "pipeline:1f1b"):
        outcome = simulate(parse(spec), Costs.uniform(4, 1.0, 2.0), Cluster.even(4), num_microbatches=8)
        fractions = [goodput_with_failures(outcome, Failures(per_hour=rate)).useful for rate in (0.0, 0.1, 1.0, 5.0)]
        assert fractions == sorted(fractions, reverse=True)
        assert fractions[0] == 1.0


def test_the_search_ranks_strategies_with_reasons() -> None:
    costs = Costs.uniform(8, 1e-3, 2e-3, weight_bytes=4_000_000, output_bytes=1_000, machine=Machine())
    slow = Cluster.even(4, link=Link.parse("100Mbps,0.1ms"))
    found = search(costs, slow, 64)
    assert found[0].reason.startswith("fastest")
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    (data,) = [one for one in found if one.strategy.spec == "data" and one.num_microbatches == 4]
    assert "communicates" in data.reason, "weights are large and the link is slow: a pipeline wins"
    assert found[0].strategy.name in ("pipeline", "ring")


def test_strategies_that_do_not_fit_come_last_with_a_reason() -> None:
    costs = Costs.uniform(8, 1e-3, 2e-3, weight_bytes=1_000_000)
    found = search(costs, Cluster.even(4, link=Link(1e9), memory=6_000_000), 64)
    refused = [one for one in found if one.result is None]
    assert any(one.strategy.spec == "data" and "memory" in one.reason for one in refused)
    assert found[: -len(refused)] == [one for one in found if one.result is not None]
    assert found[0].result is not None
    assert found[0].result.peak_memory <= 6_000_000
