"""Who is named a straggler, on generated timings: whoever is slow, soon; whoever is not, never."""

from __future__ import annotations

import random

import pytest

from hoop.engine.load_balancer import StragglerDetector

SHARD_S = 0.01


def healthy(draw: random.Random) -> float:
    """A shard's time on a machine with other things to do: sometimes several times longer than usual."""
    busy = draw.random() < 0.15
    return SHARD_S * draw.uniform(0.9, 1.1) * (draw.uniform(1, 8) if busy else 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [2, 4, 20])
def test_a_slow_device_is_named_within_ten_steps_and_nobody_else(size: int, factor: int) -> None:
    for seed in range(50):
        draw = random.Random(seed)
        watch, victim, begins = StragglerDetector(size), draw.randrange(size), draw.randint(0, 40)
        named: dict[int, int] = {}
        for step in range(begins + 10):
            times = [healthy(draw) for _ in range(size)]
            if step >= begins:
                times[victim] = SHARD_S * factor * draw.uniform(0.95, 1.3)
            named |= {verdict.rank: step for verdict in watch.observe(times) if verdict.slow}
        assert set(named) == {victim}, f"seed {seed}"
        assert named[victim] >= begins, f"seed {seed}"


@pytest.mark.parametrize("size", [2, 4, 16])
def test_healthy_devices_are_never_named(size: int) -> None:
    draw = random.Random(size)
    watch = StragglerDetector(size)
    for _ in range(20_000):
        assert watch.observe([healthy(draw) for _ in range(size)]) == []


def test_a_device_that_recovers_is_one_no_more_and_verdicts_do_not_flap() -> None:
    watch = StragglerDetector(3)
    verdicts = []
    for times in ([1, 1, 1], [1, 3, 1], [1, 1.4, 1], [1, 1.05, 1]):
        for _ in range(20):
            verdicts += watch.observe([float(one) for one in times])
    assert [(one.rank, one.slow) for one in verdicts] == [(1, True), (1, False)]
    assert verdicts[0].slowdown == 3


@pytest.mark.parametrize("oversubscription", [1.5, 2.0, 250.0])
def test_where_devices_outnumber_cores_nobody_is_named(oversubscription: float) -> None:
    """Four devices on two cores: the scheduler lets one of them wait five times as long, step after step."""
    crowded = StragglerDetector(4, oversubscription)
    for _ in range(50):
        assert crowded.observe([1.0, 1.0, 5.0, 1.2]) == []
    assert crowded.drop_rank(2) == []
    assert crowded.slow == set()


@pytest.mark.parametrize("oversubscription", [0.25, 1.0])
def test_with_a_core_for_each_a_slow_one_is_named(oversubscription: float) -> None:
    watch = StragglerDetector(4, oversubscription)
    verdicts = [one for _ in range(10) for one in watch.observe([1.0, 1.0, 5.0, 1.2])]
    assert [(one.rank, one.slow, one.slowdown) for one in verdicts] == [(2, True, 5.0)]


def test_a_device_without_shards_keeps_its_verdict() -> None:
    watch = StragglerDetector(2)
    for _ in range(10):
        watch.observe([1.0, 5.0])
    for _ in range(10):
        assert watch.observe([1.0, 0.0]) == []
    assert watch.slow == {1}
