"""A device with other versions than the members of its cluster: an event names them, and a job refuses it."""

from __future__ import annotations

from dataclasses import replace

from roster import NOW, cluster, device

from hoop.job_events import Ready
from hoop.membership import events as m
from hoop.membership.state import CommunicatorState, State
from hoop.membership.state_machine import step
from hoop.servers.job_record import JobRecord

SAME = {"hoop": "0.2.0", "torch": "2.13.0", "arithmetic": "aa"}


def joined(state: State, device_id: int, torch: str) -> tuple[State, list[m.Announce]]:
    info = replace(device(device_id), hoop_version="0.2.0", torch_version=torch, python_version="3.11")
    state, instructions = step(state, m.Joined(info, NOW))
    return state, [one for one in instructions if isinstance(one, m.Announce)]


def test_a_device_with_another_version_is_announced() -> None:
    state, news = joined(cluster(), 1, "2.13.0")
    assert [one.kind for one in news] == ["device_joined"]
    state, news = joined(state, 2, "2.13.0")
    assert [one.kind for one in news] == ["device_joined"]
    state, news = joined(state, 3, "2.15.0")
    assert [one.kind for one in news] == ["device_joined", "device_differs"]
    assert news[1].text == "device 3 (pid 103, 127.0.0.1:4003) has PyTorch 2.15.0, where device 1 has PyTorch 2.13.0"


def test_a_device_that_states_no_version_is_not_announced() -> None:
    state, _ = joined(cluster(), 1, "2.13.0")
    _, instructions = step(state, m.Joined(device(2), NOW))
    assert [one.kind for one in instructions if isinstance(one, m.Announce)] == ["device_joined"]


def test_a_job_refuses_a_device_that_would_change_its_weights() -> None:
    job = JobRecord(CommunicatorState(1, (1,)), "{}", data="d", environment=SAME)
    assert job.refusal(device(2), Ready(data="d", environment=SAME)) == ""
    assert job.rounding(device(2), Ready(data="d", environment=SAME)) is None
    other = Ready(data="d", environment={**SAME, "arithmetic": "bb"})
    assert job.refusal(device(2), other) == "", "it takes part, and is named"
    rounding = job.rounding(device(2), other)
    assert rounding is not None
    assert rounding.text.startswith("device 2 on here rounds differently from the others ")
    strict = JobRecord(CommunicatorState(1, (1,)), '{"require_same_bits": true}', data="d", environment=SAME)
    refusal = strict.refusal(device(2), other)
    assert "device 2" in refusal
    assert "on here has" in refusal
    assert "the result of the numeric probe bb, where the others have the result of the numeric probe aa" in refusal
    assert job.refusal(device(2), Ready(data=None, environment={})) == "", "it took part before"


def test_a_job_that_allows_a_mixture_refuses_none() -> None:
    job = JobRecord(CommunicatorState(1, (1,)), "{}", data="d", environment={})
    assert job.refusal(device(2), Ready(data="d", environment=SAME)) == ""
