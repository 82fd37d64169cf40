"""Mirrors of what ranks hold: their bytes, their time, their memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hoop.errors import FailedPrecondition
from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.cost_model import FREE_MACHINE, BlockCost, Costs, LinearCost
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

MACHINE = replace(FREE_MACHINE, copy_s=1.0, byte_s=0.5, message_s=2.0)
BLOCK = BlockCost("b", LinearCost(1.0), LinearCost(2.0), weight_bytes=10, optimizer_bytes=20, gradient_bytes=10)
COSTS = replace(Costs((BLOCK,) * 4, 1, MACHINE), update_s=0.1)


def run(spec: str, devices: int, replicate: bool, hosts: int = 1, **host: object) -> SimulationResult:
    cluster = Cluster.even(devices, devices // hosts, Link(1e30), **host)
    return simulate(parse(spec), COSTS, cluster, num_microbatches=4, replicate=replicate)


def more(spec: str, devices: int, hosts: int = 1) -> tuple[float, float, list[int]]:
    """Seconds, bytes and memory that mirrors cost."""
    without, with_ = (run(spec, devices, mirror, hosts) for mirror in (False, True))
    memory = [one - other for one, other in zip(with_.memory, without.memory, strict=True)]
    return with_.step_seconds - without.step_seconds, with_.bytes - without.bytes, memory


def test_a_gradient_is_read_where_it_lies_and_the_holder_updates_while_it_waits() -> None:
    seconds, moved, memory = more("pipeline:gpipe", 4)
    # Each holds a block of 10 bytes: 2 + 4 to say where its gradient lies, 2 + 4 and 10 to copy another's. The update
    # of a mirror, 1, is made while a rank waits for its first input, or before the next gradient is sent.
    assert seconds == pytest.approx(6 + 16 + 1, abs=1.0)
    assert moved == 4 * 10
    assert memory == [30 + 10] * 4


def test_between_hosts_it_is_sent() -> None:
    near, far = (more("pipeline:gpipe", 4, hosts)[0] for hosts in (1, 4))
    assert near - far == pytest.approx((6 + 16) - (7 + 7))


def test_what_a_replica_has_costs_nothing() -> None:
    assert more("hybrid:replicas=2", 4) == (0.0, 0, [0] * 4)
    assert more("data", 4) == (0.0, 0, [0] * 4)


def test_of_a_parameter_server_its_slice_is_mirrored() -> None:
    _, moved, memory = more("ps:bsp", 2)
    assert moved == 40
    assert sorted(memory) == [0, 120 + 40]


def test_asynchronous_strategies_send_their_state_where_they_meet() -> None:
    _, moved, memory = more("ps:asp", 2)
    assert moved == 120 / 32  # a step
    assert sorted(memory) == [120, 2 * 120]


def test_mirrors_that_do_not_fit_are_refused() -> None:
    room = max(run("pipeline:gpipe", 4, False).memory) + 30
    assert run("pipeline:gpipe", 4, False, memory=room)
    with pytest.raises(FailedPrecondition, match="--no-replicate"):
        run("pipeline:gpipe", 4, True, memory=room)
