"""LoadBalancer on generated timings: shards leave slow devices, come back, and do not go to and fro."""

from __future__ import annotations

import numpy as np
import pytest

from hoop.engine.load_balancer import MAX_PAUSE, WINDOW, LoadBalancer
from hoop.engine.stage.state import SPEED
from hoop.plan.plan import Plan
from hoop.strategies.catalog import parse

SHARD_S = 0.001
LONGEST_PAUSE = MAX_PAUSE + 2 * WINDOW
"""Steps. The timings are constant: shards that have not moved in this time never will."""


class Devices:
    """Devices that take ``fixed`` shards' time in every step, and the time of their shards, times ``slowdown``."""

    def __init__(self, slowdown: list[float], fixed: float, shards: int = 4, shared_cores: int | None = None) -> None:
        self.slowdown, self._fixed = slowdown, fixed
        strategy = parse("data")
        size = len(slowdown)
        self._plan = strategy.plan(size, shards)
        self._balancer = LoadBalancer(strategy, self._plan, size, size / (shared_cores or size), shared_cores)
        self.changes = 0

    def run(self, steps: int) -> list[int]:
        """The shards of each device afterwards."""
        tail = np.zeros(SPEED + len(self.slowdown))
        for _ in range(steps):
            for rank, (times, shards) in enumerate(zip(self.slowdown, shares(self._plan), strict=True)):
                tail[SPEED + rank] = times * SHARD_S * (self._fixed + shards) / shards if shards else 0.0
            if (plan := self._balancer.observe(tail)) is not None:
                self._plan, self.changes = plan, self.changes + 1
        return shares(self._plan)


def shares(plan: Plan) -> list[int]:
    return [len(plan.computed_by(rank, 0)) for rank in range(plan.size)]


@pytest.mark.parametrize("fixed", [0.0, 0.25, 0.5, 1.0])
def test_a_device_that_was_slow_for_a_while_gets_its_shards_back(fixed: float) -> None:
    devices = Devices([1.0, 2.5], fixed)
    assert devices.run(50) == [3, 1]
    devices.slowdown = [1.0, 1.0]
    assert devices.run(600) == [2, 2]
    changes = devices.changes
    assert devices.run(LONGEST_PAUSE) == [2, 2]
    assert devices.changes == changes


@pytest.mark.slow_if(when=lambda params: params["fixed"] in (0.25, 0.5, 1.0) and params["shards"] != 6)
@pytest.mark.parametrize("fixed", [0.0, 0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("slowdown", [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 5.0, 20.0])
@pytest.mark.parametrize("shards", [4, 6, 16])
def test_shards_do_not_go_to_and_fro(slowdown: float, fixed: float, shards: int) -> None:
    devices = Devices([1.0, slowdown, 1.0], fixed, shards)
    devices.run(500)
    changes = devices.changes
    devices.run(LONGEST_PAUSE)
    assert devices.changes == changes


@pytest.mark.parametrize(
    ("devices", "cores", "shards", "expected"),
    [(3, 2, 4, [2, 2, 0]), (4, 2, 4, [2, 2, 0, 0]), (5, 1, 3, [3, 0, 0, 0, 0]), (6, 4, 2, [1, 1, 0, 0, 0, 0])],
)
def test_devices_that_share_cores_leave_the_shards_to_one_device_a_core(
    devices: int, cores: int, shards: int, expected: list[int]
) -> None:
    crowded = Devices([1.0] * devices, 0.25, shards, cores)
    assert crowded.run(WINDOW - 1) == shares(parse("data").plan(devices, shards))
    assert crowded.run(1) == expected
    assert crowded.run(LONGEST_PAUSE) == expected


def test_shards_still_follow_the_speed_of_the_devices_that_compute() -> None:
    devices = Devices([1.0, 1.0, 1.0, 1.0], 0.0, 4, 2)
    assert devices.run(WINDOW) == [2, 2, 0, 0]
    devices.slowdown = [4.0, 1.0, 1.0, 1.0]
    assert devices.run(LONGEST_PAUSE) == [1, 3, 0, 0]
