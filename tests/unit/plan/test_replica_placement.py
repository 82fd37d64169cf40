"""Placement of replicas: each rank holds one other rank's replica, on another machine where possible."""

from __future__ import annotations

from itertools import product

import pytest

from hoop.membership.replication import replica_holders


def test_the_next_rank_holds_the_replica_if_all_machines_are_equal() -> None:
    assert replica_holders(4) == [1, 2, 3, 0]
    assert replica_holders(4, "aaaa") == [1, 2, 3, 0]
    assert replica_holders(4, "abcd") == [1, 2, 3, 0]
    assert replica_holders(1, "a") == [0]


@pytest.mark.parametrize(("hosts", "wanted"), [("aabb", [2, 3, 0, 1]), ("abab", [1, 0, 3, 2]), ("aab", [2, 0, 1])])
def test_placement_on_given_machines(hosts: str, wanted: list[int]) -> None:
    assert replica_holders(len(hosts), hosts) == wanted


def test_placement_on_any_machines() -> None:
    """As many replicas as possible are on another machine, and each rank holds exactly one."""
    for size in range(2, 7):
        for hosts in product("abc", repeat=size):
            found = replica_holders(size, hosts)
            assert sorted(found) == list(range(size)), hosts
            assert all(rank != holder for rank, holder in enumerate(found)), hosts
            crossing = sum(hosts[rank] != hosts[holder] for rank, holder in enumerate(found))
            largest = max(map(hosts.count, set(hosts)))
            assert crossing == min(size, 2 * (size - largest)), hosts
