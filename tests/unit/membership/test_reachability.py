"""Devices that cannot connect to each other: what is announced, which ones a job does without, and who may join it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from roster import NOW, cluster, device

from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.reachability import cut_off, describe, left_out
from hoop.membership.state import COORDINATOR, Connection, State
from hoop.membership.state_machine import step

TIMED_OUT = "no answer within 3 s"


def checked(state: State, device_id: int, results: dict[Connection, str]) -> tuple[State, list[m.Announce]]:
    event = m.LinksChecked(device_id, state.members[device_id].info.incarnation, results)
    state, instructions = step(state, event)
    return state, [one for one in instructions if isinstance(one, m.Announce)]


def firewalled(target: int, *sources: int) -> dict[Connection, str]:
    """No device reaches the data port of one; that one reaches all."""
    return {Connection(one, target): TIMED_OUT for one in sources} | {Connection(target, one): "" for one in sources}


def test_a_device_that_others_cannot_connect_to_is_announced_with_the_remedy() -> None:
    state, news = checked(cluster(1, 2, 3), 3, firewalled(3, 1, 2))
    assert [one.kind for one in news] == ["device_unreachable"]
    address = state.members[3].info.data_address
    assert news[0].text == (
        f"{state.members[3].info}: device 1 (127.0.0.1) and device 2 (127.0.0.1) cannot connect to its data port at "
        f"{address} ({TIMED_OUT}): open port {address.port} there, or name an address that leads to it with "
        "hoop device --advertise-data HOST:PORT"
    )
    assert news[0].fields == {"device": 3, "sources": "1 2"}
    assert left_out(state, [1, 2, 3]) == [3]
    assert left_out(state, [1, 2]) == []
    # The same result again is no news; a connection that works is.
    assert checked(state, 3, firewalled(3, 1, 2))[1] == []
    state, news = checked(state, 3, {Connection(1, 3): "", Connection(2, 3): ""})
    assert [one.kind for one in news] == ["device_reachable"]
    assert left_out(state, [1, 2, 3]) == []
    assert describe(state, 3) == ""


def test_of_two_devices_the_one_with_the_closed_port_is_left_out() -> None:
    assert left_out(checked(cluster(1, 2), 2, {Connection(2, 1): TIMED_OUT, Connection(1, 2): ""})[0], [1, 2]) == [1]
    assert left_out(checked(cluster(1, 2), 2, firewalled(2, 1))[0], [1, 2]) == [2]
    both = {Connection(1, 2): TIMED_OUT, Connection(2, 1): TIMED_OUT}
    assert left_out(checked(cluster(1, 2), 2, both)[0], [1, 2]) == [2], "the higher id, as with link faults"


def test_a_device_whose_services_the_coordinator_cannot_call_is_left_out() -> None:
    state, news = checked(cluster(1, 2), 2, {Connection(COORDINATOR, 2, data=False): "Connection refused"})
    assert left_out(state, [1, 2]) == [2]
    assert "the coordinator cannot connect to its services at" in news[0].text
    assert "--advertise HOST:PORT" in news[0].text


def test_a_data_port_that_only_the_coordinator_cannot_reach_is_said_and_counts() -> None:
    state, news = checked(cluster(1, 2), 2, {Connection(COORDINATOR, 2): TIMED_OUT})
    assert [one.kind for one in news] == ["device_unreachable"]
    assert left_out(state, [1, 2]) == []
    assert not cut_off(state, 2, [1])
    assert "the coordinator" in describe(state, 2)


def test_what_is_known_about_a_device_ends_with_its_process() -> None:
    state, _ = checked(cluster(1, 2), 2, firewalled(2, 1))
    late = m.LinksChecked(2, "of an earlier process", {Connection(1, 2): ""})
    assert step(state, late) == (state, ())
    gone, _ = step(state, m.Left(2, state.members[2].info.incarnation))
    assert left_out(gone, [1, 2]) == []
    back, _ = step(gone, m.Joined(replace(device(2), incarnation="next"), NOW))
    assert not back.unreachable


@pytest.mark.parametrize("failed", [Connection(1, 3), Connection(3, 1)])
def test_a_device_that_cannot_reach_a_member_does_not_join_its_job(failed: Connection) -> None:
    state = cluster(1, 2, 3)
    state, _ = step(state, m.Created((1, 2)))
    job = jm.JobView(1)
    for device_id in (1, 2):
        job, _ = jm.advance(job, jm.TaskFound(device_id, state.members[device_id].info.incarnation, 1), state, NOW)
    job, _ = jm.advance(job, jm.TasksListed(), state, NOW)
    cut, _ = checked(state, 3, {failed: TIMED_OUT})
    assert jm.advance(job, jm.DeviceArrived(3), cut, NOW)[1] == (), "it is not invited"
    # It was invited before the check had ended: it waits until the connection works.
    job, instructions = jm.advance(job, jm.DeviceArrived(3), state, NOW)
    assert instructions == (jm.Invite(3),)
    job, instructions = jm.advance(job, jm.TaskReady(3, state.members[3].info.incarnation), cut, NOW)
    assert instructions == ()
    again, _ = checked(cut, 3, {failed: ""})
    assert jm.advance(job, jm.JobTick(), again, NOW)[1] == (jm.Assign((3,), planned=True),)
