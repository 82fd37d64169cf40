"""``follow_events``: an event log as a stream, whose reader may ask to be woken up less often."""

from __future__ import annotations

import asyncio

import pytest

from hoop.events import Event, EventLog
from hoop.servers.job_record import follow_events, is_over

EVENTS = 20


class CountingLog(EventLog):
    """Counts how often a reader looks for new events."""

    looks = 0

    def after(self, sequence: int = 0) -> list[Event]:
        self.looks += 1
        return super().after(sequence)


async def followed(log: EventLog, interval_s: float) -> list[int]:
    """The sequence numbers of what a reader gets while events are published one after the other."""

    async def read() -> list[int]:
        return [event.sequence async for event in follow_events(log, 0, is_over, interval_s)]

    reader = asyncio.create_task(read())
    for _ in range(EVENTS):
        log.publish("steps", "")
        for _ in range(5):  # the reader takes a few turns of the loop
            await asyncio.sleep(0)
    log.publish("job_ended", "")
    return await reader


@pytest.mark.parametrize(("interval_s", "least", "most"), [(0.0, EVENTS, EVENTS + 1), (1.0, 1, 3)])
def test_events_of_an_interval_come_together_and_none_is_lost(interval_s: float, least: int, most: int) -> None:
    log = CountingLog()
    assert asyncio.run(followed(log, interval_s)) == list(range(1, EVENTS + 2))
    assert least <= log.looks <= most
