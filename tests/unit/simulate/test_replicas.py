"""The cost of replicas of model state in the simulator: bytes, time and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.simulate.cluster import Cluster, Link
from hoop.simulate.cost_model import FREE_MACHINE, BlockCost, Costs, LinearCost
from hoop.simulate.result import SimulationResult
from hoop.simulate.simulation import simulate
from hoop.strategies.catalog import parse

MACHINE = replace(FREE_MACHINE, copy_s=1.0, byte_s=0.5, message_s=2.0)
BLOCK = BlockCost("b", LinearCost(1.0), LinearCost(2.0), weight_bytes=10, optimizer_bytes=20, gradient_bytes=10)
COSTS = replace(Costs((BLOCK,) * 4, 1, MACHINE), update_s=0.1)


def run(
    spec: str, devices: int, replicate: bool, hosts: int = 1, replicas: int = 1, **host: object
) -> SimulationResult:
    cluster = Cluster.even(devices, devices // hosts, Link(1e30), **host)
    return simulate(parse(spec), COSTS, cluster, num_microbatches=4, replicate=replicate, replicas=replicas)


def replica_cost(spec: str, devices: int, hosts: int = 1, replicas: int = 1) -> tuple[float, float, list[int]]:
    """Extra seconds, bytes and memory that replicas cost."""
    without, replicated = run(spec, devices, False, hosts), run(spec, devices, True, hosts, replicas)
    memory = [one - other for one, other in zip(replicated.memory, without.memory, strict=True)]
    return replicated.step_seconds - without.step_seconds, replicated.bytes - without.bytes, memory


def test_on_one_host_gradients_are_read_in_place_and_replicas_updated_while_waiting() -> None:
    seconds, extra_bytes, memory = replica_cost("pipeline:gpipe", 4)
    # Each rank holds a block of 10 bytes: 2 + 4 to announce the address of its gradient, 2 + 4 and 10 to copy another
    # rank's. A rank updates its replica, 1, while it waits for its first input, or before it sends the next gradient.
    assert seconds == pytest.approx(6 + 16 + 1, abs=1.0)
    assert extra_bytes == 4 * 10
    assert memory == [30 + 10] * 4


def test_a_replica_is_updated_in_every_step_though_its_holder_never_waits() -> None:
    """Of two devices with a sharded update each updates its half, and that of the other one."""
    costs = replace(COSTS, machine=FREE_MACHINE)
    found = [
        simulate(parse("data:sharded"), costs, Cluster.even(2, 2), num_microbatches=4, replicate=replicate).step_seconds
        for replicate in (False, True)
    ]
    assert found[1] - found[0] == pytest.approx(40 * 0.1 / 2)


def test_between_hosts_gradients_are_sent() -> None:
    one_host, four_hosts = (replica_cost("pipeline:gpipe", 4, hosts)[0] for hosts in (1, 4))
    assert one_host - four_hosts == pytest.approx((6 + 16) - (7 + 7))


def test_state_that_another_rank_holds_anyway_costs_nothing() -> None:
    assert replica_cost("hybrid:replicas=2", 4) == (0.0, 0, [0] * 4)
    assert replica_cost("data", 4) == (0.0, 0, [0] * 4)


def test_each_further_replica_costs_as_much_as_the_first() -> None:
    one, two = (replica_cost("pipeline:gpipe", 4, replicas=replicas) for replicas in (1, 2))
    assert two[0] == pytest.approx(2 * one[0], abs=1.0)
    assert two[1:] == (2 * 4 * 10, [2 * (30 + 10)] * 4)
    one, two = (replica_cost("ps:asp", 3, replicas=replicas) for replicas in (1, 2))
    assert (two[1], sum(two[2])) == (2 * one[1], sum(one[2]) + 2 * 120)


def test_a_hybrid_sends_only_the_replicas_that_its_pipelines_lack() -> None:
    """Two stages of two blocks each have one further copy, at a rank of the other stage."""
    _, extra_bytes, memory = replica_cost("hybrid:replicas=2", 4, replicas=2)
    assert extra_bytes == 2 * 20
    assert memory == [0, 60 + 20, 60 + 20, 0]


def test_more_replicas_than_other_devices_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"replicas: 4 of each .*with 4 there are 3"):
        run("pipeline:gpipe", 4, True, replicas=4)
    with pytest.raises(InvalidArgument, match="--no-replicate"):
        run("pipeline:gpipe", 4, False, replicas=2)


def test_a_parameter_servers_slice_is_replicated() -> None:
    _, extra_bytes, memory = replica_cost("ps:bsp", 2)
    assert extra_bytes == 40
    assert sorted(memory) == [0, 120 + 40]


def test_asynchronous_strategies_send_their_state_when_they_synchronize() -> None:
    _, extra_bytes, memory = replica_cost("ps:asp", 2)
    assert extra_bytes == 120 / 32  # per step
    assert sorted(memory) == [120, 2 * 120]


def test_replicas_that_do_not_fit_are_rejected() -> None:
    memory = max(run("pipeline:gpipe", 4, False).memory) + 30
    assert run("pipeline:gpipe", 4, False, memory=memory)
    with pytest.raises(FailedPrecondition, match="--no-replicate"):
        run("pipeline:gpipe", 4, True, memory=memory)
    assert run("pipeline:gpipe", 4, True, memory=memory + 10)
    with pytest.raises(
        FailedPrecondition, match=r"80 B for replicas .*with --replicas 1 it needs less; .*--no-replicate"
    ):
        run("pipeline:gpipe", 4, True, replicas=2, memory=memory + 10)
