"""The settings that a coordinator gives to a device that joins a running job."""

from __future__ import annotations

import json

import pytest

from hoop.membership.state import CommunicatorState
from hoop.servers.job_record import JobRecord


def record(settings: dict[str, object], sharded: bool) -> JobRecord:
    return JobRecord(CommunicatorState(1, (1, 2)), json.dumps(settings), sharded_update=sharded)


@pytest.mark.parametrize("settings", [{}, {"strategy": "data"}, {"sharded_update": "auto", "epochs": 3}])
def test_a_device_that_joins_gets_the_choice_of_the_ranks(settings: dict[str, object]) -> None:
    found = json.loads(record(settings, sharded=True).join_settings)
    assert found == {**settings, "strategy": "data:sharded", "sharded_update": "on"}


@pytest.mark.parametrize(
    ("settings", "sharded"),
    [
        ({"strategy": "data"}, False),
        ({"strategy": "data", "sharded_update": "on"}, True),
        ({"strategy": "data:sharded"}, True),
        ({"strategy": "pipeline"}, False),
    ],
)
def test_without_a_choice_of_the_ranks_it_gets_the_settings_of_the_job(
    settings: dict[str, object], sharded: bool
) -> None:
    job = record(settings, sharded)
    assert job.join_settings == job.settings
