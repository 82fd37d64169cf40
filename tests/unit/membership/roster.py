"""Test devices, and helpers that build membership states from events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hoop.membership import events as m
from hoop.membership.heartbeats import DetectorConfig
from hoop.membership.state import State
from hoop.membership.state_machine import step
from hoop.topology import Address, DeviceInfo

NOW = 1000.0
"""Start of the tests' monotonic clock; the value is arbitrary."""
CONFIG = DetectorConfig(heartbeat_s=0.1, lease_s=1.5, failures=3)


def device(device_id: int = 0, incarnation: str = "a") -> DeviceInfo:
    return DeviceInfo(
        device_id,
        address=Address("127.0.0.1", 4000 + device_id % 1000),
        data_address=Address("127.0.0.1", 5000 + device_id % 1000),
        min_address=0x1000,
        max_address=0x11000,
        host="here",
        pid=100 + device_id % 1000,
        incarnation=incarnation,
    )


def after(state: State, *messages: m.MembershipEvent) -> State:
    """Return the state after all messages."""
    for message in messages:
        state, _ = step(state, message)
    return state


def cluster(*device_ids: int) -> State:
    """Return a state in which these devices joined as incarnation ``a`` and sent their first heartbeat."""
    joins = (m.Joined(device(one), NOW) for one in device_ids)
    beats = (m.Heartbeat(one, "a", NOW) for one in device_ids)
    return after(State(CONFIG, last_tick=NOW), *joins, *beats)


def pass_time(state: State, start: float, end: float, *beating: int, every_s: float = 0.1) -> State:
    """The state after these seconds, with punctual ticks, in which only ``beating`` devices send heartbeats."""
    for count in range(1, round((end - start) / every_s) + 1):
        now = start + count * every_s
        state = after(state, *(m.Heartbeat(one, "a", now) for one in beating), m.Tick(now))
    return state


def ran_until(state: State, now: float) -> State:
    """The state of a coordinator that has run and heard devices until now."""
    return replace(state, last_tick=now)


def dead(device_id: int) -> m.MembershipEvent:
    """Return an event that makes a member of ``cluster`` dead."""
    return m.Probed(device_id, "a", "connection refused")


def announced(instructions: Iterable[m.MembershipInstruction]) -> list[str]:
    return [one.kind for one in instructions if isinstance(one, m.Announce)]


def recorded(instructions: Iterable[m.MembershipInstruction]) -> list[m.Record]:
    return [one for one in instructions if isinstance(one, m.Record)]


def stops(instructions: Iterable[m.MembershipInstruction]) -> list[m.Stop]:
    return [one for one in instructions if isinstance(one, m.Stop)]
