"""Links that fail between live devices: new links are tried, then one device is evicted; generations stay few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roster import CONFIG, NOW, after, announced, cluster, dead, pass_time, recorded, stops

from hoop.membership import events as m
from hoop.membership.state import RELINK_WINDOW_S, State
from hoop.membership.state_machine import step

DECISION_S = CONFIG.lease_s / 6
THREE = after(cluster(1, 2, 3), m.Created((1, 2, 3)))


def complaint(state: State, device_id: int, peer_id: int, now: float) -> m.LinkFailureReported:
    return m.LinkFailureReported(1, state.communicator(1).generation, device_id, peer_id, now)


def tick(state: State, now: float) -> tuple[State, tuple[m.MembershipInstruction, ...]]:
    """All usable devices send a heartbeat, then the clock ticks."""
    beats = (m.Heartbeat(one.info.device_id, "a", now) for one in state.members.values() if one.usable)
    return step(after(state, *beats), m.Tick(now))


def report_failed_links(
    state: State, now: float, *pairs: tuple[int, int]
) -> tuple[State, tuple[m.MembershipInstruction, ...]]:
    """The first device of each pair complains of the second; then the coordinator decides."""
    state = after(state, *(complaint(state, *pair, now) for pair in pairs))
    return tick(state, now + DECISION_S)


def rebuilt(state: State) -> State:
    return after(state, m.Rebuilt(1))


def test_the_first_link_failure_gives_the_same_members_new_links() -> None:
    state, instructions = report_failed_links(THREE, NOW, (1, 2))
    assert announced(instructions) == ["links_failed"]
    (stop,) = stops(instructions)
    assert (stop.generation, stop.members, stop.lost_device) == (1, (1, 2, 3), 0)
    assert rebuilt(state).communicator(1).members == (1, 2, 3)


@pytest.mark.parametrize(
    ("complaints", "evicted"),
    [
        ([(1, 2)], 2),
        ([(2, 1)], 1),
        ([(1, 2), (2, 1)], 2),
        ([(1, 3), (2, 3), (3, 1), (3, 2)], 3),
        ([(2, 1), (3, 1), (1, 2), (1, 3)], 1),
    ],
    ids=["one way", "the other way", "both ways", "cut off from all", "the first cut off from all"],
)
def test_the_second_link_failure_evicts_the_device_with_most_complaints(
    complaints: list[tuple[int, int]], evicted: int
) -> None:
    state, _ = report_failed_links(THREE, NOW, *complaints)
    state, instructions = report_failed_links(rebuilt(state), NOW + 1, *complaints)
    assert announced(instructions) == ["device_evicted"]
    (stop,) = stops(instructions)
    assert stop.lost_device == evicted
    assert len(recorded(instructions)) == 1
    state = rebuilt(state)
    assert state.communicator(1).members == tuple(one for one in (1, 2, 3) if one != evicted)
    assert state.member(evicted).usable, "it left this communicator but is not dead"
    assert (
        rebuilt(after(state, m.Rebuilt(1, joining=(evicted,)))).communicator(1).members == state.communicator(1).members
    )


def test_working_links_reset_the_failure_count_only_a_few_times() -> None:
    state, events = THREE, []
    for round_index in range(4):
        state, instructions = report_failed_links(state, NOW + round_index, (1, 2))
        state = rebuilt(state)
        state = after(state, m.LinkWorked(1, state.communicator(1).generation))
        events += announced(instructions)
    assert events == ["links_failed"] * 3 + ["device_evicted"]


def test_a_failure_after_the_relink_window_counts_as_the_first() -> None:
    state, _ = report_failed_links(THREE, NOW, (1, 2))
    _, instructions = report_failed_links(rebuilt(state), NOW + RELINK_WINDOW_S + 1, (1, 2))
    assert announced(instructions) == ["links_failed"]


def test_a_silent_device_is_left_to_the_failure_detector() -> None:
    late = NOW + 1.0
    state = pass_time(THREE, NOW, NOW + 0.6, 1, 3)
    state = pass_time(after(state, complaint(THREE, 1, 2, NOW + 0.6)), NOW + 0.6, late, 1, 3)
    state, instructions = step(state, m.Tick(late))  # the last heartbeat of device 2 was at NOW
    assert instructions == (m.Probe(2, (1, 3)),)
    state, instructions = step(after(state, m.Heartbeat(2, "a", late)), m.Tick(late))
    assert announced(instructions) == ["links_failed"], "the device is alive, so the link failed"

    state = after(THREE, complaint(THREE, 1, 2, NOW), dead(2))
    state, instructions = tick(state, NOW + 1)
    assert instructions == (), "its death explains the complaint"


def test_complaints_of_old_generations_unknown_devices_and_oneself_are_ignored() -> None:
    old = complaint(THREE, 1, 2, NOW)
    state = rebuilt(THREE)
    for ignored in (
        old,
        m.LinkFailureReported(1, 2, 1, 9, NOW),
        m.LinkFailureReported(1, 2, 1, 1, NOW),
        m.LinkFailureReported(7, 1, 1, 2, NOW),
    ):
        assert step(state, ignored) == (state, ())
    _, instructions = tick(after(THREE, old, m.Rebuilt(1)), NOW + 1)
    assert instructions == (), "a new generation has new links"
    state, _ = report_failed_links(THREE, NOW, (1, 2))
    assert step(state, complaint(state, 3, 2, NOW)) == (state, ()), "the failure is already decided"


def test_a_second_eviction_lasts_twice_as_long() -> None:
    state = THREE
    for evictions in (1, 2):
        now = NOW + 1000 * evictions
        state, _ = tick(state, now)
        for delay in (1, 2):
            state, _ = report_failed_links(state, now + delay, (1, 2))
            state = rebuilt(state)
        assert state.communicator(1).members == (1, 3)
        end = now + 2 + DECISION_S + evictions * RELINK_WINDOW_S
        state, instructions = tick(state, end - 1)
        assert instructions == ()
        state, instructions = tick(state, end)
        assert announced(instructions) == ["eviction_ended"]
        state = after(state, m.Rebuilt(1, joining=(2,)))
        assert state.communicator(1).members == (1, 3, 2)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=60), st.booleans())
def test_any_complaints_cause_a_bounded_number_of_generations(
    complaints: list[tuple[int, int]], links_work: bool
) -> None:
    """At most three generations per pair, and one per evicted device."""
    state, now = after(cluster(1, 2, 3, 4, 5), m.Created((1, 2, 3, 4, 5))), NOW
    for pair in complaints:
        now += 0.3
        state, instructions = report_failed_links(state, now, pair)
        if stops(instructions):
            state = rebuilt(state)
            if links_work:
                state = after(state, m.LinkWorked(1, state.communicator(1).generation))
    assert now - NOW < RELINK_WINDOW_S
    assert state.communicator(1).generation <= 1 + 3 * 10 + 4
    assert state.communicator(1).members
