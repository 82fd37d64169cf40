"""``hoop drain`` on devices without work; ``tests/fault/test_rolling_restart.py`` drains devices of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable

from background import END_S, START_S, Running

import hoop

Start = Callable[..., Running]


def test_a_drained_device_leaves_and_ends_with_code_0(start: Start) -> None:
    coordinator = start("coordinator")
    devices = [start("device", "--join", coordinator.address, "--memory", "8MiB", "--id", key) for key in (1, 2)]
    assert [one.id for one in devices] == [1, 2]
    drain = start("drain", 2, "--coordinator", coordinator.address, "--json")
    found = json.loads(drain.line())
    assert (found["device"], found["jobs"]) == (2, [])
    assert drain.wait(START_S) == 0
    assert devices[1].wait(START_S) == 0
    again = start("drain", 2, "--coordinator", coordinator.address)
    assert again.wait(START_S) == 2
    assert "device 2" in again.errors
    assert "is left (it left): it has no work to hand over" in again.errors
    with hoop.connect(coordinator.address) as cluster:
        texts: list[str] = []
        cluster.drain(1, progress=lambda one: texts.append(one.text))
        assert texts[-1] == "device 1 has left"
        assert devices[0].wait(END_S + START_S) == 0
        assert [one.state for one in cluster.status().devices] == ["left", "left"]
