"""Links that fail while nobody dies: who goes, who stays, and that it comes to an end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roster import CONFIG, NOW, after, announced, cluster, dead, recorded, stops

from hoop.membership import events as m
from hoop.membership.state import RELINK_WINDOW_S, State
from hoop.membership.state_machine import step

LONG_ENOUGH = CONFIG.lease_s / 6
THREE = after(cluster(1, 2, 3), m.Created((1, 2, 3)))


def complaint(state: State, device_id: int, peer_id: int, now: float) -> m.Complained:
    return m.Complained(1, state.communicator(1).generation, device_id, peer_id, now)


def ticked(state: State, now: float) -> tuple[State, tuple[m.MembershipInstruction, ...]]:
    """Everybody is heard from, and time has passed."""
    beats = (m.Heartbeat(one.info.device_id, "a", now) for one in state.members.values() if one.usable)
    return step(after(state, *beats), m.Tick(now))


def failed(state: State, now: float, *pairs: tuple[int, int]) -> tuple[State, tuple[m.MembershipInstruction, ...]]:
    """These complain of those, and it is decided."""
    state = after(state, *(complaint(state, *pair, now) for pair in pairs))
    return ticked(state, now + LONG_ENOUGH)


def again(state: State) -> State:
    return after(state, m.Rebuilt(1))


def test_the_first_time_the_same_members_get_new_links() -> None:
    state, instructions = failed(THREE, NOW, (1, 2))
    assert announced(instructions) == ["links_failed"]
    (stop,) = stops(instructions)
    assert (stop.generation, stop.members, stop.lost_device) == (1, (1, 2, 3), 0)
    assert again(state).communicator(1).members == (1, 2, 3)


@pytest.mark.parametrize(
    ("complaints", "goes"),
    [
        ([(1, 2)], 2),
        ([(2, 1)], 1),
        ([(1, 2), (2, 1)], 2),
        ([(1, 3), (2, 3), (3, 1), (3, 2)], 3),
        ([(2, 1), (3, 1), (1, 2), (1, 3)], 1),
    ],
    ids=["one way", "the other way", "both ways", "cut off from all", "the first cut off from all"],
)
def test_the_second_time_whoever_most_complain_of_goes(complaints: list[tuple[int, int]], goes: int) -> None:
    state, _ = failed(THREE, NOW, *complaints)
    state, instructions = failed(again(state), NOW + 1, *complaints)
    assert announced(instructions) == ["device_evicted"]
    (stop,) = stops(instructions)
    assert stop.lost_device == goes
    assert len(recorded(instructions)) == 1
    state = again(state)
    assert state.communicator(1).members == tuple(one for one in (1, 2, 3) if one != goes)
    assert state.member(goes).usable, "it is out of this communicator, not dead"
    assert again(after(state, m.Rebuilt(1, joining=(goes,)))).communicator(1).members == state.communicator(1).members


def test_where_new_links_helped_the_next_failure_is_a_first_one_again_but_not_for_ever() -> None:
    state, seen = THREE, []
    for round_index in range(4):
        state, instructions = failed(state, NOW + round_index, (1, 2))
        state = again(state)
        state = after(state, m.LinkWorked(1, state.communicator(1).generation))
        seen += announced(instructions)
    assert seen == ["links_failed"] * 3 + ["device_evicted"]


def test_a_minute_later_it_is_a_first_one_again() -> None:
    state, _ = failed(THREE, NOW, (1, 2))
    _, instructions = failed(again(state), NOW + RELINK_WINDOW_S + 1, (1, 2))
    assert announced(instructions) == ["links_failed"]


def test_a_device_whose_heartbeats_are_gone_is_the_detectors_business() -> None:
    state = after(THREE, complaint(THREE, 1, 2, NOW))
    late = NOW + 0.7
    state = after(state, m.Heartbeat(1, "a", late), m.Heartbeat(3, "a", late))
    state, instructions = step(state, m.Tick(late))  # 2 was heard from at NOW, and no more
    assert instructions == ()
    state, instructions = step(after(state, m.Heartbeat(2, "a", late)), m.Tick(late))
    assert announced(instructions) == ["links_failed"], "it is back: it was the link after all"

    state = after(THREE, complaint(THREE, 1, 2, NOW), dead(2))
    state, instructions = ticked(state, NOW + 1)
    assert instructions == (), "its death explains everything"


def test_complaints_of_older_generations_of_strangers_and_of_oneself_are_ignored() -> None:
    old = complaint(THREE, 1, 2, NOW)
    state = again(THREE)
    for wrong in (
        old,
        m.Complained(1, 2, 1, 9, NOW),
        m.Complained(1, 2, 1, 1, NOW),
        m.Complained(7, 1, 1, 2, NOW),
    ):
        assert step(state, wrong) == (state, ())
    _, instructions = ticked(after(THREE, old, m.Rebuilt(1)), NOW + 1)
    assert instructions == (), "a new generation is the remedy"
    state, _ = failed(THREE, NOW, (1, 2))
    assert step(state, complaint(state, 3, 2, NOW)) == (state, ()), "it is decided already"


def test_an_evicted_device_is_forgiven_the_second_time_after_twice_as_long() -> None:
    state = THREE
    for times in (1, 2):
        now = NOW + 1000 * times
        state, _ = ticked(state, now)
        for later in (1, 2):
            state, _ = failed(state, now + later, (1, 2))
            state = again(state)
        assert state.communicator(1).members == (1, 3)
        over = now + 2 + LONG_ENOUGH + times * RELINK_WINDOW_S
        state, instructions = ticked(state, over - 1)
        assert instructions == ()
        state, instructions = ticked(state, over)
        assert announced(instructions) == ["device_forgiven"]
        state = after(state, m.Rebuilt(1, joining=(2,)))
        assert state.communicator(1).members == (1, 3, 2)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=60), st.booleans())
def test_whatever_is_complained_of_few_generations_come_of_it_within_a_minute(
    complaints: list[tuple[int, int]], works: bool
) -> None:
    """At most three a pair, and one for everybody but the last."""
    state, now = after(cluster(1, 2, 3, 4, 5), m.Created((1, 2, 3, 4, 5))), NOW
    for pair in complaints:
        now += 0.3
        state, instructions = failed(state, now, pair)
        if stops(instructions):
            state = again(state)
            if works:
                state = after(state, m.LinkWorked(1, state.communicator(1).generation))
    assert now - NOW < RELINK_WINDOW_S
    assert state.communicator(1).generation <= 1 + 3 * 10 + 4
    assert state.communicator(1).members
