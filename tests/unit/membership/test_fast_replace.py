"""The package's own ``replace`` copies as ``dataclasses.replace`` does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from roster import CONFIG, NOW, device

from hoop.membership import fast_replace
from hoop.membership.heartbeats import HeartbeatHistory
from hoop.membership.job_membership import JobView
from hoop.membership.state import State
from hoop.membership.task_membership import TaskRanks

CHANGES: list[tuple[Any, dict[str, Any]]] = [
    (State(CONFIG, last_tick=NOW), {"members": {}, "last_tick": NOW + 1}),
    (JobView(1, size=2), {"over": True}),
    (TaskRanks(3, 2, planned=True), {"newest": 4, "planned": False}),
    (HeartbeatHistory(NOW), {}),
    (device(1), {"device_id": 7}),
]


@pytest.mark.parametrize(("one", "changes"), CHANGES, ids=lambda value: type(value).__name__)
def test_a_copy_equals_that_of_the_standard_library(one: Any, changes: dict[str, Any]) -> None:
    before = dict(vars(one))
    copy = fast_replace.replace(one, **changes)
    assert type(copy) is type(one)
    assert copy == dataclasses.replace(one, **changes)
    assert list(vars(copy)) == list(before)
    assert copy is not one
    assert vars(one) == before, "the original is unchanged"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(copy, next(iter(before)), None)


def test_an_unknown_field_is_refused() -> None:
    fields: dict[str, Any] = {"stoped": 3}
    with pytest.raises(TypeError, match="a TaskRanks cannot be copied with stoped"):
        fast_replace.replace(TaskRanks(), **fields)


def test_a_class_that_checks_its_fields_is_refused() -> None:
    with pytest.raises(TypeError, match="a DetectorConfig cannot be copied with lease_s"):
        fast_replace.replace(CONFIG, lease_s=-1.0)
