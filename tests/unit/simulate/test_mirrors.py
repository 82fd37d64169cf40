"""Copies of what ranks hold, after each step: their bytes, their time, their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hoop.errors import FailedPrecondition
from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.costs import FREE, BlockCost, Costs, Line
from hoop.simulate.mirrors import Mirroring
from hoop.simulate.outcome import Outcome
from hoop.simulate.run import simulate
from hoop.strategies.catalog import parse

MACHINE = replace(FREE, copy_s=1.0, byte_s=0.5, message_s=2.0, keep_s=3.0)
BLOCK = BlockCost("b", Line(1.0), Line(2.0), weight_bytes=10, optimizer_bytes=20, gradient_bytes=10)
COSTS = Costs((BLOCK,) * 4, 1, MACHINE)


def run(spec: str, devices: int, mirroring: Mirroring | None, **host: object) -> Outcome:
    return simulate(
        parse(spec), COSTS, Cluster.even(devices, devices, Link(1e30), **host), micros=4, mirroring=mirroring
    )


def test_each_rank_copies_its_state_and_sends_it_on() -> None:
    without, with_ = run("pipeline:gpipe", 4, None), run("pipeline:gpipe", 4, Mirroring())
    # Each holds a block: 3 + 30 to copy it, 2 + 15 to send it and 2 + 15 to receive another's. All do so at once.
    assert with_.step_seconds - without.step_seconds == pytest.approx(33 + 17 + 17)
    assert with_.bytes - without.bytes == 4 * 30
    assert with_.messages - without.messages == 4
    assert [more - less for more, less in zip(with_.memory, without.memory, strict=True)] == [2 * 60] * 4


def test_how_often_and_whether_one_waits_is_a_choice() -> None:
    without = run("pipeline:gpipe", 4, None).step_seconds
    assert run("pipeline:gpipe", 4, Mirroring(copies=0)).step_seconds - without == pytest.approx(34)
    far = Cluster.even(4, 1, Link(1e30, 5.0))
    waits, goes_on = (
        simulate(parse("pipeline:gpipe"), COSTS, far, micros=4, mirroring=Mirroring(overlapped=one))
        for one in (False, True)
    )
    assert waits.step_seconds - goes_on.step_seconds == pytest.approx(5.0)


def test_what_a_replica_has_does_not_travel() -> None:
    without, with_ = run("hybrid:replicas=2", 4, None), run("hybrid:replicas=2", 4, Mirroring())
    assert with_.step_seconds - without.step_seconds == pytest.approx(3 + 60)
    assert with_.bytes == without.bytes
    assert run("data", 4, Mirroring()).step_seconds == run("data", 4, None).step_seconds


def test_of_a_parameter_server_its_slice_is_copied() -> None:
    without, with_ = run("ps:bsp", 2, None), run("ps:bsp", 2, Mirroring())
    assert with_.bytes - without.bytes == 120
    assert max(with_.memory) - max(without.memory) == 2 * 120


def test_copies_that_do_not_fit_are_refused() -> None:
    room = max(run("pipeline:gpipe", 4, None).memory) + 100
    assert run("pipeline:gpipe", 4, None, memory=room)
    with pytest.raises(FailedPrecondition, match="--no-mirror"):
        run("pipeline:gpipe", 4, Mirroring(), memory=room)
