"""The rules of the membership state machine, one test each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from roster import CONFIG, NOW, after, announced, cluster, dead, device, pass_time, recorded, stops

from hoop.errors import FailedPrecondition, InvalidArgument, MembershipChanged, NotFound, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.journal import communicator_entry
from hoop.membership.state import Health, OperationOutcome, State
from hoop.membership.state_machine import step

# ---- joining


def test_a_device_joins_with_the_id_it_brings() -> None:
    state, instructions = step(State(CONFIG), m.Joined(device(7), NOW))
    assert state.member(7).info == device(7)
    assert state.member(7).health == Health.ALIVE
    assert announced(instructions) == ["device_joined"]
    assert recorded(instructions)[0].entry["kind"] == "device_joined"


def test_id_zero_requests_a_new_id() -> None:
    state = after(cluster(1, 7), m.Joined(device(0, "b"), NOW), m.Joined(device(0, "c"), NOW))
    assert sorted(state.members) == [1, 7, 8, 9]
    assert state.member(8).info == replace(device(0, "b"), device_id=8)
    assert sorted(after(State(CONFIG), m.Joined(device(0), NOW)).members) == [1]


def test_the_id_of_a_device_that_left_is_not_reused() -> None:
    state = after(cluster(1, 2), m.Left(2, "a"), m.Joined(device(0, "b"), NOW))
    assert state.member(2).health == Health.LEFT
    assert state.member(3).info.incarnation == "b"


def test_an_id_in_use_is_refused_and_the_holder_named() -> None:
    with pytest.raises(FailedPrecondition, match=r"device id 1 is in use by device 1 \(pid 101, .*--id"):
        step(cluster(1), m.Joined(device(1, "b"), NOW))


@pytest.mark.parametrize("gone", [m.LinkClosed(1, "a"), dead(1), m.Left(1, "a")])
def test_a_restarted_device_takes_its_id_back(gone: m.MembershipEvent) -> None:
    before = after(cluster(1, 2), m.Created((1, 2)), gone)
    state, instructions = step(before, m.Joined(device(1, "b"), NOW + 1))
    assert state.member(1).health == Health.ALIVE
    assert state.member(1).info.incarnation == "b"
    assert "came back" in next(one.text for one in instructions if isinstance(one, m.Announce))


def test_a_restart_breaks_the_communicators_of_the_former_incarnation() -> None:
    before = after(cluster(1, 2), m.Created((1, 2)), m.Created((2,)), m.LinkClosed(1, "a"))
    state, instructions = step(before, m.Joined(device(1, "b"), NOW))
    assert state.communicator(1).broken_by == 1
    assert state.communicator(2).broken_by == 0
    assert [(one.communicator_id, one.lost_device) for one in stops(instructions)] == [(1, 1)]
    assert after(state, m.Rebuilt(1)).communicator(1).members == (1, 2), "the new incarnation may be a member"


def test_a_device_that_was_only_slow_joins_again() -> None:
    before = after(cluster(1, 2), m.Created((1, 2)), m.LinkClosed(1, "a"))
    state, instructions = step(before, m.Joined(device(1), NOW + 1))
    assert state.member(1).health == Health.ALIVE
    assert state.member(1).reason == ""
    assert state.communicator(1).broken_by == 0, "it still has its state"
    assert "is here again" in next(one.text for one in instructions if isinstance(one, m.Announce))


def test_joining_again_after_death_repairs_no_communicator() -> None:
    state = after(cluster(1, 2), m.Created((1, 2)), dead(1), m.Joined(device(1), NOW))
    assert state.member(1).usable
    assert state.communicator(1).broken_by == 1


def test_joining_again_clears_the_call_history() -> None:
    state = after(cluster(1), *[m.CallReported(1, "refused", NOW)] * 3)
    assert state.member(1).heartbeats.failed_calls == 3
    state = after(state, m.Joined(device(1), NOW + 5))
    assert state.member(1).heartbeats.failed_calls == 0
    assert after(state, m.Tick(NOW + 5)).member(1).usable


def test_the_number_of_devices_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoop.membership.state_machine.MAX_DEVICES", 2)
    state = cluster(1, 2)
    for one in (0, 3):
        with pytest.raises(ResourceExhausted, match="2 devices are known already"):
            step(state, m.Joined(device(one, "b"), NOW))
    step(state, m.Joined(device(2), NOW))  # a known device may always join again


def test_joining_is_idempotent() -> None:
    state = after(cluster(7), m.Joined(device(0, "b"), NOW), m.Created((7, 8)), m.Joined(device(0, "b"), NOW))
    assert sorted(state.members) == [7, 8]
    assert state.member(8).info == replace(device(0, "b"), device_id=8)
    assert state.communicator(1).broken_by == 0, "it is the same device"


# ---- heartbeats


def test_a_heartbeat_renews_the_lease() -> None:
    state = after(cluster(1), m.Tick(NOW + 0.7), m.Heartbeat(1, "a", NOW + 1.4), m.Tick(NOW + 1.4))
    state, instructions = step(state, m.Tick(NOW + 2.0))
    assert state.member(1).health == Health.ALIVE
    assert instructions == ()


@pytest.mark.parametrize(
    ("state", "beat"),
    [
        (cluster(1), m.Heartbeat(2, "a", NOW)),
        (cluster(1), m.Heartbeat(1, "older", NOW)),
        (after(cluster(1), dead(1)), m.Heartbeat(1, "a", NOW)),
        (after(cluster(1), m.Left(1, "a")), m.Heartbeat(1, "a", NOW)),
    ],
    ids=["unknown", "stale incarnation", "dead", "left"],
)
def test_a_heartbeat_of_a_non_member_is_refused(state: State, beat: m.Heartbeat) -> None:
    with pytest.raises(MembershipChanged, match=f"device {beat.device_id} is not a member .*join again"):
        step(state, beat)


def test_a_heartbeat_clears_a_suspect() -> None:
    state, instructions = step(after(cluster(1), m.LinkClosed(1, "a")), m.Heartbeat(1, "a", NOW))
    assert (state.member(1).health, state.member(1).reason) == (Health.ALIVE, "")
    assert announced(instructions) == ["device_recovered"]


def test_a_device_without_heartbeats_is_dead_when_its_lease_ends() -> None:
    state = after(cluster(1, 2), m.Created((1, 2)))
    for tenths in range(1, 16):
        state = after(state, m.Heartbeat(2, "a", NOW + tenths / 10), m.Tick(NOW + tenths / 10))
    assert state.member(1).usable
    state, instructions = step(state, m.Tick(NOW + 1.6))
    assert (state.member(1).health, state.member(2).health) == (Health.DEAD, Health.ALIVE)
    assert state.member(1).reason == "no heartbeat for 1.6 s (lease 1.5 s)"
    assert announced(instructions) == ["device_dead", "communicator_failed"]
    assert stops(instructions)[0].lost_device == 1


def test_a_dead_device_is_declared_dead_only_once() -> None:
    state = after(cluster(1), dead(1))
    assert step(state, m.Tick(NOW + 0.5))[1] == ()
    assert step(state, dead(1)) == (state, ())


# ---- pauses of the coordinator


@pytest.mark.parametrize("gap", [5.0, 3600.0])
def test_silence_during_a_pause_of_the_coordinator_is_excused(gap: float) -> None:
    state = after(cluster(1), m.Tick(NOW + 0.1), m.Tick(NOW + gap))
    assert state.member(1).health == Health.ALIVE
    assert state.last_tick == NOW + gap


def test_after_a_pause_a_silent_device_is_dead_within_two_leases() -> None:
    now = NOW + 3600
    state = after(cluster(1, 2), m.Tick(now))
    for tenths in range(1, 30):
        state = after(state, m.Heartbeat(2, "a", now + tenths / 10), m.Tick(now + tenths / 10))
    assert state.member(1).health == Health.DEAD


def test_the_first_tick_excuses_no_silence() -> None:
    beats = [m.Heartbeat(2, "a", NOW + tenths / 10) for tenths in (5, 10, 15)]
    joined = (m.Joined(device(1), NOW), m.Heartbeat(1, "a", NOW), m.Joined(device(2), NOW))
    state = after(State(CONFIG), *joined, *beats, m.Tick(NOW + 1.6))
    assert state.member(1).health == Health.DEAD


def test_the_lease_begins_with_the_first_heartbeat() -> None:
    """If 200 devices join at once on a busy machine, replies are late, and heartbeat streams open even later."""
    joined = [m.Joined(device(key), NOW) for key in (1, 2, 3)]
    state = after(State(CONFIG, last_tick=NOW), *joined)
    for tenths in range(1, 41):
        state = after(state, m.Heartbeat(3, "a", NOW + tenths / 10))
        state, instructions = step(state, m.Tick(NOW + tenths / 10))
        assert not announced(instructions)
    state = after(state, m.Heartbeat(1, "a", NOW + 4.0))
    for tenths in range(41, 57):
        state = after(state, m.Heartbeat(3, "a", NOW + tenths / 10), m.Tick(NOW + tenths / 10))
    assert (state.member(1).health, state.member(1).reason) == (
        Health.DEAD,
        "no heartbeat for 1.6 s (lease 1.5 s)",
    )
    assert (state.member(2).health, state.member(2).reason) == (
        Health.DEAD,
        "no heartbeat within 5.1 s after it joined",
    )


def test_silence_is_excused_only_until_the_current_time() -> None:
    now = NOW + 100
    state = after(cluster(1, 2), m.Tick(NOW + 0.1), m.Heartbeat(1, "a", now), m.Tick(now + 0.1))
    assert state.member(1).heartbeats.last_heartbeat <= now + 0.1
    for tenths in range(2, 40):
        state = after(state, m.Heartbeat(2, "a", now + tenths / 10), m.Tick(now + tenths / 10))
    assert state.member(1).health == Health.DEAD


def test_one_failed_call_after_a_pause_makes_a_device_only_suspect() -> None:
    state = after(cluster(1), m.Tick(NOW + 0.1), m.CallReported(1, "connection reset", NOW + 100))
    assert state.member(1).health == Health.SUSPECT


# ---- the coordinator hears no device


def tick_without_heartbeats(state: State, start: float, end: float) -> State:
    """No device sends a heartbeat; the coordinator ticks every tenth of a second."""
    for tenths in range(round(10 * start), round(10 * end) + 1):
        state = after(state, m.Tick(NOW + tenths / 10))
    return state


def test_a_coordinator_that_hears_no_device_declares_none_dead() -> None:
    """Its network was cut for 4.4 s, or all devices were stopped: no device is dead, no communicator is broken."""
    state = tick_without_heartbeats(after(cluster(1, 2, 3), m.Created((1, 2, 3))), 0.1, 4.4)
    assert [one.health for one in state.members.values()] == [Health.ALIVE] * 3
    for failed in range(5):
        state = after(state, m.CallReported(2, "ping timeout", NOW + 4.4 + failed / 10))
    assert state.member(2).health == Health.SUSPECT, "failed calls do not count meanwhile"
    state = tick_without_heartbeats(after(state, m.Heartbeat(1, "a", NOW + 5.0)), 5.0, 5.5)
    assert all(one.usable for one in state.members.values())
    assert not state.communicator(1).broken_by


def test_after_isolation_silent_devices_get_its_duration_plus_a_lease() -> None:
    state = after(tick_without_heartbeats(cluster(1, 2), 0.1, 4.0), m.Heartbeat(1, "a", NOW + 4.0))
    for tenths in range(41, 96):
        state = after(state, m.Heartbeat(1, "a", NOW + tenths / 10), m.Tick(NOW + tenths / 10))
    assert state.member(2).usable
    for tenths in range(96, 98):
        state = after(state, m.Heartbeat(1, "a", NOW + tenths / 10), m.Tick(NOW + tenths / 10))
    assert state.member(2).health == Health.DEAD


def test_devices_that_stay_silent_beyond_the_isolation_limit_are_dead() -> None:
    state = tick_without_heartbeats(cluster(1, 2), 0.1, CONFIG.isolation_s - 0.1)
    assert all(one.usable for one in state.members.values())
    state = tick_without_heartbeats(state, CONFIG.isolation_s, CONFIG.isolation_s + 0.5)
    assert [one.health for one in state.members.values()] == [Health.DEAD] * 2


def test_a_refused_connection_proves_death_even_if_no_device_is_heard() -> None:
    state = after(tick_without_heartbeats(cluster(1, 2), 0.1, 2.0), dead(1))
    assert (state.member(1).health, state.member(1).ended) == (Health.DEAD, True)


# ---- suspects


def test_a_closed_heartbeat_link_makes_a_suspect_that_is_probed() -> None:
    state, instructions = step(cluster(1), m.LinkClosed(1, "a"))
    assert (state.member(1).health, state.member(1).reason) == (Health.SUSPECT, "its heartbeat link closed")
    assert state.member(1).usable
    assert announced(instructions) == ["device_suspect"]
    assert instructions[-1] == m.Probe(1)


def test_a_suspect_is_probed_again_without_another_announcement() -> None:
    state = after(cluster(1), m.LinkClosed(1, "a"))
    assert step(state, m.LinkClosed(1, "a")) == (state, (m.Probe(1),))


def test_a_suspect_is_probed_at_every_tick_until_its_next_heartbeat() -> None:
    state = after(cluster(1, 2), m.LinkClosed(1, "a"))
    assert step(state, m.Tick(NOW + 0.1))[1] == (m.Probe(1, (2,)),)
    assert step(after(state, m.Heartbeat(1, "a", NOW + 0.1)), m.Tick(NOW + 0.1))[1] == ()


def test_a_suspect_that_answers_a_probe_stays_suspect() -> None:
    state = after(cluster(1), m.LinkClosed(1, "a"))
    assert step(state, m.Probed(1, "a", "")) == (state, ())


def test_an_unreachable_suspect_is_dead_and_breaks_its_communicators() -> None:
    before = after(cluster(1, 2, 3), m.Created((3, 1)), m.Created((2, 3)), m.LinkClosed(1, "a"))
    state, instructions = step(before, m.Probed(1, "a", "127.0.0.1:4001 refuses connections"))
    assert (state.member(1).health, state.member(1).reason) == (
        Health.DEAD,
        "127.0.0.1:4001 refuses connections",
    )
    broken = state.communicator(1)
    assert [one.entry for one in recorded(instructions)] == [
        communicator_entry(broken),
        {"kind": "device_gone", "device": 1, "health": "dead", "ended": True},
    ]
    assert announced(instructions) == ["device_dead", "communicator_failed"]
    assert (broken.outcome, broken.broken_by, broken.generation) == (OperationOutcome.FAILED, 1, 1)
    assert stops(instructions) == [m.Stop(1, 1, broken.reason, (3, 1), lost_device=1)]
    for part in ("device 1 (pid 101", "refuses connections", "rebuild"):
        assert part in broken.reason
    assert state.communicator(2) == before.communicator(2)


def test_a_communicator_is_broken_by_the_first_device_that_dies() -> None:
    state, instructions = step(after(cluster(1, 2), m.Created((1, 2)), dead(2)), dead(1))
    assert state.communicator(1).broken_by == 2
    assert [stop.lost_device for stop in stops(instructions)] == [1], "the streams of device 1 must end too"


@pytest.mark.parametrize(
    "message",
    [
        m.LinkClosed(1, "older"),
        m.Probed(1, "older", "refused"),
        m.Left(1, "older"),
        m.LinkClosed(9, "a"),
        m.Probed(9, "a", "refused"),
        m.Left(9, "a"),
        m.CallReported(9, "refused", NOW),
    ],
)
def test_events_of_former_incarnations_and_unknown_devices_are_ignored(message: m.MembershipEvent) -> None:
    state = after(cluster(1), m.Created((1,)))
    assert step(state, message) == (state, ())


@pytest.mark.parametrize("gone", [dead(1), m.Left(1, "a")])
def test_events_of_lost_devices_are_ignored(gone: m.MembershipEvent) -> None:
    state = after(cluster(1), gone)
    for message in (
        m.LinkClosed(1, "a"),
        m.CallReported(1, "refused", NOW),
        m.CallReported(1, "", NOW),
        dead(1),
    ):
        assert step(state, message) == (state, ())
    assert step(state, m.Left(1, "a")) == (state, ())


# ---- calls


def test_a_successful_call_is_recorded_and_changes_nothing_else() -> None:
    state, instructions = step(after(cluster(1), m.LinkClosed(1, "a")), m.CallReported(1, "", NOW))
    assert state.member(1).health == Health.SUSPECT, "only a heartbeat clears it"
    assert instructions == ()


def test_a_failed_call_makes_a_suspect() -> None:
    state, instructions = step(cluster(1), m.CallReported(1, "connection reset", NOW))
    assert (state.member(1).health, state.member(1).reason) == (Health.SUSPECT, "connection reset")
    assert instructions[-1] == m.Probe(1)


def test_a_device_whose_calls_fail_for_a_lease_is_dead_despite_heartbeats() -> None:
    state = after(cluster(1), *[m.CallReported(1, "reset", NOW)] * 5)
    assert state.member(1).usable, "a connection that breaks fails all calls on it at once"
    state = after(pass_time(state, NOW, NOW + 1.0, 1), m.CallReported(1, "reset", NOW + 1.0))
    assert state.member(1).usable
    state = pass_time(state, NOW + 1.0, NOW + 1.5, 1)
    state, instructions = step(state, m.CallReported(1, "reset", NOW + 1.5))
    assert (state.member(1).health, state.member(1).reason) == (
        Health.DEAD,
        "it sends heartbeats, but its last 7 calls failed, over 1.5 s: reset",
    )
    assert announced(instructions) == ["device_dead"]


def test_failed_calls_to_a_silent_device_say_no_more_than_its_silence() -> None:
    """It is frozen, for less than a lease. The coordinator hears another one, so it is not the fault."""
    state = pass_time(cluster(1, 2), NOW, NOW + 0.4, 2)
    for tenths in range(5, 15):
        state = pass_time(state, NOW + (tenths - 1) / 10, NOW + tenths / 10, 2)
        state = after(state, m.CallReported(1, "ping timeout", NOW + tenths / 10))
    assert (state.member(1).health, state.member(1).heartbeats.failed_calls) == (Health.SUSPECT, 0)


# ---- processes that are slow, stopped or gone


def test_a_silent_device_is_probed_although_it_is_no_suspect() -> None:
    state = pass_time(cluster(1, 2), NOW, NOW + 0.4, 2)
    state, instructions = step(state, m.Tick(NOW + 0.5))
    assert state.member(1).health == Health.ALIVE
    assert instructions == (m.Probe(1, (2,)),)


def test_silent_devices_have_different_witnesses_of_those_that_are_heard() -> None:
    """No device is asked about all that fail together."""
    state = pass_time(cluster(*range(1, 9)), NOW, NOW + 0.4, 1, 2, 3, 5, 8)
    probes = {one.device_id: one.witnesses for one in step(state, m.Tick(NOW + 0.5))[1] if isinstance(one, m.Probe)}
    assert probes == {4: (8, 1, 2), 6: (2, 3, 5), 7: (3, 5, 8)}


def reached_by(witness: int, seconds: float, every_s: float = 0.5) -> State:
    """Device 1 has been silent for so long; ``witness`` has reached it all the time. The coordinator is 0."""
    state, at = cluster(1, 2, 3), 0.0
    while at < seconds:
        at += every_s
        state = pass_time(state, NOW + at - every_s, NOW + at, 2, 3)
        state = after(state, m.Probed(1, "a", "", NOW + at, True, witness))
    return state


def test_a_device_that_another_one_reaches_has_four_leases() -> None:
    member = reached_by(2, 4 * CONFIG.lease_s - 0.5).member(1)
    assert member.health == Health.SUSPECT
    assert member.reason.endswith("(lease 1.5 s), and other devices reach it")
    member = pass_time(reached_by(2, 4 * CONFIG.lease_s), NOW + 6.0, NOW + 6.1, 2, 3).member(1)
    assert member.health == Health.DEAD
    assert member.reason == "other devices reach it, and the coordinator has not for 6.1 s (lease 1.5 s)"
    assert not member.ended, "it may still have its state"
    assert reached_by(0, 60.0).member(1).usable, "the coordinator reaches it by itself"


def test_a_device_that_no_other_one_reaches_any_more_is_dead_a_lease_later() -> None:
    state = pass_time(reached_by(2, 2.0), NOW + 2.0, NOW + 3.5, 2, 3)
    assert state.member(1).usable
    assert pass_time(state, NOW + 3.5, NOW + 3.7, 2, 3).member(1).health == Health.DEAD


def test_a_witness_proves_nothing_before_the_first_heartbeat_of_a_device() -> None:
    """Another process may listen at the address that it gave."""
    state = after(cluster(2), m.Joined(device(1), NOW))
    for second in range(1, 7):
        state = pass_time(state, NOW + second - 1, NOW + second, 2)
        state = after(state, m.Probed(1, "a", "", NOW + second, True, 2))
    assert state.member(1).health == Health.DEAD


def test_a_silent_device_whose_process_runs_is_not_dead() -> None:
    """It holds Python's interpreter lock for a minute, or waits for a core."""
    state = pass_time(cluster(1, 2), NOW, NOW + 1, 2)
    state = pass_time(after(state, m.Probed(1, "a", "", runs_at=NOW + 1)), NOW + 1, NOW + 1.5, 2)
    assert state.member(1).health == Health.ALIVE
    _, instructions = step(state, m.Tick(NOW + 1.6))
    news = next(one for one in instructions if isinstance(one, m.Announce))
    assert (news.kind, news.fields) == ("device_suspect", {"device": 1})
    assert news.text.endswith("no heartbeat for 1.6 s (lease 1.5 s), and its process runs")
    for second in range(1, 60):
        state = pass_time(state, NOW + second, NOW + second + 1, 2)
        state = after(state, m.Probed(1, "a", "", runs_at=NOW + second + 1))
    assert state.member(1).health == Health.SUSPECT
    assert announced(step(state, m.Heartbeat(1, "a", NOW + 60))[1]) == ["device_recovered"]
    state = pass_time(state, NOW + 60, NOW + 61.4, 2)
    assert state.member(1).usable
    state = pass_time(state, NOW + 61.4, NOW + 61.6, 2)
    assert state.member(1).health == Health.DEAD, "it was stopped"


@pytest.mark.parametrize(("by_answer", "health"), [(True, Health.DEAD), (False, Health.SUSPECT)])
def test_before_its_first_heartbeat_only_the_kernel_can_say_that_a_device_runs(by_answer: bool, health: Health) -> None:
    """What answers at an address at which no device was ever heard may be another process."""
    state = after(cluster(2), m.Joined(device(1), NOW))
    for second in range(10):
        state = pass_time(state, NOW + second, NOW + second + 1, 2)
        state = after(state, m.Probed(1, "a", "", NOW + second + 1, by_answer))
    assert state.member(1).health == health


def test_a_late_coordinator_gives_silent_devices_more_time() -> None:
    """Its ticks come in bursts, every half second: it waits for a core itself."""
    state, now = cluster(1, 2), NOW
    for _ in range(4):
        state = pass_time(after(state, m.Heartbeat(2, "a", now + 0.5), m.Tick(now + 0.5)), now + 0.5, now + 1, 2)
        now += 1
    assert state.member(1).usable
    assert state.observer.late_seconds == 4
    state = pass_time(state, now, now + 8, 2)
    assert state.member(1).health == Health.DEAD


def test_a_freeze_of_the_coordinator_is_no_silence_of_its_devices() -> None:
    """Whichever it processes first afterwards: its tick, or what devices had sent."""
    state, now = pass_time(cluster(1, 2), NOW, NOW + 1, 1, 2), NOW + 1
    for freeze in (0.3, 1.0, 1.4, 2.5, 5.0, 19.0):
        for order in ((m.Tick, m.Heartbeat), (m.Heartbeat, m.Tick)):
            now += freeze
            for kind in order:
                state = after(state, m.Tick(now) if kind is m.Tick else m.Heartbeat(2, "a", now))
            state = after(pass_time(state, now, now + 1.0, 2), m.Heartbeat(1, "a", now + 1.0))
            now += 1.0
            assert state.member(1).health == state.member(2).health == Health.ALIVE


# ---- leaving


def test_a_device_that_leaves_is_not_declared_dead() -> None:
    state, instructions = step(after(cluster(1, 2), m.Created((1, 2))), m.Left(1, "a"))
    assert (state.member(1).health, state.member(1).usable) == (Health.LEFT, False)
    assert recorded(instructions)[-1].entry == {
        "kind": "device_gone",
        "device": 1,
        "health": "left",
        "ended": True,
    }
    assert announced(instructions) == ["device_left", "communicator_failed"]
    assert stops(instructions)[0].lost_device == 1


# ---- communicators


def test_a_communicator_keeps_the_order_of_its_devices() -> None:
    state, instructions = step(cluster(1, 2, 3), m.Created((3, 1)))
    one = state.communicator(1)
    assert (one.members, one.generation, one.outcome) == ((3, 1), 1, OperationOutcome.IN_PROGRESS)
    assert recorded(instructions)[0].entry == {
        "kind": "communicator",
        "id": 1,
        "members": [3, 1],
        "generation": 1,
        "finalized": False,
        "broken_by": 0,
        "reason": "",
        "ran": False,
    }
    assert announced(instructions) == ["communicator_created"]


def test_a_suspect_may_be_in_a_new_communicator() -> None:
    assert after(cluster(1), m.LinkClosed(1, "a"), m.Created((1,))).communicator(1).members == (1,)


@pytest.mark.parametrize(
    ("device_ids", "kind", "why"),
    [
        ((), InvalidArgument, "needs at least one"),
        ((1, 2, 1), InvalidArgument, r"\[1, 2, 1\] names a device twice"),
        ((1, 9), NotFound, r"device 9 is unknown; known: \[1, 2, 3\]"),
        ((1, 3), FailedPrecondition, r"device 3 \(pid 103, .* is dead: connection refused"),
    ],
)
def test_invalid_communicators_are_refused(device_ids: tuple[int, ...], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        step(after(cluster(1, 2, 3), dead(3)), m.Created(device_ids))


def test_the_number_of_communicators_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hoop.membership.state_machine.MAX_COMMUNICATORS", 2)
    state = after(cluster(1), m.Created((1,)), m.Created((1,)))
    with pytest.raises(ResourceExhausted, match=r"2 communicators exist; destroy some \(CommDestroy\)"):
        step(state, m.Created((1,)))
    assert sorted(after(state, m.Destroyed(1), m.Created((1,))).communicators) == [2, 3]


def test_a_rebuilt_communicator_leaves_out_dead_devices() -> None:
    before = after(cluster(1, 2, 3), m.Created((3, 1, 2)), dead(1))
    state, instructions = step(before, m.Rebuilt(1))
    one = state.communicator(1)
    assert (one.members, one.generation, one.broken_by) == ((3, 2), 2, 0)
    assert (one.outcome, one.reason) == (OperationOutcome.IN_PROGRESS, "")
    assert recorded(instructions)[0].entry["generation"] == 2
    assert announced(instructions) == ["communicator_rebuilt"]
    assert stops(instructions) == [m.Stop(1, 1, "communicator 1 was rebuilt", (3, 1, 2))]


def test_an_intact_communicator_may_be_rebuilt_too() -> None:
    state = after(cluster(1, 2), m.Created((1, 2)), m.Rebuilt(1), m.Rebuilt(1))
    assert (state.communicator(1).members, state.communicator(1).generation) == ((1, 2), 3)


def test_a_communicator_without_live_devices_cannot_be_rebuilt() -> None:
    with pytest.raises(FailedPrecondition, match="communicator 1: none of its devices is alive"):
        step(after(cluster(1), m.Created((1,)), dead(1)), m.Rebuilt(1))


def test_a_destroyed_communicator_is_stopped_and_its_id_is_not_reused() -> None:
    before = after(cluster(1), m.Created((1,)))
    state, instructions = step(before, m.Destroyed(1))
    assert state.communicators == {}
    assert recorded(instructions) == [m.Record({"kind": "communicator_destroyed", "id": 1})]
    assert stops(instructions) == [m.Stop(1, 1, "communicator 1 was destroyed", (1,))]
    assert sorted(after(state, m.Created((1,))).communicators) == [2]


def test_a_finalized_communicator_stays_finalized_when_rebuilt() -> None:
    state, instructions = step(after(cluster(1), m.Created((1,))), m.Finalized(1))
    assert state.communicator(1).finalized
    assert instructions == (m.Record(communicator_entry(state.communicator(1))),)
    assert communicator_entry(state.communicator(1))["finalized"] is True
    assert after(state, m.Rebuilt(1)).communicator(1).finalized


@pytest.mark.parametrize("message", [m.Rebuilt(5), m.Started(5), m.Finalized(5), m.Destroyed(5)])
def test_an_unknown_communicator_is_refused(message: m.MembershipEvent) -> None:
    with pytest.raises(NotFound, match="communicator 5 is unknown or destroyed; call CommInit"):
        step(cluster(1), message)


# ---- operations


def test_an_operation_starts_and_succeeds() -> None:
    state = after(cluster(1), m.Created((1,)), m.Started(1), m.Finished(1, 1))
    assert (state.communicator(1).outcome, state.communicator(1).generation) == (OperationOutcome.SUCCESS, 1)
    assert after(state, m.Started(1)).communicator(1).outcome == OperationOutcome.IN_PROGRESS


def test_a_failed_operation_starts_a_generation_with_new_links() -> None:
    before = after(cluster(1, 2), m.Created((1, 2)), m.Started(1))
    state, instructions = step(before, m.Finished(1, 1, "checksum"))
    one = state.communicator(1)
    assert (one.outcome, one.reason, one.generation) == (OperationOutcome.FAILED, "checksum", 2)
    assert one.broken_by == 0, "all devices are alive: the next operation may start at once"
    assert recorded(instructions)[0].entry["generation"] == 2
    assert announced(instructions) == ["operation_failed"]
    assert stops(instructions) == [m.Stop(1, 1, "checksum", (1, 2))]
    assert after(state, m.Started(1)).communicator(1).outcome == OperationOutcome.IN_PROGRESS


@pytest.mark.parametrize(
    "finished", [m.Finished(1, 1), m.Finished(1, 1, "too late"), m.Finished(1, 3), m.Finished(9, 1, "whose?")]
)
def test_the_end_of_an_operation_of_another_generation_is_ignored(finished: m.Finished) -> None:
    state = after(cluster(1), m.Created((1,)), m.Rebuilt(1), m.Started(1))
    assert step(state, finished) == (state, ())


@pytest.mark.parametrize("failure", ["", "peer lost"])
def test_the_end_of_an_operation_does_not_repair_a_broken_communicator(failure: str) -> None:
    state = after(cluster(1, 2), m.Created((1, 2)), m.Started(1), dead(1))
    assert step(state, m.Finished(1, 1, failure)) == (state, ())


def test_a_broken_communicator_refuses_operations_with_the_reason() -> None:
    state = after(cluster(1, 2), m.Created((1, 2)), dead(1))
    with pytest.raises(FailedPrecondition, match=r"communicator 1: device 1 .* is gone: .*; rebuild"):
        step(state, m.Started(1))


# ---- usable devices


def test_usable_devices_are_sorted_by_load_without_lost_ones() -> None:
    state = after(
        cluster(1, 2, 3, 4, 5),
        m.Created((1, 2)),
        m.Created((1, 3)),
        m.LinkClosed(3, "a"),
        m.Left(4, "a"),
        dead(5),
    )
    assert state.usable() == [2, 1, 3], "device 3 is suspect"
    assert after(state, m.Heartbeat(3, "a", NOW)).usable() == [2, 3, 1]
