"""StragglerDetector on generated timings: a slow rank is reported within ten steps, a healthy one never."""

from __future__ import annotations

import random

import pytest

from hoop.engine.load_balancer import StragglerDetector

SHARD_S = 0.01


def healthy_time(rng: random.Random) -> float:
    """A shard's time on a busy machine: sometimes several times longer than usual."""
    busy = rng.random() < 0.15
    return SHARD_S * rng.uniform(0.9, 1.1) * (rng.uniform(1, 8) if busy else 1)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("factor", [2, 4, 20])
def test_only_the_slow_device_is_reported_within_ten_steps(size: int, factor: int) -> None:
    for seed in range(50):
        rng = random.Random(seed)
        detector, slow_rank, slow_from = StragglerDetector(size), rng.randrange(size), rng.randint(0, 40)
        reported: dict[int, int] = {}
        for step in range(slow_from + 10):
            times = [healthy_time(rng) for _ in range(size)]
            if step >= slow_from:
                times[slow_rank] = SHARD_S * factor * rng.uniform(0.95, 1.3)
            reported |= {verdict.rank: step for verdict in detector.observe(times) if verdict.slow}
        assert set(reported) == {slow_rank}, f"seed {seed}"
        assert reported[slow_rank] >= slow_from, f"seed {seed}"


@pytest.mark.parametrize("size", [2, 4, 16])
def test_healthy_devices_are_never_reported(size: int) -> None:
    rng = random.Random(size)
    detector = StragglerDetector(size)
    for _ in range(20_000):
        assert detector.observe([healthy_time(rng) for _ in range(size)]) == []


def test_a_recovered_device_is_cleared_and_verdicts_do_not_flap() -> None:
    detector = StragglerDetector(3)
    verdicts = []
    for times in ([1, 1, 1], [1, 3, 1], [1, 1.4, 1], [1, 1.05, 1]):
        for _ in range(20):
            verdicts += detector.observe([float(one) for one in times])
    assert [(one.rank, one.slow) for one in verdicts] == [(1, True), (1, False)]
    assert verdicts[0].slowdown == 3


@pytest.mark.parametrize("oversubscription", [1.5, 2.0, 250.0])
def test_no_device_is_reported_where_devices_outnumber_cores(oversubscription: float) -> None:
    """With four devices on two cores the scheduler may delay the same device fivefold in every step."""
    detector = StragglerDetector(4, oversubscription)
    for _ in range(50):
        assert detector.observe([1.0, 1.0, 5.0, 1.2]) == []
    assert detector.drop_rank(2) == []
    assert detector.slow == set()


@pytest.mark.parametrize("oversubscription", [0.25, 1.0])
def test_a_slow_device_is_reported_with_a_core_per_device(oversubscription: float) -> None:
    detector = StragglerDetector(4, oversubscription)
    verdicts = [one for _ in range(10) for one in detector.observe([1.0, 1.0, 5.0, 1.2])]
    assert [(one.rank, one.slow, one.slowdown) for one in verdicts] == [(2, True, 5.0)]


def test_a_device_without_shards_keeps_its_verdict() -> None:
    detector = StragglerDetector(2)
    for _ in range(10):
        detector.observe([1.0, 5.0])
    for _ in range(10):
        assert detector.observe([1.0, 0.0]) == []
    assert detector.slow == {1}
