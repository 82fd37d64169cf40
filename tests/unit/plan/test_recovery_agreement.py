"""Recovery after a membership change: the step from which ranks continue, and the ranks that provide the state."""

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


def agree_on_whole_state(*statuses: RankStatus) -> RecoveryPlan:
    """Agree among ranks that each hold all of the state."""
    return agree(statuses, {WHOLE.name: WHOLE.elements})


def stayed(done: int, computed: tuple[int, ...] = (), epoch_end: int = EPOCH) -> RankStatus:
    offers = [(done, [WHOLE])] if done > NO_STATE else []
    return RankStatus(done + 100, done, epoch_end, True, offers, computed)


def returned(done: int, epoch_end: int = 0) -> RankStatus:
    offers = [(done, [WHOLE])] if done > NO_STATE else []
    return RankStatus(done + 200, done, epoch_end, False, offers)


def holds(done: int, *slices: SliceSpec, stayed: bool = True, later: tuple[SliceSpec, ...] = ()) -> RankStatus:
    """A rank with slices of a partitioned state; ``later``: its slices of the next step, not known to be done."""
    offers = [(done, slices), *([(done + 1, later)] if later else [])]
    return RankStatus(done + 100, done, EPOCH, stayed, offers)


# ---- data parallel


def test_a_rank_returns_at_the_step_of_the_others() -> None:
    plan = agree_on_whole_state(stayed(12, (0, 1)), returned(12), stayed(12, (3,)))
    assert plan.done == (12, 12, 12)
    assert (plan.new, plan.returned, plan.root) == ((), (1,), 0)
    assert [plan.source_of(rank) for rank in range(3)] == ["", OWN_ARENA, ""]
    assert plan.missing_shards(SHARDS) == [2]
    assert plan.epoch_end == EPOCH, "a returning rank does not override those that stayed"
    assert not plan.all_restarted


def test_a_rank_one_step_behind_catches_up_and_one_that_returns_too_late_receives_all() -> None:
    plan = agree_on_whole_state(returned(11), stayed(12), stayed(11))
    assert plan.done == (NO_STATE, 12, 11)
    assert (plan.new, plan.behind, plan.root) == ((0,), (2,), 1)
    assert plan.source_of(0) == "device 112"


def test_a_rank_that_returns_ahead_of_those_that_stayed_is_rolled_back() -> None:
    """The others have the whole state and all losses of their step; the later step is repeated, to the same bits."""
    plan = agree_on_whole_state(stayed(11, (0,)), returned(12), stayed(11, (1,)))
    assert (plan.step, plan.done) == (11, (11, NO_STATE, 11))
    assert plan.computed == ((0,), (), (1,))


def test_all_ranks_return() -> None:
    plan = agree_on_whole_state(returned(11), returned(NO_STATE), returned(12, epoch_end=EPOCH))
    assert plan.done == (NO_STATE, NO_STATE, 12)
    assert (plan.root, plan.returned, plan.all_restarted, plan.epoch_end) == (2, (2,), True, EPOCH)


def test_a_rank_with_half_overwritten_state_provides_none() -> None:
    plan = agree_on_whole_state(stayed(NO_STATE), stayed(12))
    assert (plan.new, plan.root) == ((0,), 1)


def test_recovery_fails_if_no_rank_has_state() -> None:
    with pytest.raises(StateLost, match="everything"):
        agree_on_whole_state(returned(NO_STATE), returned(NO_STATE))


# ---- partitioned


def test_the_newest_complete_step_that_is_known_to_be_done_is_used() -> None:
    plan = agree([holds(5, FIRST, later=(FIRST,)), holds(5, SECOND, later=(SECOND,))], PARTS)
    assert (plan.step, dict(plan.sources)) == (5, {FIRST: 0, SECOND: 1})
    plan = agree([holds(5, FIRST, later=(FIRST,)), holds(6, SECOND)], PARTS)
    assert plan.step == 6, "one rank knows that it is done"


def test_a_step_known_only_to_a_rank_that_was_left_out_is_used_if_no_other_is_complete() -> None:
    """A rank committed step 6 and was cut off. The one that stayed has its part of step 6; step 5 is incomplete."""
    plan = agree([holds(5, FIRST, later=(FIRST,)), holds(6, SECOND, stayed=False)], PARTS)
    assert (plan.step, dict(plan.sources)) == (6, {FIRST: 0, SECOND: 1})


def test_a_rank_that_stayed_is_preferred_as_the_source() -> None:
    plan = agree([holds(5, FIRST, SECOND, stayed=False), holds(5, FIRST, SECOND)], PARTS)
    assert dict(plan.sources) == {FIRST: 1, SECOND: 1}


def test_a_rank_that_was_left_out_provides_nothing_that_the_others_have() -> None:
    """Its slices are cut in other places, and would be written over theirs, which may be of another state."""
    left, right = SliceSpec("first", 0, 4, 16), SliceSpec("first", 4, 4, 16)
    plan = agree([holds(5, FIRST, SECOND, stayed=False), holds(5, left, SECOND), holds(5, right)], PARTS)
    assert dict(plan.sources) == {left: 1, right: 2, SECOND: 1}


def test_where_slices_overlap_those_of_the_ranks_that_stayed_are_written_last() -> None:
    left = SliceSpec("first", 0, 4, 16)
    plan = agree([holds(5, FIRST, stayed=False), holds(5, left, SECOND)], PARTS)
    assert list(plan.sources.items()) == [(FIRST, 0), (left, 1), (SECOND, 1)]


def test_missing_tensors_are_named() -> None:
    with pytest.raises(StateLost, match=r"^second$"):
        agree([holds(5, FIRST), holds(4, FIRST)], PARTS)


def test_a_run_before_its_first_step_loses_no_state() -> None:
    plan = agree([RankStatus(1, 0, 0, True, [], fresh_start=True)], PARTS)
    assert (plan.step, plan.sources) == (0, {})


def first_rank(device: int, *slices: SliceSpec) -> RankStatus:
    """One of three ranks that the run began with; the others continued without it. No slices: it never had state."""
    return RankStatus(device, 0, 0, False, [(0, slices)] if slices else [], fresh_start=True, first_size=3)


def test_a_run_whose_first_ranks_were_all_left_out_before_they_had_state_begins_again() -> None:
    """No step was done: a rank that does one has state. A device that joins changes nothing."""
    joined = RankStatus(4, NO_STATE, 0, False, [])
    for statuses in (
        [first_rank(1), first_rank(2), first_rank(3)],
        [first_rank(1), joined, first_rank(2), first_rank(3)],
    ):
        plan = agree(statuses, PARTS)
        assert (plan.step, plan.sources, plan.all_restarted) == (0, {}, True)


def test_a_first_rank_that_is_absent_may_have_state() -> None:
    """It may have done steps while the others were left out: the coordinator waits for it."""
    with pytest.raises(StateLost, match=r"^everything$"):
        agree([first_rank(1), first_rank(3)], PARTS)


def test_a_lost_state_is_explained_by_what_each_rank_has() -> None:
    joined = RankStatus(4, NO_STATE, 0, False, [])
    with pytest.raises(StateLost) as raised:
        agree([first_rank(1), joined], PARTS)
    assert raised.value.found == (
        "device 1 has no state: it began with the run, and never got its part of the model; device 4 has no state"
    )
    with pytest.raises(StateLost) as raised:
        agree([holds(5, FIRST), holds(4, FIRST, stayed=False), *[joined] * 20], PARTS)
    assert raised.value.found.startswith(
        "device 105 has 1 slice of step 5; "
        "device 104 has 1 slice of step 4 from before it was left out or restarted; device 4 has no state; "
    )
    assert raised.value.found.endswith("; 6 more devices")
    with pytest.raises(StateLost) as raised:
        agree_on_whole_state(returned(NO_STATE), stayed(NO_STATE))
    assert raised.value.found == "device 199 has no state; device 99 has no state: it was being overwritten"


def test_slices_cover_a_tensor_together() -> None:
    low, high, gap = SliceSpec("first", 0, 3, 12), SliceSpec("first", 3, 5, 20), SliceSpec("first", 4, 4, 16)
    assert uncovered({"first": 8}, [high, low]) == []
    assert uncovered({"first": 8}, [low, gap]) == ["first"]
    assert uncovered({"empty": 0}, []) == ["empty"]
