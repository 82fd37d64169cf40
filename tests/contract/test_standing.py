"""Whose state counts after a loss: those who stayed, those who return on their arenas, those who are new."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ranks import LONG_S, Ranks

from hoop.collectives.communicator import Communicator
from hoop.engine.survival.standing import NEW, OWN_ARENA, Mine, Standing, StateLost, compare

SHARDS = 4
EPOCH = 10


def told(said: Sequence[Mine]) -> Standing:
    """What every rank concludes, which is the same."""

    def each(one: Communicator) -> Standing:
        return compare(one, said[one.rank], SHARDS, LONG_S)

    with Ranks("inproc", len(said)) as ranks:
        found = ranks.run(each)
    assert all(one == found[0] for one in found)
    return found[0]


def stays(done: int, computed: Sequence[int] = (), ended: int = EPOCH) -> Mine:
    return Mine(done, ended, computed, True, done + 100)


def returns(done: int, ended: int = 0) -> Mine:
    return Mine(done, ended, (), False, done + 200)


def test_one_returns_to_where_the_others_are() -> None:
    found = told([stays(12, [0, 1]), returns(12), stays(12, [3])])
    assert found.done == (12, 12, 12)
    assert (found.new, found.returned, found.root) == ((), (1,), 0)
    assert found.source(1) == OWN_ARENA
    assert found.source(0) == found.source(2) == ""
    assert found.missing(SHARDS) == [2]
    assert found.ended == EPOCH, "one that returns does not know better than those who stayed"
    assert not found.afresh


def test_one_returns_too_late() -> None:
    """It has no total, and nobody's shards: a step behind is as good as nothing."""
    found = told([returns(11), stays(12), stays(11)])
    assert found.done == (NEW, 12, 11)
    assert (found.new, found.behind, found.root) == ((0,), (2,), 1)
    assert found.source(0) == "device 112"


def test_one_returns_ahead_of_those_who_stayed() -> None:
    """It had updated, and died before they had: they take its state, for it has no total to give."""
    found = told([stays(11, [0]), returns(12), stays(11, [1])])
    assert found.done == (NEW, 12, NEW)
    assert (found.root, found.behind) == (1, ())
    assert not any(found.computed)


def test_all_return() -> None:
    found = told([returns(11), returns(NEW), returns(12, ended=EPOCH)])
    assert found.done == (NEW, NEW, 12)
    assert (found.root, found.returned, found.afresh, found.ended) == (2, (2,), True, EPOCH)


def test_nobody_has_anything() -> None:
    with pytest.raises(StateLost):
        told([returns(NEW), returns(NEW)])
