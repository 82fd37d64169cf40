"""Failures and the search: hand-computed goodput, and a ranking with its reasons."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.cost_model import Costs, Machine
from hoop.simulate.failure_model import Failures, goodput
from hoop.simulate.search import goodput_with_failures, search
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse


def shared(seconds: float, devices: int) -> Callable[[int], float | None]:
    return lambda alive: seconds * devices / alive if alive else None


def test_without_failures_everything_is_useful() -> None:
    found = goodput(shared(2.0, 4), 4, True, Failures(), steps=100)
    assert (found.seconds, found.steps, found.losses, found.useful) == (200.0, 100, 0, 1.0)


def test_an_elastic_job_pauses_and_goes_on_with_fewer() -> None:
    failures = Failures(at=[10.5], return_after=None, pause=3.0)
    found = goodput(shared(1.0, 4), 4, True, failures, steps=20)
    # 10 steps; lost at 10.5, a pause of 3, a quarter of the step again, then 10 steps on three devices
    assert found.seconds == pytest.approx(10.5 + 3 + 0.25 * 1 + 10 * 4 / 3)
    assert (found.steps, found.losses, found.repeated) == (20, 1, 0)


def test_a_device_that_comes_back_is_used_again() -> None:
    failures = Failures(at=[10.5], return_after=5.0, pause=1.0)
    found = goodput(shared(1.0, 2), 2, True, failures, steps=20)
    # lost at 10.5, on at 12 (pause, half a step again); back at 16.5: two steps of 2 s are whole; a pause; 8 steps left
    assert found.seconds == pytest.approx(16.5 + 1 + 8)


def test_a_job_that_is_not_elastic_goes_back_to_its_checkpoint() -> None:
    failures = Failures(at=[10.5], return_after=7.0, pause=1.0, restart=20.0, checkpoint_every=8)
    found = goodput(shared(1.0, 4), 4, False, failures, steps=20)
    # 10 steps, 2 of them lost; a pause and a restart, by which time the device is back; 12 steps
    assert found.seconds == pytest.approx(10.5 + 1 + 20 + 12)
    assert found.repeated == 2


def test_a_job_with_mirrors_goes_on_from_its_last_copies() -> None:
    failures = Failures(at=[10.5], return_after=7.0, pause=1.0, reshard=2.0)
    found = goodput(shared(1.0, 4), 4, True, failures, steps=20, replicate_every=4)
    # 10 steps, 2 of them lost; a pause and a cut for three; 4 steps by three (4/3 s each) until the device is back,
    # which costs a pause and a cut again; 8 steps by four
    assert found.repeated == 2
    assert found.seconds == pytest.approx(18.5 + 1 + 2 + 9)
    without = goodput(shared(1.0, 4), 4, False, failures, steps=20)
    assert found.useful > without.useful


def test_failures_by_chance_are_the_same_for_the_same_seed() -> None:
    outcome = simulate(parse("data"), Costs.uniform(2, 1.0, 2.0), Cluster.even(4), num_microbatches=4)
    first, again, other = (goodput_with_failures(outcome, Failures(per_hour=0.5, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert 0 < first.useful < 1
    assert first.losses > 10


def test_more_failures_leave_less() -> None:
    for spec in ("data", "pipeline:1f1b"):
        outcome = simulate(parse(spec), Costs.uniform(4, 1.0, 2.0), Cluster.even(4), num_microbatches=8)
        shares = [goodput_with_failures(outcome, Failures(per_hour=rate)).useful for rate in (0.0, 0.1, 1.0, 5.0)]
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == 1.0


def test_the_search_ranks_and_says_why() -> None:
    costs = Costs.uniform(8, 1e-3, 2e-3, weight_bytes=4_000_000, output_bytes=1_000, machine=Machine())
    slow = Cluster.even(4, link=Link.parse("100Mbps,0.1ms"))
    found = search(costs, slow, 64)
    assert found[0].reason.startswith("fastest")
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    (data,) = [one for one in found if one.strategy.spec == "data" and one.num_microbatches == 4]
    assert "communicates" in data.reason, "weights are large and the link is slow: a pipeline wins"
    assert found[0].strategy.name in ("pipeline", "ring")


def test_what_does_not_fit_is_last_with_its_reason() -> None:
    costs = Costs.uniform(8, 1e-3, 2e-3, weight_bytes=1_000_000)
    found = search(costs, Cluster.even(4, link=Link(1e9), memory=6_000_000), 64)
    refused = [one for one in found if one.result is None]
    assert any(one.strategy.spec == "data" and "memory" in one.reason for one in refused)
    assert found[: -len(refused)] == [one for one in found if one.result is not None]
    assert found[0].result is not None
    assert found[0].result.peak_memory <= 6_000_000
