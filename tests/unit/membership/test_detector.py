"""Failure detector: signs of life, the lease, failed calls, and the health of the coordinator itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.membership.fast_replace import replace
from hoop.membership.heartbeats import LONGEST_LEASE_S, DetectorConfig, HeartbeatHistory, ObserverHealth

CONFIG = DetectorConfig(heartbeat_s=0.125, lease_s=1.5, failures=3)  # exact in binary


def calls(text: str, every_s: float = 1.0, history: HeartbeatHistory | None = None) -> tuple[HeartbeatHistory, float]:
    """A history with one call per character (``x`` is a failed call), and the time of the last one."""
    history, now = history or HeartbeatHistory(100.0), 100.0
    for one in text:
        now += every_s
        history = history.with_call(one != "x", now)
    return history, now


def test_silence_is_tolerated_until_the_lease_ends() -> None:
    history = HeartbeatHistory(100.0)
    assert history.silence_verdict(100.0, CONFIG) == history.silence_verdict(101.5, CONFIG) == ""
    assert history.silence_verdict(101.75, CONFIG) == "no heartbeat for 1.8 s (lease 1.5 s)"


def test_a_heartbeat_renews_the_lease() -> None:
    history = HeartbeatHistory(100.0).with_heartbeat(101.0)
    assert history.silence_verdict(102.5, CONFIG) == ""
    assert history.silence_verdict(102.6, CONFIG)


def test_a_device_that_joined_has_time_for_its_first_heartbeat() -> None:
    history = HeartbeatHistory.joined(100.0, CONFIG)
    assert history.silence_verdict(105.0, CONFIG) == ""
    assert history.silence_verdict(105.25, CONFIG) == "no heartbeat within 5.2 s after it joined"
    assert history.with_heartbeat(101.0).silence_verdict(102.75, CONFIG) == "no heartbeat for 1.8 s (lease 1.5 s)"


def test_a_pause_of_the_coordinator_also_extends_the_time_for_the_first_heartbeat() -> None:
    history = HeartbeatHistory.joined(100.0, CONFIG).discount_pause(60.0, 161.0)
    assert history.silence_verdict(165.0, CONFIG) == ""
    assert history.silence_verdict(165.25, CONFIG)


def test_a_long_lease_also_applies_to_the_first_heartbeat() -> None:
    config = DetectorConfig(lease_s=20.0)
    assert HeartbeatHistory.joined(100.0, config).silence_verdict(120.0, config) == ""
    assert HeartbeatHistory.joined(100.0, config).silence_verdict(120.5, config)


def test_an_older_heartbeat_does_not_move_the_last_one_back() -> None:
    assert HeartbeatHistory(100.0).with_heartbeat(101.0).with_heartbeat(100.5).last_heartbeat == 101.0


def test_a_history_is_immutable() -> None:
    history = HeartbeatHistory(100.0)
    history.with_heartbeat(200.0)
    history.with_call(False, 200.0)
    history.with_sighting(200.0)
    history.with_witness(200.0)
    history.discount_pause(5.0, 200.0)
    assert history == HeartbeatHistory(100.0)


@pytest.mark.parametrize("history", ["", "...", "x", "xx", "x.x", "xx...", "xx....xx", "xxx.", "xx.xx.xx", ".x.x."])
def test_fewer_than_x_failed_calls_in_succession_are_tolerated(history: str) -> None:
    failed, now = calls(history)
    assert failed.call_verdict(now, CONFIG) == ""


def test_x_failed_calls_in_succession_declare_a_device_dead() -> None:
    failed, now = calls(".....xxx")
    assert failed.call_verdict(now, CONFIG) == "it sends heartbeats, but its last 3 calls failed, over 2.0 s"


def test_calls_that_fail_together_are_one_fault() -> None:
    """A connection that breaks fails all calls on it at once: that is no evidence of a broken server."""
    failed, now = calls("xxxxxxxx", every_s=0.0)
    assert failed.call_verdict(now, CONFIG) == failed.call_verdict(now + 1.25, CONFIG) == ""
    assert failed.with_call(False, now + 1.5).call_verdict(now + 1.5, CONFIG)


@given(st.lists(st.booleans(), max_size=40))
def test_an_answered_call_ends_a_series_of_failures(outcomes: list[bool]) -> None:
    history, now = calls("".join("." if ok else "x" for ok in outcomes))
    failed = next((index for index, ok in enumerate(reversed(outcomes)) if ok), len(outcomes))
    assert history.failed_calls == failed
    assert bool(history.call_verdict(now, CONFIG)) == (failed >= 3)


# ---- signs of life


def test_a_process_that_runs_is_not_dead_however_long_it_is_silent() -> None:
    history = HeartbeatHistory(100.0).with_sighting(158.75)
    assert history.silence_verdict(160.0, CONFIG) == ""
    assert history.silence_verdict(160.5, CONFIG) == "no heartbeat for 60.5 s (lease 1.5 s)", "it was stopped since"


def test_a_process_that_runs_without_a_heartbeat_is_hung_after_ten_minutes() -> None:
    history = HeartbeatHistory(100.0).with_sighting(700.5)
    assert history.silence_verdict(700.0, CONFIG) == ""
    assert "its process runs, but has sent no heartbeat for 600.5 s" in history.silence_verdict(700.5, CONFIG)


def test_an_older_sighting_does_not_move_the_last_one_back() -> None:
    assert HeartbeatHistory(100.0).with_sighting(101.0).with_sighting(100.5).last_seen == 101.0


def test_what_another_device_saw_counts_for_four_leases_since_the_last_sign_to_the_coordinator() -> None:
    history = HeartbeatHistory(100.0).with_sighting(110.0).with_witness(116.0)
    assert history.silence_verdict(116.0, CONFIG) == ""
    assert "the coordinator has not for 6.1 s" in history.silence_verdict(116.125, CONFIG)
    assert history.with_heartbeat(116.25).silence_verdict(117.5, CONFIG) == ""
    assert HeartbeatHistory(100.0).with_witness(101.0).with_witness(100.5).last_witnessed == 101.0


def beats(*gaps: float) -> tuple[HeartbeatHistory, float]:
    """A history with heartbeats after these gaps, and the time of the last one."""
    history, now = HeartbeatHistory(100.0), 100.0
    for gap in gaps:
        now += gap
        history = history.with_heartbeat(now)
    return history, now


def test_punctual_heartbeats_do_not_extend_the_lease() -> None:
    history, now = beats(*[0.125] * 200)
    assert history.silence_verdict(now + 1.5, CONFIG) == ""
    assert history.silence_verdict(now + 1.625, CONFIG)


def test_uneven_heartbeats_extend_the_lease_of_their_device() -> None:
    history, now = beats(*([0.125] * 8 + [1.375]) * 20)
    assert history.silence_verdict(now + 2.5, CONFIG) == ""
    assert history.silence_verdict(now + LONGEST_LEASE_S, CONFIG)
    later, now = beats(*([0.125] * 8 + [1.375]) * 20, *[0.125] * 200)
    assert later.silence_verdict(now + 1.75, CONFIG), "it is punctual again"


def test_a_gap_while_a_device_loads_a_job_does_not_extend_its_lease() -> None:
    history, _ = beats(*[0.125] * 50)
    history = replace(history, suspended_until=200.0).with_heartbeat(190.0).with_heartbeat(190.125)
    assert history.spread_s < 0.2


@given(st.lists(st.floats(0.0, 60.0), max_size=60), st.integers(0, 7))
def test_a_lease_is_never_shorter_than_configured_and_never_above_its_limit(gaps: list[float], late: int) -> None:
    history, _ = beats(*gaps)
    for config in (CONFIG, DetectorConfig(lease_s=30.0)):
        lease = history.lease_s(config, ObserverHealth(late))
        assert config.lease_s <= lease <= max(config.lease_s, LONGEST_LEASE_S)


# ---- the coordinator's own health


def test_each_second_with_a_late_tick_extends_every_lease_and_each_punctual_one_takes_it_back() -> None:
    health, now = ObserverHealth(), 100.0
    for late_seconds in range(1, 12):
        for gap in (0.125, 0.5, 0.125, 0.5):
            now += gap
            health = health.after_tick(gap, now, CONFIG)
        assert health.late_seconds == min(7, late_seconds)
    assert HeartbeatHistory(now).silence_verdict(now + 12.0, CONFIG, health) == ""
    assert HeartbeatHistory(now).silence_verdict(now + 12.5, CONFIG, health)
    for _ in range(8 * 12):
        now += 0.125
        health = health.after_tick(0.125, now, CONFIG)
    assert health.late_seconds == 0


# ---- pauses of the coordinator


def test_a_pause_of_the_coordinator_is_discounted_from_silence() -> None:
    history = HeartbeatHistory(100.0).discount_pause(60.0, 161.0)
    assert history.silence_verdict(161.5, CONFIG) == ""
    assert history.silence_verdict(161.6, CONFIG)


def test_a_discounted_pause_ends_at_the_current_time() -> None:
    assert HeartbeatHistory(100.0).discount_pause(60.0, 130.0).last_heartbeat == 130.0


@pytest.mark.parametrize(
    ("heartbeat", "lease"),
    [(0, 1), (-1, 1), (1, 1), (2, 1), (math.nan, 1), (0.1, math.nan), (math.inf, math.inf), (0.1, -1)],
)
def test_the_heartbeat_interval_must_be_below_the_lease(heartbeat: float, lease: float) -> None:
    with pytest.raises(InvalidArgument, match=f"heartbeat {heartbeat:g} s .* below the lease, {lease:g} s"):
        DetectorConfig(heartbeat_s=heartbeat, lease_s=lease)


def test_the_failure_threshold_is_at_least_one_and_the_defaults_are_valid() -> None:
    with pytest.raises(InvalidArgument, match="failures: 0 is below 1"):
        DetectorConfig(failures=0)
    assert DetectorConfig(failures=1).heartbeat_s < DetectorConfig().lease_s
