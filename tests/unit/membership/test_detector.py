"""Failure detector: the lease, X failures of the last Y calls, and pauses of the coordinator itself."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import InvalidArgument
from hoop.membership.heartbeats import DetectorConfig, HeartbeatHistory

CONFIG = DetectorConfig(heartbeat_s=0.125, lease_s=1.5, failures=3, window=5)  # exact in binary


def calls(text: str, history: HeartbeatHistory | None = None) -> HeartbeatHistory:
    """Return a history with one call per character; ``x`` is a failed call."""
    history = history or HeartbeatHistory(100.0)
    for one in text:
        history = history.with_call(one != "x", CONFIG)
    return history


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
    history.with_call(False, CONFIG)
    history.discount_pause(5.0, 200.0)
    assert history == HeartbeatHistory(100.0)


@pytest.mark.parametrize("history", ["", "...", "x", "xx", "x.x", "xx...", "xx....xx", "xxx...", ".x.x."])
def test_fewer_than_x_failures_of_the_last_y_calls_are_tolerated(history: str) -> None:
    assert calls(history).call_verdict(CONFIG) == ""


@pytest.mark.parametrize(
    ("history", "verdict"),
    [
        ("xxx", "3 of the last 3 calls failed"),
        ("x.x.x", "3 of the last 5 calls failed"),
        ("xxx..", "3 of the last 5 calls failed"),
        (".....xxx", "3 of the last 5 calls failed"),
        ("xxxxxxxx", "5 of the last 5 calls failed"),
    ],
)
def test_x_failures_of_the_last_y_calls_declare_a_device_dead(history: str, verdict: str) -> None:
    assert calls(history).call_verdict(CONFIG) == verdict


def test_heartbeats_and_calls_are_judged_independently() -> None:
    beating = calls("xxx").with_heartbeat(200.0)
    assert "calls failed" in beating.call_verdict(CONFIG), "it sends heartbeats but answers no calls"
    assert beating.silence_verdict(200.0, CONFIG) == ""
    answering = calls(".....")
    assert "no heartbeat" in answering.silence_verdict(200.0, CONFIG), "old answers do not replace heartbeats"
    assert answering.call_verdict(CONFIG) == ""


@given(st.lists(st.booleans(), max_size=40))
def test_the_window_holds_only_the_last_calls(outcomes: list[bool]) -> None:
    history = HeartbeatHistory(0.0)
    for ok in outcomes:
        history = history.with_call(ok, CONFIG)
    assert history.calls == tuple(outcomes[-5:])
    assert bool(history.call_verdict(CONFIG)) == (outcomes[-5:].count(False) >= 3)


def test_a_pause_of_the_coordinator_is_discounted_from_silence() -> None:
    history = HeartbeatHistory(100.0).discount_pause(60.0, 161.0)
    assert history.silence_verdict(161.5, CONFIG) == ""
    assert history.silence_verdict(161.6, CONFIG)
    assert calls("xxx").discount_pause(60.0, 161.0).call_verdict(CONFIG), "failed calls are not discounted"


def test_a_discounted_pause_ends_at_the_current_time() -> None:
    assert HeartbeatHistory(100.0).discount_pause(60.0, 130.0).last_heartbeat == 130.0


@pytest.mark.parametrize(
    ("heartbeat", "lease"),
    [(0, 1), (-1, 1), (1, 1), (2, 1), (math.nan, 1), (0.1, math.nan), (math.inf, math.inf), (0.1, -1)],
)
def test_the_heartbeat_interval_must_be_below_the_lease(heartbeat: float, lease: float) -> None:
    with pytest.raises(InvalidArgument, match=f"heartbeat {heartbeat:g} s .* below the lease, {lease:g} s"):
        DetectorConfig(heartbeat_s=heartbeat, lease_s=lease)


@pytest.mark.parametrize(("failures", "window"), [(0, 5), (-1, 5), (6, 5), (1, 0)])
def test_the_failure_threshold_is_at_least_one_and_at_most_the_window(failures: int, window: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"failures: {failures} is not in 1..{window} \(the window\)"):
        DetectorConfig(failures=failures, window=window)


def test_the_smallest_window_and_the_defaults_are_valid() -> None:
    assert DetectorConfig(failures=1, window=1).failures == 1
    assert DetectorConfig().heartbeat_s < DetectorConfig().lease_s
