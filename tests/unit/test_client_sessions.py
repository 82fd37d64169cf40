"""A coordinator that cannot free the memory of a client that ended says so."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hoop.errors import HoopError, PeerLost, PermissionDenied
from hoop.events import EventLog
from hoop.servers.client_sessions import ClientSessions


@pytest.mark.parametrize("error", [PermissionDenied("/hoop.v1.Device/ListBuffers: may not"), PeerLost("it is dead")])
def test_a_refusal_is_an_event_and_a_lost_device_is_not(error: HoopError) -> None:
    async def call(*_: object) -> None:
        raise error

    events = EventLog()
    coordinator: Any = SimpleNamespace(call=call, events=events)
    asyncio.run(ClientSessions(coordinator)._free(3, "hoop.staging.0011."))
    published = [(event.kind, event.fields["device"]) for event in events.after(0)]
    assert published == ([] if isinstance(error, PeerLost) else [("staging_not_freed", "3")])
