"""From which step ranks go on after a membership change, and which of them provide the state."""

from __future__ import annotations

import pytest

from hoop.membership.recovery import (
    NO_STATE,
    OWN_ARENA,
    WHOLE,
    RankStatus,
    RecoveryPlan,
    SliceSpec,
    StateLost,
    agree,
    uncovered,
)

SHARDS = 4
EPOCH = 10
FIRST, SECOND = SliceSpec("first", 0, 8, 32), SliceSpec("second", 0, 4, 16)
PARTS = {"first": 8, "second": 4}


def whole(*statuses: RankStatus) -> RecoveryPlan:
    """Every rank keeps all of the state."""
    return agree(statuses, {WHOLE.name: WHOLE.elements})


def stays(done: int, computed: tuple[int, ...] = (), epoch_end: int = EPOCH) -> RankStatus:
    offers = [(done, [WHOLE])] if done > NO_STATE else []
    return RankStatus(done + 100, done, epoch_end, True, offers, computed)


def returns(done: int, epoch_end: int = 0) -> RankStatus:
    offers = [(done, [WHOLE])] if done > NO_STATE else []
    return RankStatus(done + 200, done, epoch_end, False, offers)


def holds(done: int, *pieces: SliceSpec, stays: bool = True, later: tuple[SliceSpec, ...] = ()) -> RankStatus:
    """Some pieces of a partitioned state; ``later``: of the step after, which it has not seen done."""
    offers = [(done, pieces), *([(done + 1, later)] if later else [])]
    return RankStatus(done + 100, done, EPOCH, stays, offers)


# ---- data parallel


def test_a_rank_returns_to_where_the_others_are() -> None:
    found = whole(stays(12, (0, 1)), returns(12), stays(12, (3,)))
    assert found.done == (12, 12, 12)
    assert (found.new, found.returned, found.root) == ((), (1,), 0)
    assert [found.source_of(rank) for rank in range(3)] == ["", OWN_ARENA, ""]
    assert found.missing_shards(SHARDS) == [2]
    assert found.epoch_end == EPOCH, "one that returns does not know better than those that stayed"
    assert not found.all_restarted


def test_a_rank_that_is_a_step_behind_catches_up_and_one_that_returns_too_late_gets_all() -> None:
    found = whole(returns(11), stays(12), stays(11))
    assert found.done == (NO_STATE, 12, 11)
    assert (found.new, found.behind, found.root) == ((0,), (2,), 1)
    assert found.source_of(0) == "device 112"


def test_a_rank_that_returns_ahead_of_those_that_stayed_goes_back_with_them() -> None:
    """They have everything of their step, and its losses; the later one is done again, to the same bits."""
    found = whole(stays(11, (0,)), returns(12), stays(11, (1,)))
    assert (found.step, found.done) == (11, (11, NO_STATE, 11))
    assert found.computed == ((0,), (), (1,))


def test_all_return() -> None:
    found = whole(returns(11), returns(NO_STATE), returns(12, epoch_end=EPOCH))
    assert found.done == (NO_STATE, NO_STATE, 12)
    assert (found.root, found.returned, found.all_restarted, found.epoch_end) == (2, (2,), True, EPOCH)


def test_a_rank_that_was_overwritten_halfway_has_nothing() -> None:
    found = whole(stays(NO_STATE), stays(12))
    assert (found.new, found.root) == ((0,), 1)


def test_nobody_has_anything() -> None:
    with pytest.raises(StateLost, match="everything"):
        whole(returns(NO_STATE), returns(NO_STATE))


# ---- partitioned


def test_the_newest_step_that_is_whole_and_known_to_be_done() -> None:
    found = agree([holds(5, FIRST, later=(FIRST,)), holds(5, SECOND, later=(SECOND,))], PARTS)
    assert (found.step, dict(found.sources)) == (5, {FIRST: 0, SECOND: 1})
    found = agree([holds(5, FIRST, later=(FIRST,)), holds(6, SECOND)], PARTS)
    assert found.step == 6, "one rank has seen it done"


def test_a_step_that_only_a_rank_that_was_left_out_has_seen_done_is_better_than_none() -> None:
    """A rank committed step 6 and was cut off; the one that stayed has its part of it, and not all of step 5."""
    found = agree([holds(5, FIRST, later=(FIRST,)), holds(6, SECOND, stays=False)], PARTS)
    assert (found.step, dict(found.sources)) == (6, {FIRST: 0, SECOND: 1})


def test_a_rank_that_stayed_provides_before_one_that_returned() -> None:
    found = agree([holds(5, FIRST, SECOND, stays=False), holds(5, FIRST, SECOND)], PARTS)
    assert dict(found.sources) == {FIRST: 1, SECOND: 1}


def test_what_is_missing_is_named() -> None:
    with pytest.raises(StateLost, match=r"^second$"):
        agree([holds(5, FIRST), holds(4, FIRST)], PARTS)


def test_a_run_that_has_only_begun_loses_nothing() -> None:
    found = agree([RankStatus(1, 0, 0, True, [], fresh_start=True)], PARTS)
    assert (found.step, found.sources) == (0, {})


def test_slices_cover_a_tensor_together() -> None:
    low, high, gap = SliceSpec("first", 0, 3, 12), SliceSpec("first", 3, 5, 20), SliceSpec("first", 4, 4, 16)
    assert uncovered({"first": 8}, [high, low]) == []
    assert uncovered({"first": 8}, [low, gap]) == ["first"]
    assert uncovered({"empty": 0}, []) == ["empty"]
