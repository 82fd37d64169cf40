"""The ids of communicators of some ranks of a job: another one for every group."""

from __future__ import annotations

import itertools

from hoop.collectives.rank_context import group_id


def test_no_two_groups_have_the_same_id() -> None:
    """Two groups of a recovery may have the same first rank and the same size."""
    small = [ranks for size in range(1, 7) for ranks in itertools.combinations(range(6), size)]
    large = [*itertools.combinations(range(64), 2), tuple(range(40)), tuple(range(1, 41))]
    groups = {*small, *large}
    assert len({group_id(7, ranks) for ranks in groups}) == len(groups)


def test_an_id_has_64_bits_and_begins_with_that_of_the_job() -> None:
    for ranks in ([31], [0, 31], list(range(32)), [32], [4000, 4095]):
        found = group_id(0xFFFF_FFFF, ranks)
        assert found & 0xFFFF_FFFF == 0xFFFF_FFFF
        assert 1 << 32 <= found < 1 << 64
