"""Who keeps whose mirror: everybody one, on another machine wherever that is possible."""

from __future__ import annotations

from itertools import product

import pytest

from hoop.membership.replication import replica_holders


def test_on_one_machine_the_next_rank_does() -> None:
    assert replica_holders(4) == [1, 2, 3, 0]
    assert replica_holders(4, "aaaa") == [1, 2, 3, 0]
    assert replica_holders(4, "abcd") == [1, 2, 3, 0]
    assert replica_holders(1, "a") == [0]


@pytest.mark.parametrize(("hosts", "wanted"), [("aabb", [2, 3, 0, 1]), ("abab", [1, 0, 3, 2]), ("aab", [2, 0, 1])])
def test_machines_by_hand(hosts: str, wanted: list[int]) -> None:
    assert replica_holders(len(hosts), hosts) == wanted


def test_any_machines() -> None:
    """Each rank keeps one other's; as many cross to another machine as can when everybody keeps one."""
    for size in range(2, 7):
        for hosts in product("abc", repeat=size):
            found = replica_holders(size, hosts)
            assert sorted(found) == list(range(size)), hosts
            assert all(rank != keeper for rank, keeper in enumerate(found)), hosts
            crossing = sum(hosts[rank] != hosts[keeper] for rank, keeper in enumerate(found))
            largest = max(map(hosts.count, set(hosts)))
            assert crossing == min(size, 2 * (size - largest)), hosts
