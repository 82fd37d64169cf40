"""Placement of replicas: each rank holds equally many of the others', on different machines where possible."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from hoop.errors import InvalidArgument
from hoop.membership.replication import check_replicas, replica_holders, same_state
from hoop.plan.plan import Plan
from hoop.strategies.catalog import parse, plan_for_devices


def holders(size: int, hosts: str = "", replicas: int = 1) -> list[int]:
    """The last holder of each rank."""
    return [ranks[-1] for ranks in replica_holders(size, hosts, replicas)]


def test_the_next_rank_holds_the_replica_if_all_machines_are_equal() -> None:
    assert holders(4) == [1, 2, 3, 0]
    assert holders(4, "aaaa") == [1, 2, 3, 0]
    assert holders(4, "abcd") == [1, 2, 3, 0]
    assert replica_holders(1, "a") == [()]


@pytest.mark.parametrize(("hosts", "wanted"), [("aabb", [2, 3, 0, 1]), ("abab", [1, 0, 3, 2]), ("aab", [2, 0, 1])])
def test_placement_on_given_machines(hosts: str, wanted: list[int]) -> None:
    assert holders(len(hosts), hosts) == wanted


def test_placement_on_any_machines() -> None:
    """As many replicas as possible are on another machine, and each rank holds exactly one."""
    for size in range(2, 7):
        for hosts in product("abc", repeat=size):
            found = holders(size, "".join(hosts))
            assert sorted(found) == list(range(size)), hosts
            assert all(rank != holder for rank, holder in enumerate(found)), hosts
            crossing = sum(hosts[rank] != hosts[holder] for rank, holder in enumerate(found))
            largest = max(map(hosts.count, set(hosts)))
            assert crossing == min(size, 2 * (size - largest)), hosts


def test_two_replicas_on_any_machines() -> None:
    """Each rank holds two, of different ranks. All copies are on different machines if no machine has over a third."""
    for size in range(3, 8):
        for hosts in product("abcd", repeat=size):
            if size == 7 and list(dict.fromkeys(hosts)) != sorted(set(hosts)):
                continue  # the same machines with other names
            found = replica_holders(size, hosts, 2)
            assert [ranks[:1] for ranks in found] == replica_holders(size, hosts), "the first holder does not move"
            copies = [{rank, *ranks} for rank, ranks in enumerate(found)]
            assert all(len(ranks) == 3 for ranks in copies), hosts
            assert set(Counter(rank for ranks in found for rank in ranks).values()) == {2}, hosts
            apart = all(len({hosts[rank] for rank in ranks}) == 3 for ranks in copies)
            assert apart == (max(map(hosts.count, set(hosts))) <= size // 3), hosts
            if max(map(hosts.count, set(hosts))) <= size // 2:
                assert all(len({hosts[rank] for rank in ranks}) >= 2 for ranks in copies), hosts


def test_two_replicas_on_given_machines() -> None:
    assert replica_holders(4, "", 2) == [(1, 2), (2, 3), (3, 0), (0, 1)]
    assert holders(6, "aabbcc", 2) == [4, 5, 0, 1, 2, 3]
    assert holders(3, "aab", 2) == [1, 2, 0]


def test_there_are_as_many_replicas_as_other_ranks() -> None:
    """After losses there may be fewer ranks than a run began with."""
    assert replica_holders(3, "", 5) == [(1, 2), (2, 0), (0, 1)]
    assert replica_holders(2, "", 2) == [(1,), (0,)]
    assert replica_holders(1, "", 2) == [()]


def hybrid(devices: int, blocks: int = 64) -> Plan:
    return plan_for_devices(parse("hybrid:replicas=2"), devices, 8, blocks)[1]


def test_a_hybrid_needs_only_the_copies_that_its_pipelines_lack() -> None:
    groups = same_state(hybrid(4))
    assert groups == [(0, 2), (1, 3)]
    assert replica_holders(4, "", 1, groups) == [(), (), (), ()]
    assert replica_holders(4, "", 2, groups) == [(1,), (2,), (), ()]
    assert replica_holders(4, "", 3, groups) == [(1, 3), (2, 0), (), ()]
    assert replica_holders(4, "aabb", 9, groups) == [(1, 3), (2, 0), (), ()]


def test_the_replica_beside_a_hybrid_is_on_a_third_machine() -> None:
    groups = same_state(hybrid(6))
    assert groups == [(0, 3), (1, 4), (2, 5)]
    hosts = "aabbcc"  # stages on a and b, on a and c, on b and c
    for (first, second), ranks in zip(groups, replica_holders(6, hosts, 2, groups), strict=False):
        assert {hosts[rank] for rank in (first, second, *ranks)} == set("abc")


def test_ranks_without_a_stage_hold_replicas_and_have_none() -> None:
    plan = hybrid(5, blocks=2)
    assert same_state(plan) == [(0, 2), (1, 3)]
    assert replica_holders(5, "aaaab", 2, same_state(plan)) == [(4,), (4,), (), (), ()]
    assert replica_holders(5, "", 2, same_state(plan)) == [(1,), (2,), (), (), ()]


@pytest.mark.parametrize("spec", ["pipeline:interleaved", "ring", "ps:bsp", "ps:servers=2"])
def test_only_a_hybrid_has_ranks_with_the_same_state(spec: str) -> None:
    assert same_state(parse(spec).plan(4, 8)) == []


@pytest.mark.parametrize(
    ("replicas", "devices", "text"),
    [
        (0, 4, "replicas: 0 is not a whole number of at least 1; --no-replicate"),
        (-1, None, "replicas: -1 is not"),
        (4, 4, "replicas: 4 of each .* with 4 there are 3; take 1 to 3, or at least 5 devices"),
        (2, 2, "with 2 there is 1; take 1, or at least 3 devices"),
        (2, 1, "with 1 there are 0; take 1, or at least 3 devices"),
    ],
)
def test_a_wrong_number_of_replicas_is_refused(replicas: int, devices: int | None, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        check_replicas(replicas, devices)


def test_replicas_and_no_replication_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"replicas: 2, and --no-replicate .* leave one of them out"):
        check_replicas(2, 4, replicate=False)


@pytest.mark.parametrize(("replicas", "devices"), [(1, 1), (1, 2), (3, 4), (5, None)])
def test_a_right_number_of_replicas_is_taken(replicas: int, devices: int | None) -> None:
    check_replicas(replicas, devices)
